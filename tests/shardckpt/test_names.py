"""Tests of tensor names."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardckpt.errors import MismatchError, UnsupportedError
from shardckpt.names import Key, Path, assign, chunk_key, escaped, name_of_key, plain

NASTY = ["", ".", "..", "a", "a.b", "b", "A", "%", "%2E", "%25", "%i0", "0", "x/y", "\0", "%@", "%@1", "é", "e\u0301"]
NASTY += ["%e", "_orig_mod", "__metadata__", "%5F_metadata__", "$tensor", " ", "\n", "n" * 300]

keys: st.SearchStrategy[Key] = st.one_of(
    st.sampled_from(NASTY), st.integers(-3, 12), st.text(st.characters(exclude_categories=["Cs"]), max_size=3)
)
paths: st.SearchStrategy[Path] = st.lists(keys, max_size=4).map(tuple)


@given(st.lists(paths, unique=True, max_size=12))
def test_no_two_paths_of_a_state_share_a_name(found: list[Path]) -> None:
    """Whatever the keys, all names of one state differ and can be keys of a safetensors file."""
    names = assign(found)
    assert list(names) == found
    assert len(set(names.values())) == len(found)
    assert all("\0" not in name and name != "__metadata__" for name in names.values())


@given(st.lists(paths, unique=True, max_size=12))
def test_escaped_names_are_injective(found: list[Path]) -> None:
    """Two paths that differ have escaped names that differ."""
    assert len({escaped(path) for path in found}) == len(found)


@given(paths, st.integers(0, 120))
def test_chunk_keys_lead_back_to_the_name(path: Path, number: int) -> None:
    """The key of any chunk gives the tensor's name, whatever the name looks like."""
    for name in (plain(path), escaped(path)):
        assert name_of_key(chunk_key(name, number)) == name


def test_names_read_as_people_know_them() -> None:
    """Keys without a clash are joined with dots and otherwise left alone."""
    assert plain(("model", "layers.0.weight")) == "model.layers.0.weight"
    assert plain(("optimizer", "state", 0, "exp_avg")) == "optimizer.state.0.exp_avg"
    assert plain(("größe", "x/y", "..")) == "größe.x/y..."


def test_only_names_that_clash_are_escaped() -> None:
    """`a.b` beside a nested a -> b are told apart, and their neighbours stay readable."""
    assert assign([("a.b",), ("a", "b"), ("c.d",)]) == {("a.b",): "a%2Eb", ("a", "b"): "a.b", ("c.d",): "c.d"}
    assert assign([("s", 0), ("s", "0")]) == {("s", 0): "s.%i0", ("s", "0"): "s.0"}


def test_a_path_that_occurs_twice_is_refused() -> None:
    """The message shows the path and says to rename."""
    with pytest.raises(MismatchError, match=r"share the path \('a', 1\); rename one of them"):
        assign([("a", 1), ("b",), ("a", 1)])


def test_a_key_that_is_no_unicode_text_is_refused() -> None:
    """A lone surrogate has no place in a file."""
    with pytest.raises(UnsupportedError, match=r"the name '\\udc80' is not valid Unicode text; rename it"):
        assign([("\udc80",)])
