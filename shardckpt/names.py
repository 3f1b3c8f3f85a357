"""Names of tensors: how a path into a nested state becomes one string, and that no two paths share one.

A name is the path's keys joined with dots, so that module parameters read as people know them
(`model.layers.0.weight`). Where two paths of one state would get the same name (`{"a.b": x, "a": {"b": y}}`), those
whose keys hold dots are written escaped. `escaped` is injective: `%` starts every escape and is itself always escaped.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from shardckpt.errors import MismatchError, UnsupportedError

Key = str | int
Path = tuple[Key, ...]

CHUNK_MARK = "%@"
"""Between a tensor's name and the number of a further chunk of it in one file; `%` alone never occurs in a name."""

_ESCAPED = {"25": "%", "00": "\0", "2E": ".", "5F": "_", "e": "", "i": ""}
_ESCAPE = re.compile("%(" + "|".join(_ESCAPED) + ")")


def plain(path: Path) -> str:
    """Give the readable name of `path`: keys joined with dots, dots inside keys left alone."""
    return _reserved(".".join(_readable(key) for key in path))


def escaped(path: Path) -> str:
    """Give the injective name of `path`: as `plain`, with dots inside keys and the type of integer keys written out."""
    return _reserved(
        ".".join(f"%i{key}" if isinstance(key, int) else _readable(key).replace(".", "%2E") for key in path)
    )


def assign(paths: Iterable[Path]) -> dict[Path, str]:
    """Give every path of one state a name that no other of them has.

    Raises:
        MismatchError: If a path occurs twice.
    """
    ordered = list(paths)
    if len(set(ordered)) < len(ordered):
        twice = next(path for path, count in Counter(ordered).items() if count > 1)
        raise MismatchError(f"two values share the path {twice!r}; rename one of them")
    taken = Counter(plain(path) for path in ordered)
    return {path: escaped(path) if taken[plain(path)] > 1 else plain(path) for path in ordered}


def chunk_key(name: str, number: int) -> str:
    """Give the key, in a shard file, of the `number`-th chunk of the tensor there."""
    return name if number == 0 else f"{name}{CHUNK_MARK}{number}"


def name_of_key(key: str) -> str:
    """Give the tensor's name of a key in a shard file: the inverse of `chunk_key`."""
    name, mark, number = key.rpartition(CHUNK_MARK)
    return name if mark and number.isdigit() else key


def unescaped(text: str) -> str:
    """Give the text key that stands as `text` in a name: undoes what `plain` and `escaped` did to it."""
    return _ESCAPE.sub(lambda match: _ESCAPED[match[1]], text)


def section_prefix(section: str, *, is_escaped: bool = False) -> str:
    """Give what the names of a section's tensors begin with, the dot included."""
    join = escaped if is_escaped else plain
    return join((section, "x")).removesuffix("x")


def _readable(key: Key) -> str:
    if isinstance(key, int):
        return str(key)
    try:
        key.encode()
    except UnicodeEncodeError:
        raise UnsupportedError(f"the name {key!r} is not valid Unicode text; rename it") from None
    return key.replace("%", "%25").replace("\0", "%00") or "%e"


def _reserved(name: str) -> str:
    return name.replace("_", "%5F", 1) if name == "__metadata__" else name
