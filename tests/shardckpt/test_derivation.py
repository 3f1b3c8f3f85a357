"""Tensors that are renamed, fused, split and converted on their way into files, against NumPy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

from shardckpt.batches import Sizes
from shardckpt.catalogue import Catalogue, CatalogueBuilder, File, Tensor
from shardckpt.conversion import Conversion
from shardckpt.derivation import Derivation, Piece
from shardckpt.endpoints import MemorySource
from shardckpt.errors import CorruptError, MismatchError
from shardckpt.formats.huggingface import lay_out_files
from shardckpt.region import Box, Span, normalise
from shardckpt.storage import open_store
from shardckpt.transfer import TransferOptions
from shardckpt.write_files import write_files
from tests.shardckpt.checkpoints import in_memory

Arrays = dict[str, NDArray[np.generic]]
RANDOM = np.random.default_rng(5)
ARRAYS: Arrays = {
    "qkv": RANDOM.normal(size=(12, 5)).astype(np.float32),
    "gate": RANDOM.normal(size=(4, 6)).astype(np.float32),
    "up": RANDOM.normal(size=(3, 6)).astype(np.float32),
    "ids": np.arange(9),
}
SMALL = TransferOptions(num_workers=3, sizes=Sizes(64, step_bytes=16, batch_bytes=40, window_bytes=48))


def columns(low: int, high: int) -> Piece:
    """Give columns of qkv."""
    return Piece("qkv", normalise(Box((0, low), (12, high - low)), (12, 5), fqn="qkv"))


PIECES = {
    "q": [Piece("qkv", Span(0, 20))],
    "k": [Piece("qkv", Span(20, 40))],
    "v": [columns(3, 5)],
    "fused": [Piece("gate", Span(0, 24)), Piece("up", Span(0, 18))],
    "turns": [Piece("up", Span(0, 6)), Piece("gate", Span(0, 6)), Piece("up", Span(6, 12)), columns(0, 1)],
    "renamed": [Piece("ids", Span(0, 9))],
}
EXPECTED: Arrays = {
    "q": ARRAYS["qkv"][:4],
    "k": ARRAYS["qkv"][4:8],
    "v": ARRAYS["qkv"][:, 3:],
    "fused": np.concatenate([ARRAYS["gate"], ARRAYS["up"]]),
    "turns": np.concatenate([ARRAYS["up"][0], ARRAYS["gate"][0], ARRAYS["up"][1], ARRAYS["qkv"][:, 0]]),
    "renamed": ARRAYS["ids"],
    "gate": ARRAYS["gate"],
}


def sharded() -> tuple[Catalogue, list[MemorySource]]:
    """Give the arrays as two ranks hold them, column-wise where that is possible."""
    builder = CatalogueBuilder()
    sources = []
    for name, array in ARRAYS.items():
        tensor = builder.add_tensor(Tensor(name, "I64" if name == "ids" else "F32", array.shape))
        for half in np.array_split(np.arange(array.shape[-1]), 2):
            held = np.ascontiguousarray(array[..., half[0] : half[-1] + 1])
            file = builder.add_file(File(f"{name} {half[0]}", held.nbytes, 0))
            offset = (*(0,) * (array.ndim - 1), int(half[0]))
            builder.add_chunk(
                tensor, normalise(Box(offset, held.shape), array.shape, fqn=name), file=file, byte_offset=0
            )
            sources.append(MemorySource(held.reshape(-1).view(np.uint8)))
    return builder.build(), sources


@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize("options", [TransferOptions(), SMALL])
@pytest.mark.parametrize("dtype", ["F32", "F64", "F16"])
def test_pieces_come_together_as_in_numpy(
    tmp_path: Path, is_sharded: bool, options: TransferOptions, dtype: str
) -> None:
    """Whole tensors, rows, columns, and any sequence of them; in the same dtype, and in wider and narrower ones."""
    source, sources = sharded() if is_sharded else in_memory(ARRAYS)
    dtypes = {name: "I64" if array.dtype == np.int64 else dtype for name, array in EXPECTED.items()}
    tensors = [Tensor(name, dtypes[name], array.shape) for name, array in EXPECTED.items()]
    files = lay_out_files([("a.safetensors", tensors[:4]), ("b.safetensors", tensors[4:])])
    derivation = Derivation.assembling(source, files.catalogue, PIECES)
    write_files(source, sources, files, open_store(tmp_path), options=options, derivation=derivation)
    found: Arrays = load_file(tmp_path / "a.safetensors") | load_file(tmp_path / "b.safetensors")
    assert set(found) == set(EXPECTED)
    numpy_dtype = {"F32": np.float32, "F64": np.float64, "F16": np.float16}[dtype]
    for name, array in EXPECTED.items():
        expected = array if array.dtype == np.int64 else array.astype(numpy_dtype)
        assert found[name].dtype == expected.dtype
        assert np.array_equal(found[name], expected), name
    counted = {one.name: one.numel for one in derivation.conversions}
    floats = {name: array.size for name, array in EXPECTED.items() if array.dtype != np.int64}
    assert counted == ({} if dtype == "F32" else floats)
    assert sum(one.num_rounded for one in derivation.conversions) == (
        sum(int((EXPECTED[n] != EXPECTED[n].astype(np.float16)).sum()) for n in floats) if dtype == "F16" else 0
    )


def test_checksums_of_the_source_are_compared_all_the_same(tmp_path: Path) -> None:
    """A chunk that goes to two tensors, converted, is checked as a whole."""
    source, _ = in_memory({"qkv": ARRAYS["qkv"]})
    wrong = MemorySource(np.zeros(12 * 5 * 4, np.uint8))
    source.spans.crc[:] = 1
    tensors = [Tensor("q", "F16", (4, 5)), Tensor("rest", "F16", (8, 5))]
    files = lay_out_files([("a.safetensors", tensors)])
    pieces = {"q": PIECES["q"], "rest": [Piece("qkv", Span(20, 60))]}
    derivation = Derivation.assembling(source, files.catalogue, pieces)
    with pytest.raises(CorruptError, match=r"of 'qkv'"):
        write_files(source, [wrong], files, open_store(tmp_path), options=TransferOptions(), derivation=derivation)
    assert list(tmp_path.iterdir()) == []


def test_pieces_that_do_not_fit_are_refused() -> None:
    """By the name of the tensor that they were for."""
    source, _ = in_memory(ARRAYS)
    target = lay_out_files([("a", [Tensor("q", "F32", (4, 5))])]).catalogue
    with pytest.raises(MismatchError, match=r"'q' is to be made of 'none'.*inspect --tensors"):
        Derivation.assembling(source, target, {"q": [Piece("none", Span(0, 20))]})
    with pytest.raises(MismatchError, match="'q' has 20 elements, but what it is to be made of has 19"):
        Derivation.assembling(source, target, {"q": [Piece("qkv", Span(0, 19))]})


def test_counts_of_parts_add_up() -> None:
    """A tensor that is converted in several goes is one row."""
    one = Conversion("a", "F32", "F16", 3, 2, 1)
    assert one.plus(Conversion("a", "F32", "F16", 4, 1, 0)) == Conversion("a", "F32", "F16", 7, 3, 1)
