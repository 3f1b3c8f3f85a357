"""Every command that writes, where writing fails or is stopped: nothing half-written, and the next run starts clean."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from shardckpt.storage import TEMPORARY_SUFFIX
from tests.shardckpt.checkpoints import write_checkpoint
from tests.shardckpt.cli.invocation import error_of, run, run_json, tree
from tests.shardckpt.cli.sources import OF_HF, OF_OURS, Verb, write_hf, write_ours

WRITERS = [verb for verb in (*OF_OURS, *OF_HF) if verb.name in ("reshard", "consolidate", "export", "import")]
PROGRAM = (sys.executable, "-c", "from shardckpt.cli.main import main; main()")


def _source(verb: Verb, folder: Path) -> Path:
    return write_hf(folder / "hf") if verb in OF_HF else write_ours(folder / "ours")


def _target(verb: Verb, source: Path, out: Path) -> Path:
    return Path(str(verb.arguments(source, out)[1]))


@pytest.mark.parametrize("verb", WRITERS, ids=str)
def test_a_dry_run_writes_nothing_and_foretells_the_run(tmp_path: Path, verb: Verb) -> None:
    """Files and bytes are those that the run then writes."""
    source, out = _source(verb, tmp_path), tmp_path / "out"
    out.mkdir()
    arguments = verb.arguments(source, out)
    planned = run_json(verb.name, *arguments, "--dry-run")
    assert tree(out) == {}
    assert list(out.iterdir()) == []
    assert planned["is_dry_run"] is True
    assert planned["budget_bytes"] == 128 << 20
    assert isinstance(planned["free_bytes"], int)
    done = run_json(verb.name, *arguments)
    files = planned["files"]
    assert isinstance(files, list)
    target = _target(verb, source, out)
    for file in files:
        path = target if target.is_file() else target / file["path"]
        assert path.stat().st_size == file["nbytes"]
    assert (done["num_files"], done["nbytes"]) == (planned["num_files"], planned["nbytes"])
    assert "would be\n" not in run(verb.name, *arguments, "--overwrite").stderr


@pytest.mark.parametrize("verb", WRITERS, ids=str)
def test_a_taken_destination_is_refused_and_replaced_on_request(tmp_path: Path, verb: Verb) -> None:
    """Without --overwrite nothing changes, in a dry run neither; with it, the result is that of a first run."""
    source, out = _source(verb, tmp_path), tmp_path / "out"
    out.mkdir()
    arguments = verb.arguments(source, out)
    run(verb.name, *arguments)
    before = tree(out)
    for extra in ([], ["--dry-run"]):
        message = error_of(verb.name, *arguments, *extra)
        assert "choose another destination" in message
        assert str(_target(verb, source, out).parent) in message
        assert tree(out) == before
    run(verb.name, *arguments, "--overwrite")
    assert len(tree(out)) == len(before)
    assert run_json("diff", _target(verb, source, out), source, "--only", "*weight")["is_same"] is True


@pytest.mark.parametrize("verb", WRITERS, ids=str)
def test_a_destination_that_cannot_be_a_folder_is_refused(tmp_path: Path, verb: Verb) -> None:
    """A path below a file names itself in the error."""
    source, out = _source(verb, tmp_path), tmp_path / "out"
    out.write_text("a file")
    message = error_of(verb.name, *verb.arguments(source, out))
    assert str(out) in message
    assert out.read_text() == "a file"


@pytest.mark.parametrize("verb", WRITERS, ids=str)
def test_a_failing_write_leaves_nothing(tmp_path: Path, verb: Verb) -> None:
    """The system refuses to write more than some bytes a file: the error names the file, and all temporaries go."""
    source, out = _source(verb, tmp_path), tmp_path / "out"
    out.mkdir()
    command = [*PROGRAM, verb.name, *map(str, verb.arguments(source, out))]
    before = tree(source)
    done = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=_no_file_over(900))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("Error: cannot write ")
    assert str(out) in done.stderr
    assert "Traceback" not in done.stderr
    assert tree(out) == {}
    assert tree(source) == before


def _no_file_over(nbytes: int) -> Callable[[], None]:
    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, nbytes))

    return limit


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB and 6 files, where we may mount one; else a folder in which the tests below hold too."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k,nr_inodes=6", "tmpfs", str(place)]
    is_mounted = os.geteuid() == 0 and subprocess.run(mount, check=False, capture_output=True).returncode == 0
    yield place
    if is_mounted:
        subprocess.run(["umount", str(place)], check=True)


def test_a_disk_that_is_too_small_is_refused_before_writing(tmp_path: Path, small_disk: Path) -> None:
    """Both numbers are told, in a dry run too, and nothing is written."""
    free = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize
    if free > 1 << 20:  # not mounted: ask for more than any disk has, through a sparse source
        source = _sparse(tmp_path / "big", 1 << 60)
    else:
        write_checkpoint(str(tmp_path / "big"), {"model.a": np.zeros(40_000)}, world_size=2)
        source = tmp_path / "big"
    for extra in ([], ["--dry-run"]):
        message = error_of("reshard", source, small_disk / "new", "--to", 1, *extra)
        assert "bytes free" in message
        assert "free some room or choose another destination" in message
        assert tree(small_disk) == {}


def _sparse(root: Path, nbytes: int) -> Path:
    """Write a checkpoint of one rank with a huge tensor that takes no room."""
    from shardckpt.catalogue import CatalogueBuilder, File, Tensor
    from shardckpt.committed import Draft, commit, prepare
    from shardckpt.layout import single_bucket
    from shardckpt.region import whole
    from shardckpt.storage import open_store

    tensor = Tensor("model.a", "U8", (nbytes,))
    builder = CatalogueBuilder()
    builder.add_file(File("shard-00000-of-00001.safetensors", nbytes, 0))
    builder.add_chunk(builder.add_tensor(tensor), whole(tensor.shape), file=0, byte_offset=0, crc=0)
    draft = Draft(1, 1, {"model": "module"}, (tensor,), single_bucket([tensor]), {"model": {}})
    commit(prepare(open_store(root), overwrite=False), draft, builder.build(), [0])
    return root


def test_a_disk_that_fills_up_in_the_middle_leaves_nothing(tmp_path: Path, small_disk: Path) -> None:
    """Room for all bytes but not for all files: what was begun goes, and the error says that there is no room."""
    source = write_ours(tmp_path / "ours")
    is_small = os.statvfs(small_disk).f_files <= 6
    to_ranks = 12 if is_small else 1
    for name, arguments in (
        ("reshard", (source, small_disk / "new", "--to", to_ranks)),
        ("export", (source, small_disk / "hf", "--max-shard-size", 1 if is_small else 10**9)),
    ):
        if is_small:
            message = error_of(name, *arguments)
            assert "No space left on device" in message
            assert "Free some room or choose another destination" in message
            assert tree(small_disk) == {}
        else:
            run(name, *arguments)


def _kill(command: Sequence[str], out: Path, number: int) -> int | None:
    """Start a command and send it a signal once it has begun to write; give its exit code, None if it was too quick."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while process.poll() is None and not any(name.endswith(TEMPORARY_SUFFIX) for name in _names(out)):
        time.sleep(0.001)
    if process.poll() is not None:
        process.communicate()
        return None
    process.send_signal(number)
    stdout, stderr = process.communicate()
    if process.returncode == 0:
        return None
    assert stdout == ""
    assert "Traceback" not in stderr
    if number == signal.SIGINT:
        assert "interrupted" in stderr
    return process.returncode


