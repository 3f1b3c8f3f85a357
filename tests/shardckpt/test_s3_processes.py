"""Tests of S3 storage from processes of all kinds: spawned ranks, forks, data-loader workers, a running event loop."""

from __future__ import annotations

import asyncio
import multiprocessing
import warnings
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor

import torch
from torch.utils.data import DataLoader, Dataset

import shardckpt
from tests.ranks import run_ranks
from tests.s3_server import S3Root
from tests.shardckpt.models import tied

Options = Mapping[str, object]

ROWS = torch.arange(40.0).reshape(10, 4)


class Rows(Dataset[torch.Tensor]):
    """The rows of a stored tensor, read from a checkpoint that is opened at once or by each worker."""

    def __init__(self, url: str, options: Options, *, is_opened: bool) -> None:
        self.url, self.options = url, options
        self.checkpoint = shardckpt.open(url, storage_options=options) if is_opened else None

    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.checkpoint is None:
            self.checkpoint = shardckpt.open(self.url, storage_options=self.options)
        return self.checkpoint["rows"][index]


def read_in_worker_processes(url: str, options: Options, method: str) -> bool:
    """Read all rows by data-loader workers of a process that has used S3 itself."""
    rows = Rows(url, options, is_opened=method == "fork")
    context = multiprocessing.get_context(method)
    if method == "fork":
        assert torch.equal(rows[3], ROWS[3])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        loader = DataLoader(
            rows, batch_size=5, num_workers=2 if method == "fork" else 1, multiprocessing_context=context
        )
        found = torch.cat(list(loader))
    if method == "fork":
        assert torch.equal(rows[4], ROWS[4])  # and the parent's connections still work
    return torch.equal(found, ROWS)


def save_and_load(url: str, options: Options) -> bool:
    """Save on all ranks, load into another model, and compare."""
    shardckpt.save(url, {"model": tied(1), "step": 5}, storage_options=options)
    other = {"model": tied(2), "step": 0}
    shardckpt.load(url, other, storage_options=options)
    expected, found = tied(1).state_dict(), other["model"].state_dict()
    return other["step"] == 5 and all(torch.equal(found[name], value) for name, value in expected.items())


def test_ranks_save_to_s3_and_load_from_it(s3_root: S3Root) -> None:
    """Spawned processes, each with its own file."""
    assert run_ranks(2, save_and_load, s3_root.url, s3_root.options) == [True, True]


def test_data_loader_workers_reach_s3(s3_root: S3Root) -> None:
    """Forked workers read by a checkpoint that their parent has opened and read from, spawned ones by their own."""
    shardckpt.save(s3_root.url, {"rows": ROWS}, storage_options=s3_root.options)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:  # fork from a process of one thread
        for method in ("fork", "spawn"):
            assert fresh.submit(read_in_worker_processes, s3_root.url, s3_root.options, method).result(120)


def test_a_running_event_loop_does_not_matter(s3_root: S3Root) -> None:
    """As in a notebook: calls from inside a coroutine work like any others."""

    async def notebook() -> torch.Tensor:
        shardckpt.save(s3_root.url, {"rows": ROWS}, storage_options=s3_root.options)
        await asyncio.sleep(0)
        with shardckpt.open(s3_root.url, storage_options=s3_root.options) as checkpoint:
            return checkpoint["rows"][2:4]

    assert torch.equal(asyncio.run(notebook()), ROWS[2:4])
