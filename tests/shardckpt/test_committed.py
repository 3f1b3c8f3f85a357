"""Tests of the commit: whatever is cut off where, a reader finds the old checkpoint or the new one, whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import numpy as np
import pytest

import shardckpt
from shardckpt.checksum import crc32c
from shardckpt.committed import check_space, draft_of, prepare, read_committed, refuse_remains
from shardckpt.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptError,
    FormatError,
    NoSpaceError,
    StorageError,
)
from shardckpt.local_store import LocalStore
from shardckpt.manifest import MANIFEST_PATH
from shardckpt.storage import Reader, Store, Writer, open_store
from tests.shardckpt.checkpoints import read_checkpoint, write_checkpoint

OLD = {"model.w": np.arange(50, dtype=np.float32), "model.b": np.arange(6).reshape(2, 3)}
NEW = {"model.w": -np.arange(50, dtype=np.float32), "model.b": -np.arange(6).reshape(2, 3)}


class Killed(BaseException):
    """The process is gone: nothing that comes after it has any effect."""


class KilledStore(Store):
    """A store of a process that is killed just before its n-th change of what is stored."""

    def __init__(self, inner: Store, num_changes: int) -> None:
        self.inner, self.left = inner, num_changes
        self.url, self.is_sequential = inner.url, inner.is_sequential

    def change(self) -> None:
        """Count a change, or be killed before it."""
        if self.left == 0:
            raise Killed
        self.left -= 1

    def open_reader(self, path: str) -> Reader:
        """Read as the inner store."""
        return self.inner.open_reader(path)

    def list(self) -> dict[str, int]:
        """List as the inner store."""
        return self.inner.list()

    def exists(self, path: str) -> bool:
        """Look as the inner store."""
        return self.inner.exists(path)

    def put(self, path: str, data: bytes, *, is_new: bool = False) -> None:
        """Put, if alive."""
        self.change()
        self.inner.put(path, data, is_new=is_new)

    def delete(self, path: str) -> None:
        """Delete, if alive."""
        self.change()
        self.inner.delete(path)

    def create(self, path: str, *, nbytes: int) -> Writer:
        """Create, if alive."""
        self.change()
        return KilledWriter(self, self.inner.create(path, nbytes=nbytes))


class KilledWriter(Writer):
    """A writer of a killed process."""

    def __init__(self, store: KilledStore, inner: Writer) -> None:
        self.store, self.inner, self.path = store, inner, inner.path

    def write(self, byte_offset: int, data: bytes) -> None:  # type: ignore[override]
        """Write, if alive."""
        self.store.change()
        self.inner.write(byte_offset, data)

    def finish(self) -> None:
        """Finish, if alive."""
        self.store.change()
        self.inner.finish()

    def commit(self) -> None:
        """Commit, if alive."""
        self.store.change()
        self.inner.commit()

    def abort(self) -> None:
        """Do nothing: the dead clean nothing up."""


@pytest.fixture(params=["local", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Give an empty place to write to."""
    if request.param == "local":
        yield str(tmp_path / "root")
    else:
        memory = fsspec.filesystem("memory")
        memory.pipe_file("/committed/beside", b"")
        yield "memory://committed/root"
        memory.rm("/committed", recursive=True)


def killed_after(num_changes: int, root: str, **arguments: object) -> bool:
    """Write NEW until so many changes were made; tell whether that was a kill."""
    try:
        write_checkpoint(KilledStore(open_store(root), num_changes), NEW, world_size=3, **arguments)  # type: ignore[arg-type]
    except Killed:
        return True
    return False


def holds(root: str, arrays: dict[str, np.ndarray]) -> bool:
    """Tell whether the checkpoint at a root has these very tensors."""
    found = read_checkpoint(root)
    return list(found) == list(arrays) and all(found[name].tobytes() == arrays[name].tobytes() for name in arrays)


def test_a_checkpoint_is_read_as_it_was_written(root: str) -> None:
    """Tensors, step, objects and world size; the checksums of files are those of their bytes."""
    write_checkpoint(root, OLD, objects={"note": 1.5}, step=3, aliases={"model.w": ("model.tied",)})
    assert holds(root, OLD)
    found, store = read_committed(open_store(root)), open_store(root)
    assert (found.manifest.step, found.manifest.world_size, found.objects) == (3, 2, {"note": 1.5})
    assert found.catalogue.by_name["model.tied"] == 0
    assert draft_of(found).layout == found.manifest.layout
    for file in found.catalogue.files:
        assert crc32c(store.get(file.path, max_nbytes=1 << 20)) == file.crc
    assert set(store.list()) == {MANIFEST_PATH, "chunks.safetensors", *(f.path for f in found.catalogue.files)}


