"""Values that are meant to differ from rank to rank, and what a rank gets of them at another world size.

Encoded, such a value is `{"$per_rank": {"rule", "world_size", "values"}}`, its values by rank. Refuses to know how
values themselves are encoded.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from shardckpt.errors import MismatchError, UnsupportedError
from shardckpt.manifest import Json

RULES = ("error", "same", "broadcast", "drop")


@dataclass(frozen=True, slots=True)
class RankOf:
    """A place among ranks."""

    rank: int
    world_size: int


LONE = RankOf(0, 1)
"""The place of a process that is alone."""


@dataclass(frozen=True, slots=True)
class PerRank:
    """A value that is meant to differ from rank to rank: random number state, a data loader's position.

    Each rank gets its own back at the same world size. At another one, the rule decides:

    * "error": loading is refused;
    * "same": a rank gets what the rank of that number saved, those beyond get None;
    * "broadcast": every rank gets rank 0's;
    * "drop": every rank gets None.

    Attributes:
        value: What this rank saves, or what it has loaded.
        rule: One of the four.
    """

    value: object
    rule: str = "error"

    def __post_init__(self) -> None:
        """Check the rule."""
        if self.rule not in RULES:
            raise UnsupportedError(f"PerRank has the rule {self.rule!r}; it can be {', '.join(RULES)}")


class PerRankRecord(msgspec.Struct, forbid_unknown_fields=True):
    """What `$per_rank` holds."""

    rule: str
    world_size: int
    values: dict[str, object]  # Json, by rank


def for_rank(value: Json, place: RankOf) -> Json:
    """Give an encoded value as one rank loads it: of each value that differs per rank, what its rule gives this rank.

    Raises:
        MismatchError: If a rule forbids this world size.
    """
    if isinstance(value, list):
        return [for_rank(item, place) for item in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"$per_rank": dict(found), **rest} if not rest:
            return {"$per_rank": _of_rank(msgspec.convert(found, PerRankRecord), place)}
    return {key: for_rank(item, place) for key, item in value.items()}


def _of_rank(record: PerRankRecord, place: RankOf) -> Json:
    source = place.rank
    if record.world_size != place.world_size:
        if record.rule == "error":
            raise MismatchError(
                f"the checkpoint has state of each of {record.world_size} ranks (PerRank with the rule 'error'), and "
                "is "
                f"loaded by {place.world_size}. Load at the same world size, leave that section out, or save it with "
                "another rule."
            )
        source = {"broadcast": 0, "drop": -1}.get(record.rule, place.rank)
    kept: Json = record.values.get(str(source))  # type: ignore[assignment]  # Json
    return {"rule": record.rule, "value": kept}


def merge_per_rank(one: Json, other: Json) -> Json | None:
    """Put together the same `$per_rank` value of two ranks; None if they are not such, or have different rules."""
    match one, other:
        case {"$per_rank": dict(a)}, {"$per_rank": dict(b)}:
            first, second = msgspec.convert(a, PerRankRecord), msgspec.convert(b, PerRankRecord)
            if (first.rule, first.world_size) == (second.rule, second.world_size):
                values = dict(sorted({**first.values, **second.values}.items(), key=lambda item: int(item[0])))
                merged: Json = msgspec.to_builtins(PerRankRecord(first.rule, first.world_size, values))
                return {"$per_rank": merged}
    return None


def without_values(value: Json) -> Json:
    """Give an encoded value with every `$per_rank` emptied: what is alike on all ranks."""
    if isinstance(value, list):
        return [without_values(item) for item in value]
    match value:
        case {"$per_rank": dict(found), **rest} if not rest:
            return {"$per_rank": {**found, "values": {}}}
        case dict():
            return {key: without_values(item) for key, item in value.items()}
    return value
