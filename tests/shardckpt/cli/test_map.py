"""`shardckpt map`: a picture as SVG, as HTML and as text."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest

from tests.shardckpt.checkpoints import write_checkpoint
from tests.shardckpt.cli.invocation import error_of, run, run_json, tree

SVG = "{http://www.w3.org/2000/svg}"
NASTY = 'model.<script>alert("&")</script>'


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkpoint of four ranks with a name that is no harmless text."""
    write_checkpoint(str(tmp_path / "a"), {"model.w": np.zeros((64, 8)), NASTY: np.zeros(40)}, world_size=4)
    return tmp_path / "a"


def _titles(svg: str) -> list[str]:
    return [str(title.text) for title in ET.fromstring(svg).iter(f"{SVG}title")]


def test_the_picture_is_sound_svg_that_names_everything(root: Path, tmp_path: Path) -> None:
    """Every rank, every tensor and every part has a title; the picture is well-formed whatever the names."""
    before = tree(root)
    facts = run_json("map", root, "-o", tmp_path / "a.svg", "--to", 3)
    assert tree(root) == before
    assert facts["num_ranks"] == 4
    svg = (tmp_path / "a.svg").read_text()
    titles = _titles(svg)
    assert [f"rank {rank}" for rank in range(4)] == [
        title for title in titles if title in {f"rank {r}" for r in range(4)}
    ][:4]
    assert f"{NASTY}: 320 B on rank 3" in titles
    assert any(title.startswith("model.w: ") and title.endswith("on rank 0") for title in titles)
    text = "".join(str(element.text) for element in ET.fromstring(svg).iter(f"{SVG}text"))
    assert "What moves from 4 to 3 ranks" in text
    assert "a: 4 ranks, 4.42 kB" in text


def test_the_page_holds_the_same_picture(root: Path, tmp_path: Path) -> None:
    """HTML with the SVG inside, and no script."""
    run("map", root, "-o", tmp_path / "a.svg")
    run("map", root, "-o", tmp_path / "a.html")
    page = (tmp_path / "a.html").read_text()
    assert page.startswith("<!DOCTYPE html>")
    assert (tmp_path / "a.svg").read_text() in page
    assert "<script" not in page


def test_a_picture_that_is_there_is_not_replaced_unasked(root: Path, tmp_path: Path) -> None:
    """As for every file that a command writes."""
    (tmp_path / "a.svg").write_text("mine")
    assert "exists; choose another file" in error_of("map", root, "-o", tmp_path / "a.svg")
    assert (tmp_path / "a.svg").read_text() == "mine"
    run("map", root, "-o", tmp_path / "a.svg", "--overwrite")
    assert (tmp_path / "a.svg").read_text().startswith("<svg")
    assert "ends in .svg or .html" in run("map", root, "-o", tmp_path / "a.png", exit_code=2).stderr


def test_the_terminal_shows_ranks_and_tensors(root: Path) -> None:
    """A bar for each rank, and for each tensor a character for the rank that holds each part."""
    lines = run("map", root).stdout.splitlines()
    assert [line.split()[:3] for line in lines if line.startswith("rank ")] == [
        ["rank", str(r), str(r)] for r in range(4)
    ]
    tensor = next(line for line in lines if "model.w" in line)
    assert tensor.split()[1] == "".join(sorted(tensor.split()[1]))
    assert set(tensor.split()[1]) == set("0123")


def test_many_ranks_make_no_huge_picture(tmp_path: Path) -> None:
    """A thousand ranks fit a picture of bounded size."""
    write_checkpoint(str(tmp_path / "a"), {f"model.{i}": np.zeros(3000 + i) for i in range(20)}, world_size=1000)
    run("map", tmp_path / "a", "-o", tmp_path / "a.svg", "--to", 600)
    assert (tmp_path / "a.svg").stat().st_size < 3 << 20
