"""Copies of local tensors in host memory that is kept and used again: the snapshot of an asynchronous save."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardckpt.endpoints import MemorySource, Source
from shardckpt.tensors import flat_bytes

_ALIGN_BYTES = 64


class Staging:
    """One buffer of host memory, pinned where tensors come from an accelerator.

    It grows to what is needed, and stays.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)  # [capacity]

    @property
    def nbytes(self) -> int:
        """Bytes that the buffer holds on to."""
        return self._buffer.numel()

    def copy(self, tensors: Sequence[torch.Tensor], *, fqns: Sequence[str]) -> list[Source]:
        """Copy every tensor's elements, row-major, and give a source over each copy.

        The sources are good until the next call. When this returns, changing a tensor changes no copy.

        Args:
            tensors: On any device, of any strides.
            fqns: Their names, for messages.
        """
        flats = [flat_bytes(tensor, fqn=fqn) for tensor, fqn in zip(tensors, fqns, strict=True)]
        begins, end = [], 0
        for flat in flats:
            begins.append(end)
            end += -(-flat.numel() // _ALIGN_BYTES) * _ALIGN_BYTES
        accelerated = [flat.device for flat in flats if flat.device.type != "cpu"]
        self._reserve(end, is_pinned=bool(accelerated))
        places = [self._buffer[begin : begin + flat.numel()] for begin, flat in zip(begins, flats, strict=True)]
        for place, flat in zip(places, flats, strict=True):
            place.copy_(flat, non_blocking=True)
        for device in dict.fromkeys(accelerated):
            torch.get_device_module(device).synchronize(device)
        return [MemorySource(place.numpy()) for place in places]

    def _reserve(self, nbytes: int, *, is_pinned: bool) -> None:
        if self._buffer.numel() < nbytes or (is_pinned and not self._buffer.is_pinned()):
            self._buffer = torch.empty(0, dtype=torch.uint8)  # the old one goes before the new one comes
            self._buffer = torch.empty(nbytes, dtype=torch.uint8, pin_memory=is_pinned)
