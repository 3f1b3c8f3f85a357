"""Optimizer state in files: one a bucket of parameters, read and written around the step of its bucket.

Knows `torch.optim.Optimizer` and files; refuses to know units: shards are parameters like any other here.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist

from sharding.errors import StateError, UnsupportedError

BucketState = dict[int, dict[str, object]]
"""Position of a parameter in all groups -> its state."""

_NUM_THREADS = 2  # one reads the next bucket while one writes the last


class DiskState(MutableMapping[torch.Tensor, dict[str, object]]):
    """Parameter -> its optimizer state, held in files.

    What is read is a copy: assign it to change it. A file is replaced whole, so that a crash leaves the old one or the
    new one. It names the parameters that it holds, by position, and the optimizer that wrote it.
    """

    def __init__(self, parameters: list[torch.Tensor], folder: Path, *, bucket_bytes: int) -> None:
        """Cut the parameters into buckets; write nothing."""
        self.parameters = parameters
        self.folder = folder
        self.buckets = list(_buckets(parameters, bucket_bytes))
        self._position = {id(parameter): position for position, parameter in enumerate(parameters)}
        self._bucket = {position: number for number, bucket in enumerate(self.buckets) for position in bucket}
        self._held: set[int] = set()  # positions of parameters that have state
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._writer = uuid.uuid4().hex

    def __getitem__(self, parameter: torch.Tensor) -> dict[str, object]:
        position = self._position.get(id(parameter), -1)
        if position not in self._held:
            raise KeyError(parameter)
        return self.read(self._bucket[position], is_lazy=True)[position]

    def __setitem__(self, parameter: torch.Tensor, state: dict[str, object]) -> None:
        position = self._position[id(parameter)]
        number = self._bucket[position]
        self.write(number, self.read(number, is_lazy=True) | {position: state})

    def __delitem__(self, parameter: torch.Tensor) -> None:
        position = self._position[id(parameter)]
        number = self._bucket[position]
        kept = self.read(number, is_lazy=True)
        del kept[position]
        self.write(number, kept)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (self.parameters[position] for position in sorted(self._held))

    def __len__(self) -> int:
        return len(self._held)

    def path(self, number: int) -> Path:
        """Give the file of a bucket of this rank."""
        return self.folder / f"rank-{self._rank:05d}-bucket-{number:05d}.pt"

    def read(self, number: int, *, is_lazy: bool = False) -> BucketState:
        """Read a bucket.

        Args:
            number: Of the bucket.
            is_lazy: Map the file, so that only what is used is read.

        Raises:
            StateError: If another optimizer has written the file.
        """
        if self._held.isdisjoint(self.buckets[number]):
            return {}
        found = torch.load(self.path(number), weights_only=True, mmap=is_lazy)
        if found["writer"] != self._writer:
            raise StateError(
                f"{self.path(number)} was written by another optimizer: two share the folder {self.folder}. Give each "
                "optimizer a folder of its own, and load the last checkpoint."
            )
        state: BucketState = found["state"]
        return state

    def write(self, number: int, state: BucketState) -> None:
        """Replace the file of a bucket."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.path(number)
        partial = path.with_suffix(".partial")
        torch.save({"writer": self._writer, "state": state}, partial)
        os.replace(partial, path)
        self._held = (self._held - set(self.buckets[number])) | state.keys()


