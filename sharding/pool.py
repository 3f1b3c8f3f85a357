"""Buffers that serve again and again, so that a step takes no memory from the system that an earlier one gave back."""

from __future__ import annotations

import torch


class Pool:
    """Memory for buffers that live for a part of a step.

    It never holds more than was once in use at one time; what fits nobody any more is let go.

    Attributes:
        num_allocations: How often it had nothing that fits; it stops rising when steps repeat.
    """

    def __init__(self) -> None:
        self.num_allocations = 0
        self._free: list[torch.Tensor] = []  # [bytes] each
        self._used: dict[int, torch.Tensor] = {}  # by address
        self._used_bytes = 0
        self._peak_bytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes that it holds, in use or free."""
        return self._used_bytes + self._free_bytes

    @property
    def _free_bytes(self) -> int:
        return sum(memory.nbytes for memory in self._free)

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Give a buffer of undefined content, the caller's until `give_back`. # [numel]"""
        nbytes = numel * dtype.itemsize
        fitting = [memory for memory in self._free if memory.nbytes >= nbytes and memory.device == device]
        if fitting:
            memory = min(fitting, key=lambda memory: memory.nbytes)
            self._free = [other for other in self._free if other is not memory]
        else:
            self._make_room(nbytes)
            memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
            self.num_allocations += 1
        self._used[memory.data_ptr()] = memory
        self._used_bytes += memory.nbytes
        self._peak_bytes = max(self._peak_bytes, self._used_bytes)
        return memory[:nbytes].view(dtype)

    def give_back(self, buffer: torch.Tensor) -> None:
        """Take back what `take` gave, and nobody uses; on an accelerator, but for work queued on this stream.

        What was taken before `clear` is not ours any more, and left to its holders.
        """
        memory = self._used.pop(buffer.data_ptr(), None)
        if memory is not None:
            self._free.append(memory)
            self._used_bytes -= memory.nbytes

    def clear(self) -> None:
        """Let all memory go, also buffers that are never given back, as after an exception."""
        self._free.clear()
        self._used.clear()
        self._used_bytes = self._peak_bytes = 0

    def _make_room(self, nbytes: int) -> None:
        """Let go the smallest free ones that would not have been in use beside the others."""
        self._free.sort(key=lambda memory: memory.nbytes)
        limit = max(self._peak_bytes, self._used_bytes + nbytes)
        while self._free and self.nbytes + nbytes > limit:
            del self._free[0]
