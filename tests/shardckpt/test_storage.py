"""Tests of storage: one contract for all kinds of stores, and what is peculiar to each."""

from __future__ import annotations

import contextlib
import errno
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from shardckpt.errors import CheckpointExistsError, CheckpointNotFoundError, FormatError, NoSpaceError, StorageError
from shardckpt.local_store import LocalStore, LocalWriter
from shardckpt.storage import Store, open_store, split_url
from shardckpt.store import temporary_name

CONTENT = bytes(range(256)) * 40


class StorageContract(ABC):
    """What every store must do; subclassed for each kind."""

    @abstractmethod
    @pytest.fixture
    def store(self) -> Store:
        """Give an empty store."""

    def test_a_range_is_read_as_it_was_written(self, store: Store) -> None:
        """Ranges at the start, in the middle, at the end, and empty ones come back bit by bit."""
        store.put("a.bin", CONTENT)
        with contextlib.closing(store.open_reader("a.bin")) as reader:
            assert reader.nbytes == len(CONTENT)
            for low, high in ((0, 1), (0, len(CONTENT)), (100, 5000), (len(CONTENT) - 3, len(CONTENT)), (7, 7)):
                assert reader.read(low, high - low) == CONTENT[low:high]
                out = np.full(high - low, 0xEE, np.uint8)
                reader.read_into(low, out)
                assert out.tobytes() == CONTENT[low:high]

    def test_what_a_killed_writer_left_of_one_file_is_found_and_removed(self, store: Store) -> None:
        """Only the remains of that file go: not those of others, nor files that look similar."""
        for name in ("a.bin", "b.bin", ".a.bin.tmp", ".a.bin.0123456789abcdeg.tmp", ".b.bin.0123456789abcdef.tmp"):
            store.put(name, CONTENT)
            store.put(f"deeper/{name}", CONTENT)
        before = store.list()
        assert store.discard_temporaries("a.bin") == ()
        assert store.discard_temporaries("nowhere/a.bin") == ()
        left = temporary_name("a.bin")
        if not store.url.startswith("s3://"):  # where an unfinished file is none
            store.put(left, CONTENT)
            store.put(f"deeper/{left}", CONTENT)
            assert store.discard_temporaries("a.bin") == (left,)
            assert store.discard_temporaries("deeper/a.bin") == (left,)
        assert store.list() == before

    @pytest.mark.parametrize(("begin", "nbytes"), [(len(CONTENT) - 1, 2), (len(CONTENT), 1), (len(CONTENT) + 5, 1)])
    def test_a_read_past_the_end_says_truncated(self, store: Store, begin: int, nbytes: int) -> None:
        """A file that ends early is an error that names it and both sizes; never a short answer."""
        store.put("a.bin", CONTENT)
        text = r"a\.bin' is truncated: .* where at least .* are needed\. Restore the file from a copy"
        with contextlib.closing(store.open_reader("a.bin")) as reader:
            with pytest.raises(FormatError, match=text):
                reader.read(begin, nbytes)
            with pytest.raises(FormatError, match=text):
                reader.read_into(begin, np.empty(nbytes, np.uint8))

    def test_an_absurd_read_is_refused_before_memory_is_taken(self, store: Store) -> None:
        """A size from a hostile file is compared with the real one first."""
        store.put("a.bin", CONTENT)
        with (
            contextlib.closing(store.open_reader("a.bin")) as reader,
            pytest.raises(FormatError, match="is truncated"),
        ):
            reader.read(0, 1 << 60)

    @pytest.mark.parametrize("path", ["b.bin", "folder/b.bin"])
    def test_a_file_appears_whole_at_commit(self, store: Store, path: str) -> None:
        """Nothing of that name is there while it is written, nor when it is finished."""
        writer = store.create(path, nbytes=len(CONTENT))
        writer.write(0, CONTENT[:100])
        assert not store.exists(path)
        writer.write(100, np.frombuffer(CONTENT[100:], np.uint8))
        writer.finish()
        assert not store.exists(path)
        assert path not in store.list()
        writer.commit()
        assert store.exists(path)
        assert store.list() == {path: len(CONTENT)}
        assert store.get(path, max_nbytes=1 << 20) == CONTENT

    @pytest.mark.parametrize("is_finished", [False, True])
    def test_an_aborted_file_leaves_nothing(self, store: Store, is_finished: bool) -> None:
        """Abort, before or after the end, removes what was written."""
        writer = store.create("b.bin", nbytes=len(CONTENT))
        writer.write(0, CONTENT)
        if is_finished:
            writer.finish()
        writer.abort()
        writer.abort()
        assert store.list() == {}

    def test_an_aborted_overwrite_leaves_the_old_file(self, store: Store) -> None:
        """The file of that name stays as it was until the commit, and after an abort."""
        store.put("a.bin", b"old")
        writer = store.create("a.bin", nbytes=11)
        writer.write(0, b"new content")
        assert store.get("a.bin", max_nbytes=100) == b"old"
        writer.abort()
        assert store.get("a.bin", max_nbytes=100) == b"old"
        assert store.list() == {"a.bin": 3}

    def test_a_commit_replaces_the_old_file(self, store: Store) -> None:
        """After the commit there is the new file alone."""
        store.put("a.bin", b"old and longer")
        writer = store.create("a.bin", nbytes=3)
        writer.write(0, b"new")
        writer.finish()
        writer.commit()
        assert store.get("a.bin", max_nbytes=100) == b"new"
        assert store.list() == {"a.bin": 3}

    def test_an_empty_file_can_be_written_and_read(self, store: Store) -> None:
        """A file without bytes is a file."""
        writer = store.create("empty", nbytes=0)
        writer.finish()
        writer.commit()
        store.put("also-empty", b"")
        assert store.list() == {"also-empty": 0, "empty": 0}
        assert store.get("empty", max_nbytes=0) == b""

    def test_put_replaces(self, store: Store) -> None:
        """Putting twice leaves the second content."""
        store.put("m.json", b"first")
        store.put("m.json", b"2nd")
        assert store.get("m.json", max_nbytes=10) == b"2nd"

    def test_a_put_that_must_be_new_refuses_a_file_that_is_there(self, store: Store) -> None:
        """The file stays as it was; the message says what happened and what to do."""
        store.put("m.json", b"first", is_new=True)
        with pytest.raises(CheckpointExistsError, match=r"m\.json' appeared meanwhile: another save .*choose another"):
            store.put("m.json", b"2nd", is_new=True)
        assert store.get("m.json", max_nbytes=10) == b"first"
        assert store.list() == {"m.json": 5}

    @pytest.mark.parametrize("found", [0, 4, 6])
    def test_a_file_of_another_size_than_announced_is_not_published(self, store: Store, found: int) -> None:
        """Too little or too much is an error before the commit."""
        writer = store.create("b.bin", nbytes=5)

        def write() -> None:
            writer.write(0, CONTENT[:found])
            writer.finish()

        with pytest.raises(StorageError, match=rf"b\.bin' has {found} bytes after the write, expected 5; save again"):
            write()
        writer.abort()
        assert store.list() == {}

    def test_list_gives_paths_below_the_root_with_sizes(self, store: Store) -> None:
        """Files in folders are listed with `/`; a root that is not there is empty."""
        assert store.list() == {}
        for path, content in (("x", b"1"), ("f/y", b"22"), ("f/g/z", b"333"), ("weird #%ü", b"")):
            store.put(path, content)
        assert store.list() == {"x": 1, "f/y": 2, "f/g/z": 3, "weird #%ü": 0}

    def test_names_are_no_patterns(self, store: Store) -> None:
        """Names with the marks of patterns mean themselves."""
        writer = store.create("x[1]*?.bin", nbytes=1)
        writer.write(0, b"1")
        writer.finish()
        writer.commit()
        store.put("x1.bin", b"22")
        assert store.list() == {"x1.bin": 2, "x[1]*?.bin": 1}
        store.delete("x[1]*?.bin")
        assert store.list() == {"x1.bin": 2}

    def test_delete_removes_and_does_not_mind_what_is_gone(self, store: Store) -> None:
        """A second delete of the same file is no error."""
        store.put("x", b"1")
        store.put("y", b"1")
        store.delete("x")
        store.delete("x")
        assert not store.exists("x")
        assert store.list() == {"y": 1}

    def test_exists_is_about_files(self, store: Store) -> None:
        """A folder is no file."""
        store.put("f/y", b"22")
        assert store.exists("f/y")
        assert not store.exists("f")
        assert not store.exists("f/z")

    def test_a_missing_file_is_named(self, store: Store) -> None:
        """The message says what to check, and the error is a FileNotFoundError."""
        with pytest.raises(
            CheckpointNotFoundError, match=r"no file '.*nowhere\.bin'; check the path, and that the save"
        ):
            store.open_reader("nowhere.bin")
        with pytest.raises(FileNotFoundError):
            store.get("nowhere.bin", max_nbytes=10)

    def test_get_refuses_a_file_that_is_too_large(self, store: Store) -> None:
        """A limit is checked before the file is read."""
        store.put("m.json", CONTENT)
        with pytest.raises(
            FormatError, match=r"'m.json' in .* has 10240 bytes, more than the 10239 .* not what its name"
        ):
            store.get("m.json", max_nbytes=len(CONTENT) - 1)

    def test_writers_do_not_mix(self, store: Store) -> None:
        """Two files written in turns, and two writers of one name, keep apart; the last commit stays."""
        one, two, three = (store.create(path, nbytes=100) for path in ("one", "two", "one"))
        for at in range(0, 100, 10):
            one.write(at, b"1" * 10)
            two.write(at, b"2" * 10)
            three.write(at, b"3" * 10)
        for writer in (one, two, three):
            writer.finish()
            writer.commit()
        assert store.get("one", max_nbytes=100) == b"3" * 100
        assert store.get("two", max_nbytes=100) == b"2" * 100


