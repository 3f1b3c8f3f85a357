"""Which tensors of a checkpoint go out to another format, and what they are called there.

Knows sections and patterns; refuses to know the format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from shardckpt import names
from shardckpt.catalogue import Tensor
from shardckpt.derivation import Piece
from shardckpt.errors import MismatchError, listing
from shardckpt.manifest import Stored, sections_of
from shardckpt.region import whole


@dataclass(frozen=True, slots=True)
class Choice:
    """What to take.

    Attributes:
        only: Patterns of names, as `inspect --tensors` shows them; empty for all.
        skip: Patterns of names to leave out.
        is_everything: Take the tensors of all sections, not weights alone.
    """

    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    is_everything: bool = False


@dataclass(frozen=True, slots=True)
class Selection:
    """Tensors by their new names.

    Attributes:
        tensors: In the order of the checkpoint; names and aliases are the new ones.
        pieces: New name -> what the tensor is made of, unless it is the checkpoint's of that name.
    """

    tensors: tuple[Tensor, ...]
    pieces: Mapping[str, tuple[Piece, ...]] = field(default_factory=dict)

    def source_names(self, tensor: Tensor) -> list[str]:
        """Give the names, in the checkpoint, of what a tensor is made of."""
        return [piece.source for piece in self.pieces.get(tensor.name, ())] or [tensor.name]


def select(found: Stored, choice: Choice) -> Selection:
    """Pick tensors: by default the weights, that is, those of sections that were modules.

    Where all come from one section, its prefix is taken off; otherwise the names stay as they are.

    Raises:
        MismatchError: If nothing is left, a pattern fits nothing, or it is not clear which are the weights.
    """
    by_section = tensors_by_section(found)
    picked = list(by_section) if choice.is_everything else _weight_sections(found, by_section, choice)
    candidates = {section: by_section.get(section, []) for section in picked}
    _check_patterns(choice, [tensor for tensors in candidates.values() for tensor in tensors])
    chosen = {
        section: kept
        for section, tensors in candidates.items()
        if (kept := [tensor for whole in tensors if (tensor := _filtered(whole, choice))])
    }
    if not chosen:
        raise MismatchError(
            "no tensor is left to write. Check the sections with `shardckpt inspect`, and --only and --skip against "
            "`shardckpt inspect --tensors`."
        )
    if choice.is_everything or len(chosen) > 1:
        return Selection(tuple(tensor for tensors in chosen.values() for tensor in tensors))
    ((section, tensors),) = chosen.items()
    return _without_prefix(section, tensors)


def fanned_out(selection: Selection, names_of: Callable[[Tensor], Sequence[str]]) -> Selection:
    """Give the selection with a tensor for each name that `names_of` gives of one; all are made of the same pieces."""
    tensors: list[Tensor] = []
    pieces: dict[str, tuple[Piece, ...]] = {}
    for tensor in selection.tensors:
        found = names_of(tensor)
        others = tuple(name for name in (tensor.name, *tensor.aliases) if name not in found)
        tensors += [replace(tensor, name=name, aliases=others if name == found[0] else ()) for name in found]
        whole_tensor = (Piece(tensor.name, whole(tensor.shape)),)
        pieces |= {name: selection.pieces.get(tensor.name, whole_tensor) for name in found}
    return Selection(tuple(tensors), pieces)


def tensors_by_section(found: Stored) -> dict[str, list[Tensor]]:
    """Give the tensors of each section that has any."""
    home = tensor_sections([tensor.name for tensor in found.catalogue.tensors], found.manifest.sections)
    result: dict[str, list[Tensor]] = {}
    for tensor in found.catalogue.tensors:
        result.setdefault(home[tensor.name], []).append(tensor)
    return result


def tensor_sections(tensor_names: Iterable[str], sections: Iterable[str]) -> dict[str, str]:
    """Give the section of each tensor: the longest that its name begins with, "" if there is none."""
    prefixes = {prefix: section for section in sections for prefix in _prefixes(section)}
    longest_first = sorted(prefixes, key=len, reverse=True)

    def section_of(name: str) -> str:
        return next((prefixes[p] for p in longest_first if name.startswith(p) or name == p[:-1]), "")

    return {name: section_of(name) for name in tensor_names}


def _prefixes(section: str) -> tuple[str, str]:
    return names.section_prefix(section), names.section_prefix(section, is_escaped=True)


def _weight_sections(found: Stored, by_section: Iterable[str], choice: Choice) -> list[str]:
    """Give the sections that hold weights: modules, or, without any, the one other that is no optimizer."""
    sections = found.manifest.sections
    modules = sections_of(sections, "module")
    if modules:
        return modules
    others = [section for section in by_section if sections.get(section) != "optimizer"]
    if len(others) == 1 or (others and choice.only):
        return others
    raise MismatchError(
        f"it is not clear which tensors are the weights: no section was saved from a module, and {listing(others)} "
        "hold tensors. Say which with --only, as in --only 'model.*'."
    )


def _check_patterns(choice: Choice, tensors: Iterable[Tensor]) -> None:
    every = [name for tensor in tensors for name in (tensor.name, *tensor.aliases)]
    idle = [pattern for pattern in (*choice.only, *choice.skip) if not any(fnmatchcase(n, pattern) for n in every)]
    if idle:
        raise MismatchError(
            f"no tensor fits the pattern {listing(idle)}; there are {listing(every)}. "
            "List them with `shardckpt inspect --tensors`."
        )


def _filtered(tensor: Tensor, choice: Choice) -> Tensor | None:
    """Give the tensor with those of its names that are wanted, or None if none is."""
    kept = [
        name
        for name in (tensor.name, *tensor.aliases)
        if (not choice.only or any(fnmatchcase(name, pattern) for pattern in choice.only))
        and not any(fnmatchcase(name, pattern) for pattern in choice.skip)
    ]
    return replace(tensor, name=kept[0], aliases=tuple(kept[1:])) if kept else None


def _without_prefix(section: str, tensors: Iterable[Tensor]) -> Selection:
    def bare(name: str) -> str:
        for prefix in _prefixes(section):
            if name.startswith(prefix):
                return names.unescaped(name[len(prefix) :])
        return name

    pieces = {bare(tensor.name): (Piece(tensor.name, whole(tensor.shape)),) for tensor in tensors}
    aliased = (replace(t, name=bare(t.name), aliases=tuple(bare(alias) for alias in t.aliases)) for t in tensors)
    return Selection(tuple(aliased), pieces)
