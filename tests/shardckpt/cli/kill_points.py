"""A program that runs one command again and again, each time killed one write step later, until it comes through.

Called with the name of the destination, in which `{}` stands for the number of the run, and the command's arguments.
It prints the number of runs; the last one was not killed.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
from types import FrameType

from shardckpt.cli.main import main

STEPS = frozenset(
    ("pwrite", "write", "fsync", "ftruncate", "truncate", "rename", "replace", "link", "unlink", "remove", "mkdir")
)


def _die_before(number: int) -> None:
    """Have this process killed by the system just before its step `number`, in whichever thread."""
    steps = itertools.count()

    def watch(frame: FrameType, event: str, called: object) -> None:
        is_step = event == "c_call" and getattr(called, "__module__", "") == "posix"
        if is_step and getattr(called, "__name__", "") in STEPS and next(steps) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    threading.setprofile(watch)
    sys.setprofile(watch)


def _run(arguments: list[str], number: int) -> int:
    """Run the command in a child, and give how it ended."""
    child = os.fork()
    if child == 0:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
        sys.argv[1:] = [argument.replace("{}", str(number)) for argument in arguments]
        _die_before(number)
        main()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    for run in itertools.count():
        match _run(sys.argv[1:], run):
            case 0:
                print(run + 1)
                break
            case code if code != -signal.SIGKILL:
                sys.exit(f"run {run} ended with {code}")
