"""The files beside the weights of a model: config, tokenizer, code, model card.

Knows which files of a folder these are, and how a config says the dtype of the weights; refuses to know the rest of
what is in them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shardckpt.catalogue import Tensor
from shardckpt.container import parse_json
from shardckpt.storage import Store

CONFIG_PATH = "config.json"
ADAPTER_CONFIG_PATH = "adapter_config.json"
ADAPTER_SECTION = "adapter_config"
"""Section of a checkpoint whose value is the text of that file."""
MAX_COMPANION_NBYTES = 64 << 20
"""Tokenizers have up to some 40 MB; what is larger is no companion."""

_WEIGHTS = re.compile(r".*\.(safetensors|bin|pt|pth|ckpt|h5|msgpack|onnx|gguf|ot|npz|tflite)|.*\.index\.json")
_CONFIG_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True, slots=True)
class Companions:
    """Files that go along with the weights.

    Attributes:
        store: Where they are.
        paths: Path in the export -> path in `store`.
        left_out: Files that are too large for companions.
    """

    store: Store
    paths: Mapping[str, str]
    left_out: tuple[str, ...] = ()

    def read(self, path: str) -> bytes:
        """Read one, by its path in the export."""
        return self.store.get(self.paths[path], max_nbytes=MAX_COMPANION_NBYTES)


def config_alone(folder: Store, name: str) -> Companions:
    """Give one config, of a model or of adapters, under its usual name."""
    fields = parse_json(folder.get(name, max_nbytes=MAX_COMPANION_NBYTES), name)
    is_adapter = isinstance(fields, dict) and "peft_type" in fields
    return Companions(folder, {ADAPTER_CONFIG_PATH if is_adapter else CONFIG_PATH: name})


def find_companions(folder: Store) -> Companions:
    """Find them in a folder: all files but weights, hidden ones, and large ones."""
    found = {
        path: nbytes
        for path, nbytes in folder.list().items()
        if not is_weights_file(path) and not any(part.startswith(".") for part in path.split("/"))
    }
    small = {path: path for path, nbytes in found.items() if nbytes <= MAX_COMPANION_NBYTES}
    return Companions(folder, small, tuple(path for path in found if path not in small))


def is_weights_file(path: str) -> bool:
    """Tell whether the name is one of a file of weights, in any format, or of their index."""
    return _WEIGHTS.fullmatch(path.lower()) is not None


def config_in_step(config: bytes, tensors: Iterable[Tensor]) -> bytes:
    """Give a config whose dtype is one that the weights have, so that loading them does not change them.

    Unchanged, to the byte, if it names no dtype or one that some of them have; otherwise it names that of the most
    bytes.

    Raises:
        FormatError: If the config is no JSON.
    """
    nbytes: dict[str, int] = {}
    for tensor in tensors:
        if tensor.dtype in _CONFIG_DTYPES:
            name = _CONFIG_DTYPES[tensor.dtype]
            nbytes[name] = nbytes.get(name, 0) + tensor.nbytes
    fields = parse_json(config, CONFIG_PATH)
    stated = [key for key in ("dtype", "torch_dtype") if isinstance(fields, dict) and isinstance(fields.get(key), str)]
    if not isinstance(fields, dict) or not nbytes or all(fields[key] in nbytes for key in stated):
        return config
    commonest = max(nbytes, key=lambda name: nbytes[name])
    return (json.dumps(fields | dict.fromkeys(stated, commonest), indent=2, ensure_ascii=False) + "\n").encode()
