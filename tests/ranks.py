"""Real gloo ranks for tests: a pool of spawned processes that run a function as ranks 0..n-1.

The processes stay alive between tests, since importing torch costs more than most tests; every call gets a fresh
process group. A rank that raises fails the call with its traceback, and the pool is replaced, so that no
test sees what another left behind.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any


class RankError(AssertionError):
    """A rank raised, died or hung; the message holds what the first such rank said.

    Attributes:
        errors: rank -> (exception type's name, message, traceback), for each rank that raised.
    """

    def __init__(self, message: str, errors: dict[int, tuple[str, str, str]]) -> None:
        super().__init__(message)
        self.errors = errors


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 120) -> list[Any]:
    """Run `function(*args)` as every rank of a gloo group and give each rank's (picklable) result, by rank.

    Inside, `torch.distributed` is initialised and torch runs on one thread. `function` must be at module level.

    Raises:
        RankError: If a rank raises, dies, or is not done after `timeout_s` seconds.
    """
    while len(_pool) < world_size:
        _pool.append(_Worker())
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(world_size):
            _pool[rank].connection.send((rank, world_size, f"{folder}/store", timeout_s, function, args))
        return _collect(world_size, timeout_s)


class _Worker:
    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()


_pool: list[_Worker] = []


def _collect(world_size: int, timeout_s: float) -> list[Any]:
    results: list[Any] = [None] * world_size
    waiting = {_pool[rank].connection: rank for rank in range(world_size)}
    errors: dict[int, tuple[str, str, str]] = {}
    deadline = time.monotonic() + timeout_s
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for connection in ready:
            rank = waiting.pop(connection)  # type: ignore[index]
            try:
                is_error, value = connection.recv()  # type: ignore[union-attr]
            except EOFError:
                is_error, value = True, ("Died", f"exit code {_pool[rank].process.exitcode}", "")
            if is_error:
                errors[rank] = value
                deadline = min(deadline, time.monotonic() + 5)
            else:
                results[rank] = value
    if errors or waiting:
        _discard_pool()
        hung = f"ranks {sorted(waiting.values())} did not finish\n" if waiting else ""
        text = "".join(f"rank {r}: {kind}: {message}\n{trace}\n" for r, (kind, message, trace) in errors.items())
        raise RankError(hung + text, errors)
    return results


def _discard_pool() -> None:
    for worker in _pool:
        worker.process.kill()
        worker.process.join()
        worker.connection.close()
    _pool.clear()


atexit.register(_discard_pool)


def _serve(connection: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    warnings.simplefilter("error")
    while True:
        try:
            rank, world_size, store, timeout_s, function, args = connection.recv()
        except EOFError:
            os._exit(0)
        try:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{store}",
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout_s),
            )
            torch.manual_seed(0)
            result = function(*args)
            dist.barrier()
            dist.destroy_process_group()
            connection.send((False, result))
        except BaseException as error:
            connection.send((True, (type(error).__name__, str(error), traceback.format_exc())))
