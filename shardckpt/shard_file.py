"""What one rank writes: the header of its shard file and where its chunks lie in it.

Headers carry what is needed to rebuild a lost manifest: rank, world size, step, each cut tensor's global shape and
region; rank 0's also the state's structure. They hold nothing that depends on the time or the machine, so that equal
states give equal files.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from shardckpt.catalogue import NO_CRC, Boxes, Catalogue, File, Spans, Tensor
from shardckpt.container import FileSet, build_header
from shardckpt.layout import RankChunks
from shardckpt.names import chunk_key
from shardckpt.region import Box, Region, Span


@dataclass(frozen=True, slots=True)
class ShardNaming:
    """What all shard files of one save have in common.

    Attributes:
        world_size: Number of ranks.
        step: The training step, or None.
        token: Sets the files of a save over an older one apart from those; "" otherwise.
        state: The structure of the state, kept in rank 0's header (see `docs/format.md`).
    """

    world_size: int
    step: int | None
    token: str = ""
    state: bytes = b"{}"

    def path(self, rank: int) -> str:
        """Give the name of a rank's file."""
        token = f"-{self.token}" if self.token else ""
        return f"shard-{rank:05}-of-{self.world_size:05}{token}.safetensors"

    def metadata(self, rank: int, regions: dict[str, list[object]]) -> dict[str, str]:
        """Give the metadata of a rank's file.

        `regions` holds, by key, the global shape and region of each cut tensor.
        """
        own = {
            "format": "shardckpt",
            "version": "1",
            "rank": str(rank),
            "world_size": str(self.world_size),
            "step": json.dumps(self.step),
            "regions": msgspec.json.encode(regions).decode(),
        }
        return own | {"state": self.state.decode()} if rank == 0 else own


def lay_out_shards(tensors: Sequence[Tensor], chunks: RankChunks, naming: ShardNaming) -> FileSet:
    """Lay out the files of all ranks, one each."""
    headers = [
        lay_out_shard(tensors, chunks_of(tensors, chunks.of_rank(rank)), rank, naming)[0]
        for rank in range(naming.world_size)
    ]
    return FileSet(place_shards(tensors, chunks, naming, [len(header) for header in headers]), tuple(headers))


def place_shards(
    tensors: Sequence[Tensor], chunks: RankChunks, naming: ShardNaming, header_nbytes: Sequence[int]
) -> Catalogue:
    """Give the catalogue of the files of all ranks, from the sizes of their headers alone.

    Its spans and its boxes are each in file order: chunk `i` of it is row `chunk_rows(chunks)[i]` of `chunks`.
    """
    item = np.array([tensor.item_bytes for tensor in tensors], np.int64)
    ends = np.concatenate([[0], np.cumsum((chunks.stop - chunks.start) * item[chunks.tensor])])
    bases = ends[np.searchsorted(chunks.rank, np.arange(naming.world_size + 1))]  # payload bytes of all ranks before
    headers = np.array(header_nbytes, np.int64)
    at = ends[:-1] - bases[chunks.rank] + headers[chunks.rank]
    files = tuple(
        File(naming.path(rank), header + payload, header)
        for rank, (header, payload) in enumerate(zip(headers.tolist(), np.diff(bases).tolist(), strict=True))
    )
    no_crc = np.full(len(chunks.rank), NO_CRC, np.int64)
    is_span = chunks.box < 0
    columns = (chunks.tensor, chunks.start, chunks.stop, chunks.rank, at, no_crc)
    spans = Spans(*(column[is_span] for column in columns))
    box, boxes = chunks.box[~is_span], chunks.take(np.flatnonzero(~is_span))
    offset, shape = chunks.offset[box], chunks.shape[box]
    return Catalogue(
        tuple(tensors), files, spans, Boxes(boxes.tensor, offset, shape, boxes.rank, at[~is_span], no_crc[~is_span])
    )


def chunk_rows(chunks: RankChunks) -> NDArray[np.int64]:
    """Give the row of every chunk of the catalogue that `place_shards` makes: spans first, then boxes."""
    return np.concatenate([np.flatnonzero(chunks.box < 0), np.flatnonzero(chunks.box >= 0)])


def chunks_of(tensors: Sequence[Tensor], chunks: RankChunks) -> list[tuple[int, Region]]:
    """Give the (tensor, region) of each row."""
    found: list[tuple[int, Region]] = []
    columns = (chunks.tensor.tolist(), chunks.start.tolist(), chunks.stop.tolist(), chunks.box.tolist())
    for tensor, start, stop, box in zip(*columns, strict=True):
        if box < 0:
            found.append((tensor, Span(start, stop)))
        else:
            ndim = len(tensors[tensor].shape)
            found.append(
                (tensor, Box(tuple(chunks.offset[box, :ndim].tolist()), tuple(chunks.shape[box, :ndim].tolist())))
            )
    return found


def lay_out_shard(
    tensors: Sequence[Tensor], chunks: Sequence[tuple[int, Region]], rank: int, naming: ShardNaming
) -> tuple[bytes, list[int], int]:
    """Lay out one rank's file.

    Args:
        tensors: All tensors of the checkpoint.
        chunks: (index of the tensor, normalised region) of each chunk, in the order of the file (see `chunk_order`).
        rank: Whose file.
        naming: What all files share.

    Returns:
        The header, where each chunk begins, and the size of the file.
    """
    seen: dict[int, int] = {}
    rows: list[tuple[str, str, tuple[int, ...]]] = []
    cut: dict[str, list[object]] = {}
    for index, region in chunks:
        tensor = tensors[index]
        key = chunk_key(tensor.name, seen.get(index, 0))
        seen[index] = seen.get(index, 0) + 1
        match region:
            case Span(start, stop) if stop - start == tensor.numel:
                shape = tensor.shape
            case Span(start, stop):
                shape = (stop - start,)
                cut[key] = [tensor.shape, start, stop]
            case Box(offset, shape):
                cut[key] = [tensor.shape, offset, shape]
        rows.append((key, tensor.dtype, shape))
    header, begins = build_header(rows, naming.metadata(rank, cut))
    last = [region.numel * tensors[index].item_bytes for index, region in chunks[-1:]]
    return header, begins, max(begins, default=len(header)) + sum(last)


def chunk_order(tensors: Sequence[Tensor], chunks: Sequence[tuple[int, Region]]) -> list[int]:
    """Give the order in which a rank's chunks lie in its file: widest elements first, so that all are aligned.

    Then by tensor, region.
    """

    def key(position: int) -> tuple[int, int, tuple[int, ...]]:
        tensor, region = chunks[position]
        at = (region.start,) if isinstance(region, Span) else region.offset
        return -tensors[tensor].item_bytes, tensor, at

    return sorted(range(len(chunks)), key=key)
