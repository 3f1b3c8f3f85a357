"""Reading folders of safetensors files, and laying them out."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from shardckpt.catalogue import Tensor
from shardckpt.errors import CheckpointNotFoundError, FormatError, UnsupportedError
from shardckpt.formats.huggingface import lay_out_folder, read_files, read_folder
from shardckpt.storage import open_store
from tests.shardckpt.formats.hf_folders import arrays, write_index, write_sharded, write_single


def shapes_of(folder: Path) -> dict[str, tuple[int, ...]]:
    return {tensor.name: tensor.shape for tensor in read_folder(open_store(folder)).catalogue.tensors}


def test_a_single_file_is_read(tmp_path: Path) -> None:
    """All tensors are there, by name and shape, the empty one and the scalar too."""
    tensors = arrays()
    assert shapes_of(write_single(tmp_path, tensors)) == {name: array.shape for name, array in tensors.items()}


def test_numbered_files_are_read_by_their_index(tmp_path: Path) -> None:
    """The tensors of all files are there; a file that the index does not name is told, not read."""
    tensors = arrays()
    names = list(tensors)
    write_sharded(tmp_path, {n: tensors[n] for n in names[:3]}, {n: tensors[n] for n in names[3:]})
    save_file({"other": np.ones(3)}, tmp_path / "consolidated.safetensors")
    found = read_folder(open_store(tmp_path))
    assert {tensor.name for tensor in found.catalogue.tensors} == set(tensors)
    assert found.unused == ("consolidated.safetensors",)


def test_aliases_in_the_metadata_are_taken(tmp_path: Path) -> None:
    """What safetensors' `save_model` notes of tied tensors comes back as aliases."""
    write_single(tmp_path, {"embed": np.ones(3), "b": np.ones(2)}, {"head": "embed", "b": "embed", "note": "nothing"})
    found = {tensor.name: tensor.aliases for tensor in read_folder(open_store(tmp_path)).catalogue.tensors}
    assert found == {"embed": ("head",), "b": ()}


def test_a_file_missing_from_the_folder_is_named(tmp_path: Path) -> None:
    """The index names a file that is not there."""
    write_sharded(tmp_path, {"a": np.ones(3)}, {"b": np.ones(3)})
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointNotFoundError, match=r"not there: 'model-00002-of-00002.safetensors'; fetch them"):
        read_folder(open_store(tmp_path))


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": 1}, "no 'weight_map' of names to files; fetch it again"),
        ({}, "no 'weight_map'"),
        (["a"], "no 'weight_map'"),
        (
            {"a": "model-00001-of-00002.safetensors", "b": "model-00001-of-00002.safetensors"},
            "names tensors that no file holds: 'b'",
        ),
        (
            {"b": "model-00001-of-00002.safetensors", "a": "model-00002-of-00002.safetensors"},
            r"says that '[ab]' is in .* \(2 such tensors\); index and files are of different saves",
        ),
        ({"a": "../elsewhere.safetensors"}, "names files outside its folder"),
        ({"a": "/etc/passwd"}, "names files outside its folder"),
    ],
)
def test_an_index_at_odds_with_its_files_is_refused(tmp_path: Path, weight_map: object, message: str) -> None:
    """Each contradiction is told by name."""
    write_sharded(tmp_path, {"a": np.ones(3)}, {"b": np.ones(3)})
    write_index(tmp_path, weight_map)
    with pytest.raises(FormatError, match=message):
        read_folder(open_store(tmp_path))


def test_tensors_that_the_index_does_not_name_are_told(tmp_path: Path) -> None:
    """They may belong to another save."""
    write_sharded(tmp_path, {"a": np.ones(3), "b": np.ones(3)})
    write_index(tmp_path, {"a": "model-00001-of-00001.safetensors"})
    with pytest.raises(FormatError, match=r"does not name tensors that its files hold: 'b'; fetch it again"):
        read_folder(open_store(tmp_path))


