"""The demo from its command line: choose a folder and a scale, run the three parts, print the table."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from pathlib import Path

from scripts.demo_parts import handover, training, weights
from scripts.demo_parts.commands import ROOT, CommandError, Commands
from scripts.demo_parts.report import Report

DEFAULT_OUT = ROOT / "demo-out"
QUICK = training.Scale(layers=2, steps=12, save_every=4, stop_after=6)


def main() -> int:
    """Run the demo; give its exit code."""
    parser = argparse.ArgumentParser(prog="scripts/demo", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="train a smaller model for a few steps only")
    parser.add_argument(
        "--out", type=Path, help=f"an empty folder for what is made; without it {DEFAULT_OUT}, emptied first"
    )
    args = parser.parse_args()
    return demonstrate(_fresh(args.out), QUICK if args.quick else training.Scale())


def demonstrate(out: Path, scale: training.Scale) -> int:
    """Run all parts in an empty folder; give 0 if every claim held."""
    report = Report()
    commands = Commands(report, out)
    started = time.monotonic()
    try:
        weights.run(report, commands)
        checkpoint = training.run(report, commands, scale)
        handover.run(report, commands, checkpoint, ranks=scale.offline)
    except CommandError as error:
        report.claim(str(error), False)
    code = report.finish()
    report.say(f"The demo took {time.monotonic() - started:.0f} s; what it made is in {out}")
    return code


def _fresh(wanted: Path | None) -> Path:
    """Give an empty folder to work in."""
    if wanted is None:
        shutil.rmtree(DEFAULT_OUT, ignore_errors=True)
    elif wanted.exists() and any(wanted.iterdir()):
        raise SystemExit(f"scripts/demo: {wanted} is not empty; name another folder, or empty it")
    out = (wanted or DEFAULT_OUT).resolve()
    out.mkdir(parents=True, exist_ok=True)
    return out


if __name__ == "__main__":
    sys.exit(main())
