"""`state_dict`, `load_state_dict` and `summon_full_params` of wrapped modules and of what holds them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import sharding
from sharding import FullyShardedDataParallel, ModuleWrapPolicy, ShardingStrategy
from sharding.errors import StateError, UnsupportedError, WrapError
from sharding.sharded_tensor import boxes_of_span
from sharding.state_options import FullStateDictConfig, LocalStateDictConfig, StateDictType
from tests.ranks import run_ranks
from tests.sharding.models import Block, Net, global_batch, loss_of, net


def _wrapped(strategy: str = "FULL_SHARD") -> FullyShardedDataParallel:
    return FullyShardedDataParallel(
        net(), sharding_strategy=ShardingStrategy[strategy], auto_wrap_policy=ModuleWrapPolicy([Block])
    )


def _assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def _check(*checks: Callable[[], None]) -> None:
    for check in checks:
        check()


@given(st.lists(st.integers(1, 4), max_size=4), st.data())
def test_boxes_of_a_span_are_its_elements_in_order(shape: list[int], data: st.DataObject) -> None:
    """Filled with the elements' numbers, the boxes give the span's, one after the other."""
    whole = torch.arange(math.prod(shape)).view(shape)
    start = data.draw(st.integers(0, whole.numel()))
    stop = data.draw(st.integers(start, whole.numel()))
    boxes = list(boxes_of_span(tuple(shape), start, stop))
    found: list[int] = []
    for offset, size in boxes:
        found += whole[tuple(slice(o, o + s) for o, s in zip(offset, size, strict=True))].reshape(-1).tolist()
    assert found == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


def _full_states() -> None:
    plain = net().state_dict()
    for strategy in ("FULL_SHARD", "NO_SHARD"):
        model = _wrapped(strategy)
        _assert_equal(model.state_dict(), plain)
        other = nn.ModuleDict({"inner": _wrapped(strategy), "plain": nn.Linear(2, 2)})
        state = {name: torch.full_like(value, 2) for name, value in other.state_dict().items()}
        assert set(state) == {f"inner.{name}" for name in plain} | {"plain.weight", "plain.bias"}
        assert not other.load_state_dict(state).missing_keys
        _assert_equal(other.state_dict(), state)
    functional = sharding.fully_shard(net(), auto_wrap_policy=ModuleWrapPolicy([Block]))
    _assert_equal(functional.state_dict(), plain)
    inner = model.module.blocks[1].up
    assert torch.equal(inner.state_dict()["weight"], plain["blocks.1.up.weight"])


def _loading_reports() -> None:
    model = _wrapped()
    state = net().state_dict()
    del state["blocks.1.up.weight"]
    state["blocks.0.more"] = torch.ones(1)
    report = model.load_state_dict(state, strict=False)
    assert report.missing_keys == ["blocks.1.up.weight"]
    assert report.unexpected_keys == ["blocks.0.more"]
    with pytest.raises(RuntimeError, match=r"state dict has shape \(3,\), the module \(10, 7\); build the module as"):
        model.load_state_dict(net().state_dict() | {"blocks.0.up.weight": torch.ones(3)})
    with pytest.raises(UnsupportedError, match="would part parameters from their shard; leave it out"):
        model.load_state_dict(net().state_dict(), assign=True)


def _rank0_only() -> None:
    model = _wrapped()
    config = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
        state = model.state_dict()
    assert set(state) == (set(net().state_dict()) if dist.get_rank() == 0 else set())
    assert set(model.state_dict()) == set(net().state_dict())
    with pytest.raises(WrapError, match="FULL_STATE_DICT takes FullStateDictConfig and"):
        model.set_state_dict_type(model, StateDictType.FULL_STATE_DICT, LocalStateDictConfig())
    model.set_state_dict_type(model.module.blocks[0], StateDictType.LOCAL_STATE_DICT)
    with pytest.raises(StateError, match="set it on the outermost module"):
        model.get_state_dict_type(model)


def _other_kinds(folder: str) -> None:
    plain, model = net().state_dict(), _wrapped()
    local = sharding.local_state_dict(model)
    with model.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        state = model.state_dict()
        assert {name: value.shape for name, value in state.items()} == {n: h.tensor.shape for n, h in local.items()}
        model.load_state_dict({name: value + 1 for name, value in state.items()})
    _assert_equal(model.state_dict(), {name: value + 1 for name, value in plain.items()})
    with model.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        sharded = model.state_dict()
        dcp.save(sharded, checkpoint_id=folder)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch's own, of the class that its checkpoints take
            dcp.load(sharded, checkpoint_id=folder)
        model.load_state_dict(sharded)
    _assert_equal(model.state_dict(), {name: value + 1 for name, value in plain.items()})


def _summon() -> None:
    plain = net()
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
        model, rank = _wrapped(strategy), dist.get_rank()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        known = [id(parameter) for parameter in model.parameters()]
        loss_of(model, global_batch(0)).backward()
        loss_of(plain, global_batch(0)).backward()
        with model.summon_full_params(model, with_grads=True):
            assert [id(parameter) for parameter in model.parameters()] == known
            for (name, found), (other, expected) in zip(
                model.named_parameters(), plain.named_parameters(), strict=True
            ):
                assert name == other
                assert torch.equal(found, expected), name
                if name != "unused":
                    torch.testing.assert_close(found.grad, expected.grad)
            model.module.blocks[0].up.weight.data.fill_(5.0)
            model.module.blocks[0].up.weight.grad.zero_()
        optimizer.step()
        changed = model.state_dict()
        assert torch.equal(changed["blocks.0.up.weight"], torch.full((10, 7), 5.0)), strategy
        with model.summon_full_params(model, writeback=False, recurse=False):
            is_whole = model.one.shape == (1,) and model.module.blocks[0].up.weight.shape == (10, 7)
            assert is_whole == (strategy == "NO_SHARD")
        with model.summon_full_params(model, rank0_only=True, writeback=False):
            if rank == 0:
                assert model.module.blocks[0].up.weight.shape == (10, 7)
                model.module.blocks[1].down.weight.data.zero_()
        if strategy != "NO_SHARD":
            _assert_equal(model.state_dict(), changed)
        plain.zero_grad()
    with pytest.raises(UnsupportedError, match="pass one of them"), model.summon_full_params(model, rank0_only=True):
        pass


def _apply() -> None:
    def fill(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            assert module.weight.dim() == 2
            with torch.no_grad():
                module.weight.fill_(float(module.weight.shape[0]))

    plain, model = net().apply(fill), _wrapped().apply(fill)
    _assert_equal(model.state_dict(), plain.state_dict())
    assert isinstance(model.module, Net)


def test_full_states_are_those_of_the_module_without_sharding() -> None:
    """Also within plain modules, of submodules, and for `fully_shard`; loading reports as torch does."""
    run_ranks(2, _check, _full_states, _loading_reports, _rank0_only)


def test_local_and_sharded_states_are_loaded_back(tmp_path: str) -> None:
    """Spans by name; sharded tensors also by way of torch.distributed.checkpoint."""
    run_ranks(2, _other_kinds, str(tmp_path))


def test_summoned_parameters_are_whole_and_changes_are_kept() -> None:
    """With their gradients, under their identity; `apply` sees whole parameters."""
    run_ranks(3, _check, _summon, _apply)
