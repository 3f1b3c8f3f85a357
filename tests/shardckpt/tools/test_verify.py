"""Verifying: every kind of damage is found, and named by file and tensor."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shardckpt.catalogue import Catalogue
from shardckpt.committed import Destination, commit, draft_of, read_committed
from shardckpt.errors import CheckpointNotFoundError
from shardckpt.storage import open_store
from shardckpt.tools.soundness import Problem, read_through
from shardckpt.tools.verify import survey
from shardckpt.transfer import TransferOptions
from tests.shardckpt.checkpoints import write_checkpoint

SHARDS = [f"shard-{rank:05}-of-00003.safetensors" for rank in range(3)]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkpoint of three ranks, with tensors that lie in one, two and all of its files."""
    arrays = {
        "model.a": np.arange(40, dtype=np.float32).reshape(8, 5),
        "model.b": np.arange(3, dtype=np.float32),
        "model.c": np.arange(60, dtype=np.float32),
        "model.empty": np.zeros((0, 3), np.float32),
        "model.scalar": np.array(7, np.int64),
    }
    write_checkpoint(str(tmp_path / "a"), arrays, world_size=3)
    return tmp_path / "a"


def _problems(root: Path) -> list[Problem]:
    surveyed = survey(open_store(root))
    return [*surveyed.problems, *read_through(surveyed, options=TransferOptions(is_verified=False))]


def _holders(root: Path, shard: str) -> set[str]:
    """Names of the tensors with elements in a file."""
    found = read_committed(open_store(root)).catalogue
    number = [file.path for file in found.files].index(shard)
    return {found.tensors[tensor].name for tensor in found.chunk_tensor[found.chunk_file == number].tolist()}


def test_a_sound_checkpoint_has_no_problems(root: Path) -> None:
    """Every byte is read, once, and nothing is found."""
    surveyed = survey(open_store(root))
    assert surveyed.nbytes == sum((root / shard).stat().st_size for shard in SHARDS)
    assert _problems(root) == []


