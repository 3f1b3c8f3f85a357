"""One checkpoint out of ranks that hold different things: pipeline stages, experts, meshes over some of the ranks.

Pure: what every rank says it holds goes in; the tensors of the whole, and which rank writes which region of them,
come out. Equal names with equal regions are replicas if their checksums agree, and refused if not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from shardckpt.catalogue import Tensor
from shardckpt.errors import MismatchError, listing
from shardckpt.layout import RankChunks
from shardckpt.manifest import Json
from shardckpt.per_rank import merge_per_rank
from shardckpt.region import Box, Region, Span, strides


class HeldTensor(msgspec.Struct, array_like=True):
    """What a rank says of one tensor: of the whole, and of the region that it holds.

    `offset` and `shape` are those of a box; for a span they are `[start]` and `[stop - start]` and `is_box` is false.
    """

    name: str
    dtype: str
    global_shape: tuple[int, ...]
    aliases: tuple[str, ...]
    is_box: bool
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    crc: int


class HeldState(msgspec.Struct):
    """All that a rank holds."""

    tensors: list[HeldTensor]
    sections: dict[str, str]
    objects: dict[str, bytes]  # JSON


@dataclass(frozen=True)
class Merged:
    """The whole state.

    Attributes:
        tensors: All tensors, in the order in which ranks name them.
        sections: All sections.
        objects: All objects.
        chunks: Which rank writes which region.
    """

    tensors: tuple[Tensor, ...]
    sections: dict[str, str]
    objects: dict[str, Json]
    chunks: RankChunks


def held(tensor: Tensor, region: Region, crc: int) -> HeldTensor:
    """Describe one tensor and the region that this rank holds of it."""
    match region:
        case Span(start, stop):
            is_box, offset, shape = False, (start,), (stop - start,)
        case Box(offset, shape):
            is_box = True
    return HeldTensor(tensor.name, tensor.dtype, tensor.shape, tensor.aliases, is_box, offset, shape, crc)


def merge(states: Sequence[HeldState]) -> Merged:
    """Put together what all ranks hold.

    Args:
        states: By rank.

    Raises:
        MismatchError: If ranks contradict each other; names the tensor or value, and the ranks.
    """
    tensors = _merge_tensors(states)
    sections: dict[str, str] = {}
    objects: dict[str, Json] = {}
    owners: dict[str, int] = {}
    for rank, state in enumerate(states):
        for section, kind in state.sections.items():
            if sections.setdefault(section, kind) != kind:
                raise MismatchError(
                    f"state[{section!r}] is of kind {sections[section]!r} on some ranks, {kind!r} on rank {rank}"
                )
        for section, raw in state.objects.items():
            value: Json = msgspec.json.decode(raw)
            if section in objects:
                value = merge_values(objects[section], value, f"state[{section!r}]", (owners[section], rank))
            else:
                owners[section] = rank
            objects[section] = value
    index = {tensor.name: i for i, tensor in enumerate(tensors)}
    return Merged(tensors, sections, objects, _assign(states, tensors, index).in_file_order(tensors))


def _merge_tensors(states: Sequence[HeldState]) -> tuple[Tensor, ...]:
    found: dict[str, Tensor] = {}
    first: dict[str, int] = {}
    for rank, state in enumerate(states):
        for one in state.tensors:
            tensor = Tensor(one.name, one.dtype, tuple(one.global_shape), tuple(one.aliases))
            known = found.setdefault(one.name, tensor)
            first.setdefault(one.name, rank)
            if (known.dtype, known.shape) != (tensor.dtype, tensor.shape):
                raise MismatchError(
                    f"{one.name!r} has dtype {known.dtype} and global shape {known.shape} on rank {first[one.name]}, "
                    f"{tensor.dtype} and {tensor.shape} on rank {rank}. Give it a name of its own on each, or the "
                    "same value."
                )
            if known.aliases != tensor.aliases:
                raise MismatchError(
                    f"{one.name!r} is tied to {listing(known.aliases)} on rank {first[one.name]}, to "
                    f"{listing(tensor.aliases)} "
                    f"on rank {rank}. Tie the same tensors on all ranks."
                )
    names = [name for tensor in found.values() for name in (tensor.name, *tensor.aliases)]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise MismatchError(
            f"{twice!r} is a tensor of its own on one rank and tied on another. Tie the same tensors on all ranks."
        )
    return tuple(found.values())


def _assign(states: Sequence[HeldState], tensors: Sequence[Tensor], index: Mapping[str, int]) -> RankChunks:
    """Give each distinct region to a rank that holds it: large ones first, each to the one with the least to write."""
    holders: dict[tuple[int, bool, tuple[int, ...], tuple[int, ...]], list[tuple[int, int]]] = {}
    for rank, state in enumerate(states):
        for one in state.tensors:
            if 0 not in one.shape:
                key = (index[one.name], one.is_box, tuple(one.offset), tuple(one.shape))
                holders.setdefault(key, []).append((rank, one.crc))
    load = [0] * len(states)
    rows: list[tuple[int, int, int, int, int]] = []
    boxes: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    by_size = sorted(holders.items(), key=lambda item: -_numel(item[0][3]) * tensors[item[0][0]].item_bytes)
    for (tensor, is_box, offset, shape), found in by_size:
        _refuse_differing(tensors[tensor].name, found)
        rank = min((rank for rank, _ in found), key=lambda rank: (load[rank], rank))
        load[rank] += _numel(shape) * tensors[tensor].item_bytes
        start = sum(o * s for o, s in zip(offset, strides(tensors[tensor].shape), strict=True)) if is_box else offset[0]
        rows.append((rank, tensor, start, start + _numel(shape), len(boxes) if is_box else -1))
        if is_box:
            boxes.append((offset, shape))
    width = max((len(offset) for offset, _ in boxes), default=0)
    rank_, tensor_, start_, stop_, box_ = np.array(rows, np.int64).reshape(-1, 5).T.copy()
    return RankChunks(
        rank_,
        tensor_,
        start_,
        stop_,
        box_,
        np.array([(*offset, *(0,) * (width - len(offset))) for offset, _ in boxes], np.int64).reshape(
            len(boxes), width
        ),
        np.array([(*shape, *(1,) * (width - len(shape))) for _, shape in boxes], np.int64).reshape(len(boxes), width),
    )


def _refuse_differing(name: str, found: Sequence[tuple[int, int]]) -> None:
    rank, crc = found[0]
    for other, other_crc in found[1:]:
        if other_crc != crc:
            raise MismatchError(
                f"{name!r} has the same name on ranks {rank} and {other}, but different bytes (checksums {crc:08x} "
                f"and {other_crc:08x}). "
                "Give what differs a name of its own on each rank (experts, pipeline stages), or bring the ranks "
                "together before saving."
            )


def merge_values(one: Json, other: Json, path: str, ranks: tuple[int, int]) -> Json:
    """Put two encoded values together: dicts by key, lists of parameter names by union; all else must be equal."""
    if (per_rank := merge_per_rank(one, other)) is not None:
        return per_rank
    if isinstance(one, dict) and isinstance(other, dict) and not _is_marked(one) and not _is_marked(other):
        merged = dict(one)
        for key, value in other.items():
            merged[key] = merge_values(one[key], value, f"{path}[{key!r}]", ranks) if key in one else value
        return merged
    if isinstance(one, list) and isinstance(other, list):
        if path.endswith("['params']"):
            return [*one, *(name for name in other if name not in one)]
        if len(one) == len(other):
            pairs = zip(one, other, strict=True)
            return [merge_values(a, b, f"{path}[{i}]", ranks) for i, (a, b) in enumerate(pairs)]
    if one != other or type(one) is not type(other):
        raise MismatchError(
            f"{path} is {_short(one)} on rank {ranks[0]}, {_short(other)} on rank {ranks[1]}. Make it the same on all "
            "ranks, or "
            "leave it out."
        )
    return one


def _is_marked(value: Mapping[str, Json]) -> bool:
    return any(key.startswith("$") for key in value)


def _short(value: Json) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _numel(shape: Sequence[int]) -> int:
    return int(np.prod(shape, dtype=np.int64))
