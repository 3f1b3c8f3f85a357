"""torch tensors as bytes: names of dtypes, views of memory, and sources and sinks over tensors on any device.

The only file, with `state.py` and `optimizer_state.py`, that knows torch's tensors; it refuses to know how they are
distributed.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from shardckpt.dtypes import ITEM_BYTES
from shardckpt.endpoints import MemorySink, MemorySource, Sink, Source
from shardckpt.errors import UnsupportedError

Bytes = NDArray[np.uint8]

_TORCH_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "I64": "int64",
    "U64": "uint64",
    "F64": "float64",
    "C64": "complex64",
}

TORCH_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, torch_name) for name, torch_name in _TORCH_NAMES.items() if hasattr(torch, torch_name)
}
"""Name in a file -> dtype, for those that the installed torch has."""

_FILE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def dtype_name(tensor: torch.Tensor, *, fqn: str) -> str:
    """Give the name of a tensor's dtype in files.

    Raises:
        UnsupportedError: If the format has no such dtype.
    """
    try:
        return _FILE_NAMES[tensor.dtype]
    except KeyError:
        raise UnsupportedError(
            f"cannot save {fqn!r}: its dtype {tensor.dtype} is not supported; known are {', '.join(ITEM_BYTES)}. "
            "Convert it before saving."
        ) from None


def torch_dtype(name: str, *, fqn: str) -> torch.dtype:
    """Give the dtype of a name in files.

    Raises:
        UnsupportedError: If the installed torch has no such dtype.
    """
    try:
        return TORCH_DTYPES[name]
    except KeyError:
        raise UnsupportedError(
            f"cannot load {fqn!r}: torch {torch.__version__} has no dtype for {name!r}; install a newer torch"
        ) from None


def source_of(tensor: torch.Tensor, *, fqn: str) -> Source:
    """Give a source over a tensor's elements, row-major; CPU memory is read where it lies, if it is dense."""
    flat = flat_bytes(tensor, fqn=fqn)
    return MemorySource(flat.numpy()) if flat.device.type == "cpu" else DeviceSource(flat)


def fill_of(tensor: torch.Tensor, *, fqn: str) -> Fill:
    """Give what is needed to fill a tensor in place: a sink, and what to do when the sink is full."""
    _refuse_opaque(tensor, fqn)
    target = tensor.detach()
    if target.device.type == "cpu" and target.is_contiguous():
        return Fill(MemorySink(_flat_bytes(target).numpy()), None, target)
    staged = torch.empty(target.shape, dtype=target.dtype)
    return Fill(MemorySink(_flat_bytes(staged).numpy()), staged, target)


class Fill:
    """A tensor being filled through a sink; through a copy in host memory where it has to be."""

    def __init__(self, sink: Sink, staged: torch.Tensor | None, target: torch.Tensor) -> None:
        self.sink = sink
        self._staged = staged
        self._target = target

    def finish(self) -> None:
        """Move what came into its place; call when the transfer is over."""
        if self._staged is not None:
            self._target.copy_(self._staged)


class DeviceSource(Source):
    """A tensor on a device, copied out range by range."""

    def __init__(self, flat: torch.Tensor) -> None:
        self._flat = flat  # [nbytes] uint8

    def fetch(self, byte_offset: int, out: Bytes) -> Bytes:
        torch.from_numpy(out).copy_(self._flat[byte_offset : byte_offset + len(out)])
        return out


def flat_bytes(tensor: torch.Tensor, *, fqn: str) -> torch.Tensor:
    """Give a tensor's elements as bytes, row-major: a view if it is dense, else a copy. # [nbytes] uint8

    Raises:
        UnsupportedError: If its elements do not lie in memory as its shape says.
    """
    _refuse_opaque(tensor, fqn)
    return _flat_bytes(tensor.detach().resolve_conj().resolve_neg().contiguous())


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor as bytes. # [nbytes] uint8"""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    flat = tensor.reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8, device=flat.device)


def _refuse_opaque(tensor: torch.Tensor, fqn: str) -> None:
    """Refuse tensors whose elements do not lie in memory as their shape says."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        kind = "meta" if tensor.device.type == "meta" else "quantized" if tensor.is_quantized else str(tensor.layout)
        raise UnsupportedError(
            f"{fqn!r} is a {kind} tensor, whose elements do not lie in memory; materialise or convert it first"
        )