def test_every_flipped_bit_of_a_data_file_is_found(root: Path) -> None:
    """Wherever it is: in the header the file is named, behind it the tensor too."""
    path = root / SHARDS[1]
    sound = path.read_bytes()
    header = int.from_bytes(sound[:8], "little") + 8
    for at in (0, 8, header - 1, header, len(sound) // 2 + header // 2, len(sound) - 1):
        path.write_bytes(sound[:at] + bytes([sound[at] ^ 1]) + sound[at + 1 :])
        (problem,) = _problems(root)
        assert (problem.path, problem.kind) == (SHARDS[1], "damaged")
        assert bool(problem.tensors) == (at >= header)
        assert set(problem.tensors) <= _holders(root, SHARDS[1])
        assert "recorded is" in problem.text or "are not those that were saved" in problem.text


@pytest.mark.parametrize("kept", [0, 7, 100, -1])
def test_truncation_names_the_tensors_that_are_cut(root: Path, kept: int) -> None:
    """Cut anywhere, the file is named with both sizes, and so are the tensors behind the cut."""
    path = root / SHARDS[2]
    sound = path.read_bytes()
    path.write_bytes(sound[:kept])
    (problem,) = _problems(root)
    assert (problem.path, problem.kind) == (SHARDS[2], "size")
    assert problem.text == f"it is truncated: expected {len(sound)} bytes, found {len(sound[:kept])}"
    assert set(problem.tensors) == (_holders(root, SHARDS[2]) if kept >= 0 else {problem.tensors[-1]})


def test_damage_before_a_cut_is_found_too(root: Path) -> None:
    """What is left of a truncated file is still compared."""
    path = root / SHARDS[0]
    sound = bytearray(path.read_bytes())
    header = int.from_bytes(sound[:8], "little") + 8
    sound[header] ^= 1
    path.write_bytes(sound[:-1])
    assert [problem.kind for problem in _problems(root)] == ["size", "damaged"]


def test_all_problems_are_reported(root: Path) -> None:
    """A missing file, one that grew and one with zeros are three problems, not one."""
    (root / SHARDS[0]).unlink()
    (root / SHARDS[1]).write_bytes((root / SHARDS[1]).read_bytes() + b"x")
    size = (root / SHARDS[2]).stat().st_size
    (root / SHARDS[2]).write_bytes(bytes(size))
    found = {problem.path: problem for problem in _problems(root)}
    assert [found[shard].kind for shard in SHARDS] == ["missing", "size", "damaged"]
    assert set(found[SHARDS[0]].tensors) == _holders(root, SHARDS[0])
    assert found[SHARDS[1]].text.startswith("it is longer than it was")
    assert set(found[SHARDS[2]].tensors) == _holders(root, SHARDS[2])


def test_a_damaged_table_still_lets_files_be_checked(root: Path) -> None:
    """Without the chunk table, files are compared as wholes."""
    (root / "chunks.safetensors").write_bytes(b"nonsense")
    (root / SHARDS[1]).write_bytes(bytes((root / SHARDS[1]).stat().st_size))
    found = {problem.path: problem.kind for problem in _problems(root)}
    assert found == {"chunks.safetensors": "damaged", SHARDS[1]: "damaged"}
    (root / "chunks.safetensors").unlink()
    found = {problem.path: problem.kind for problem in _problems(root)}
    assert found == {"chunks.safetensors": "missing", SHARDS[1]: "damaged"}


def test_every_flipped_bit_of_the_manifest_is_found(root: Path) -> None:
    """The manifest is under a checksum of its own, or is no manifest any more."""
    path = root / "manifest.json"
    sound = path.read_bytes()
    for at in range(0, len(sound), 37):
        path.write_bytes(sound[:at] + bytes([sound[at] ^ 1]) + sound[at + 1 :])
        (problem,) = _problems(root)
        assert (problem.path, problem.kind) == ("manifest.json", "damaged")


def test_a_hole_is_found_though_all_checksums_match(root: Path) -> None:
    """Coverage is proved from the table: a tensor whose chunks leave a hole is named."""
    store = open_store(root)
    found = read_committed(store)
    catalogue = found.catalogue
    rows = np.flatnonzero(catalogue.spans.tensor != catalogue.by_name["model.b"])
    holed = Catalogue(catalogue.tensors, catalogue.files, catalogue.spans.take(rows))
    headers_crc = [0] * len(holed.files)
    commit(Destination(store, "0badcafe", ()), draft_of(found), holed, headers_crc)
    surveyed = survey(store)
    kinds = {(problem.kind, *problem.tensors) for problem in surveyed.problems}
    assert ("incomplete", "model.b") in kinds
    assert any(kind == "malformed" for kind, *_ in kinds)


def test_nothing_at_all_is_an_error_not_an_answer(tmp_path: Path) -> None:
    """Where nothing is committed there is nothing to verify."""
    with pytest.raises(CheckpointNotFoundError, match="nothing is there; check the path"):
        survey(open_store(tmp_path / "void"))


def test_files_beside_the_checkpoint_are_told(root: Path) -> None:
    """A file that no manifest names is no problem, but is mentioned."""
    (root / "notes.txt").write_text("mine")
    surveyed = survey(open_store(root))
    assert surveyed.extra == ("notes.txt",)
    assert surveyed.problems == ()


def test_a_checkpoint_without_tensors_is_sound(tmp_path: Path) -> None:
    """No tensors, empty data files: nothing to complain about."""
    write_checkpoint(str(tmp_path / "a"), {}, world_size=2)
    assert _problems(tmp_path / "a") == []


def test_checking_holds_on_every_store() -> None:
    """The same on a store that is read front to back."""
    url = "memory://verify/a"
    write_checkpoint(url, {"model.a": np.arange(1000)}, world_size=2)
    surveyed = survey(open_store(url))
    assert surveyed.problems == ()
    assert read_through(surveyed, options=TransferOptions(is_verified=False)) == ()
