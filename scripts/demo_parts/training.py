"""Part 2, real training: stopped, resharded and resumed at other world sizes, beside a run that was never stopped."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.demo_parts.commands import TRAIN, Commands
from scripts.demo_parts.report import Done, Report
from scripts.demo_parts.weights import claim_identical

TOLERANCE = 1e-4
"""How far a loss may be from that of the uninterrupted run, relatively.

Another number of ranks adds the same numbers in another order, so float32 rounds differently, by about 1e-7, and
training amplifies that slowly. A lost moment, step count or learning rate moves the next losses by percents.
"""


@dataclass(frozen=True)
class Scale:
    """How much to train.

    Attributes:
        layers: Blocks of the model.
        steps: Length of a run.
        save_every: Steps from save to save.
        stop_after: The run to be stopped is stopped once it has logged this step.
        ranks: World size of the first two runs.
        offline: That of the run that resumes what was resharded offline.
        at_load: That of the run that loads the checkpoint as it is.
    """

    layers: int = 4
    steps: int = 48
    save_every: int = 16
    stop_after: int = 20
    ranks: int = 4
    offline: int = 2
    at_load: int = 3

    @property
    def saved(self) -> int:
        """The last step that the stopped run has saved."""
        return self.stop_after // self.save_every * self.save_every


def run(report: Report, commands: Commands, scale: Scale) -> Path:
    """Train as the module says; give the last checkpoint of the run that was resharded offline."""
    report.title("Part 2. Real training: a byte-level Llama reads Python's standard library")
    out = commands.folder
    whole, stopped, offline, at_load = (out / name for name in ("whole", "stopped", "offline", "at-load"))

    report.say(f"First, to compare with, {scale.steps} steps that nobody stops, sharded over {scale.ranks} ranks.")
    done = _train(commands, scale, scale.ranks, whole)
    losses = losses_of(whole)
    first, last = losses[1], losses[scale.steps]
    report.claim(f"the loss went down, from {first:.3f} to {last:.3f}", last < first - 0.5)
    report.row(f"save on {scale.ranks} training ranks", _typical_save(whole, done), newest(whole))

    report.say(f"\nThe same again, but all ranks are terminated once step {scale.stop_after} is done.")
    _train(commands, scale, scale.ranks, stopped, stop_when=lambda: scale.stop_after in losses_of(stopped))
    some = losses_of(stopped)
    same = all(losses[step] == loss for step, loss in some.items())
    report.claim(f"its {len(some)} losses up to there are those of the first run, to the last bit", same)
    checkpoint = newest(stopped)
    report.claim(f"its newest whole checkpoint is {checkpoint.name}", checkpoint.name == f"step-{scale.saved:06}")

    commands.shardckpt("inspect", checkpoint)

    report.say(f"\nReshard that from {scale.ranks} to {scale.offline} ranks, weights and both moments of AdamW.")
    resharded = out / f"{checkpoint.name}-of-{scale.offline}"
    done = commands.shardckpt("reshard", checkpoint, resharded, "--from", str(scale.ranks), "--to", str(scale.offline))
    is_identical = _same_state(report, commands, checkpoint, resharded)
    report.row(f"reshard {scale.ranks} to {scale.offline} with AdamW", done, resharded, is_identical=is_identical)

    report.say(f"\nResume it on {scale.offline} ranks.")
    _train(commands, scale, scale.offline, offline, resume=resharded)
    _claim_continued(report, scale, whole, offline)

    report.say(f"\nResume the {scale.ranks}-rank checkpoint on {scale.at_load} ranks, resharding while it is loaded.")
    _train(commands, scale, scale.at_load, at_load, resume=checkpoint)
    _claim_continued(report, scale, whole, at_load)
    return newest(offline)


def losses_of(run_folder: Path) -> dict[int, float]:
    """Give step -> loss, as far as the run has logged it."""
    return {record["step"]: record["loss"] for record in _log(run_folder) if "loss" in record}


def newest(run_folder: Path) -> Path:
    """Give the last committed checkpoint of a run: the manifest is what commits it."""
    return max(manifest.parent for manifest in run_folder.glob("step-*/manifest.json"))


def _log(run_folder: Path) -> list[dict[str, Any]]:
    path = run_folder / "log.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _train(
    commands: Commands,
    scale: Scale,
    ranks: int,
    out: Path,
    *,
    resume: Path | None = None,
    stop_when: Callable[[], bool] | None = None,
) -> Done:
    """Run the training script; it is the same one, and the same goal, each time."""
    size = [f"--{name}={value}" for name, value in (("steps", scale.steps), ("save-every", scale.save_every))]
    options = [*size, f"--layers={scale.layers}"] if scale != Scale() else []
    source = ("--resume", resume) if resume else ()
    return commands.torchrun(ranks, TRAIN, "--out", out, *source, *options, stop_when=stop_when)


def _typical_save(run_folder: Path, done: Done) -> Done:
    """Give the median save of a run; the memory is that of a training rank, all in all."""
    seconds = statistics.median(record["seconds"] for record in _log(run_folder) if "saved" in record)
    return Done("", seconds, done.peak_bytes)


def _same_state(report: Report, commands: Commands, one: Path, other: Path) -> bool:
    """Compare two checkpoints as single files of all their tensors, optimizer included."""
    singles = [path.with_name(f"{path.name}-all.safetensors") for path in (one, other)]
    for path, single in zip((one, other), singles, strict=True):
        commands.shardckpt("consolidate", path, single, "--optimizer")
    return claim_identical(report, *singles)


def _claim_continued(report: Report, scale: Scale, whole: Path, resumed: Path) -> None:
    """Hold the losses and learning rates of a resumed run against those of the run that was never stopped."""
    rates, others = ({r["step"]: r["learning_rate"] for r in _log(run) if "loss" in r} for run in (whole, resumed))
    losses, found = losses_of(whole), losses_of(resumed)
    steps = range(scale.saved + 1, scale.steps + 1)
    is_complete = list(found) == list(steps)
    report.claim(
        f"it did steps {steps[0]} to {steps[-1]}, at the same learning rates",
        is_complete and others.items() <= rates.items(),
    )
    off = max(abs(found[step] / losses[step] - 1) for step in found)
    text = (
        f"all its losses are those of the run that was never stopped, within {TOLERANCE:g} (off by {off:.1e} at most)"
    )
    report.claim(text, off <= TOLERANCE)
    report.say(
        "       (another number of ranks adds the same float32 numbers in another order, and rounds differently)"
    )