def test_two_files_with_one_tensor_are_refused(tmp_path: Path) -> None:
    """Which of the two is meant cannot be known."""
    write_sharded(tmp_path, {"a": np.ones(3)}, {"a": np.ones(3)})
    store = open_store(tmp_path)
    with pytest.raises(FormatError, match=r"'a' is in 'model-00001.*' and in 'model-00002.*'; the files are"):
        read_files(store, ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"])


def test_what_could_be_meant_twice_is_refused(tmp_path: Path) -> None:
    """One file beside an index, several indices, several files without an index."""
    write_sharded(tmp_path / "both", {"a": np.ones(3)})
    write_single(tmp_path / "both", {"a": np.zeros(3)})
    with pytest.raises(FormatError, match=r"'model.safetensors', which may hold different weights; name the file"):
        read_folder(open_store(tmp_path / "both"))
    (tmp_path / "many").mkdir()
    for name in "xy":
        save_file({name: np.ones(3)}, tmp_path / "many" / f"{name}.safetensors")
    with pytest.raises(FormatError, match=r"has 'x.safetensors', 'y.safetensors' but no index; name one of the files"):
        read_folder(open_store(tmp_path / "many"))


def test_folders_without_weights_are_refused(tmp_path: Path) -> None:
    """Nothing, other files, and pickles, each with what to do."""
    with pytest.raises(CheckpointNotFoundError, match="nothing is there; check the path"):
        read_folder(open_store(tmp_path / "none"))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointNotFoundError, match=r"it has 'config.json'; check the path"):
        read_folder(open_store(tmp_path))
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK\x03\x04")
    with pytest.raises(UnsupportedError, match=r"pickles only \('pytorch_model.bin'\).*save the model again"):
        read_folder(open_store(tmp_path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "Git LFS pointer.*git lfs pull"),
        (b"<!DOCTYPE html><html>" + b" " * 99, "HTML page"),
        (b"PK\x03\x04" + b"x" * 99, "zip archive"),
        (b"\x80\x02}q\x00" + b"x" * 99, "pickle"),
        (b"\x00" * 500, "zeros"),
        (b"hello, world, this is text", "no safetensors"),
        (b"", "too few"),
    ],
)
def test_files_of_other_kinds_are_told_by_what_they_are(tmp_path: Path, content: bytes, message: str) -> None:
    """A name does not make a safetensors file."""
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(FormatError, match=message):
        read_folder(open_store(tmp_path))


def test_tensors_are_split_by_bytes_in_their_order() -> None:
    """No file holds more than it may, unless for a single tensor; the index names each tensor's file."""
    tensors = [Tensor(f"t{i}", "F32", (n,)) for i, n in enumerate((10, 10, 10, 100, 1, 1))]
    files, index = lay_out_folder(tensors, max_file_bytes=80)
    assert [
        [t.name for t in tensors if json.loads(index or b"")["weight_map"][t.name] == f.path]
        for f in files.catalogue.files
    ] == [
        ["t0", "t1"],
        ["t2"],
        ["t3"],
        ["t4", "t5"],
    ]
    assert [file.path for file in files.catalogue.files][:2] == [
        "model-00001-of-00004.safetensors",
        "model-00002-of-00004.safetensors",
    ]
    assert json.loads(index or b"")["metadata"] == {"total_size": 4 * 132}
    assert lay_out_folder(tensors, max_file_bytes=None)[1] is None
    assert lay_out_folder(tensors, max_file_bytes=10**6)[1] is None


def test_laid_out_files_are_aligned_and_marked(tmp_path: Path) -> None:
    """Wider elements come first, and the metadata says what transformers asks for, and the aliases."""
    tensors = [Tensor("a", "BOOL", (3,)), Tensor("b", "F32", (3,), ("tied",)), Tensor("c", "F16", (3,))]
    files, _ = lay_out_folder(tensors, max_file_bytes=None)
    path = tmp_path / "x.safetensors"
    path.write_bytes(files.headers[0] + bytes(3 + 12 + 6))
    with safe_open(path, "numpy") as opened:
        assert opened.metadata() == {"format": "pt", "tied": "b"}
        assert set(opened.keys()) == {"a", "b", "c"}
    item = {tensor.name: tensor.item_bytes for tensor in tensors}
    catalogue = files.catalogue
    for chunk, offset in enumerate(catalogue.chunk_byte_offset.tolist()):
        assert offset % item[catalogue.tensors[int(catalogue.chunk_tensor[chunk])].name] == 0
