"""Runs contenders in child processes, in turns, and puts their times side by side.

Knows processes, clocks and tables; refuses to know what is measured. Times are noisy: what is printed is the median of
ratios, each taken between two runs that followed each other.
"""

from __future__ import annotations

import multiprocessing
import os
import platform
import shutil
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path

MIB = 1 << 20


@dataclass(frozen=True)
class Run:
    """One run of one contender.

    Attributes:
        seconds: Wall time, imports not counted.
        cpu_seconds: Time of processors, of user and kernel, children included.
        peak_bytes: Resident memory at its highest, above that at the start.
    """

    seconds: float
    cpu_seconds: float
    peak_bytes: int


def in_child(function: Callable[..., object], *args: object) -> Run:
    """Time, in a process of its own, the work that `function(*args)` gives; what it does itself is not timed."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(theirs, function, args))
    process.start()
    theirs.close()
    try:
        run = ours.recv()
    except EOFError:
        raise RuntimeError(f"{function.__name__} failed; see above") from None
    process.join()
    assert isinstance(run, Run)
    return run


def _child(connection: Connection, function: Callable[..., object], args: Sequence[object]) -> None:
    work = function(*args)  # imports and opens; gives what is to be timed
    assert callable(work)
    peak = Peak()
    begin, cpu = time.perf_counter(), sum(os.times()[:4])
    work()
    seconds, cpu = time.perf_counter() - begin, sum(os.times()[:4]) - cpu
    connection.send(Run(seconds, cpu, peak.above_start()))


class Peak:
    """The resident memory of this process, from now on."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the highest is that from here on
        self._start = _status("VmRSS")

    def restart(self) -> None:
        """Forget the highest so far, not the start."""
        Path("/proc/self/clear_refs").write_text("5")

    def above_start(self) -> int:
        """Give the highest so far, in bytes above that at the start."""
        return max(_status("VmHWM") - self._start, 0)


def _status(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def in_turns(
    contenders: Mapping[str, Callable[[], Run]], *, pairs: int, clean: Callable[[], None], once: Iterable[str] = ()
) -> dict[str, list[Run]]:
    """Run all contenders `pairs` times, in turns, every second round in reverse.

    Args:
        contenders: Name -> what runs it.
        pairs: Number of rounds.
        clean: Called before every run: removes outputs and waits for the disk.
        once: Contenders too slow to be run in more than the first round.
    """
    runs: dict[str, list[Run]] = {name: [] for name in contenders}
    for number in range(pairs):
        names = [name for name in contenders if number == 0 or name not in set(once)]
        for name in names if number % 2 == 0 else reversed(names):
            clean()
            runs[name].append(contenders[name]())
    clean()
    return runs


def ratio(of: Sequence[Run], to: Sequence[Run]) -> float:
    """Give how many times faster `of` is than `to`: the median of the ratios, pair by pair."""
    return statistics.median(b.seconds / a.seconds for a, b in zip(of, to, strict=False))


def cpu_ratio(of: Sequence[Run], to: Sequence[Run]) -> float:
    """Give how many times less processor time `of` takes than `to`, as `ratio` does."""
    return statistics.median(b.cpu_seconds / a.cpu_seconds for a, b in zip(of, to, strict=False))


def seconds(runs: Sequence[Run]) -> float:
    """Give the median of the times."""
    return statistics.median(run.seconds for run in runs)


def peak_mib(runs: Sequence[Run]) -> float:
    """Give the highest peak."""
    return max(run.peak_bytes for run in runs) / MIB


def remove(folder: Path) -> None:
    """Remove a folder and wait until the disk has nothing left to write."""
    shutil.rmtree(folder, ignore_errors=True)
    os.sync()


def copy_files(source: Path, target: Path, *, is_synced: bool = False) -> Callable[[], object]:
    """Give the work of `cp` on every data file of a folder; `is_synced` waits until all bytes are on the disk."""
    import subprocess

    files = sorted(str(path) for path in source.iterdir() if path.suffix == ".safetensors")

    def work() -> None:
        target.mkdir(parents=True, exist_ok=True)
        subprocess.run(["cp", *files, str(target)], check=True)
        if is_synced:
            sync(target)

    return work


def sync(folder: Path) -> None:
    """Wait until every file of a folder is on the disk."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def warm(folder: Path) -> None:
    """Read all files once, so that every contender finds them in the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                while file.read(8 * MIB):
                    pass


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a Markdown table."""
    print(f"\n**{title}**\n")
    print("| " + " | ".join(columns) + " |")
    print("|" + "|".join("---" if i == 0 else "---:" for i in range(len(columns))) + "|")
    for row in rows:
        print("| " + " | ".join(row) + " |", flush=True)


def machine(folder: Path) -> str:
    """Describe the machine, where the files lie, and how much others had it do in the last minute."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    inside = [mount for mount in mounts if str(folder.resolve()).startswith(mount[1])]
    kind = max(inside, key=lambda mount: len(mount[1]))[2]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "numpy", "safetensors", "google-crc32c"))
    return (
        f"{os.cpu_count()} cores ({platform.machine()}), {memory:.0f} GiB memory, {kind}, "
        f"Linux {platform.release().split('-')[0]}, Python {platform.python_version()}, {packages}; "
        f"load of others {os.getloadavg()[0]:.1f}"
    )
