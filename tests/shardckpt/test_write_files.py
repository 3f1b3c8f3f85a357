"""Tests of writing laid-out files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shardckpt.catalogue import Catalogue
from shardckpt.checksum import crc32c
from shardckpt.container import FileSet
from shardckpt.endpoints import MemorySource
from shardckpt.errors import MismatchError, NoSpaceError, StorageError
from shardckpt.layout import regions, single_bucket
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
    renamed = {"a": "model.w", "b": "model.b"}
    written = write_files(source, sources, files, store, options=TransferOptions(), renamed=renamed)
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
