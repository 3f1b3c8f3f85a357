"""Every command on damaged and foreign files: a clear error or the right result, and never a trace of a wrong one.

The rule: if a command succeeds, its output is that of the undamaged source; if not, the exit code says so, the message
names the file and what to do, the destination is as empty as before, and the source untouched.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.shardckpt.cli.sources import OF_HF, OF_OURS, SHARDS, Verb, outcome, spoilt, write_hf, write_ours

ADVICE = re.compile(
    r"[Rr]estore|use an earlier|use another|[Cc]heck the path|name (the|a|one)|fetch|git lfs pull|was not written|"
    r"are not those that were saved|it is (truncated|missing|longer)|its header was changed|"
    r"it looks like|a download went wrong"
)


def _check(verb: Verb, source: Path, out: Path, file: str, way: str, good: dict[str, bytes]) -> bool:
    """Hold one outcome against the rule; True if the command refused."""
    exit_code, text, left = outcome(verb, source, out)
    label = f"{verb}, {file} {way}: exit code {exit_code}\n{text}"
    if exit_code == 0:
        assert left == good, f"a wrong result passes for a good one: {label}"
        return False
    assert exit_code == verb.bad_exit_code, label
    assert left == {}, f"something was left behind: {label}"
    assert Path(file).name in text, f"the file is not named: {label}"
    assert ADVICE.search(text), f"nothing says what to do: {label}"
    return True


@pytest.mark.parametrize("verb", OF_OURS, ids=str)
@pytest.mark.parametrize("file", ["manifest.json", "chunks.safetensors"])
def test_a_damaged_description_is_always_refused(tmp_path: Path, verb: Verb, file: str) -> None:
    """Manifest and chunk table are under checksums: no command works with damaged ones, not even to look."""
    source, out = write_ours(tmp_path / "ours"), tmp_path / "out"
    _, _, good = outcome(verb, source, out)
    for way in spoilt(source / file):
        if file == "manifest.json" and way in ("missing", "a folder"):
            exit_code, text, left = outcome(verb, source, out)
            assert (exit_code, left) == (1, {})
            assert ("holds an unfinished save" if way == "missing" else "is not a regular file") in text
        else:
            assert _check(verb, source, out, file, way, good), f"{verb} accepted {file} {way}"


@pytest.mark.parametrize("verb", OF_OURS, ids=str)
@pytest.mark.parametrize("file", [SHARDS[0], SHARDS[2]])
def test_damaged_data_never_passes_for_good(tmp_path: Path, verb: Verb, file: str) -> None:
    """What is read is compared; what is not needed (a header) may be damaged, and only `verify` has to find it."""
    source, out = write_ours(tmp_path / "ours"), tmp_path / "out"
    _, _, good = outcome(verb, source, out)
    header = int.from_bytes((source / file).read_bytes()[:8], "little") + 8
    for way in spoilt(source / file):
        refused = _check(verb, source, out, file, way, good)
        flipped = re.fullmatch(r"bit flipped in byte (\d+)", way)
        hits_header_only = flipped is not None and int(flipped[1]) < header
        if verb.reads_data and verb.name != "export" and not hits_header_only:
            assert refused, f"{verb} accepted {file} {way}"
        if verb.name == "verify":
            assert refused, f"verify found nothing wrong: {file} {way}"


@pytest.mark.parametrize("verb", OF_HF, ids=str)
@pytest.mark.parametrize("file", ["model.safetensors.index.json", "model-00002-of-00002.safetensors"])
def test_damaged_weights_of_others_are_refused_if_they_can_be_told(tmp_path: Path, verb: Verb, file: str) -> None:
    """Their files have no checksums: damage that leaves a sound header and size cannot be seen by anyone."""
    source, out = write_hf(tmp_path / "hf"), tmp_path / "out"
    for way in spoilt(source / file):
        exit_code, text, left = outcome(verb, source, out)
        if exit_code == 0:
            assert way.startswith(("bit flipped", "zeroed from the middle")), f"{verb} accepted {file} {way}"
            continue
        assert exit_code in (1, verb.bad_exit_code), f"{file} {way}: {text}"
        assert left == {}, f"{file} {way}"
        assert ADVICE.search(text), f"{file} {way}: {text}"
        if way != "missing" or "index" not in file:
            named = file in text or (way.startswith("bit flipped") and source.name in text)
            assert named, f"the file is not named: {file} {way}: {text}"


@pytest.mark.parametrize("verb", [*OF_OURS, *OF_HF], ids=str)
def test_nothing_at_the_source_is_told(tmp_path: Path, verb: Verb) -> None:
    """A path that is not there, an empty folder and a lone text file are named, with what to check."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "notes.txt").write_text("mine")
    for name in ("void", "empty", "notes"):
        source = tmp_path / name
        source_is_new = not source.exists()
        if source_is_new:
            source.mkdir()  # for the comparison of before and after
        exit_code, text, left = outcome(verb, source, tmp_path / "out")
        assert (exit_code, left) == (1, {})
        assert str(source) in text
        assert "check the path" in text
