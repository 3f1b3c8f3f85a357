"""Resharding: what comes out is, byte by byte, what a save at the new world size would have written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from shardckpt.batches import Sizes
from shardckpt.committed import Draft, commit, prepare, read_committed
from shardckpt.errors import MismatchError, UnsupportedError
from shardckpt.layout import Bucket, Layout, regions
from shardckpt.plan import prove_coverage
from shardckpt.shard_file import lay_out_shards
from shardckpt.storage import open_store
from shardckpt.tools.reshard import plan_reshard
from shardckpt.tools.rewrite import rewrite
from shardckpt.transfer import TransferOptions
from shardckpt.write_files import write_files
from tests.shardckpt.checkpoints import DTYPES, in_memory, read_checkpoint, write_checkpoint
from tests.shardckpt.tools.meshes import write_on_mesh

ROWS = (0, 1, 2, 3, 5, 7, 10, 17, 4097)
SMALL = TransferOptions(budget_bytes=1 << 16, sizes=Sizes(piece_bytes=4096, step_bytes=1024, batch_bytes=2048))


def _tagged(dtype: str, number: int, shape: tuple[int, ...]) -> NDArray[np.generic]:
    """Values that tell the tensor and the place in it."""
    count = int(np.prod(shape))
    if dtype == "bool":
        return ((np.arange(count) * 7 + number) % 3 == 0).reshape(shape)
    return ((np.arange(count) + 1000 * number) % 251).astype(dtype).reshape(shape)


def _state() -> dict[str, NDArray[np.generic]]:
    """Weights and two moments of every number of rows, all dtypes, and what every rank holds."""
    arrays: dict[str, NDArray[np.generic]] = {}
    for number, rows in enumerate(ROWS):
        for tag, prefix in enumerate(("model.w{}", "optimizer.state.w{}.exp_avg", "optimizer.state.w{}.exp_avg_sq")):
            arrays[prefix.format(rows)] = _tagged("float32", 3 * number + tag, (rows, 3))
    for number, dtype in enumerate(DTYPES):
        arrays[f"model.{dtype}"] = _tagged(dtype, number, (5, 7, 2))
    arrays["model.scalar"] = np.array(3, np.int64)
    for rows in ROWS:
        arrays[f"optimizer.state.w{rows}.step"] = np.array(rows, np.float32)
    return arrays


SECTIONS = {"model": "module", "optimizer": "optimizer"}
REPLICATED = ("model.scalar", *(f"optimizer.state.w{rows}.step" for rows in ROWS))


def _write(root: Path, world_size: int) -> None:
    objects = {"model": {}, "optimizer": {"param_groups": [{"lr": 0.1}], "state": {}}}
    write_checkpoint(
        str(root), _state(), world_size=world_size, replicated=REPLICATED, sections=dict(SECTIONS), objects=objects
    )


def _reshard(source: Path, target: Path, to_ranks: int, options: TransferOptions = SMALL) -> None:
    rewrite(plan_reshard(open_store(source), to_ranks=to_ranks), open_store(target), overwrite=False, options=options)


def _data(root: Path) -> dict[str, bytes]:
    """All files but the manifest, which holds the time."""
    return {path.name: path.read_bytes() for path in root.iterdir() if path.name != "manifest.json"}


def _manifest_without_time(root: Path) -> list[str]:
    lines = (root / "manifest.json").read_text().splitlines()
    return [line for line in lines[1:] if '"created"' not in line]


@pytest.mark.parametrize(
    ("before", "after"), [(1, 4), (4, 1), (2, 3), (3, 2), (4, 7), (8, 16), (16, 8), (12, 5), (5, 101), (101, 6), (3, 3)]
)
def test_the_files_are_those_of_a_save_at_the_new_world_size(tmp_path: Path, before: int, after: int) -> None:
    """Weights, moments, replicated tensors, all dtypes: every file is byte-identical, the manifest but for the time."""
    _write(tmp_path / "a", before)
    _write(tmp_path / "b", after)
    _reshard(tmp_path / "a", tmp_path / "c", after)
    assert _data(tmp_path / "c") == _data(tmp_path / "b")
    assert _manifest_without_time(tmp_path / "c") == _manifest_without_time(tmp_path / "b")


def test_there_and_back_is_identity_over_many_world_sizes(tmp_path: Path) -> None:
    """A chain over primes, one rank and more ranks than rows ends with the files that it began with."""
    _write(tmp_path / "8", 8)
    chain = [8, 1, 7, 12, 101, 2, 13, 8]
    for i in range(1, len(chain)):
        name = str(chain[i]) if i < len(chain) - 1 else "end"
        _reshard(tmp_path / str(chain[i - 1]), tmp_path / name, chain[i])
    assert _data(tmp_path / "end") == _data(tmp_path / "8")


def test_any_budget_and_number_of_workers_gives_the_same_files(tmp_path: Path) -> None:
    """How bytes are moved leaves no trace."""
    _write(tmp_path / "a", 4)
    for number, options in enumerate(
        (TransferOptions(), TransferOptions(num_workers=1), TransferOptions(budget_bytes=1, num_workers=3), SMALL)
    ):
        _reshard(tmp_path / "a", tmp_path / str(number), 6, options)
    first = _data(tmp_path / "0")
    assert all(_data(tmp_path / str(number)) == first for number in range(1, 4))


@pytest.mark.parametrize("cuts", [[(0, 0)], [(0, 0), (1, 1)], [(1, 1)], [(1, 0), (0, 1)]])
def test_meshes_grow_along_their_first_axis(tmp_path: Path, cuts: list[tuple[int, int]]) -> None:
    """Row shards, column shards and both: 4 x 2 ranks to 3 x 2 are the files of a save on 3 x 2."""
    arrays = {f"model.w{rows}": _tagged("float32", rows, (rows, 5)) for rows in ROWS}
    write_on_mesh(tmp_path / "a", arrays, [4, 2], cuts)
    write_on_mesh(tmp_path / "b", arrays, [3, 2], cuts)
    _reshard(tmp_path / "a", tmp_path / "c", 6)
    assert _shards(tmp_path / "c").keys() == _shards(tmp_path / "b").keys()
    found = read_checkpoint(str(tmp_path / "c"))
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)
    for name, data in _shards(tmp_path / "b").items():
        if name != "shard-00000-of-00006.safetensors":  # which holds the rule, with the mesh that it was made for
            assert _shards(tmp_path / "c")[name] == data


def _shards(root: Path) -> dict[str, bytes]:
    return {name: data for name, data in _data(root).items() if name.startswith("shard")}


def test_a_mesh_that_cannot_have_so_many_ranks_is_refused(tmp_path: Path) -> None:
    """The inner axis has to divide the world size."""
    write_on_mesh(tmp_path / "a", {"model.w": np.zeros((8, 8))}, [4, 2], [(0, 0), (1, 1)])
    with pytest.raises(UnsupportedError, match="choose a multiple, or another layout"):
        plan_reshard(open_store(tmp_path / "a"), to_ranks=3)


def test_from_is_checked(tmp_path: Path) -> None:
    """A wrong `from_ranks` names the right one."""
    _write(tmp_path / "a", 4)
    with pytest.raises(MismatchError, match="written by 4 ranks, not 8; use --from 4"):
        plan_reshard(open_store(tmp_path / "a"), to_ranks=2, from_ranks=8)


def test_a_checkpoint_without_a_rule_is_told_the_way_out(tmp_path: Path) -> None:
    """Without a layout nothing says what other ranks would hold."""
    source, sources = in_memory({"model.w": np.arange(12.0)})
    draft = Draft(1, 1, {"model": "module"}, source.tensors, None, {})
    layout = Layout([Bucket(1, [12], [1], [[0]])], [])
    files = lay_out_shards(source.tensors, regions(layout, source.tensors, 1), draft.naming(""))
    destination = prepare(open_store(tmp_path / "a"), overwrite=False)
    written = write_files(source, sources, files, destination.store, options=SMALL)
    commit(destination, draft, written.catalogue, written.headers_crc)
    with pytest.raises(UnsupportedError, match="choose one, as in --layout flat"):
        plan_reshard(open_store(tmp_path / "a"), to_ranks=2)


def test_what_was_written_is_whole_by_its_own_table(tmp_path: Path) -> None:
    """The chunks of the new checkpoint tile every tensor."""
    _write(tmp_path / "a", 5)
    _reshard(tmp_path / "a", tmp_path / "b", 12)
    prove_coverage(read_committed(open_store(tmp_path / "b")).catalogue)


def test_stores_of_other_kinds_give_the_same_files(tmp_path: Path) -> None:
    """From local disk to a store that is written front to back, and from there back."""
    _write(tmp_path / "a", 4)
    remote = open_store("memory://reshard/b")
    rewrite(plan_reshard(open_store(tmp_path / "a"), to_ranks=3), remote, overwrite=False, options=SMALL)
    rewrite(plan_reshard(remote, to_ranks=4), open_store(tmp_path / "c"), overwrite=False, options=SMALL)
    assert _data(tmp_path / "c") == _data(tmp_path / "a")
