"""Another dtype for chosen tensors: which ones it is for, and under which names people know dtypes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from shardckpt.catalogue import Tensor
from shardckpt.errors import MismatchError, listing
from shardckpt.tools.selection import Selection

DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
"""Name in torch -> name in a safetensors header, of the dtypes to convert to."""

_SOURCES = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class NewDtype:
    """What to convert.

    Attributes:
        dtype: As in a safetensors header.
        keep: Patterns of full names in the checkpoint; what fits keeps its dtype.
    """

    dtype: str
    keep: tuple[str, ...] = ()


def recast(selection: Selection, new: NewDtype) -> Selection:
    """Give the selection with its floating-point tensors in another dtype.

    Integers and booleans stay as they are, and so do 8-bit floats, whose scales are tensors of their own.

    Raises:
        MismatchError: If a pattern fits no tensor.
    """
    every = [name for tensor in selection.tensors for name in selection.source_names(tensor)]
    idle = [pattern for pattern in new.keep if not any(fnmatchcase(name, pattern) for name in every)]
    if idle:
        raise MismatchError(
            f"no tensor fits the pattern {listing(idle)}; there are {listing(every)}. "
            "List them with `shardckpt inspect --tensors`."
        )

    def changed(tensor: Tensor) -> Tensor:
        is_kept = any(fnmatchcase(name, pattern) for name in selection.source_names(tensor) for pattern in new.keep)
        return tensor if is_kept or tensor.dtype not in _SOURCES else replace(tensor, dtype=new.dtype)

    return Selection(tuple(changed(tensor) for tensor in selection.tensors), selection.pieces)
