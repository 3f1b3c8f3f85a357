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
from shardckpt.per_rank import LONE, PerRank, RankOf

_INT64 = range(-(1 << 63), 1 << 63)

NameTensor = Callable[[Path, object], str | None]
"""Gives the name under which a leaf is stored as a tensor, or None if it is no tensor."""


MAX_DEPTH = 200
"""Levels of nesting: JSON parsers have limits of their own, not far above."""


def encode(value: object, path: Path, name_tensor: NameTensor, place: RankOf = LONE) -> Json:  # frozen
    """Give `value` as JSON.

    Args:
        value: What to store.
        path: Where it stands in the state.
        name_tensor: Called for every leaf.
        place: This rank, for values that differ per rank: their tensors' paths end with its number.

    Raises:
        UnsupportedError: If something in `value` cannot be stored; names its path and type.
    """

    if len(path) > MAX_DEPTH:
        raise UnsupportedError(
            f"cannot save {path_text(path[:3])}: it is nested more than {MAX_DEPTH} levels deep, or contains itself; "
            "flatten it, or leave it out"
        )

    def inner(item: object, key: Key) -> Json:
        return encode(item, (*path, key), name_tensor, place)

    if value is None or isinstance(value, bool) or type(value) is str:
        return value
    if type(value) is int:
        return value if value in _INT64 else {"$int": str(value)}
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if (name := name_tensor(path, value)) is not None:
        return {"$tensor": name}
    if type(value) is list:
        return [inner(item, i) for i, item in enumerate(value)]
    if type(value) is tuple:
        return {"$tuple": [inner(item, i) for i, item in enumerate(value)]}
    if type(value) in (set, frozenset):
        return {"$set": [inner(item, i) for i, item in enumerate(sorted(value, key=repr))]}  # type: ignore[call-overload]
    if type(value) in (bytes, bytearray):
        return {"$bytes": base64.b64encode(value).decode()}  # type: ignore[arg-type]  # narrowed by type()
    if type(value) is complex:
        return {"$complex": [inner(value.real, 0), inner(value.imag, 1)]}
    if type(value) in (dict, OrderedDict):
        return _encode_dict(value, inner)  # type: ignore[arg-type]  # narrowed by type()
    if type(value) is PerRank:
        values: dict[str, Json] = {str(place.rank): inner(value.value, place.rank)}
        return {"$per_rank": {"rule": value.rule, "world_size": place.world_size, "values": values}}
    raise UnsupportedError(
        f"cannot save {path_text(path)}: a value of type {type(value).__module__}.{type(value).__qualname__} is "
        "neither "
        "a tensor nor of a JSON type. Convert it, give the object a state_dict(), or leave it out."
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
        case "$per_rank", {"rule": str(rule), "value": own}:
            return PerRank(decode(own, get_tensor), rule)
        case "$per_rank", {"rule": str(), "values": dict(values)}:
            return {int(rank): decode(item, get_tensor) for rank, item in values.items()}
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
        case {"$per_rank": dict(found), **rest} if not rest and "values" in found:
            yield from tensor_paths(found["values"], path)
        case {"$per_rank": dict(found), **rest} if not rest:
            yield from tensor_paths(found.get("value"), path)
        case dict():
            for key, item in value.items():
                yield from tensor_paths(item, (*path, key))


def path_text(path: Path) -> str:
    """Give a path as people write it in Python: `state['a'][0]`."""
    return "state" + "".join(f"[{key!r}]" for key in path)


def _encode_dict(value: Mapping[object, object], inner: Callable[[object, Key], Json]) -> Json:
    if all(type(key) is str and not key.startswith("$") for key in value):
        return {str(key): inner(item, str(key)) for key, item in value.items()}
    pairs: list[Json] = []
    for key, item in value.items():
        part: Key = key if isinstance(key, (int, str)) and not isinstance(key, bool) else repr(key)
        pairs.append([inner(key, part), inner(item, part)])
    return {"$dict": pairs}


def per_rank_names(value: Json) -> set[str]:
    """Give the names of all tensors inside `$per_rank` values."""
    if isinstance(value, list):
        return {name for item in value for name in per_rank_names(item)}
    match value:
        case {"$per_rank": dict(), **rest} if not rest:
            return {name for _, name in tensor_paths(value)}
        case dict():
            return {name for item in value.values() for name in per_rank_names(item)}
    return set()
