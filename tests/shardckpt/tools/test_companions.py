"""Which files go along with the weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardckpt.catalogue import Tensor
from shardckpt.errors import FormatError
from shardckpt.storage import open_store
from shardckpt.tools import companions
from shardckpt.tools.companions import config_in_step, find_companions, is_weights_file


@pytest.mark.parametrize(
    "path",
    [
        "model.safetensors",
        "a/b.bin",
        "x.PT",
        "model.safetensors.index.json",
        "tf_model.h5",
        "onnx/model.onnx",
        "q.gguf",
    ],
)
def test_weights_of_all_formats_are_known(path: str) -> None:
    """By their names."""
    assert is_weights_file(path)


def test_large_files_stay_behind(tmp_path: Path) -> None:
    """They are no companions, and are told."""
    (tmp_path / "small.txt").write_text("x")
    with (tmp_path / "large.txt").open("wb") as file:
        file.truncate(companions.MAX_COMPANION_NBYTES + 1)
    found = find_companions(open_store(tmp_path))
    assert (list(found.paths), found.left_out) == (["small.txt"], ("large.txt",))
    assert found.read("small.txt") == b"x"


def test_a_config_takes_the_dtype_of_most_bytes() -> None:
    """If it names one that no tensor has; integers and odd floats do not count."""
    tensors = [Tensor("a", "F16", (100,)), Tensor("b", "F32", (10,)), Tensor("c", "I64", (10**6,))]
    assert b'"dtype": "float16"' in config_in_step(b'{"dtype": "bfloat16"}', tensors)
    for config in (b'{"dtype":"float32"}', b'{"dtype": 3}', b"{}", b"[1]"):
        assert config_in_step(config, tensors) == config
    assert config_in_step(b'{"dtype":"bfloat16"}', tensors[2:]) == b'{"dtype":"bfloat16"}'


def test_a_damaged_config_is_refused() -> None:
    """By its name."""
    with pytest.raises(FormatError, match=r"'config.json' is damaged"):
        config_in_step(b"<html>", [])
