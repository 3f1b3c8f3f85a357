"""Which tensors go out, and under which names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardckpt import names
from shardckpt.committed import read_committed
from shardckpt.errors import MismatchError
from shardckpt.manifest import Stored
from shardckpt.storage import open_store
from shardckpt.tools.selection import Choice, select, tensors_by_section
from tests.shardckpt.checkpoints import write_checkpoint


def stored(tmp_path: Path, tensor_names: list[str], sections: dict[str, str]) -> Stored:
    """Write a checkpoint of small tensors of these names, and read what it says."""
    write_checkpoint(str(tmp_path), {name: np.ones(2) for name in tensor_names}, sections=sections, overwrite=True)
    return read_committed(open_store(tmp_path))


def test_a_tensor_belongs_to_the_longest_section_that_fits(tmp_path: Path) -> None:
    """Sections may hold dots, be parts of each other, and be tensors themselves."""
    sections = {"a": "module", "a.b": "module", "ab": "value", "x": "value", "a%b": "module"}
    found = stored(tmp_path, ["a.w", "a.b.w", "ab.w", "x", "a.bc", "a%25b.w"], sections)
    by_section = {s: [t.name for t in tensors] for s, tensors in tensors_by_section(found).items()}
    assert by_section == {"a": ["a.w", "a.bc"], "a.b": ["a.b.w"], "ab": ["ab.w"], "x": ["x"], "a%b": ["a%25b.w"]}


def test_an_escaped_section_loses_its_prefix_too(tmp_path: Path) -> None:
    """As names are written where two paths would collide."""
    found = stored(tmp_path, ["a%2Eb.c%2Ed", "other"], {"a.b": "module", "other": "value"})
    selection = select(found, Choice())
    assert [tensor.name for tensor in selection.tensors] == ["c.d"]
    assert selection.source_names(selection.tensors[0]) == ["a%2Eb.c%2Ed"]


@given(st.text(max_size=12), st.text(max_size=12))
def test_a_key_comes_back_from_its_name(section: str, key: str) -> None:
    """Whatever the key, `unescaped` undoes what the name did to it."""
    for join, is_escaped in ((names.plain, False), (names.escaped, True)):
        name = join((section, key))
        prefix = names.section_prefix(section, is_escaped=is_escaped)
        assert name.startswith(prefix)
        assert names.unescaped(name[len(prefix) :]) == key


def test_names_are_filtered_one_by_one(tmp_path: Path) -> None:
    """A tied tensor loses the names that are not wanted, and goes only with the last."""
    found = stored(tmp_path, ["m.a", "m.b"], {"m": "module"})
    tensors = (replace(found.catalogue.tensors[0], aliases=("m.x", "m.y")), found.catalogue.tensors[1])
    found = replace(found, catalogue=replace(found.catalogue, tensors=tensors))
    chosen = select(found, Choice(skip=("m.a",))).tensors
    assert [(tensor.name, tensor.aliases) for tensor in chosen] == [("x", ("y",)), ("b", ())]
    assert [tensor.name for tensor in select(found, Choice(only=("m.[xb]",))).tensors] == ["x", "b"]


def test_nothing_to_take_is_an_error(tmp_path: Path) -> None:
    """An optimizer alone holds no weights."""
    found = stored(tmp_path, ["o.a"], {"o": "optimizer"})
    with pytest.raises(MismatchError, match="not clear which tensors are the weights"):
        select(found, Choice())
    assert len(select(found, Choice(is_everything=True)).tensors) == 1
