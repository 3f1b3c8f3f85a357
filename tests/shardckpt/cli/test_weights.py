"""`inspect` and `verify` of what other programs wrote: Hugging Face folders and single safetensors files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.shardckpt.cli.invocation import error_of, run, run_json
from tests.shardckpt.cli.sources import write_hf
from tests.shardckpt.formats.hf_folders import arrays, write_index, write_sharded, write_single

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    """A folder of two files and their index."""
    return write_hf(tmp_path / "hf")


def test_inspect_shows_folders_and_files(hf: Path) -> None:
    """The tensors of all files; files in place of ranks; nothing that is no tensor."""
    found = run_json("inspect", hf)
    size = sum((hf / name).stat().st_size for name in (FIRST, SECOND))
    assert (found["format"], found["num_tensors"], found["file_bytes"]) == ("safetensors", len(arrays()), size)
    assert [row["file"] for row in found["files"]] == [FIRST, SECOND]  # type: ignore[attr-defined]
    named = run_json("inspect", hf, "--tensors")["tensors"]
    assert {row["name"]: tuple(row["shape"]) for row in named} == {  # type: ignore[attr-defined]
        name: array.shape for name, array in arrays().items()
    }
    assert run_json("inspect", hf / FIRST, "--tensor", "embed.weight")["chunks"][0]["crc32c"] is None  # type: ignore[index]
    assert [row["rank"] for row in run_json("inspect", hf, "--ranks")["ranks"]] == [None, None]  # type: ignore[attr-defined]
    assert run_json("inspect", hf, "--objects") == {"objects": []}
    write_single(hf.parent / "one", {"a": np.ones(3)})
    (hf.parent / "one" / "other.safetensors").write_bytes(b"")
    assert "not part of the weights: 'other.safetensors'" in run("inspect", hf.parent / "one").stderr


def test_verify_reads_all_and_says_that_nothing_is_recorded(hf: Path) -> None:
    """A sound folder is good, but unverified; so is a file."""
    result = run("verify", hf)
    assert result.stderr == "unverified: no checksums are recorded there, so that changed values are not found\n"
    found = run_json("verify", hf)
    size = sum((hf / name).stat().st_size for name in (FIRST, SECOND))
    assert (found["is_good"], found["nbytes"], found["unverified_bytes"]) == (True, size, size)
    assert run_json("verify", hf / SECOND)["num_files"] == 1
    assert run_json("verify", hf, "--quick")["nbytes"] == 0


def test_verify_names_all_that_is_wrong(hf: Path) -> None:
    """A truncated file, one that is missing, and an index at odds with the others: not the first alone."""
    data = (hf / FIRST).read_bytes()
    (hf / FIRST).write_bytes(data[:-1])
    weight_map = json.loads((hf / INDEX).read_text())["weight_map"]
    write_index(hf, {**weight_map, "ghost": SECOND, "far": "gone.safetensors"})
    found = run_json("verify", hf, exit_code=3)
    assert [(row["path"], row["kind"]) for row in found["problems"]] == [  # type: ignore[attr-defined]
        ("gone.safetensors", "missing"),
        (FIRST, "damaged"),
        (INDEX, "inconsistent"),
    ]
    assert "names tensors that no file holds: 'ghost'" in run("verify", hf, exit_code=3).stdout
    (hf / INDEX).write_text("{")
    assert "its JSON cannot be read" in run("verify", hf, exit_code=3).stdout
    assert "its JSON cannot be read" in error_of("inspect", hf)
    (hf / FIRST).write_bytes(data[:-1])
    assert "truncated" in run("verify", hf / FIRST, exit_code=3).stdout


@pytest.mark.parametrize("is_same", [True, False])
def test_tensors_that_the_config_ties_are_to_be_the_same(tmp_path: Path, is_same: bool) -> None:
    """An output head beside the embeddings is a copy of them, or one of the two gets lost on loading."""
    table = np.arange(12.0).reshape(4, 3)
    head = table if is_same else table + 1
    write_sharded(tmp_path, {"model.embed_tokens.weight": table}, {"lm_head.weight": head})
    (tmp_path / "config.json").write_text('{"tie_word_embeddings": true}')
    found = run_json("verify", tmp_path, exit_code=0 if is_same else 3)
    names = ["lm_head.weight", "model.embed_tokens.weight"]
    problems = [] if is_same else [("config.json", "untied", names)]
    assert [(row["path"], row["kind"], row["tensors"]) for row in found["problems"]] == problems  # type: ignore[attr-defined]
    (tmp_path / "config.json").write_text("no")
    assert run_json("verify", tmp_path, exit_code=3)["problems"][0]["path"] == "config.json"  # type: ignore[index]