def test_nothing_is_there_until_all_is_there(root: str) -> None:
    """Killed before any of its changes, a first save leaves no checkpoint, and the next one finds no trace of it."""
    num_kills, store = 0, open_store(root)
    while killed_after(num_kills, root):
        with pytest.raises(
            CheckpointNotFoundError, match=r"nothing is there; check|holds an unfinished save .*; use another"
        ):
            read_committed(store)
        prepare(store, overwrite=False)
        assert store.list() == {}
        num_kills += 1
    assert holds(root, NEW)
    assert num_kills > 10


def test_an_overwrite_shows_the_old_or_the_new(root: str) -> None:
    """Killed before any of its changes, an overwrite leaves one of the two, whole, and the next one cleans up."""
    num_kills, seen = 0, []
    while True:
        write_checkpoint(root, OLD, world_size=2, overwrite=True)
        is_killed = killed_after(num_kills, root, overwrite=True)
        seen.append(holds(root, NEW))
        assert seen[-1] or holds(root, OLD)
        if not is_killed:
            break
        num_kills += 1
    assert seen == sorted(seen)
    assert seen.count(True) > 2  # killed while the old files were being removed
    assert len(open_store(root).list()) == 3 + 2


def test_a_reader_of_the_old_checkpoint_is_not_mixed_up_with_the_new(root: str) -> None:
    """No file of the old checkpoint is written to: its files are gone or as they were."""
    write_checkpoint(root, OLD, world_size=3)
    store = open_store(root)
    before = {path: store.get(path, max_nbytes=1 << 20) for path in store.list() if path != MANIFEST_PATH}
    write_checkpoint(root, NEW, world_size=3, overwrite=True)
    assert not set(before) & set(store.list())


def test_a_failed_overwrite_leaves_the_old(tmp_path: Path) -> None:
    """An error (not a kill) in the last moment before the commit leaves the old checkpoint as it was."""
    write_checkpoint(str(tmp_path), OLD)

    class NoManifest(LocalStore):
        def put(self, path: str, data: bytes, *, is_new: bool = False) -> None:
            if path == MANIFEST_PATH:
                raise StorageError.wrap("write", path, OSError("injected"))
            super().put(path, data, is_new=is_new)

    with pytest.raises(StorageError, match="injected"):
        write_checkpoint(NoManifest(tmp_path), NEW, overwrite=True)
    assert holds(str(tmp_path), OLD)
    write_checkpoint(str(tmp_path), NEW, overwrite=True)
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.parametrize("failing", ["delete", "list"])
def test_a_commit_stands_though_the_old_files_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """What cannot be removed after the commit is told, not raised, and goes with the next overwrite."""
    path = str(tmp_path / "a")
    shardckpt.save(path, {"x": 1})
    committing = LocalStore.put

    def put(store: LocalStore, path: str, data: bytes, *, is_new: bool = False) -> None:
        committing(store, path, data, is_new=is_new)
        if path == MANIFEST_PATH:
            patch.setattr(LocalStore, failing, refuse)

    def refuse(store: LocalStore, path: str = "") -> None:
        raise StorageError.wrap(failing, path, PermissionError(13, "Permission denied"))

    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "put", put)
        report = shardckpt.save(path, {"x": 2}, overwrite=True)
    assert f"cannot {failing}" in report.not_removed[0]
    assert shardckpt.open(path).objects == {"x": 2}
    assert len(open_store(path).list()) == 5
    assert shardckpt.save(path, {"x": 3}, overwrite=True).not_removed == ()
    assert len(open_store(path).list()) == 3


def test_tools_say_what_could_not_be_removed() -> None:
    """The error says that the new checkpoint is there, and how the remains go."""
    store = open_store("memory://remains")
    refuse_remains(store, ())
    with pytest.raises(
        StorageError, match=r"is replaced, but .*cannot delete 'a' \(2 in all\)\. They do no harm; the next"
    ):
        refuse_remains(store, ("cannot delete 'a'", "cannot delete 'b'"))


