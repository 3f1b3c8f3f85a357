"""Tests of writing laid-out files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from shardckpt.batches import Sizes
from shardckpt.catalogue import Catalogue, File, Tensor
from shardckpt.checksum import crc32c
from shardckpt.committed import with_chunk_crcs
from shardckpt.container import FileSet
from shardckpt.derivation import Derivation
from shardckpt.endpoints import MemorySource
from shardckpt.errors import CorruptError, MismatchError, NoSpaceError, StorageError
from shardckpt.layout import Layout, Mesh, regions, single_bucket
from shardckpt.local_store import LocalStore, LocalWriter
from shardckpt.shard_file import ShardNaming, lay_out_shards
from shardckpt.storage import Writer, open_store
from shardckpt.transfer import TransferOptions
from shardckpt.write_files import write_files
from tests.shardckpt.checkpoints import in_memory

ARRAYS = {"model.w": np.arange(50, dtype=np.float32), "model.b": np.arange(6).reshape(2, 3)}


def laid_out(names: list[str]) -> tuple[Catalogue, list[MemorySource], FileSet]:
    """Give sources, and the files of three ranks for tensors of these names."""
    source, sources = in_memory(ARRAYS)
    tensors = in_memory(dict(zip(names, ARRAYS.values(), strict=True)))[0].tensors
    return source, sources, lay_out_shards(tensors, regions(single_bucket(tensors), tensors, 3), ShardNaming(3, None))


@pytest.mark.parametrize("root", ["memory://write_files", ""])
def test_files_are_written_with_their_checksums(tmp_path: Path, root: str) -> None:
    """What is handed back is what lies there, and renamed tensors are found."""
    store = open_store(root or tmp_path)
    source, sources, files = laid_out(["a", "b"])
    derivation = Derivation.renaming(files.catalogue, {"a": "model.w", "b": "model.b"})
    written = write_files(source, sources, files, store, options=TransferOptions(), derivation=derivation)
    found = {path: store.get(path, max_nbytes=1 << 20) for path in store.list()}
    assert sorted(found) == [file.path for file in written.catalogue.files]
    assert written.nbytes == sum(map(len, found.values()))
    for chunk, crc in enumerate(written.catalogue.chunk_crc.tolist()):
        path = written.catalogue.files[int(written.catalogue.chunk_file[chunk])].path
        at, nbytes = int(written.catalogue.chunk_byte_offset[chunk]), int(written.catalogue.chunk_nbytes[chunk])
        assert crc == crc32c(found[path][at : at + nbytes])
    assert list(written.headers_crc) == [crc32c(header) for header in files.headers]


class Small(LocalStore):
    """A store with little room that is never written to."""

    def free_bytes(self) -> int:
        """Give little."""
        return 100

    def create(self, path: str, *, nbytes: int) -> Writer:
        """Refuse."""
        raise AssertionError("nothing may be written")


def test_nothing_is_begun_that_cannot_end(tmp_path: Path) -> None:
    """Too little room, or a tensor that is missing, is told before the first byte is written."""
    source, sources, files = laid_out(list(ARRAYS))
    with pytest.raises(NoSpaceError, match="has 100 bytes free"):
        write_files(source, sources, files, Small(tmp_path), options=TransferOptions())
    source, sources, files = laid_out(["model.w", "model.x"])
    with pytest.raises(MismatchError, match=r"no tensor 'model.x'"):
        write_files(source, sources, files, Small(tmp_path), options=TransferOptions())


class FailsToCommit(LocalStore):
    """A store whose second file cannot be renamed."""

    def create(self, path: str, *, nbytes: int) -> Writer:
        """Give a writer that fails at commit for rank 1."""

        class Failing(LocalWriter):
            def commit(self) -> None:
                raise StorageError.wrap("write", self.path, OSError("injected"))

        return (Failing if path.startswith("shard-00001") else LocalWriter)(self.root / path, nbytes)


def test_a_failed_commit_takes_the_rest_back(tmp_path: Path) -> None:
    """No temporary file stays behind."""
    source, sources, files = laid_out(list(ARRAYS))
    with pytest.raises(StorageError, match=r"shard-00001-of-00003.*injected"):
        write_files(source, sources, files, FailsToCommit(tmp_path), options=TransferOptions())
    assert set(open_store(tmp_path).list()) <= {"shard-00000-of-00003.safetensors"}


@pytest.mark.parametrize("target", [(0, 1), (1, 3), (1, 1)], ids=["rows", "more columns", "whole"])
def test_every_flipped_bit_is_found_also_where_runs_have_gaps(tmp_path: Path, target: tuple[int, int]) -> None:
    """From column shards to rows, to other columns and back: damage anywhere in the source leaves nothing written."""
    tensors = (Tensor("w", "U8", (6, 12)),)
    source = lay_out_shards(tensors, regions(on_mesh(1, 2), tensors, 2), ShardNaming(2, None)).catalogue
    whole = np.arange(72, dtype=np.uint8).reshape(6, 12)
    files = lay_out_shards(tensors, regions(on_mesh(*target), tensors, target[1]), ShardNaming(target[1], None))
    shards = [
        np.concatenate([np.zeros(f.header_nbytes, np.uint8), half.reshape(-1)]) for f, half in halves(source, whole)
    ]
    recorded = with_chunk_crcs(source, np.array([crc32c(half.reshape(-1).copy()) for _, half in halves(source, whole)]))
    write_files(recorded, [MemorySource(s) for s in shards], files, open_store(tmp_path / "good"), options=TINY)
    for position in range(0, 36, 5):
        damaged = [shard.copy() for shard in shards]
        damaged[position % 2][source.files[position % 2].header_nbytes + position] ^= 1
        store = open_store(tmp_path / "bad")
        with pytest.raises(CorruptError, match=rf"damaged: box .* of 'w' .* in 'shard-0000{position % 2}"):
            write_files(recorded, [MemorySource(s) for s in damaged], files, store, options=TINY)
        assert store.list() == {}


def on_mesh(dim: int, size: int) -> Layout:
    """Give the layout of one tensor that is cut along a dim."""
    return Layout([], [], [Mesh([size], [(0, dim)], [0])])


def halves(source: Catalogue, whole: NDArray[np.uint8]) -> list[tuple[File, NDArray[np.uint8]]]:
    """Give each file of two column shards with its elements."""
    return list(zip(source.files, np.split(whole, 2, axis=1), strict=True))


TINY = TransferOptions(budget_bytes=64, num_workers=2, sizes=Sizes(24, 8, 32, 16, 4))
