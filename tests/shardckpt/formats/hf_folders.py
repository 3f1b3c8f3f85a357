"""Small Hugging Face folders for tests, written by safetensors itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

Arrays = Mapping[str, NDArray[np.generic]]


def arrays(seed: int = 0) -> dict[str, NDArray[np.generic]]:
    """Give a few arrays of several dtypes and shapes, a scalar and an empty one among them."""
    random = np.random.default_rng(seed)
    return {
        "embed.weight": random.normal(size=(17, 6)).astype(np.float32),
        "layers.0.weight": random.normal(size=(6, 6)).astype(np.float16),
        "layers.0.mask": random.integers(0, 2, 5).astype(bool),
        "layers.10.weight": random.normal(size=(6, 6)).astype(np.float16),
        "position_ids": np.arange(7),
        "scale": np.array(0.5, np.float32),
        "nothing": np.zeros((0, 4), np.float32),
    }


def write_single(folder: Path, tensors: Arrays, metadata: Mapping[str, str] | None = None) -> Path:
    """Write a folder with one file of weights and a config."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt", **(metadata or {})})
    (folder / "config.json").write_text('{"model_type": "tiny"}')
    return folder


def write_sharded(folder: Path, *parts: Arrays) -> Path:
    """Write a folder with numbered files and their index."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [f"model-{number:05}-of-{len(parts):05}.safetensors" for number in range(1, len(parts) + 1)]
    for path, part in zip(paths, parts, strict=True):
        save_file(dict(part), folder / path, metadata={"format": "pt"})
    weight_map = {name: path for path, part in zip(paths, parts, strict=True) for name in part}
    write_index(folder, weight_map)
    return folder


def write_index(folder: Path, weight_map: object) -> None:
    """Write an index."""
    text = json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(text)


def read_weights(folder: Path) -> dict[str, NDArray[np.generic]]:
    """Read all safetensors files of a folder, by safetensors itself."""
    found: dict[str, NDArray[np.generic]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def assert_same(found: Arrays, expected: Arrays) -> None:
    """Check that names, dtypes, shapes and all bits are equal."""
    assert sorted(found) == sorted(expected)
    for name, array in expected.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape), name
        assert found[name].tobytes() == array.tobytes(), name
