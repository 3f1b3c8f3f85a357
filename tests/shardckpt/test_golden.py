"""Golden checkpoints: what an older version of this program wrote is read for ever, byte by byte."""

from __future__ import annotations

import shutil
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

import shardckpt
from shardckpt.checksum import crc32c
from shardckpt.committed import read_committed
from shardckpt.names import name_of_key
from shardckpt.plan import prove_coverage
from shardckpt.storage import open_store
from shardckpt.tools.reshard import plan_reshard
from shardckpt.tools.rewrite import rewrite
from shardckpt.transfer import TransferOptions
from tests.shardckpt.golden.content import COLUMNS, NAMES, OBJECTS, TIED, TRAINED, raw, tensors
from tests.shardckpt.golden.make import Model, bytes_of

V1 = Path(__file__).parent / "golden/v1"


@pytest.fixture(params=[V1], ids=lambda path: path.name)
def golden(request: pytest.FixtureRequest) -> Path:
    """Give a golden checkpoint; every version holds the same content."""
    path: Path = request.param
    return path


def wrong_tensors(path: Path) -> list[str]:
    """Name the tensors whose dtype, shape or bytes are not those of the rule."""
    with closing(shardckpt.open(path)) as checkpoint:
        return [
            name
            for name, (dtype, shape) in tensors().items()
            if (checkpoint[name].dtype, checkpoint[name].shape) != (dtype, shape)
            or bytes_of(checkpoint[name][...]).numpy().tobytes() != raw(name, dtype, shape).tobytes()
        ]


def test_every_tensor_comes_back_bit_by_bit(golden: Path) -> None:
    """All dtypes, shapes and names; spans, boxes and replicas; NaNs with their payloads."""
    with closing(shardckpt.open(golden)) as checkpoint:
        assert sorted(checkpoint.names) == sorted(tensors())
    assert wrong_tensors(golden) == []


def test_parts_of_cut_tensors_come_back(golden: Path) -> None:
    """Slices across the ranks' borders are put together right."""
    with closing(shardckpt.open(golden)) as checkpoint:
        for key, (dtype, shape) in COLUMNS.items():
            name = f"mesh.{key}"
            whole = raw(name, dtype, shape).view(np.float32 if dtype == "F32" else np.int16).reshape(shape)
            assert checkpoint[name][1:4, 3:].numpy().tobytes() == whole[1:4, 3:].tobytes()


def test_objects_come_back_with_their_types(golden: Path) -> None:
    """Everything that is no tensor: also what JSON alone cannot say."""
    with closing(shardckpt.open(golden)) as checkpoint:
        found = checkpoint.objects
        assert (checkpoint.step, checkpoint.world_size) == (12345, 2)
    for section, value in OBJECTS.items():
        assert repr(found[section]) == repr(value)
    assert found["scheduler"] == {"last_epoch": 3, "factors": (0.5, [1.0])}
    assert list(found["odd"]) == list(NAMES)  # type: ignore[call-overload]
    loader = {rank: own["epoch"] for rank, own in found["loader"].items()}  # type: ignore[attr-defined]
    assert loader == {0: 0, 1: 1}
    groups = found["optimizer"]["param_groups"]  # type: ignore[index,call-overload]
    assert [group["params"] for group in groups] == [list(TRAINED[:2]), list(TRAINED[2:])]
    assert [(group["lr"], group["betas"]) for group in groups] == [(0.001, (0.9, 0.999)), (0.001, (0.8, 0.95))]


def test_tied_names_are_one_tensor(golden: Path) -> None:
    """The second name of a tied parameter is an alias, stored once."""
    with closing(shardckpt.open(golden)) as checkpoint:
        for first, second in TIED.items():
            assert checkpoint[f"model.{second}"].name == f"model.{first}"


def test_every_byte_is_under_a_checksum(golden: Path) -> None:
    """Files and chunks have the recorded sizes and checksums, and chunks tile all tensors."""
    store, found = open_store(golden), read_committed(open_store(golden))
    content = [store.get(file.path, max_nbytes=1 << 20) for file in found.catalogue.files]
    assert [(len(c), crc32c(c)) for c in content] == [(file.nbytes, file.crc) for file in found.catalogue.files]
    columns = (
        found.catalogue.chunk_file,
        found.catalogue.chunk_byte_offset,
        found.catalogue.chunk_nbytes,
        found.catalogue.chunk_crc,
    )
    for file, at, nbytes, crc in zip(*(column.tolist() for column in columns), strict=True):
        assert crc32c(content[file][at : at + nbytes]) == crc
    assert len(found.catalogue.boxes) > 0
    prove_coverage(found.catalogue)


def test_any_reader_of_safetensors_opens_the_shards(golden: Path) -> None:
    """Shard files and the chunk table are plain safetensors files."""
    keys: set[str] = set()
    for path in golden.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            keys |= {name_of_key(key) for key in file.keys()}  # noqa: SIM118  # no iterator of its own
    assert {name for name, (_, shape) in tensors().items() if 0 not in shape} <= keys


def test_it_loads_into_a_module(golden: Path) -> None:
    """A plain module on one process gets every byte."""
    model = Model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    shardckpt.load(golden, {"model": model})
    found = {f"model.{fqn}": tensor for fqn, tensor in model.state_dict().items()}
    for name, (dtype, shape) in tensors().items():
        if name.startswith("model."):
            assert bytes_of(found[name]).numpy().tobytes() == raw(name, dtype, shape).tobytes(), name
    assert model.head.weight is model.embed.weight


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_it_is_resharded(golden: Path, tmp_path: Path, ranks: int) -> None:
    """The layout rule is understood: all tensors survive, and at the same world size each in its place."""
    job = plan_reshard(open_store(golden), to_ranks=ranks)
    rewrite(job, open_store(tmp_path / "out"), overwrite=False, options=TransferOptions())
    assert wrong_tensors(tmp_path / "out") == []
    if ranks == 2:
        assert payloads(tmp_path / "out") == payloads(golden)


def payloads(path: Path) -> list[bytes]:
    """Give what lies behind the header of each shard file."""
    files = read_committed(open_store(path)).catalogue.files
    return [(path / file.path).read_bytes()[file.header_nbytes :] for file in files]


def test_a_copy_is_still_a_checkpoint(golden: Path, tmp_path: Path) -> None:
    """Nothing depends on where the folder lies."""
    shutil.copytree(golden, tmp_path / "copy")
    assert wrong_tensors(tmp_path / "copy") == []
