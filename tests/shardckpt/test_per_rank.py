"""State that is meant to differ from rank to rank: everyone gets its own back, and a stated rule holds elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import shardckpt
from shardckpt import PerRank
from shardckpt.errors import MismatchError, UnsupportedError
from shardckpt.storage import open_store
from shardckpt.tools.reshard import plan_reshard
from shardckpt.tools.rewrite import rewrite
from shardckpt.transfer import TransferOptions
from tests.ranks import run_ranks

RULES = ("same", "broadcast", "drop", "error")


def _state(seed: int) -> dict[str, object]:
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(seed + rank)
    position = {"epoch": rank, "order": torch.arange(3) + 10 * rank}
    own = {rule: PerRank(position, rule) for rule in RULES}
    return {"weights": torch.arange(50.0), "rng": PerRank(generator.get_state(), "same"), "loader": own}


def _save(folder: str) -> None:
    shardckpt.save(folder, _state(5), step=1)


def _load(folder: str, sections: tuple[str, ...] = ("weights", "rng", "loader")) -> dict[str, object]:
    state = {key: value for key, value in _state(99).items() if key in sections}
    shardckpt.load(folder, state)
    assert torch.equal(state["weights"], torch.arange(50.0))  # type: ignore[arg-type]
    return state


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 3 ranks, each with state of its own."""
    folder = tmp_path_factory.mktemp("per-rank") / "a"
    run_ranks(3, _save, str(folder))
    return folder


def test_each_rank_gets_its_own_back(saved: Path) -> None:
    """At the same world size every rule gives what that very rank saved, tensors and values."""
    for rank, state in enumerate(run_ranks(3, _load, str(saved))):
        expected = torch.Generator().manual_seed(5 + rank).get_state()
        assert isinstance(state["rng"], PerRank)
        assert torch.equal(state["rng"].value, expected)  # type: ignore[arg-type]
        for rule in RULES:
            found = state["loader"][rule]  # type: ignore[index]
            assert (found.rule, found.value["epoch"]) == (rule, rank)
            assert found.value["order"].tolist() == [10 * rank, 10 * rank + 1, 10 * rank + 2]


def _load_without_error_rule(folder: str) -> list[object]:
    with pytest.raises(MismatchError, match=r"state of each of 3 ranks .* loaded by 4"):
        _load(folder)
    other = f"{folder}-other"
    dist.barrier()
    state: dict[str, object] = {"weights": torch.zeros(50), "rng": None}
    shardckpt.load(other, state)
    rng = state["rng"]
    assert isinstance(rng, dict)
    return [rng[rule].value for rule in ("same", "broadcast", "drop")]


def _save_other(folder: str) -> None:
    own = {rule: PerRank(dist.get_rank() + 100, rule) for rule in ("same", "broadcast", "drop")}
    shardckpt.save(folder, {"weights": torch.arange(50.0), "rng": own})


def test_another_world_size_follows_the_rule(saved: Path) -> None:
    """Loading at 4 what 3 saved: refused with `error`; else own or nothing, rank 0's, or nothing.

    The weights always load.
    """
    run_ranks(3, _save_other, f"{saved}-other")
    found = run_ranks(4, _load_without_error_rule, str(saved))
    assert found == [[100, 100, None], [101, 100, None], [102, 100, None], [None, 100, None]]


def test_resharding_keeps_the_state_of_every_rank(saved: Path) -> None:
    """Offline resharding loses nothing: back at 3 ranks, each has its own again."""
    for ranks, source, target in ((2, saved, f"{saved}-2"), (3, f"{saved}-2", f"{saved}-3")):
        job = plan_reshard(open_store(str(source)), to_ranks=ranks)
        rewrite(job, open_store(target), overwrite=False, options=TransferOptions())
    for rank, state in enumerate(run_ranks(3, _load, f"{saved}-3")):
        assert state["loader"]["error"].value["epoch"] == rank  # type: ignore[index]
    for path in saved.iterdir():
        if path.name != "manifest.json":
            assert path.read_bytes() == (saved.parent / f"{saved.name}-3" / path.name).read_bytes(), path.name


def test_one_process_keeps_its_state(tmp_path: Path) -> None:
    """A lone process is rank 0 of 1."""
    shardckpt.save(tmp_path / "a", {"rng": PerRank(torch.get_rng_state())})
    state: dict[str, object] = {"rng": None}
    shardckpt.load(tmp_path / "a", state)
    assert isinstance(state["rng"], PerRank)
    assert torch.equal(state["rng"].value, torch.get_rng_state())  # type: ignore[arg-type]


def test_an_unknown_rule_is_refused() -> None:
    """The error lists the rules."""
    with pytest.raises(UnsupportedError, match="'maybe'; it can be error, same, broadcast, drop"):
        PerRank(1, "maybe")
