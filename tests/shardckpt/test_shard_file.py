"""Tests of shard files: what each rank's header says."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from shardckpt.catalogue import Tensor
from shardckpt.committed import read_committed
from shardckpt.container import read_header
from shardckpt.layout import regions, single_bucket
from shardckpt.names import name_of_key
from shardckpt.region import Box, Region, Span
from shardckpt.shard_file import ShardNaming, chunk_order, chunks_of, lay_out_shard, lay_out_shards, place_shards
from shardckpt.storage import open_store
from tests.shardckpt.checkpoints import write_checkpoint

TENSORS = (Tensor("a", "BF16", (4, 6)), Tensor("b", "F32", (5,)), Tensor("c", "I64", ()))


def test_every_rank_has_a_file_of_its_own_name() -> None:
    """Names hold rank and world size, at five digits and more, and the token of a save over an older one."""
    assert ShardNaming(8, None).path(3) == "shard-00003-of-00008.safetensors"
    assert ShardNaming(123_456, None, "0a1b2c3d").path(100_000) == "shard-100000-of-123456-0a1b2c3d.safetensors"


def test_all_files_are_laid_out_without_gaps() -> None:
    """Chunks follow each other from the end of the header to the end of the file."""
    files = lay_out_shards(TENSORS, regions(single_bucket(TENSORS), TENSORS, 4), ShardNaming(4, 7))
    catalogue = files.catalogue
    for rank, (file, header) in enumerate(zip(catalogue.files, files.headers, strict=True)):
        mine = np.flatnonzero(catalogue.chunk_file == rank)
        ends = np.cumsum(catalogue.chunk_nbytes[mine])
        assert (
            catalogue.chunk_byte_offset[mine].tolist() == (len(header) + ends - catalogue.chunk_nbytes[mine]).tolist()
        )
        assert file.nbytes == len(header) + (int(ends[-1]) if len(ends) else 0)
        assert file.header_nbytes == len(header)
    assert files.nbytes == sum(file.nbytes for file in catalogue.files)


def test_files_can_be_placed_from_the_sizes_of_their_headers_alone() -> None:
    """What all ranks know without each other's headers is what laying out gives."""
    spans = regions(single_bucket(TENSORS), TENSORS, 4)
    files = lay_out_shards(TENSORS, spans, ShardNaming(4, 7))
    placed = place_shards(TENSORS, spans, ShardNaming(4, 7), [len(header) for header in files.headers])
    assert placed.files == files.catalogue.files
    for rank in range(4):
        _, begins, _ = lay_out_shard(TENSORS, chunks_of(TENSORS, spans.of_rank(rank)), rank, ShardNaming(4, 7))
        assert placed.chunk_byte_offset[placed.chunk_file == rank].tolist() == begins


def test_a_header_tells_regions_and_global_shapes(tmp_path: Path) -> None:
    """Chunks of one tensor get numbered keys; cut ones carry global shape and region, whole ones need none."""
    chunks: list[tuple[int, Region]] = [
        (2, Span(0, 1)),
        (1, Span(1, 3)),
        (1, Span(4, 5)),
        (0, Box((0, 2), (4, 2))),
    ]
    header, begins, nbytes = lay_out_shard(TENSORS, chunks, 0, ShardNaming(2, None, state=b'{"sections":{}}'))
    (tmp_path / "x").write_bytes(header + bytes(nbytes - len(header)))
    found = read_header(open_store(tmp_path).open_reader("x"))
    assert [(entry.key, entry.shape) for entry in found.entries] == [
        ("c", ()),
        ("b", (2,)),
        ("b%@1", (1,)),
        ("a", (4, 2)),
    ]
    assert [entry.begin for entry in found.entries] == begins
    assert [name_of_key(entry.key) for entry in found.entries] == ["c", "b", "b", "a"]
    assert json.loads(found.metadata.pop("regions")) == {
        "b": [[5], 1, 3],
        "b%@1": [[5], 4, 5],
        "a": [[4, 6], [0, 2], [4, 2]],
    }
    assert found.metadata == {
        "format": "shardckpt",
        "version": "1",
        "rank": "0",
        "world_size": "2",
        "step": "null",
        "state": '{"sections":{}}',
    }


def test_chunks_are_ordered_widest_first() -> None:
    """Then by tensor, then by start, so that each is aligned to its element."""
    chunks: list[tuple[int, Region]] = [(0, Span(0, 3)), (1, Span(3, 5)), (1, Span(0, 2)), (2, Span(0, 1))]
    assert chunk_order(TENSORS, chunks) == [3, 2, 1, 0]
    boxes: list[tuple[int, Region]] = [(0, Box((0, 2), (4, 2))), (0, Box((0, 0), (4, 2)))]
    assert chunk_order(TENSORS, boxes) == [1, 0]


def test_shard_files_are_plain_safetensors(tmp_path: Path) -> None:
    """Any reader opens a rank's file, and finds its elements under the tensor's name."""
    weight = np.arange(60, dtype=np.float32).reshape(12, 5)
    write_checkpoint(str(tmp_path), {"model.w": weight, "model.s": np.array(3.5)}, world_size=3)
    parts = []
    for rank in range(3):
        with safe_open(tmp_path / f"shard-{rank:05}-of-00003.safetensors", "numpy") as file:
            assert file.metadata()["rank"] == str(rank)
            parts.append(file.get_tensor("model.w"))
    assert np.concatenate(parts).tobytes() == weight.tobytes()


@pytest.mark.parametrize("world_size", [1, 3])
def test_equal_states_give_equal_files(tmp_path: Path, world_size: int) -> None:
    """Nothing in a shard file or chunk table depends on the time or the machine."""
    arrays = {"model.w": np.arange(60, dtype=np.float32), "model.n": np.array(3)}
    for name in ("one", "two"):
        write_checkpoint(str(tmp_path / name), arrays, world_size=world_size, replicated=("model.n",), objects={"a": 1})
    found = read_committed(open_store(tmp_path / "one"))
    paths = [found.manifest.chunk_table.path, *(file.path for file in found.catalogue.files)]
    assert len(paths) == world_size + 1
    for path in paths:
        assert (tmp_path / "one" / path).read_bytes() == (tmp_path / "two" / path).read_bytes()


def test_rank_0_keeps_what_a_lost_manifest_said(tmp_path: Path) -> None:
    """The state's structure stands in rank 0's header, as in the manifest."""
    write_checkpoint(str(tmp_path), {"model.w": np.zeros(4)}, objects={"note": "hello"}, step=12)
    found = read_committed(open_store(tmp_path))
    metadata = read_header(open_store(tmp_path).open_reader("shard-00000-of-00002.safetensors")).metadata
    state = json.loads(metadata["state"])
    assert metadata["step"] == "12"
    assert state["objects"] == {"note": "hello"}
    assert state["sections"] == found.manifest.sections
    assert state["tensors"] == [{"name": "model.w", "dtype": "F64", "shape": [4]}]
    assert "state" not in read_header(open_store(tmp_path).open_reader("shard-00001-of-00002.safetensors")).metadata
