"""Places for the commands to read in tests: a checkpoint, a Hugging Face folder; and ways to spoil them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.shardckpt.checkpoints import write_checkpoint
from tests.shardckpt.cli.invocation import run, tree
from tests.shardckpt.formats.hf_folders import arrays, write_sharded

WORLD_SIZE = 3
SHARDS = tuple(f"shard-{rank:05}-of-{WORLD_SIZE:05}.safetensors" for rank in range(WORLD_SIZE))

PICKLE = b"\x80\x02}q\x00X\x05\x00\x00\x00modelq\x01K\x01s."
FOREIGN = {
    "zip": b"PK\x03\x04" + bytes(range(200)),
    "pickle": PICKLE,
    "html": b"<!DOCTYPE html><html><body>404 not found</body></html>",
    "lfs": b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n",
    "text": b"step 100, loss 2.5\n",
    "json": b'{"a": 1}',
}


def write_ours(root: Path) -> Path:
    """Write a checkpoint of three ranks: weights of several dtypes and optimizer state."""
    random = np.random.default_rng(0)
    state = {
        "model.embed.weight": random.standard_normal((19, 8)).astype(np.float32),
        "model.layers.0.weight": random.standard_normal((8, 8)).astype(np.float32),
        "model.layers.0.mask": random.integers(0, 2, 5).astype(bool),
        "model.count": np.array(3),
        "optimizer.state.embed.weight.exp_avg": random.standard_normal((19, 8)).astype(np.float32),
        "optimizer.state.embed.weight.step": np.array(7, np.float32),
    }
    objects = {"model": {}, "optimizer": {"param_groups": [{"lr": 0.1, "params": ["embed.weight"]}], "state": {}}}
    write_checkpoint(
        str(root),
        state,
        world_size=WORLD_SIZE,
        replicated=("model.count", "optimizer.state.embed.weight.step"),
        sections={"model": "module", "optimizer": "optimizer"},
        objects=objects,
    )
    return root


def write_hf(root: Path) -> Path:
    """Write a Hugging Face folder of two files of weights."""
    every = arrays()
    names = list(every)
    write_sharded(root, {n: every[n] for n in names[:3]}, {n: every[n] for n in names[3:]})
    (root / "config.json").write_text('{"model_type": "tiny"}')
    return root


@dataclass(frozen=True)
class Verb:
    """A command as these tests call it.

    Attributes:
        name: Its name.
        arguments: Give the arguments for a source and a destination.
        reads_data: Whether it reads the tensors' bytes.
        bad_exit_code: Exit code where the source is damaged.
    """

    name: str
    arguments: Callable[[Path, Path], Sequence[object]]
    reads_data: bool = True
    bad_exit_code: int = 1

    def __str__(self) -> str:
        return self.name


OF_OURS = (
    Verb("reshard", lambda source, out: (source, out / "new", "--to", 2)),
    Verb("consolidate", lambda source, out: (source, out / "one.safetensors", "--optimizer")),
    Verb("export", lambda source, out: (source, out / "hf")),
    Verb("diff", lambda source, _: (source, source)),
    Verb("inspect", lambda source, _: (source, "--tensors", "--ranks", "--objects"), reads_data=False),
    Verb("verify", lambda source, _: (source,), bad_exit_code=3),
)
OF_HF = (
    Verb("import", lambda source, out: (source, out / "new", "--ranks", 2)),
    Verb("diff", lambda source, _: (source, source)),
    Verb("inspect", lambda source, _: (source, "--tensors", "--ranks"), reads_data=False),
    Verb("verify", lambda source, _: (source,), bad_exit_code=3),
)


def spoilt(path: Path) -> Iterator[str]:
    """Spoil a file in every way, one after the other, and name the way while it is so; it is whole again at the end."""
    sound = path.read_bytes()
    middle = len(sound) // 2
    for kept in (0, 1, 7, 8, 9, middle, len(sound) - 1):
        path.write_bytes(sound[:kept])
        yield f"truncated to {kept} bytes"
    path.write_bytes(bytes(len(sound)))
    yield "zeroed"
    path.write_bytes(sound[:middle] + bytes(len(sound) - middle))
    yield "zeroed from the middle"
    for at in sorted({0, 3, 9, 30, len(sound) // 3, middle, 3 * len(sound) // 4, len(sound) - 1}):
        path.write_bytes(sound[:at] + bytes([sound[at] ^ 4]) + sound[at + 1 :])
        yield f"bit flipped in byte {at}"
    for kind, content in FOREIGN.items():
        path.write_bytes(content)
        yield f"replaced by {kind}"
    path.unlink()
    yield "missing"
    path.mkdir()
    yield "a folder"
    path.rmdir()
    path.write_bytes(sound)


def outcome(verb: Verb, source: Path, out: Path) -> tuple[int, str, dict[str, bytes]]:
    """Run a command with an empty destination; give exit code, what it said, and what it left, times taken out."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    before = tree(source)
    exit_code, text = attempt(verb.name, *verb.arguments(source, out))
    assert tree(source) == before, f"{verb} changed its source"
    left = {path: without_time(data) if path.endswith("manifest.json") else data for path, data in tree(out).items()}
    return exit_code, text, left


def attempt(*arguments: object) -> tuple[int, str]:
    """Run a command that may fail in good order."""
    for exit_code in (0, 1, 3):
        try:
            result = run(*arguments, exit_code=exit_code)
        except AssertionError as error:
            if not str(error).startswith("exit code"):
                raise
            continue
        return exit_code, result.stdout + result.stderr
    raise AssertionError(f"none of the exit codes 0, 1 and 3: {arguments}")


def without_time(manifest: bytes) -> bytes:
    """Give a manifest without its checksum and time."""
    return b"\n".join(line for line in manifest.split(b"\n")[1:] if b'"created"' not in line)
