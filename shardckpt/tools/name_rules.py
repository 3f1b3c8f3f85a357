"""Rules that turn the tensors of one program into those of another: other names, split, fused, transposed, left out.

Knows how a rule becomes pieces; refuses to know any model. The first rule that fits a tensor is used, once; tensors
that fit none keep their names.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardckpt.catalogue import Tensor
from shardckpt.derivation import Piece
from shardckpt.errors import MismatchError, UnsupportedError, listing
from shardckpt.region import Box, Region, Span, normalise
from shardckpt.tools.rules_file import Rule, templates_of
from shardckpt.tools.selection import Selection

MAX_PIECES = 1 << 20
"""Of one tensor: fusing along an inner dim takes a piece for each row."""


def apply_rules(selection: Selection, rules: Sequence[Rule]) -> Selection:
    """Give the selection as the rules have it.

    Raises:
        MismatchError: If tensors do not have the shapes that a rule needs, some that are to be fused are missing, or
            two get one name.
    """
    left = {tensor.name: tensor for tensor in selection.tensors}
    made: dict[str, list[_Made]] = {name: [] for name in left}  # by the first source, whose place they take
    for rule in rules:
        for names in _fitting(rule, list(left)):
            sources = [left.pop(name) for name in names.sources]
            made[names.sources[0]] = _make(rule, sources, names.targets, selection)
    for name, tensor in left.items():
        made[name] = [_Made(tensor, selection.pieces.get(name, ()))]
    results = [_with_new_aliases(one, rules) for group in made.values() for one in group]
    _check_distinct(results)
    pieces = {one.tensor.name: one.pieces for one in results if one.pieces}
    return Selection(tuple(one.tensor for one in results), pieces)


def _with_new_aliases(made: _Made, rules: Sequence[Rule]) -> _Made:
    """Rename further names too, by the rules that only rename."""
    plain = [
        (t[0], u[0])
        for t, u in ((templates_of(r.sources), templates_of(r.targets)) for r in rules)
        if len(t) == len(u) == 1
    ]

    def renamed(alias: str) -> str:
        found = ((target, source.match(alias)) for source, target in plain)
        return next((target.fill(values) for target, values in found if values is not None), alias)

    return replace(made, tensor=replace(made.tensor, aliases=tuple(map(renamed, made.tensor.aliases))))


@dataclass(frozen=True, slots=True)
class _Made:
    tensor: Tensor
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class _Names:
    """What one use of a rule is about."""

    sources: list[str]
    targets: list[str]


def _make(rule: Rule, sources: Sequence[Tensor], targets: Sequence[str], selection: Selection) -> list[_Made]:
    """Use a rule once."""
    if not targets:
        return []
    if len(sources) == len(targets) == 1:
        return [_renamed(rule, sources[0], targets[0], selection)]
    whole_names = [selection.source_names(tensor)[0] for tensor in sources]
    if len(sources) == 1:
        return _split(rule, sources[0], whole_names[0], targets)
    return [_fused(rule, sources, whole_names, targets[0])]


def _renamed(rule: Rule, tensor: Tensor, target: str, selection: Selection) -> _Made:
    pieces = selection.pieces.get(tensor.name) or (_whole_piece(tensor.name, tensor.shape),)
    if not rule.transpose:
        return _Made(replace(tensor, name=target), pieces)
    if len(tensor.shape) != 2:
        raise MismatchError(f"cannot transpose {tensor.name!r} of shape {tensor.shape}: it does not have two dims")
    turned = tuple(replace(piece, is_transposed=True) for piece in pieces)
    return _Made(replace(tensor, name=target, shape=tensor.shape[::-1], aliases=()), turned)


def _split(rule: Rule, tensor: Tensor, source: str, targets: Sequence[str]) -> list[_Made]:
    whole_size = _size_along(tensor, rule)
    sizes = rule.sizes or [whole_size // (rule.groups * len(targets))] * len(targets)
    if sum(sizes) * rule.groups != whole_size:
        raise MismatchError(
            f"cannot split {tensor.name!r} of shape {tensor.shape} along dim {rule.dim} into {rule.groups} groups of "
            f"{sizes}; correct the rule"
        )
    made = []
    for number, (target, size) in enumerate(zip(targets, sizes, strict=True)):
        starts = [group * sum(sizes) + sum(sizes[:number]) for group in range(rule.groups)]
        shape = _with_size(tensor.shape, rule.dim, size * rule.groups)
        parts = [(source, tensor.shape, start, size) for start in starts]
        made.append(_Made(Tensor(target, tensor.dtype, shape), _joined(parts, rule.dim)))
    return made


def _fused(rule: Rule, tensors: Sequence[Tensor], sources: Sequence[str], target: str) -> _Made:
    whole_sizes = [_size_along(tensor, rule) for tensor in tensors]
    sizes = rule.sizes or [size // rule.groups for size in whole_sizes]
    others = {(tensor.dtype, _with_size(tensor.shape, rule.dim, 0)) for tensor in tensors}
    if len(others) > 1 or [size * rule.groups for size in sizes] != whole_sizes:
        shapes = ", ".join(f"{tensor.name!r} {tensor.dtype} {tensor.shape}" for tensor in tensors)
        raise MismatchError(
            f"cannot fuse {shapes} along dim {rule.dim} in {rule.groups} groups of {sizes}; correct the rule"
        )
    parts = [
        (source, tensor.shape, group * size, size)
        for group in range(rule.groups)
        for source, tensor, size in zip(sources, tensors, sizes, strict=True)
    ]
    shape = _with_size(tensors[0].shape, rule.dim, sum(whole_sizes))
    return _Made(Tensor(target, tensors[0].dtype, shape), _joined(parts, rule.dim))


def _joined(parts: Sequence[tuple[str, tuple[int, ...], int, int]], dim: int) -> tuple[Piece, ...]:
    """Give the pieces of a tensor that is put together along `dim` from (source, its shape, start, size) each."""
    outer = parts[0][1][:dim]
    if math.prod(outer) * len(parts) > MAX_PIECES:
        raise UnsupportedError(
            f"splitting or fusing tensors such as {parts[0][0]!r} along dim {dim} would take more than {MAX_PIECES} "
            "pieces; choose another dim, or do it in the program that loads them"
        )
    return tuple(
        Piece(source, _part(shape, dim, index, start, size))
        for index in np.ndindex(*outer)
        for source, shape, start, size in parts
    )


def _part(shape: tuple[int, ...], dim: int, index: tuple[int, ...], start: int, size: int) -> Region:
    inner = shape[dim + 1 :]
    box = Box((*index, start, *(0,) * len(inner)), (*(1,) * dim, size, *inner))
    return normalise(box, shape, fqn="")


def _whole_piece(source: str, shape: tuple[int, ...]) -> Piece:
    return Piece(source, Span(0, math.prod(shape)))


def _size_along(tensor: Tensor, rule: Rule) -> int:
    if rule.dim >= len(tensor.shape):
        raise MismatchError(f"{tensor.name!r} of shape {tensor.shape} has no dim {rule.dim}; correct the rule")
    return tensor.shape[rule.dim]


def _with_size(shape: tuple[int, ...], dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])


def _check_distinct(made: Iterable[_Made]) -> None:
    seen: set[str] = set()
    twice: list[str] = []
    for one in made:
        for name in (one.tensor.name, *one.tensor.aliases):
            if name in seen:
                twice.append(name)
            seen.add(name)
    if twice:
        raise MismatchError(f"the rules give several tensors the name {listing(twice)}; make them differ")


def _fitting(rule: Rule, names: Sequence[str]) -> list[_Names]:
    """Give each use of a rule among these names."""
    sources, targets = templates_of(rule.sources), templates_of(rule.targets)
    there = set(names)
    found = []
    for name in names:
        values = sources[0].match(name)
        if values is None:
            continue
        together = [template.fill(values) for template in sources]
        if missing := [other for other in together if other not in there]:
            raise MismatchError(
                f"{name!r} is to be fused with {listing(missing)}, which is not there; correct the rule"
            )
        found.append(_Names(together, [template.fill(values) for template in targets]))
    return found
