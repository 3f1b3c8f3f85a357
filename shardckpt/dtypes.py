"""Names of element types and their sizes.

The names are those of safetensors headers. This file knows sizes only; it refuses to know torch, so that planning and
the command line need none (`state.py` maps names to `torch.dtype`; a test holds the two and the installed
safetensors together).
"""

from __future__ import annotations

from shardckpt.errors import UnsupportedError

ITEM_BYTES: dict[str, int] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "F8_E4M3FNUZ": 1,
    "F8_E5M2FNUZ": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
    "C64": 8,
}
"""Name of each element type -> bytes of one element."""


def item_bytes(dtype: str, *, fqn: str) -> int:
    """Give the bytes of one element.

    Args:
        dtype: A name as in a safetensors header.
        fqn: The tensor, for the message.

    Raises:
        UnsupportedError: If the name is not known here.
    """
    try:
        return ITEM_BYTES[dtype]
    except KeyError:
        raise UnsupportedError(
            f"tensor {fqn!r} has dtype {dtype!r}, which is not supported; known are {', '.join(ITEM_BYTES)}. "
            "Convert the tensor, or leave it out."
        ) from None
