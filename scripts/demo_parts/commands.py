"""Commands of the demo: each runs as its own process, and says how long it took and how much memory it needed."""

from __future__ import annotations

import os
import resource
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from scripts.demo_parts.report import Done, Report

ROOT = Path(__file__).parents[2]
TRAIN = ROOT / "examples" / "train_bytes.py"
TIMEOUT_S = 900
_RSS_UNIT = 1 if sys.platform == "darwin" else 1024


class CommandError(Exception):
    """A command of the demo failed; what it wrote is on the screen."""


@dataclass(frozen=True)
class Commands:
    """Runs commands in one folder, from which their paths are shown."""

    report: Report
    folder: Path

    def shardckpt(self, *arguments: str | Path, exit_code: int = 0) -> Done:
        """Run the command line of shardckpt, with what it says on the screen."""
        return self._show("shardckpt", *arguments, exit_code=exit_code)

    def torchrun(self, ranks: int, *arguments: str | Path, stop_when: Callable[[], bool] | None = None) -> Done:
        """Run `arguments` on that many local ranks; all are terminated once `stop_when`, asked often, says True."""
        options = ("--standalone", "--nproc-per-node", str(ranks))
        return self._show("torchrun", *options, *arguments, stop_when=stop_when)

    def module(self, name: str, *arguments: str | Path) -> str:
        """Run a module of this package that needs torch, out of sight, and give what it printed."""
        return _run([sys.executable, "-m", f"{__package__}.{name}", *arguments], self.folder, is_quiet=True).output

    def _show(
        self, program: str, *arguments: str | Path, exit_code: int = 0, stop_when: Callable[[], bool] | None = None
    ) -> Done:
        words = [_shown(word, self.folder) for word in arguments]
        self.report.say(f"\n$ {program} {shlex.join(words)}")
        path = Path(sys.executable).with_name(program)
        return _run([path, *words], self.folder, exit_code=exit_code, stop_when=stop_when)


def _shown(word: str | Path, folder: Path) -> str:
    """Give an argument as one would type it in `folder`."""

    if isinstance(word, Path) and word.is_relative_to(folder):
        return str(word.relative_to(folder))
    return str(word)


def _run(
    argv: list[str | Path],
    folder: Path,
    *,
    is_quiet: bool = False,
    exit_code: int = 0,
    stop_when: Callable[[], bool] | None = None,
) -> Done:
    sys.stdout.flush()
    started = time.perf_counter()
    child = subprocess.Popen(
        argv,
        cwd=folder,
        env=_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if is_quiet else None,
        stderr=subprocess.DEVNULL if stop_when else None,  # torchrun tells at length that it was terminated
        text=True,
    )
    watchdog = threading.Timer(TIMEOUT_S, child.terminate)
    watchdog.start()
    try:
        with child.stdout or nullcontext() as output:
            text = output.read() if output else ""
        usage, was_stopped = _wait(child, stop_when)
    finally:
        watchdog.cancel()
        child.terminate()  # only if this was interrupted: torchrun then ends its ranks
    if child.returncode != exit_code and not was_stopped:
        raise CommandError(f"exit code {child.returncode}, expected {exit_code}: {shlex.join(map(str, argv))}\n{text}")
    return Done(text, time.perf_counter() - started, usage.ru_maxrss * _RSS_UNIT)


def _wait(child: subprocess.Popen[str], stop_when: Callable[[], bool] | None) -> tuple[resource.struct_rusage, bool]:
    """Wait for the child, set its exit code, and give what it used; and whether it was terminated on the condition."""
    was_stopped = False
    while True:
        waits = stop_when is None or was_stopped
        pid, status, usage = os.wait4(child.pid, 0 if waits else os.WNOHANG)
        if pid:
            child.returncode = os.waitstatus_to_exitcode(status)
            return usage, was_stopped
        if stop_when is not None and stop_when():
            os.kill(child.pid, signal.SIGTERM)
            was_stopped = True
        time.sleep(0.05)


def _environment() -> dict[str, str]:
    """Give the environment of a child: offline, quiet, one thread a rank, and this repository to import from."""
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "HF_HUB_OFFLINE": "1",
        "TQDM_DISABLE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
    }