class TestLocalStore(StorageContract):
    """Folders of this machine."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        """Give a folder that is not there yet."""
        return open_store(tmp_path / "root")

    def test_ranges_may_be_written_in_any_order(self, store: Store) -> None:
        """A local file takes ranges as they come."""
        assert not store.is_sequential
        writer = store.create("a.bin", nbytes=len(CONTENT))
        for at in (5000, 0, 100, 2500):
            end = {0: 100, 100: 2500, 2500: 5000, 5000: len(CONTENT)}[at]
            writer.write(at, CONTENT[at:end])
        writer.finish()
        writer.commit()
        assert store.get("a.bin", max_nbytes=1 << 20) == CONTENT

    def test_file_urls_are_local_paths(self, tmp_path: Path) -> None:
        """`file://` and a bare path are the same store."""
        open_store(f"file://{tmp_path}").put("x", b"1")
        assert (tmp_path / "x").read_bytes() == b"1"
        assert isinstance(open_store(f"file://{tmp_path}"), LocalStore)

    def test_a_folder_or_pipe_is_no_file(self, store: Store, tmp_path: Path) -> None:
        """What is no regular file is refused, and a pipe does not block."""
        (tmp_path / "root/folder").mkdir(parents=True)
        os.mkfifo(tmp_path / "root/pipe")
        for path in ("folder", "pipe"):
            with pytest.raises(FormatError, match=f"{path}' is not a regular file; name a checkpoint's file"):
                store.open_reader(path)

    def test_a_file_as_root_is_a_storage_error(self, tmp_path: Path) -> None:
        """The message names the path and says to check it."""
        (tmp_path / "file").write_bytes(b"")
        store = open_store(tmp_path / "file")
        for action in (store.list, lambda: store.create("x", nbytes=1), lambda: store.open_reader("x")):
            with pytest.raises(StorageError, match=r"cannot \w+ '.*/file.*Check the path and access"):
                action()

    def test_a_file_that_shrinks_while_it_is_read_is_truncated(self, store: Store, tmp_path: Path) -> None:
        """An error, not a signal."""
        store.put("a.bin", CONTENT)
        with contextlib.closing(store.open_reader("a.bin")) as reader:
            os.truncate(tmp_path / "root/a.bin", 10)
            with pytest.raises(FormatError, match="is truncated: it has 10 bytes"):
                reader.read(0, 100)

    def test_a_full_disk_is_a_no_space_error(self) -> None:
        """A write to a device that is always full fails with its own kind and the path."""
        writer = FullDeviceWriter()
        with pytest.raises(NoSpaceError, match=r"cannot write '/dev/full'.*Free some room") as caught:
            writer.write(0, CONTENT)
        assert (caught.value.errno, caught.value.path) == (errno.ENOSPC, "/dev/full")

    def test_a_disk_without_the_room_is_known_at_once(
        self, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A large file for which no room can be reserved is not begun, and leaves nothing."""

        def refuse(_: int, nbytes: int) -> None:
            assert nbytes == 1 << 30
            raise OSError(errno.ENOSPC, "full")

        monkeypatch.setattr("shardckpt.local_store._reserve", refuse)
        with pytest.raises(NoSpaceError, match=r"cannot write '.*/big'.*Free some room"):
            store.create("big", nbytes=1 << 30)
        assert list((tmp_path / "root").iterdir()) == []

    def test_room_is_reserved_without_a_change_of_size(self, store: Store, tmp_path: Path) -> None:
        """What was reserved and not written is no part of the file: it is not whole."""
        writer = store.create("big", nbytes=4 << 20)
        writer.write(0, bytes(1 << 20))
        (temporary,) = (tmp_path / "root").iterdir()
        assert temporary.stat().st_size == 1 << 20
        with pytest.raises(StorageError, match="has 1048576 bytes after the write, expected 4194304; save again"):
            writer.finish()
        writer.abort()
        assert store.list() == {}

    def test_an_abort_closes_no_descriptor_but_its_own(self, store: Store, tmp_path: Path) -> None:
        """A descriptor number that was reused after the end of a file is left alone."""
        writer = store.create("a.bin", nbytes=1)
        writer.write(0, b"1")
        writer.finish()
        with (tmp_path / "other").open("wb") as other:  # takes the number that was freed
            writer.abort()
            os.fstat(other.fileno())

    def test_free_space_is_that_of_the_nearest_folder_there_is(self, tmp_path: Path) -> None:
        """A root that is not there yet has the room of its parent."""
        free = open_store(tmp_path / "not/there/yet").free_bytes()
        assert free is not None
        assert free > 0

    def test_long_names_get_temporary_names_that_fit(self, store: Store) -> None:
        """A name at the limit of the file system, in letters of several bytes, can be written."""
        name = "ü" * 127
        store.put(name, b"1")
        assert store.list() == {name: 1}


