"""Non-tensor state as JSON and back."""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
from datetime import datetime
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardckpt.errors import FormatError, UnsupportedError
from shardckpt.objects import decode, encode, path_text, tensor_paths


def _no_tensor(path: object, value: object) -> None:
    return None


def _round_trip(value: object) -> object:
    text = msgspec.json.encode(encode(value, ("s",), _no_tensor))
    return decode(msgspec.json.decode(text), lambda name: pytest.fail(f"no tensor {name} was stored"))


KEYS = st.one_of(st.text(max_size=4), st.integers(-3, 3), st.booleans(), st.none(), st.just("$tensor"))
VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(allow_nan=False),
        st.text(max_size=5),
        st.binary(max_size=5),
        st.complex_numbers(allow_nan=False),
        st.frozensets(st.integers(), max_size=3).map(set),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.lists(inner, max_size=3).map(tuple), st.dictionaries(KEYS, inner, max_size=3)
    ),
    max_leaves=12,
)


def _typed(value: object) -> object:
    """Give a form in which 1, 1.0 and True differ, and so do lists and tuples."""
    if isinstance(value, dict):
        return ("dict", [(_typed(key), _typed(item)) for key, item in value.items()])
    if isinstance(value, (list, tuple)):
        return (type(value), [_typed(item) for item in value])
    return (type(value), repr(value) if isinstance(value, (float, complex)) else value)


@given(VALUES)
def test_values_come_back_with_value_and_type(value: object) -> None:
    """Nested values of every stored type survive JSON text unchanged."""
    assert _typed(_round_trip(value)) == _typed(value)


@pytest.mark.parametrize("value", [math.inf, -math.inf, 2**63, -(2**63) - 1, 2**200, -0.0, 1e300, 5e-324])
def test_numbers_beyond_json_come_back(value: float) -> None:
    """Infinities, big integers and extreme floats keep value and type."""
    assert _typed(_round_trip(value)) == _typed(value)


def test_nan_comes_back() -> None:
    """NaN is stored by name."""
    result = _round_trip([math.nan])
    assert isinstance(result, list)
    assert math.isnan(result[0])


def test_an_ordered_dict_comes_back_as_a_dict_in_order() -> None:
    """The order of keys is kept."""
    assert list(_round_trip(OrderedDict(b=1, a=2)).items()) == [("b", 1), ("a", 2)]  # type: ignore[attr-defined]


@pytest.mark.parametrize("value", [datetime(2020, 1, 1), Path("x"), defaultdict(int), object(), len, int, range(3)])
def test_what_json_cannot_hold_is_refused_by_its_path(value: object) -> None:
    """The error names the place and says what to do; nothing is pickled."""
    with pytest.raises(UnsupportedError, match=r"state\['s'\]\['a'\]\[1\].*leave it out"):
        encode({"a": [0, value]}, ("s",), _no_tensor)


def test_tensors_are_referred_to_by_name_and_place() -> None:
    """`tensor_paths` gives every reference with the path at which it stands."""
    marker = object()

    def name_of(path: tuple[str | int, ...], value: object) -> str | None:
        return "/".join(map(str, path)) if value is marker else None

    encoded = encode({"a": [1, marker], "t": (marker,), 3: {"$x": marker}}, ("s",), name_of)
    assert list(tensor_paths(encoded)) == [
        (("a", 1), "s/a/1"),
        (("t", 0), "s/t/0"),
        ((3, "$x"), "s/3/$x"),
    ]
    assert decode(encoded, lambda name: name) == {"a": [1, "s/a/1"], "t": ("s/t/0",), 3: {"$x": "s/3/$x"}}


def test_an_unknown_mark_is_refused() -> None:
    """A later format's mark is not taken for a dict."""
    with pytest.raises(FormatError, match=r"'\$later'.*newer shardckpt"):
        decode({"$later": 1}, lambda name: name)


def test_path_text_reads_as_python() -> None:
    """Paths in messages are what people would type."""
    assert path_text(("a", 0, "b c")) == "state['a'][0]['b c']"
