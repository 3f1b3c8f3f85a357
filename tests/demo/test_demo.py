"""The demo with small numbers, and the checks that it rests on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from scripts.demo_parts.__main__ import demonstrate
from scripts.demo_parts.report import Done, Report
from scripts.demo_parts.tensor_bytes import first_difference
from scripts.demo_parts.training import Scale

SMALL = Scale(layers=2, steps=8, save_every=2, stop_after=3, ranks=2, offline=3, at_load=1)


@pytest.mark.timeout(900)
def test_every_claim_of_the_demo_holds(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """All three parts run, on real weights, real ranks and the real command line, and no claim fails."""
    code = demonstrate(tmp_path, SMALL)
    said = capfd.readouterr().out
    assert code == 0, said
    assert "bit-identical: yes" in said


def test_a_claim_that_does_not_hold_fails_the_demo(tmp_path: Path) -> None:
    """The exit code is 1 as soon as one claim is false."""
    (tmp_path / "made").write_bytes(b"1234")
    report = Report()
    report.row("made", Done("", 1.0, 1), tmp_path / "made", is_identical=True)
    assert report.finish() == 0
    report.claim("this is so", False)
    assert report.finish() == 1


def test_a_table_with_nothing_compared_is_not_bit_identical() -> None:
    """An empty comparison proves nothing."""
    assert Report().finish() == 1


@pytest.mark.parametrize("byte", [0, 100, 399])
def test_one_flipped_bit_is_a_difference(tmp_path: Path, byte: int) -> None:
    """The comparison that the demo trusts sees a single bit, and says in which tensor."""
    values = {"a": np.arange(10, dtype=np.int32), "b": np.arange(100, dtype=np.float32).reshape(4, 25)}
    save_file(values, tmp_path / "old.safetensors")
    assert first_difference(tmp_path / "old.safetensors", tmp_path / "old.safetensors") is None
    values["b"].reshape(-1).view(np.uint8)[byte] ^= 1
    save_file(values, tmp_path / "new.safetensors")
    assert first_difference(tmp_path / "old.safetensors", tmp_path / "new.safetensors") == "b: its bytes differ"


def test_another_shape_or_name_is_a_difference(tmp_path: Path) -> None:
    """Equal bytes under another shape or another name are not the same tensor."""
    save_file({"a": np.zeros((2, 3), np.float32)}, tmp_path / "a.safetensors")
    save_file({"a": np.zeros((3, 2), np.float32)}, tmp_path / "b.safetensors")
    save_file({"c": np.zeros((2, 3), np.float32)}, tmp_path / "c.safetensors")
    assert first_difference(tmp_path / "a.safetensors", tmp_path / "b.safetensors") == "a: F32 (2, 3) became F32 (3, 2)"
    assert "the names differ" in str(first_difference(tmp_path / "a.safetensors", tmp_path / "c.safetensors"))
