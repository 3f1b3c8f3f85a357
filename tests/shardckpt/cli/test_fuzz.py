"""A short fuzz run, the same each time; the long one is `scripts/fuzz`."""

from __future__ import annotations

import resource
import time
from pathlib import Path

import pytest

from tests.shardckpt.cli.fuzzing import Pristine, run_case

NUM_CASES = 120
ONCE_WRONG: tuple[int, ...] = ()
"""Seeds that a long run found to be handled wrongly, and that are right by now."""

_RSS_UNIT = 1024


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Pristine:
    """Sound sources."""
    return Pristine(tmp_path_factory.mktemp("pristine"))


@pytest.mark.parametrize("part", range(4))
def test_no_damage_makes_a_command_crash_or_hang_or_take_memory(part: int, pristine: Pristine, tmp_path: Path) -> None:
    """Each case ends well or with an error of a line; it takes no time, no memory and no place to speak of."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for seed in range(part, NUM_CASES, 4):
        started = time.monotonic()
        run_case(seed, pristine, tmp_path / "case")
        assert time.monotonic() - started < 60, f"seed {seed} takes long"
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * _RSS_UNIT
    assert grown < 512 << 20


def test_what_was_once_wrong_is_right(pristine: Pristine, tmp_path: Path) -> None:
    """The corpus: one seed for each fault that fuzzing found."""
    for seed in ONCE_WRONG:
        run_case(seed, pristine, tmp_path / "case")