def _names(folder: Path) -> list[str]:
    return [name for _, _, names in os.walk(folder) for name in names]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that takes a while to copy."""
    root = tmp_path_factory.mktemp("large") / "a"
    write_checkpoint(str(root), {"model.a": np.zeros(12 << 20)}, world_size=2)
    return root


@pytest.mark.parametrize(
    ("number", "verb"),
    [
        (signal.SIGINT, "reshard"),
        (signal.SIGTERM, "consolidate"),
        (signal.SIGKILL, "reshard"),
        (signal.SIGKILL, "consolidate"),
        (signal.SIGKILL, "export"),
    ],
    ids=str,
)
def test_a_stopped_run_leaves_nothing_that_counts_and_the_next_starts_clean(
    tmp_path: Path, large: Path, number: signal.Signals, verb: str
) -> None:
    """Interrupted or terminated, it takes its files away; killed, the next run of the same command does and says so."""
    target = tmp_path / ("new.safetensors" if verb == "consolidate" else "new")
    arguments = [verb, str(large), str(target), *(["--to", "3"] if verb == "reshard" else [])]
    command = [*PROGRAM, *arguments, "--overwrite", "--workers", "1", "--budget", "2MiB"]
    exit_code = next(code for _ in range(20) if (code := _kill(command, tmp_path, number)) is not None)
    assert exit_code == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -signal.SIGKILL}[number]
    left = [name for name in _names(tmp_path) if name.endswith(TEMPORARY_SUFFIX)]
    assert bool(left) == (number == signal.SIGKILL)
    result = run(*arguments, "--overwrite")
    assert ("started clean: removed" in result.stderr) == bool(left)
    assert not any(name.endswith(TEMPORARY_SUFFIX) for name in _names(tmp_path))
    run("diff", large, target)


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    """`shardckpt ... | head` ends in silence."""
    write_checkpoint(str(tmp_path / "a"), {f"model.{i}": np.arange(2) for i in range(3000)})
    command = [*PROGRAM, "inspect", str(tmp_path / "a"), "--tensors"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 1
