"""Loading on one rank: everything comes back in place, and what does not fit is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import shardckpt
from shardckpt.errors import CheckpointNotFoundError, CorruptError, FormatError, MismatchError, UnsupportedError
from tests.shardckpt.models import adamw, tied, train


def _trained(folder: Path) -> tuple[dict[str, object], list[float]]:
    model = tied(0)
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    train(model, optimizer, range(3))
    scheduler.step()
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "epoch": 4}
    shardckpt.save(folder, state, step=3)
    return state, train(model, optimizer, range(3, 6))


def test_training_resumes_exactly(tmp_path: Path) -> None:
    """After a load into fresh objects, the losses go on bit by bit as in the run that was not stopped."""
    _, losses = _trained(tmp_path / "a")
    model = tied(1)
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    state: dict[str, object] = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "epoch": 0}
    report = shardckpt.load(tmp_path / "a", state)
    assert (report.step, report.missing, report.unexpected, report.unverified_nbytes) == (3, (), (), 0)
    assert (state["epoch"], scheduler.step_size, scheduler.last_epoch) == (4, 2, 1)
    assert model.third.weight is model.second.weight
    assert train(model, optimizer, range(3, 6)) == losses


def test_a_load_fills_in_place(tmp_path: Path) -> None:
    """Parameters, buffers, optimizer state and plain tensors keep their identity."""
    state, _ = _trained(tmp_path / "a")
    model, optimizer = state["model"], state["optimizer"]
    assert isinstance(model, torch.nn.Module)
    assert isinstance(optimizer, torch.optim.Optimizer)
    before = {name: value.data_ptr() for name, value in model.state_dict().items()}
    moment = optimizer.state[model.first.weight]["exp_avg"]
    shardckpt.load(tmp_path / "a", state)
    assert {name: value.data_ptr() for name, value in model.state_dict().items()} == before
    assert optimizer.state[model.first.weight]["exp_avg"] is moment


def test_nested_values_come_back_around_tensors_filled_in_place(tmp_path: Path) -> None:
    """Values are replaced, tensors that fit are filled, new ones are made, and the dict stays the same object."""
    saved = {"t": torch.arange(3), "list": [torch.ones(2), 5, None], "a.b": torch.zeros(1), "a": {"b": torch.ones(1)}}
    shardckpt.save(tmp_path / "a", {"notes": saved})
    kept = torch.zeros(3, dtype=torch.int64)
    notes: dict[str, object] = {"t": kept, "list": "something else"}
    shardckpt.load(tmp_path / "a", {"notes": notes})
    assert notes["t"] is kept
    assert kept.tolist() == [0, 1, 2]
    assert notes["list"][1:] == [5, None]  # type: ignore[index]
    assert notes["a.b"].item() == 0  # type: ignore[attr-defined]
    assert notes["a"]["b"].item() == 1  # type: ignore[index]


def test_sections_that_are_not_asked_for_are_not_read(tmp_path: Path) -> None:
    """Loading the weights alone reads the weights' bytes, not the optimizer's."""
    _trained(tmp_path / "a")
    model = tied(1)
    report = shardckpt.load(tmp_path / "a", {"model": model})
    expected = sum(
        v.numel() * v.element_size() for v in {id(v): v for v in model.state_dict(keep_vars=True).values()}.values()
    )
    assert report.nbytes == expected
    assert all(name.startswith("model.") for name in report.loaded)


def test_moments_of_a_parameter_frozen_since_survive(tmp_path: Path) -> None:
    """Which state is loaded follows the checkpoint, not requires_grad."""
    _trained(tmp_path / "a")
    model = tied(1)
    optimizer = adamw(model)
    model.first.weight.requires_grad_(False)
    shardckpt.load(tmp_path / "a", {"model": model, "optimizer": optimizer})
    state = optimizer.state[model.first.weight]
    assert set(state) == {"step", "exp_avg", "exp_avg_sq"}
    assert (state["step"].shape, state["step"].dtype, state["step"].item()) == ((), torch.float32, 3.0)
    assert state["exp_avg"].abs().sum() > 0


def test_a_missing_and_an_unexpected_name_are_refused(tmp_path: Path) -> None:
    """Strict loading names both sides; lenient loading reports them and loads the rest."""
    shardckpt.save(tmp_path / "a", {"model": torch.nn.Sequential(torch.nn.Linear(2, 2))})
    other = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False))
    with pytest.raises(MismatchError, match=r"lacks 'model.1.weight'; it has 'model.0.bias'.*strict=False"):
        shardckpt.load(tmp_path / "a", {"model": other})
    report = shardckpt.load(tmp_path / "a", {"model": other}, strict=False)
    assert (report.missing, report.unexpected) == (("model.1.weight",), ("model.0.bias",))
    assert report.loaded == ("model.0.weight",)


def test_a_load_that_matches_nothing_is_an_error_even_when_lenient(tmp_path: Path) -> None:
    """A wrong prefix must not pass as a load of nothing."""
    shardckpt.save(tmp_path / "a", {"model": torch.nn.Linear(2, 2)})
    with pytest.raises(MismatchError, match=r"nothing of the checkpoint fits.*shardckpt inspect"):
        shardckpt.load(tmp_path / "a", {"model": torch.nn.Sequential(torch.nn.Linear(2, 2))}, strict=False)


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (torch.nn.Linear(2, 3), r"'model.weight'.*global shape \(2, 2\), the state F32 and \(3, 2\).*config"),
        (torch.nn.Linear(2, 2).bfloat16(), r"'model.weight'.*dtype F32.*the state BF16"),
    ],
)
def test_another_shape_or_dtype_is_refused(tmp_path: Path, model: torch.nn.Module, text: str) -> None:
    """The error names the tensor and both sides, and nothing is changed."""
    shardckpt.save(tmp_path / "a", {"model": torch.nn.Linear(2, 2)})
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(MismatchError, match=text):
        shardckpt.load(tmp_path / "a", {"model": model})
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_an_optimizer_of_other_groups_is_refused(tmp_path: Path) -> None:
    """A group whose parameters come from several stored groups has no one learning rate."""
    _trained(tmp_path / "a")
    model = tied(1)
    with pytest.raises(MismatchError, match=r"group 0 .* in the groups \[0, 2\].*Build the optimizer with the groups"):
        shardckpt.load(tmp_path / "a", {"model": model, "optimizer": torch.optim.AdamW(model.parameters())})


def test_a_module_is_not_loaded_as_an_optimizer(tmp_path: Path) -> None:
    """Sections keep their kind."""
    shardckpt.save(tmp_path / "a", {"model": torch.nn.Linear(2, 2)})
    with pytest.raises(MismatchError, match="of kind 'value', in the checkpoint it is of kind 'module'"):
        shardckpt.load(tmp_path / "a", {"model": {"weight": torch.zeros(2, 2)}})


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    """A load checks what it reads; the error names the tensor and the file."""
    shardckpt.save(tmp_path / "a", {"model": torch.nn.Linear(20, 20)})
    shard = tmp_path / "a" / "shard-00000-of-00001.safetensors"
    data = bytearray(shard.read_bytes())
    data[-8] ^= 1
    shard.write_bytes(data)
    with pytest.raises(CorruptError, match=r"damaged: .*'model\.\w+'.*shard-00000-of-00001.*earlier checkpoint"):
        shardckpt.load(tmp_path / "a", {"model": torch.nn.Linear(20, 20)})


def test_a_truncated_or_missing_file_is_named(tmp_path: Path) -> None:
    """Cut and lost shard files give errors that name the file."""
    shardckpt.save(tmp_path / "a", {"model": torch.nn.Linear(20, 20)})
    shard = tmp_path / "a" / "shard-00000-of-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(FormatError, match=r"shard-00000-of-00001.*truncated"):
        shardckpt.load(tmp_path / "a", {"model": torch.nn.Linear(20, 20)})
    shard.unlink()
    with pytest.raises(CheckpointNotFoundError, match="shard-00000-of-00001"):
        shardckpt.load(tmp_path / "a", {"model": torch.nn.Linear(20, 20)})
    with pytest.raises(CheckpointNotFoundError, match="nothing is there; check the path"):
        shardckpt.load(tmp_path / "b", {"model": torch.nn.Linear(20, 20)})


def test_wrapper_prefixes_do_not_matter(tmp_path: Path) -> None:
    """What a compiled model saved, the plain model loads, and the other way round; the files are the same."""
    plain = torch.nn.Sequential(torch.nn.Linear(3, 3))
    compiled = torch.compile(plain, backend="eager")
    shardckpt.save(tmp_path / "plain", {"model": plain})
    shardckpt.save(tmp_path / "compiled", {"model": compiled})
    name = "shard-00000-of-00001.safetensors"
    assert (tmp_path / "plain" / name).read_bytes() == (tmp_path / "compiled" / name).read_bytes()
    fresh = torch.nn.Sequential(torch.nn.Linear(3, 3))
    shardckpt.load(tmp_path / "compiled", {"model": torch.compile(fresh, backend="eager")})
    assert torch.equal(fresh[0].weight, plain[0].weight)


@pytest.mark.parametrize(
    "dtype", ["bool", "uint8", "int16", "float16", "bfloat16", "float8_e4m3fn", "float64", "complex64", "uint64"]
)
def test_every_dtype_comes_back_bit_by_bit(tmp_path: Path, dtype: str) -> None:
    """Random bits, NaN payloads among them, survive saving and loading."""
    kind = getattr(torch, dtype)
    bits = torch.randint(0, 2 if dtype == "bool" else 256, (64,), dtype=torch.uint8)
    tensor = (
        bits.view(kind) if kind is not torch.complex64 else torch.view_as_complex(bits.view(torch.float32).view(-1, 2))
    )
    shardckpt.save(tmp_path / "a", {"x": tensor, "scalar": tensor[0]})
    state: dict[str, object] = {"x": torch.empty_like(tensor), "scalar": None}
    shardckpt.load(tmp_path / "a", state)
    for name, expected in (("x", tensor), ("scalar", tensor[:1])):
        found = state[name]
        assert isinstance(found, torch.Tensor)
        assert found.dtype == kind
        as_bits = torch.view_as_real(found.reshape(-1)) if kind.is_complex else found.reshape(-1)
        wanted = torch.view_as_real(expected.reshape(-1)) if kind.is_complex else expected.reshape(-1)
        assert torch.equal(as_bits.view(torch.uint8), wanted.view(torch.uint8))


def test_a_state_that_is_no_dict_is_refused(tmp_path: Path) -> None:
    """The error shows what a state looks like."""
    shardckpt.save(tmp_path / "a", {"x": 1})
    with pytest.raises(UnsupportedError, match="the state is a Linear; give a dict"):
        shardckpt.load(tmp_path / "a", torch.nn.Linear(2, 2))  # type: ignore[arg-type]