class FullDeviceWriter(LocalWriter):
    """A writer into the device that is always full."""

    def __init__(self) -> None:
        self.path = "/dev/full"
        self._descriptor = os.open("/dev/full", os.O_WRONLY)


class TestMemoryStore(StorageContract):
    """The memory file system of fsspec, for what is done through fsspec."""

    @pytest.fixture
    def store(self) -> Iterator[Store]:
        """Give an empty part of the memory file system."""
        memory = fsspec.filesystem("memory")
        memory.pipe_file("/contract/beside", b"")
        yield open_store("memory://contract/root")
        memory.rm("/contract", recursive=True)

    def test_writes_out_of_order_are_refused(self, store: Store) -> None:
        """A store that writes front to back says so, and holds to it."""
        assert store.is_sequential
        writer = store.create("a.bin", nbytes=3)
        writer.write(0, b"12")
        with pytest.raises(StorageError, match=r"written front to back: expected offset 2, found 5; use one worker"):
            writer.write(5, b"3")
        writer.abort()
        store.put("x", b"")

    def test_room_means_nothing(self, store: Store) -> None:
        """An object store has no free space to speak of."""
        store.put("x", b"")
        assert store.free_bytes() is None

    def test_errors_of_any_kind_are_wrapped_with_the_path(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        """File systems raise what they like; what leaves here is a StorageError that names the file."""
        store.put("x", b"1")
        reader = store.open_reader("x")

        def fail(*_: object, **__: object) -> None:
            raise RuntimeError("503 slow down")

        for name in ("cat_file", "pipe_file", "rm_file", "find", "isfile", "info"):
            monkeypatch.setattr(MemoryFileSystem, name, fail)
        actions = {
            "read": lambda: reader.read(0, 1),
            "write": lambda: store.put("x", b"2"),
            "delete": lambda: store.delete("x"),
            "list": store.list,
            "find": lambda: store.exists("x"),
            "open": lambda: store.open_reader("x"),
        }
        for verb, action in actions.items():
            with pytest.raises(StorageError, match=rf"cannot {verb} 'memory://contract/root.*503 slow down\. Check"):
                action()

    def test_an_object_of_another_size_after_the_write_is_an_error(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What the store says it has is compared with what was written."""
        writer = store.create("x", nbytes=3)
        writer.write(0, b"123")
        writer.finish()
        monkeypatch.setattr(MemoryFileSystem, "info", lambda *_, **__: {"size": 2, "type": "file"})
        with pytest.raises(StorageError, match=r"root/x' has 2 bytes after the write, expected 3; save again"):
            writer.commit()


def test_an_unknown_protocol_is_a_storage_error() -> None:
    """The message shows the URL."""
    with pytest.raises(StorageError, match=r"cannot open 'nosuch://x'.*Check the path and access"):
        open_store("nosuch://x")


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("a/b", ("a", "b")),
        ("/b", ("/", "b")),
        ("b", (".", "b")),
        ("s3://bucket/a/b/", ("s3://bucket/a", "b")),
        (Path("x/y"), ("x", "y")),
    ],
)
def test_split_url_gives_folder_and_name(url: str, parts: tuple[str, str]) -> None:
    """A path or URL falls into a root to open and a name in it."""
    assert split_url(url) == parts
