"""Tests of the ends of copies: memory, files and the pool of open files."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from shardckpt.endpoints import FileSink, MemorySink, MemorySource, ReaderPool
from shardckpt.errors import CheckpointNotFoundError
from shardckpt.local_store import LocalReader, LocalStore
from shardckpt.storage import Reader, open_store


def count(n: int) -> np.ndarray:
    """Give n different bytes."""
    return np.arange(n, dtype=np.uint8)


class CountingStore(LocalStore):
    """A local store that counts how many readers were opened and are open."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.num_opened = self.num_open = 0

    def open_reader(self, path: str) -> Reader:
        """Open a reader that says when it is closed."""
        self.num_opened += 1
        self.num_open += 1
        return CountedReader(self, path)


class CountedReader(LocalReader):
    """A reader that tells its store when it is closed."""

    def __init__(self, store: CountingStore, path: str) -> None:
        self.store = store
        super().__init__(store.root / path)

    def close(self) -> None:
        """Close and tell."""
        self.store.num_open -= 1
        super().close()


def test_memory_gives_and_takes_itself() -> None:
    """A range of a buffer is fetched and filled where it lies, without a copy."""
    data = count(100)
    out = np.empty(10, np.uint8)
    fetched = MemorySource(data).fetch(20, out)
    assert np.shares_memory(fetched, data)
    assert fetched.tolist() == list(range(20, 30))
    sink = MemorySink(data)
    assert sink.is_memory
    sink.memory(0, 5)[:] = 7
    sink.write(5, np.full(5, 8, np.uint8))
    assert data[:11].tolist() == [7] * 5 + [8] * 5 + [10]


@pytest.mark.parametrize("root", ["memory://endpoints/", ""])
def test_a_file_begins_with_its_header_and_appears_at_commit(tmp_path: Path, root: str) -> None:
    """The header is written first, even of a file to which nothing else is written."""
    store = open_store(root or tmp_path)
    for name, payload in (("some", b"12345678"), ("none", b"")):
        sink = FileSink(store, name, b"header!!", 8 + len(payload))
        assert sink.is_sequential == store.is_sequential
        if payload:
            sink.write(8, np.frombuffer(payload, np.uint8))
        sink.finish()
        assert not store.exists(name)
        sink.commit()
        assert store.get(name, max_nbytes=100) == b"header!!" + payload


def test_an_abort_before_the_first_write_does_nothing(tmp_path: Path) -> None:
    """A file that was never begun needs no cleaning up."""
    FileSink(open_store(tmp_path), "x", b"", 0).abort()
    assert open_store(tmp_path).list() == {}


def test_files_are_opened_on_demand_and_kept_within_the_limit(tmp_path: Path) -> None:
    """Of many files few are open at a time; what is used again soon is not opened again."""
    paths = [f"file-{i}" for i in range(20)]
    store = CountingStore(tmp_path)
    for i, path in enumerate(paths):
        store.put(path, bytes([i]) * 10)
    pool = ReaderPool(store, max_open=3)
    sources = pool.sources(paths)
    assert store.num_opened == 0
    for i, source in enumerate(sources):
        out = np.empty(4, np.uint8)
        assert source.fetch(2, out).tobytes() == bytes([i]) * 4
        source.fetch(0, out)
        assert store.num_open <= 4
    assert store.num_opened == len(paths)
    pool.close()
    assert store.num_open == 0


def test_threads_share_an_open_file(tmp_path: Path) -> None:
    """Many threads read one file at once and each gets its own bytes."""
    store = CountingStore(tmp_path)
    data = np.random.default_rng(0).integers(0, 256, 100_000, np.uint8)
    store.put("x", data.tobytes())
    pool = ReaderPool(store, max_open=1)
    (source,) = pool.sources(["x"])
    wrong: list[int] = []

    def work(seed: int) -> None:
        for at in np.random.default_rng(seed).integers(0, 90_000, 200).tolist():
            if source.fetch(at, np.empty(1000, np.uint8)).tobytes() != data[at : at + 1000].tobytes():
                wrong.append(at)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pool.close()
    assert wrong == []
    assert (store.num_opened, store.num_open) == (1, 0)


def test_a_missing_file_is_named_at_the_first_read(tmp_path: Path) -> None:
    """The pool itself stays usable."""
    store = open_store(tmp_path)
    store.put("x", b"12")
    pool = ReaderPool(store)
    missing, there = pool.sources(["nowhere", "x"])
    with pytest.raises(CheckpointNotFoundError, match=r"nowhere'; check the path"):
        missing.fetch(0, np.empty(1, np.uint8))
    assert there.fetch(0, np.empty(2, np.uint8)).tobytes() == b"12"
    pool.close()