class DiskOptimizer(torch.optim.Optimizer):
    """An optimizer whose state lies in files; its steps equal those of the optimizer that it is made from.

    The state of at most three buckets is in memory during a step: one is stepped, the next is read and the last
    is written meanwhile. A bucket is a run of parameters of at most `bucket_bytes`, or one larger parameter; Adam's
    state takes twice the bytes of its parameters. `state_dict` and `load_state_dict` take the whole state into memory.

    The files belong to this object and are not read by a later one: save the state in checkpoints.

    Example:
        >>> import tempfile
        >>> model = torch.nn.Linear(2, 2)
        >>> folder = tempfile.TemporaryDirectory()
        >>> optimizer = DiskOptimizer(torch.optim.AdamW(model.parameters()), folder=folder.name)
        >>> model(torch.ones(2)).sum().backward()
        >>> optimizer.step()
        >>> sorted(optimizer.state[model.weight])
        ['exp_avg', 'exp_avg_sq', 'step']
        >>> folder.cleanup()
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, *, folder: str | os.PathLike[str], bucket_bytes: int = 64 << 20
    ) -> None:
        """Take over an optimizer, with the state that it has.

        Args:
            optimizer: Any that steps each parameter by itself. Don't use it any more.
            folder: A local folder, of this optimizer alone; ranks may share it. Files of an earlier run are replaced.
            bucket_bytes: Bytes of the parameters of one file.

        Raises:
            UnsupportedError: If the optimizer steps all parameters as one.
        """
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UnsupportedError("LBFGS steps all parameters as one; use an optimizer that steps each by itself")
        self._is_complete = False
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._is_complete = True
        self._is_torn = False
        self._optimizer = optimizer
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        self._files = DiskState(parameters, Path(folder), bucket_bytes=bucket_bytes)
        self._fill(optimizer.state)
        optimizer.state.clear()

    def add_param_group(self, param_group: dict[str, object]) -> None:
        """Refuse; called while this is made only.

        Raises:
            UnsupportedError: After that.
        """
        if self._is_complete:
            raise UnsupportedError("the files are laid out already; add param groups before making the DiskOptimizer")
        super().add_param_group(param_group)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # overloads
        """Step bucket by bucket.

        Raises:
            StateError: If an earlier step failed half way.
            OSError: If a file cannot be read or written.
        """
        if self._is_torn:
            raise StateError(
                "an earlier step failed with some buckets stepped and others not; make the optimizer anew and load the "
                "last checkpoint"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._is_torn = True
        self._step_buckets([number for number in range(len(self._files.buckets)) if self._has_gradients(number)])
        self._is_torn = False
        return loss

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Replace the state and the hyperparameters, as in torch."""
        super().load_state_dict(state_dict)
        self._fill(self.state)

    def _fill(self, state: MutableMapping[torch.Tensor, dict[str, object]]) -> None:
        """Replace the files by this state, bucket by bucket."""
        for number, bucket in enumerate(self._files.buckets):
            parameters = {position: self._files.parameters[position] for position in bucket}
            self._files.write(number, {at: state[tensor] for at, tensor in parameters.items() if tensor in state})
        self.state = self._files  # type: ignore[assignment]  # a mapping, where torch says defaultdict

    def _has_gradients(self, number: int) -> bool:
        return any(self._files.parameters[position].grad is not None for position in self._files.buckets[number])

    def _step_buckets(self, numbers: list[int]) -> None:
        writing: Future[None] | None = None
        with ThreadPoolExecutor(_NUM_THREADS) as pool:
            reading = pool.submit(self._files.read, numbers[0]) if numbers else None
            for number, following in zip(numbers, [*numbers[1:], None], strict=True):
                assert reading is not None
                state = reading.result()
                reading = None if following is None else pool.submit(self._files.read, following)
                after = self._step_bucket(number, state)
                # Before the read after the next starts: no more than three buckets are in memory.
                if writing is not None:
                    writing.result()
                writing = pool.submit(self._files.write, number, after)
            if writing is not None:
                writing.result()

    def _step_bucket(self, number: int, state: BucketState) -> BucketState:
        """Step the parameters of a bucket with their state; give their state after it."""
        members = {position: self._files.parameters[position] for position in self._files.buckets[number]}
        ids = {id(parameter) for parameter in members.values()}
        inner = self._optimizer
        inner.state.update({members[position]: found for position, found in state.items()})
        inner.param_groups = [
            {**group, "params": [parameter for parameter in group["params"] if id(parameter) in ids]}
            for group in self.param_groups
        ]
        inner.step()
        after = {position: inner.state[tensor] for position, tensor in members.items() if tensor in inner.state}
        inner.state.clear()
        return after


def _buckets(parameters: Iterable[torch.Tensor], bucket_bytes: int) -> Iterator[range]:
    """Cut the positions of the parameters into runs of at most so many bytes, or of one parameter."""
    start, stop, held = 0, 0, 0
    for parameter in parameters:
        nbytes = parameter.numel() * parameter.element_size()
        if stop > start and held + nbytes > bucket_bytes:
            yield range(start, stop)
            start, held = stop, 0
        held += nbytes
        stop += 1
    if stop > start:
        yield range(start, stop)
