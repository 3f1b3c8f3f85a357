"""Non-tensor state as JSON, types kept, and back.

JSON's own types stand for themselves. What JSON lacks is an object with one key that begins with `$`: tuples,
integers and floats that JSON cannot carry, bytes, sets, complex numbers, dicts whose keys are not plain text, and
`$tensor`, which names a tensor of the checkpoint. Whatever has no place here is refused by its path. Never pickle.
"""

from __future__ import annotations

import base64
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping

from shardckpt.errors import FormatError, UnsupportedError
from shardckpt.manifest import Json
from shardckpt.names import Key, Path

_INT64 = range(-(1 << 63), 1 << 63)

NameTensor = Callable[[Path, object], str | None]
"""Gives the name under which a leaf is stored as a tensor, or None if it is no tensor."""


def encode(value: object, path: Path, name_tensor: NameTensor) -> Json:
    """Give `value` as JSON.

    Args:
        value: What to store.
        path: Where it stands in the state.
        name_tensor: Called for every leaf.

    Raises:
        UnsupportedError: If something in `value` cannot be stored; names its path and type.
    """
    if value is None or isinstance(value, bool) or type(value) is str:
        return value
    if type(value) is int:
        return value if value in _INT64 else {"$int": str(value)}
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if (name := name_tensor(path, value)) is not None:
        return {"$tensor": name}
    if type(value) is list:
        return [encode(item, (*path, i), name_tensor) for i, item in enumerate(value)]
    if type(value) is tuple:
        return {"$tuple": [encode(item, (*path, i), name_tensor) for i, item in enumerate(value)]}
    if isinstance(value, (set, frozenset)) and type(value) in (set, frozenset):
        return {"$set": [encode(item, path, name_tensor) for item in sorted(value, key=repr)]}
    if type(value) in (bytes, bytearray):
        return {"$bytes": base64.b64encode(value).decode()}  # type: ignore[arg-type]  # narrowed by type()
    if type(value) is complex:
        return {"$complex": [encode(value.real, path, name_tensor), encode(value.imag, path, name_tensor)]}
    if type(value) in (dict, OrderedDict):
        return _encode_dict(value, path, name_tensor)  # type: ignore[arg-type]  # narrowed by type()
    raise UnsupportedError(
        f"cannot save {path_text(path)}: a value of type {type(value).__module__}.{type(value).__qualname__} is "
        "neither a tensor "
        "nor of a JSON type. Convert it, give the object a state_dict(), or leave it out."
    )


def decode(value: Json, get_tensor: Callable[[str], object]) -> object:
    """Give the value that `encode` took.

    Args:
        value: As stored.
        get_tensor: Gives the tensor of a name.

    Raises:
        FormatError: If `value` has a `$` key that is not known here.
    """
    if isinstance(value, list):
        return [decode(item, get_tensor) for item in value]
    if not isinstance(value, dict):
        return value
    mark = next(iter(value)) if len(value) == 1 else ""
    if not mark.startswith("$"):
        return {key: decode(item, get_tensor) for key, item in value.items()}
    inner = value[mark]
    match mark, inner:
        case "$tensor", str():
            return get_tensor(inner)
        case "$tuple", list():
            return tuple(decode(item, get_tensor) for item in inner)
        case "$set", list():
            return {decode(item, get_tensor) for item in inner}
        case "$int", str():
            return int(inner)
        case "$float", str():
            return float(inner)
        case "$bytes", str():
            return base64.b64decode(inner)
        case "$complex", [_, _]:
            real, imag = (decode(part, get_tensor) for part in inner)
            return complex(real, imag)  # type: ignore[call-overload]  # floats, as encoded
        case "$dict", list():
            pairs = [decode(pair, get_tensor) for pair in inner]
            return dict(pairs)  # type: ignore[arg-type]  # lists of two, as encoded
    raise FormatError(f"the objects of the checkpoint hold the unknown mark {mark!r}; install a newer shardckpt")


def tensor_paths(value: Json, path: Path = ()) -> Iterator[tuple[Path, str]]:
    """Yield the place and the name of every tensor that an encoded value refers to, in order."""
    match value:
        case list():
            for i, item in enumerate(value):
                yield from tensor_paths(item, (*path, i))
        case {"$tensor": str(name), **rest} if not rest:
            yield path, name
        case {"$tuple": list(items), **rest} if not rest:
            yield from tensor_paths(items, path)
        case {"$dict": list(pairs), **rest} if not rest:
            for key, item in (pair for pair in pairs if isinstance(pair, list)):
                yield from tensor_paths(item, (*path, key if isinstance(key, (int, str)) else repr(key)))
        case dict():
            for key, item in value.items():
                yield from tensor_paths(item, (*path, key))


def path_text(path: Path) -> str:
    """Give a path as people write it in Python: `state['a'][0]`."""
    return "state" + "".join(f"[{key!r}]" for key in path)


def _encode_dict(value: Mapping[object, object], path: Path, name_tensor: NameTensor) -> Json:
    if all(type(key) is str and not key.startswith("$") for key in value):
        return {str(key): encode(item, (*path, str(key)), name_tensor) for key, item in value.items()}
    pairs: list[Json] = []
    for key, item in value.items():
        part: Key = key if isinstance(key, (int, str)) and not isinstance(key, bool) else repr(key)
        pairs.append([encode(key, (*path, part), name_tensor), encode(item, (*path, part), name_tensor)])
    return {"$dict": pairs}
