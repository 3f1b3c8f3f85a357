"""`--rules`: tensors of one program as those of another, against NumPy."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.shardckpt.checkpoints import write_checkpoint
from tests.shardckpt.cli.invocation import error_of, run
from tests.shardckpt.formats.hf_folders import assert_same, read_weights

Arrays = dict[str, NDArray[np.generic]]
Rules = list[dict[str, Any]]


def exported(tmp_path: Path, arrays: Arrays, rules: Rules, *more: object) -> Arrays:
    """Save arrays as a model on three ranks, export them by rules, and read what came out."""
    write_checkpoint(str(tmp_path / "a"), {f"model.{name}": array for name, array in arrays.items()}, world_size=3)
    (tmp_path / "rules.json").write_text(json.dumps({"rules": rules}))
    run("export", tmp_path / "a", tmp_path / "out", "--rules", tmp_path / "rules.json", *more)
    return read_weights(tmp_path / "out")


def matrix(rows: int, columns: int, seed: int = 0) -> NDArray[np.generic]:
    return np.random.default_rng(seed).normal(size=(rows, columns)).astype(np.float32)


def test_tensors_are_renamed_and_left_out(tmp_path: Path) -> None:
    """The first rule that fits is used, once; what fits none stays."""
    arrays = {
        "h.0.w": matrix(2, 3),
        "h.10.w": matrix(2, 3, 1),
        "h.0.b.c": matrix(1, 3),
        "tmp.x": matrix(1, 1),
        "e": matrix(4, 2),
    }
    rules: Rules = [
        {"from": "h.{i}.w", "to": "layers.{i}.weight"},
        {"from": "{any*}.weight", "to": "wrong"},
        {"from": "h.{rest*}", "to": "rest.{rest*}"},
        {"from": "tmp.{x}", "to": None},
    ]
    names = {"h.0.w": "layers.0.weight", "h.10.w": "layers.10.weight", "h.0.b.c": "rest.0.b.c", "e": "e"}
    assert_same(exported(tmp_path, arrays, rules), {new: arrays[old] for old, new in names.items()})


@pytest.mark.parametrize("dim", [0, 1])
def test_split_and_fuse_are_inverse(tmp_path: Path, dim: int) -> None:
    """Along rows and along columns, in unequal parts."""
    whole = matrix(12, 8)
    cut = 3
    q, kv = np.split(whole, [cut], axis=dim)
    sizes = [cut, whole.shape[dim] - cut]
    split: Rules = [{"from": "{i}.qkv", "to": ["{i}.q", "{i}.kv"], "dim": dim, "sizes": sizes}]
    assert_same(exported(tmp_path / "split", {"0.qkv": whole}, split), {"0.q": q, "0.kv": kv})
    fuse: Rules = [{"from": ["{i}.q", "{i}.kv"], "to": "{i}.qkv", "dim": dim}]
    found = exported(tmp_path / "fuse", {"0.kv": kv, "0.q": q, "1.kv": q, "1.q": kv}, fuse)
    assert_same(found, {"0.qkv": whole, "1.qkv": np.concatenate([kv, q], axis=dim)})


def test_parts_may_take_turns_by_heads(tmp_path: Path) -> None:
    """Two groups of four query heads, one key and one value head each, as some programs fuse them; and back."""
    groups, head, width = 2, 3, 5
    fused = matrix(groups * 6 * head, width)
    by_group = fused.reshape(groups, 6 * head, width)
    parts = {
        "q": by_group[:, : 4 * head].reshape(-1, width),
        "k": by_group[:, 4 * head : 5 * head].reshape(-1, width),
        "v": by_group[:, 5 * head :].reshape(-1, width),
    }
    sizes = [4 * head, head, head]
    split: Rules = [{"from": "qkv", "to": ["q", "k", "v"], "sizes": sizes, "groups": groups}]
    assert_same(exported(tmp_path / "split", {"qkv": fused}, split), parts)
    fuse: Rules = [{"from": ["q", "k", "v"], "to": "qkv", "groups": groups}]
    assert_same(exported(tmp_path / "fuse", parts, fuse), {"qkv": fused})


@pytest.mark.parametrize("more", [(), ("--dtype", "float16"), ("--budget", "100", "--workers", "2")])
@pytest.mark.parametrize("shape", [(7, 5), (1, 6), (6, 1), (0, 3), (3, 0), (1500, 1100)])
def test_matrices_are_transposed(tmp_path: Path, shape: tuple[int, int], more: tuple[str, ...]) -> None:
    """Larger ones in several blocks; a conversion may come on top."""
    arrays = {"w": matrix(*shape), "other": matrix(2, 2)}
    found = exported(tmp_path, arrays, [{"from": "w", "to": "w", "transpose": True}], *more)
    dtype = np.float16 if "float16" in more else np.float32
    assert_same(found, {"w": arrays["w"].T.astype(dtype), "other": arrays["other"].astype(dtype)})


def test_marks_of_wrappers_are_taken_off_without_rules(tmp_path: Path) -> None:
    """Those that no model has in its names, anywhere; `module.` only where all have it."""
    arrays = {"module._orig_mod.a._fsdp_wrapped_module.w": matrix(2, 2), "module.module.b": matrix(3, 2)}
    assert_same(exported(tmp_path / "x", arrays, []), {"a.w": matrix(2, 2), "module.b": matrix(3, 2)})
    kept = {"module.a": matrix(2, 2), "b": matrix(3, 2)}
    assert_same(exported(tmp_path / "y", kept, []), kept)


def test_further_names_are_renamed_too(tmp_path: Path) -> None:
    """So that a tied tensor is found under the name that the other program keeps."""
    root, like = tmp_path / "a", tmp_path / "like"
    write_checkpoint(str(root), {"model.net.a": matrix(2, 2)}, aliases={"model.net.a": ("model.net.b",)})
    exported(like, {"b": matrix(2, 2, 1)}, [])
    (tmp_path / "rules.json").write_text('{"rules": [{"from": "net.{x}", "to": "{x}"}]}')
    run("export", root, tmp_path / "out", "--like", like / "out", "--rules", tmp_path / "rules.json")
    assert_same(read_weights(tmp_path / "out"), {"b": matrix(2, 2)})


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"from": "w", "to": ["a", "b"], "sizes": [1, 2]}, r"cannot split 'w' of shape \(4, 6\) along dim 0.*\[1, 2\]"),
        ({"from": "w", "to": ["a", "b", "c"]}, "cannot split 'w'"),
        ({"from": "w", "to": ["a", "b"], "dim": 2}, r"'w' of shape \(4, 6\) has no dim 2; correct the rule"),
        ({"from": ["w", "v"], "to": "a"}, "cannot fuse 'w' F32"),
        ({"from": ["w", "none"], "to": "a"}, "'w' is to be fused with 'none', which is not there"),
        ({"from": "v", "to": "v", "transpose": True}, "cannot transpose 'v' of shape"),
        ({"from": "w", "to": "v"}, "give several tensors the name 'v'"),
    ],
)
def test_rules_that_do_not_fit_the_tensors_are_told(tmp_path: Path, rule: dict[str, Any], message: str) -> None:
    """With names and shapes; nothing is written."""
    with pytest.raises(AssertionError, match=f"Error: .*{message}"):
        exported(tmp_path, {"w": matrix(4, 6), "v": np.ones(3, np.float32)}, [rule])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "is no rules file"),
        ("nonsense", "is no rules file"),
        ('{"rules": [{"from": "a"}]}', "is no rules file"),
        ('{"rules": [{"from": "a", "to": "b", "new": 1}]}', "unknown field `new`"),
        ('{"rules": [{"from": [], "to": "b"}]}', "rule 1 of .* has an empty list"),
        ('{"rules": [{"from": "a", "to": []}]}', "has an empty list"),
        ('{"rules": [{"from": "a", "to": "b"}, {"from": "a", "to": "{x}"}]}', r"rule 2 of .* uses \{x\}"),
        ('{"rules": [{"from": ["a", "b"], "to": ["c", "d"]}]}', "write two rules"),
        ('{"rules": [{"from": "a", "to": ["c", "d"], "sizes": [1]}]}', "has 1 sizes for 2 parts"),
        ('{"rules": [{"from": "a", "to": "b", "groups": 0}]}', "groups or sizes that are not positive"),
        ('{"rules": [{"from": ["a", "b"], "to": "c", "transpose": true}]}', "transposes and splits or fuses"),
    ],
)
def test_a_malformed_rules_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    """By the number of the rule, before anything else is looked at."""
    write_checkpoint(str(tmp_path / "a"), {"model.a": np.ones(3)})
    (tmp_path / "rules.json").write_text(text)

    assert re.search(message, error_of("export", tmp_path / "a", tmp_path / "out", "--rules", tmp_path / "rules.json"))


def test_a_column_fuse_of_too_many_rows_is_refused(tmp_path: Path) -> None:
    """It would take a piece for each row."""
    arrays = {"a": np.ones((600_000, 1), np.uint8), "b": np.ones((600_000, 1), np.uint8)}
    with pytest.raises(AssertionError, match="more than 1048576 pieces; choose another dim"):
        exported(tmp_path, arrays, [{"from": ["a", "b"], "to": "c", "dim": 1}])
