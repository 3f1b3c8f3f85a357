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

from shardckpt.catalogue import NO_CRC, Catalogue, File, Spans, Tensor
from shardckpt.container import FileSet, build_header
from shardckpt.layout import RankSpans
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


def lay_out_shards(tensors: Sequence[Tensor], spans: RankSpans, naming: ShardNaming) -> FileSet:
    """Lay out the files of all ranks, one each, for chunks that are spans."""
    headers = [
        lay_out_shard(tensors, chunks_of(spans.of_rank(rank)), rank, naming)[0] for rank in range(naming.world_size)
    ]
    return FileSet(place_shards(tensors, spans, naming, [len(header) for header in headers]), tuple(headers))


def place_shards(
    tensors: Sequence[Tensor], spans: RankSpans, naming: ShardNaming, header_nbytes: Sequence[int]
) -> Catalogue:
    """Give the catalogue of the files of all ranks, from the sizes of their headers alone."""
    item = np.array([tensor.item_bytes for tensor in tensors], np.int64)
    ends = np.cumsum((spans.stop - spans.start) * item[spans.tensor])
    first = np.searchsorted(spans.rank, np.arange(naming.world_size + 1))
    bases = np.concatenate([[0], ends])[first]  # payload bytes of all ranks before
    headers = np.array(header_nbytes, np.int64)
    at = np.concatenate([[0], ends])[:-1] - bases[spans.rank] + headers[spans.rank]
    files = tuple(
        File(naming.path(rank), header + payload, header)
        for rank, (header, payload) in enumerate(zip(headers.tolist(), np.diff(bases).tolist(), strict=True))
    )
    no_crc = np.full(len(spans.rank), NO_CRC, np.int64)
    return Catalogue(tuple(tensors), files, Spans(spans.tensor, spans.start, spans.stop, spans.rank, at, no_crc))


def chunks_of(spans: RankSpans) -> list[tuple[int, Region]]:
    """Give the (tensor, region) of each row."""
    rows = zip(spans.tensor.tolist(), spans.start.tolist(), spans.stop.tolist(), strict=True)
    return [(tensor, Span(start, stop)) for tensor, start, stop in rows]


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
    end = 0
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
        end += region.numel * tensor.item_bytes
    header, begins = build_header(rows, naming.metadata(rank, cut))
    return header, begins, len(header) + end


def chunk_order(tensors: Sequence[Tensor], chunks: Sequence[tuple[int, Region]]) -> list[int]:
    """Give the order in which a rank's chunks lie in its file: widest elements first, so that all are aligned.

    Then by tensor, region.
    """

    def key(position: int) -> tuple[int, int, tuple[int, ...]]:
        tensor, region = chunks[position]
        at = (region.start,) if isinstance(region, Span) else region.offset
        return -tensors[tensor].item_bytes, tensor, at

    return sorted(range(len(chunks)), key=key)
