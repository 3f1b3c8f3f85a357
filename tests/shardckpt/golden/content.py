"""What the golden checkpoints hold: every byte by a rule that depends on no library."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shardckpt.dtypes import ITEM_BYTES

MODULE = {
    "embed.weight": ("F32", (7, 3)),
    "block.weight": ("F32", (5, 7)),
    "block.bias": ("F32", (5,)),
    "frozen": ("F32", (2, 2)),
    "scale": ("F32", ()),
    "one": ("F32", (1,)),
    "low": ("BF16", (3, 4)),
    **{f"buffer_{dtype}": (dtype, (3,)) for dtype in ITEM_BYTES},
    "empty": ("I64", (0, 4)),
    "count": ("I64", ()),
}
"""FQN -> dtype and shape; buffers are those that begin with `buffer_`, `empty` and `count`."""

TIED = {"embed.weight": "head.weight"}
TRAINED = ("embed.weight", "block.weight", "block.bias", "scale", "one", "low")
MOMENTS = ("exp_avg", "exp_avg_sq")
COLUMNS = {"columns": ("F32", (6, 10)), "rows": ("I16", (5, 4))}
"""Cut over the ranks along dim 1 and dim 0."""
NAMES = ("a.b", "x/y", "..", "%2F", "größe", "_orig_mod", "", " ", "n" * 300, "Case", "case")
"""Keys of tensors that no one would choose."""

OBJECTS: dict[str, object] = {
    "step": 12345,
    "values": {
        "none": None,
        "yes": True,
        "float": 0.1,
        "whole float": 3.0,
        "tiny": 5e-324,
        "inf": [float("inf"), float("-inf")],
        "big": 1 << 100,
        "text": "zwölf\n\0",
        "bytes": b"\x00\xff",
        "tuple": (1, (2, [3])),
        "set": {1, 2},
        "complex": 1 + 2j,
        "keys": {1: "int", "1": "text", (2, 3): "tuple", "$tensor": "mark"},
        "empty": [{}, [], (), ""],
    },
}


def raw(name: str, dtype: str, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Give the bytes of a tensor: they differ between names, and cover NaNs with payloads. # [nbytes]"""
    tag = sum((i + 1) * byte for i, byte in enumerate(name.encode()))
    nbytes = int(np.prod(shape, dtype=np.int64)) * ITEM_BYTES[dtype]
    values = (np.arange(nbytes) * 37 + tag * 101) % 257 % 256
    return (values % 2 if dtype == "BOOL" else values).astype(np.uint8)


def own_name(rank: int) -> str:
    """Give the name of the tensor that one rank alone has."""
    return f"loader.{rank}.order"


def tensors() -> dict[str, tuple[str, tuple[int, ...]]]:
    """Give dtype and shape of every tensor of the checkpoint, by name, aliases left out."""
    found = {f"model.{fqn}": spec for fqn, spec in MODULE.items()}
    for fqn in TRAINED:
        found[f"optimizer.state.{fqn}.step"] = ("F32", ())
        found |= {f"optimizer.state.{fqn}.{moment}": MODULE[fqn] for moment in MOMENTS}
    found |= {f"mesh.{key}": spec for key, spec in COLUMNS.items()}
    found |= {own_name(rank): ("U8", (4,)) for rank in range(2)}
    return found | {f"odd.{key.replace('%', '%25') or '%e'}": ("U8", (4,)) for key in NAMES}
