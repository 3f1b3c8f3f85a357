"""Which checkpoints of a run to keep, by step and by metric. Numbers only; refuses to know where they lie."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from shardckpt.errors import MismatchError

Metrics = Mapping[str, float | None]


@dataclass(frozen=True, slots=True)
class Best:
    """Which checkpoints are the best.

    Attributes:
        metric: Name of the metric that decides.
        mode: "min" if less is better, "max" if more is.
        keep: How many of the best to keep.
    """

    metric: str
    mode: str = "min"
    keep: int = 1

    def __post_init__(self) -> None:
        """Check mode and number."""
        if self.mode not in ("min", "max"):
            raise MismatchError(f"mode={self.mode!r} of the best checkpoints is none; give 'min' or 'max'")
        if self.keep < 1:
            raise MismatchError(f"keep={self.keep} of the best checkpoints; must be at least 1")

    def ranked(self, metrics: Mapping[int, Metrics]) -> list[int]:
        """Give the steps that have the metric, best first; of equal ones the newer first."""
        sign = 1 if self.mode == "min" else -1
        found = [(step, values.get(self.metric)) for step, values in metrics.items()]
        ordered = sorted((sign * value, -step) for step, value in found if value is not None)
        return [-step for _, step in ordered]


@dataclass(frozen=True, slots=True)
class Retention:
    """What is kept.

    Attributes:
        newest: How many of the newest; None for all.
        every: Also those whose step is a multiple of this.
        best: Also the best.
    """

    newest: int | None = None
    every: int | None = None
    best: Best | None = None

    def __post_init__(self) -> None:
        """Check the numbers."""
        if (self.newest is not None and self.newest < 1) or (self.every is not None and self.every < 1):
            raise MismatchError(f"keep={self.newest} and keep_every={self.every}: both must be at least 1, or None")

    def doomed(
        self, steps: Sequence[int], metrics: Mapping[int, Metrics], *, protected: Collection[int] = ()
    ) -> list[int]:
        """Give the steps to remove.

        Args:
            steps: Of all checkpoints that can be read, oldest first.
            metrics: Of each.
            protected: Steps to keep in any case.
        """
        newest = steps if self.newest is None else steps[-self.newest :]
        best = self.best.ranked(metrics)[: self.best.keep] if self.best else []
        kept = {*newest, *best, *protected}
        return [step for step in steps if step not in kept and not (self.every is not None and step % self.every == 0)]
