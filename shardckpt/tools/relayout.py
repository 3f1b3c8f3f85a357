"""Another rule by which a checkpoint's tensors are split: flat buckets, dim-0 shards, or cuts over a mesh.

Knows how people name such rules and which tensors they are for; refuses to know files. What every rank holds whole, and
what one rank alone has, stays so.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardckpt.catalogue import Tensor
from shardckpt.errors import MismatchError, UnsupportedError
from shardckpt.layout import Bucket, Layout, Mesh
from shardckpt.manifest import sections_of
from shardckpt.tools.selection import tensor_sections

FLAT_ALIGN = 4
"""Elements; 16 bytes of most parameters, as the runtime aligns them."""

_AXIS = re.compile(r"(\w+)=(\d+)(?::(\d+|-))?")


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a mesh.

    Attributes:
        name: For messages.
        size: Ranks along it.
        dim: The dim of each tensor that it cuts; None for none, so that ranks along it hold the same.
    """

    name: str
    size: int
    dim: int | None


Kind = str | tuple[Axis, ...]
"""What is asked for: "flat", "dim0", or axes of a mesh, the outermost first."""


def parse_kind(text: str) -> Kind:
    """Read what is asked for: `flat`, `dim0`, or `dp=4,tp=2`, each size with `:DIM` or `:-` behind it if need be.

    Without it, an axis named `tp` cuts dim 1, any other dim 0.

    Raises:
        UnsupportedError: If it is none of these.
    """
    if text in ("flat", "dim0"):
        return text
    matches = [_AXIS.fullmatch(part) for part in text.split(",")]
    axes = tuple(
        Axis(m[1], int(m[2]), None if m[3] == "-" else int(m[3] or (m[1] == "tp"))) for m in matches if m is not None
    )
    if len(axes) < len(matches) or any(not 1 <= axis.size < 1 << 31 for axis in axes):
        raise UnsupportedError(
            f"{text!r} is no layout; write flat, dim0, or the axes of a mesh, the outermost first, such as dp=4,tp=2 "
            "or dp=4:0,tp=2:1 with the dims that they cut (:- for none)"
        )
    return axes


def layout_of_kind(
    kind: Kind, tensors: Sequence[Tensor], sections: Mapping[str, str], current: Layout | None, *, num_ranks: int
) -> Layout:
    """Give the rule that is asked for.

    Args:
        kind: What is asked for.
        tensors: All tensors of the checkpoint.
        sections: Section -> kind.
        current: The rule that it has, if any. Without one that splits anything, all but scalars is split.
        num_ranks: The world size that the rule is to be used for.

    Raises:
        MismatchError: If a mesh has another number of ranks.
    """
    if current is None or not (current.buckets or current.meshes):
        alone = current.per_rank if current else []
        scalars = [i for i, tensor in enumerate(tensors) if not tensor.shape and i not in dict(alone)]
        current = Layout([], scalars, [], alone)
    kept = {*current.replicated, *(tensor for tensor, _ in current.per_rank)}
    split = [i for i in range(len(tensors)) if i not in kept]
    if kind == "flat":
        in_buckets = {tensor for bucket in current.buckets for column in bucket.columns for tensor in column}
        more = _flat([i for i in split if i not in in_buckets], tensors, sections)
        return Layout([*current.buckets, *more], current.replicated, [], current.per_rank)
    axes = (Axis("ranks", num_ranks, 0),) if isinstance(kind, str) else kind
    if math.prod(axis.size for axis in axes) != num_ranks:
        sizes = " x ".join(f"{axis.name}={axis.size}" for axis in axes)
        raise MismatchError(f"a mesh of {sizes} has {math.prod(a.size for a in axes)} ranks, not {num_ranks}")
    return Layout([], current.replicated, _meshes(axes, split, tensors), current.per_rank)


def _meshes(axes: Sequence[Axis], split: Sequence[int], tensors: Sequence[Tensor]) -> list[Mesh]:
    """Put tensors of equal cuts on one mesh; what lacks a dim is not cut along it."""
    by_cuts: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for i in split:
        ndim = len(tensors[i].shape)
        cuts = [(number, axis.dim) for number, axis in enumerate(axes) if axis.dim is not None and axis.dim < ndim]
        by_cuts.setdefault(tuple(cuts), []).append(i)
    return [Mesh([axis.size for axis in axes], list(cuts), members) for cuts, members in by_cuts.items()]


def _flat(split: Sequence[int], tensors: Sequence[Tensor], sections: Mapping[str, str]) -> list[Bucket]:
    """Give a bucket for each dtype of parameters; optimizer state that is shaped like a parameter is cut like it."""
    home = tensor_sections([tensor.name for tensor in tensors], sections)
    modules = sections_of(sections, "module")
    parameters = {
        _fqn(tensors[i].name, home[tensors[i].name], modules): i for i in split if home[tensors[i].name] in modules
    }
    columns: dict[str, dict[int, int]] = {}  # kind of optimizer state -> parameter -> tensor
    loose: list[int] = []
    for i in split:
        section = home[tensors[i].name]
        if section in modules:
            continue
        fqn, _, key = tensors[i].name.removeprefix(f"{section}.state.").rpartition(".")
        parameter = parameters.get(fqn, -1)
        if sections.get(section) == "optimizer" and parameter >= 0 and tensors[parameter].shape == tensors[i].shape:
            columns.setdefault(f"{section} {key}", {})[parameter] = i
        else:
            loose.append(i)
    buckets = []
    for members in _by_dtype(list(parameters.values()), tensors):
        rows = [[found.get(i, -1) for i in members] for found in columns.values()]
        buckets.append(_bucket(members, tensors, [members, *(row for row in rows if max(row) >= 0)]))
    return buckets + [_bucket(members, tensors, [members]) for members in _by_dtype(loose, tensors)]


def _fqn(name: str, section: str, modules: Sequence[str]) -> str:
    """Give a parameter's name as optimizers have it."""
    return name.removeprefix(f"{section}.") if len(modules) == 1 else name


def _by_dtype(indices: Sequence[int], tensors: Sequence[Tensor]) -> list[list[int]]:
    groups: dict[str, list[int]] = {}
    for i in indices:
        groups.setdefault(tensors[i].dtype, []).append(i)
    return list(groups.values())


def _bucket(members: Sequence[int], tensors: Sequence[Tensor], columns: list[list[int]]) -> Bucket:
    return Bucket(FLAT_ALIGN, [tensors[i].numel for i in members], [1] * len(members), columns)
