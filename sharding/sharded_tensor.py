"""Spans of flattened tensors as torch's `ShardedTensor`, which knows boxes only, and back.

A span of a row-major tensor is a few boxes: the end of a row, whole rows, the beginning of a row, and so on in each
dim. Every rank computes those of all ranks from the layout; nothing is communicated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharded_tensor.shard import Shard

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and shape, one number a dim."""


def boxes_of_span(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes that make up elements `[start, stop)` of a flattened tensor, in their order."""
    if start >= stop:
        return
    if len(shape) < 2:
        yield ((start,), (stop - start,)) if shape else ((), ())
        return
    stride = 1
    for size in shape[1:]:
        stride *= size
    first, last = start // stride, (stop - 1) // stride
    if first == last or start % stride:
        end = min(stop - first * stride, stride)
        yield from (((first, *o), (1, *s)) for o, s in boxes_of_span(shape[1:], start - first * stride, end))
        yield from boxes_of_span(shape, (first + 1) * stride, stop)
        return
    rows = stop // stride - first
    yield (first, *(0,) * (len(shape) - 1)), (rows, *shape[1:])
    yield from boxes_of_span(shape, (first + rows) * stride, stop)


def to_sharded_tensor(
    span: torch.Tensor, shape: tuple[int, ...], spans: Sequence[tuple[int, int]], group: dist.ProcessGroup
) -> ShardedTensor:
    """Give a sharded tensor over what all ranks of a group hold; it shares this rank's memory.

    Args:
        span: What this rank holds. # [stop - start]
        shape: Global shape.
        spans: Start and stop of each rank's span, by rank in the group.
        group: The ranks.

    Collective:
        None.
    """
    ranks, me = dist.get_process_group_ranks(group), dist.get_rank(group)
    metadata: list[ShardMetadata] = []
    mine: list[Shard] = []
    begin = 0
    for rank, (start, stop) in enumerate(spans):
        for offset, size in boxes_of_span(shape, start, stop):
            one = ShardMetadata(list(offset), list(size), placement=f"rank:{ranks[rank]}/{span.device}")
            metadata.append(one)
            if rank == me:
                numel = torch.Size(size).numel()
                mine.append(Shard(span.reshape(-1).narrow(0, begin, numel).view(size), one))
                begin += numel
    properties = TensorProperties(dtype=span.dtype)
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        mine, ShardedTensorMetadata(metadata, torch.Size(shape), properties), process_group=group
    )


def from_sharded_tensor(tensor: ShardedTensor, shape: tuple[int, ...], start: int, stop: int) -> torch.Tensor:
    """Give this rank's span out of a sharded tensor that is cut as the module is. # [stop - start]

    Raises:
        ValueError: If it is cut in another way.
    """
    shards = tensor.local_shards()
    found = [(tuple(shard.metadata.shard_offsets), tuple(shard.metadata.shard_sizes)) for shard in shards]
    expected = list(boxes_of_span(shape, start, stop))
    if found != expected:
        raise ValueError(f"the sharded tensor has the boxes {found} on this rank, the module {expected}")
    return torch.cat([shard.tensor.reshape(-1) for shard in shards]) if shards else torch.empty(0)


def is_sharded_tensor(value: object) -> bool:
    """Tell whether a value is torch's `ShardedTensor`."""
    return isinstance(value, ShardedTensor)