def test_an_existing_checkpoint_is_not_touched(root: str) -> None:
    """Without being asked to, nothing is overwritten; the message says what to do."""
    write_checkpoint(root, OLD)
    with pytest.raises(
        CheckpointExistsError, match="holds a checkpoint already; choose another destination, or ask to"
    ):
        write_checkpoint(root, NEW)
    assert holds(root, OLD)


def test_foreign_files_are_neither_buried_nor_removed(root: str) -> None:
    """A folder with other files is refused unless asked for, and they stay; what looks like ours but is not, too."""
    store = open_store(root)
    foreign = {
        "notes.txt",
        ".cache/x.tmp",
        ".x.tmp",
        "shard-1-of-2.safetensors",
        "sub/shard-00000-of-00002.safetensors",
    }
    for path in foreign:
        store.put(path, b"mine")
    with pytest.raises(CheckpointExistsError, match=r"is not empty: it has .*choose another destination, or ask to"):
        write_checkpoint(root, NEW)
    write_checkpoint(root, OLD, overwrite=True)
    write_checkpoint(root, NEW, overwrite=True)
    assert foreign <= set(store.list())
    assert holds(root, NEW)


def test_leftovers_of_a_killed_save_are_told(root: str) -> None:
    """Who writes where a save was killed learns what was removed."""
    assert killed_after(9, root)
    left = set(open_store(root).list())
    assert left
    assert set(prepare(open_store(root), overwrite=False).leftovers) == left


@pytest.mark.parametrize(
    ("files", "text"),
    [
        ((), "there is no checkpoint at .*: nothing is there; check the path"),
        (
            ("step-1/manifest.json", "step-1/x", "step-2/manifest.json"),
            "holds no checkpoint itself, but 'step-1', 'step-2'; name one",
        ),
        (
            ("shard-00000-of-00008.safetensors",),
            r"holds an unfinished save \(shard files, but no manifest\); use another",
        ),
        (("chunks.safetensors",), "holds an unfinished save"),
        (
            ("model.safetensors", "config.json"),
            "it has 'config.json', 'model.safetensors' but no manifest.json; check the",
        ),
    ],
)
def test_what_is_there_instead_is_said(root: str, files: tuple[str, ...], text: str) -> None:
    """A folder that is no checkpoint is told apart by what it holds."""
    for path in files:
        open_store(root).put(path, b"")
    with pytest.raises(CheckpointNotFoundError, match=text):
        read_committed(open_store(root))


def flipped(path: Path) -> None:
    """Flip a bit in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(data)


@pytest.mark.parametrize("name", [MANIFEST_PATH, "chunks.safetensors", "shard-00000-of-00002.safetensors"])
@pytest.mark.parametrize(
    "damage",
    [
        flipped,
        lambda path: path.write_bytes(path.read_bytes()[:-9]),
        lambda path: path.write_bytes(bytes(path.stat().st_size)),
        lambda path: path.write_bytes(b""),
        Path.unlink,
    ],
)
def test_damage_of_any_file_is_found(tmp_path: Path, name: str, damage: Callable[[Path], object]) -> None:
    """Flipped, cut, zeroed, emptied or removed: the error names the file; nothing is filled in."""
    weight = {"model.w": np.random.default_rng(0).standard_normal(3000).astype(np.float32)}
    write_checkpoint(str(tmp_path), weight)
    damage(tmp_path / name)
    with pytest.raises((FormatError, CheckpointNotFoundError), match=f"{name}|no {MANIFEST_PATH}|no manifest"):
        read_checkpoint(str(tmp_path))


def test_damage_of_a_chunk_names_it(tmp_path: Path) -> None:
    """The error names tensor, elements and file."""
    write_checkpoint(str(tmp_path), {"model.w": np.zeros(3000, np.float32)})
    path = tmp_path / "shard-00001-of-00002.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    with pytest.raises(
        CorruptError, match=r"elements \[1500, 3000\) of 'model.w' .* in 'shard-00001-of.*earlier checkpoint"
    ):
        read_checkpoint(str(tmp_path))


def test_too_little_room_is_known_beforehand(tmp_path: Path) -> None:
    """Both numbers are in the message."""

    class Small(LocalStore):
        def free_bytes(self) -> int:
            return 1000

    check_space(Small(tmp_path), 1000)
    check_space(open_store("memory://x"), 1 << 60)
    with pytest.raises(NoSpaceError, match="has 1000 bytes free, 1001 are needed; free some room or choose another"):
        check_space(Small(tmp_path), 1001)
