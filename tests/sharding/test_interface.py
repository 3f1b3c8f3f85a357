"""The corners of torch's interface that its users and its own tests lean on."""

from __future__ import annotations

import copy
import pickle
import socket

import pytest
import torch
import torch.distributed as dist
from torch import nn

import sharding
from sharding import FullyShardedDataParallel, ModuleWrapPolicy, ShardingStrategy, UnsupportedError, WrapError
from sharding.mesh import rank_grid
from tests.ranks import run_ranks


def _plain() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def _wrapped(strategy: str = "FULL_SHARD") -> FullyShardedDataParallel:
    return FullyShardedDataParallel(
        _plain(), sharding_strategy=ShardingStrategy[strategy], auto_wrap_policy=ModuleWrapPolicy([nn.Linear])
    )


def _copies() -> None:
    wrapped = _wrapped()
    in_place = sharding.fully_shard(_plain())
    for model in (wrapped, in_place):
        for act in (copy.deepcopy, pickle.dumps):
            with pytest.raises(UnsupportedError, match=r"neither copied nor pickled.*before it is wrapped.*state_dict"):
                act(model)


def test_copies_are_refused_with_the_way_round() -> None:
    """A sharded module says why it cannot be copied or pickled, and what to do."""
    run_ranks(2, _copies)


def _ignores_badly() -> None:
    plain = _plain()
    sparse = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 3))
    cases = (
        (plain, {"ignored_modules": plain[0]}, "should be an iterable.*in a list"),
        (plain, {"ignored_modules": [torch.ones(1)]}, "all nn.Module but found types Tensor"),
        (plain, {"ignored_states": [plain[0], plain[2].weight]}, "found types Linear, Parameter"),
        (plain, {"ignored_modules": [plain[0]], "ignored_states": [plain[2].weight]}, "at the same time"),
        (plain, {"ignored_modules": [_wrapped()]}, "should not include FSDP modules"),
        (sparse, {}, "'0.weight' takes sparse gradients.*sparse=False"),
    )
    for module, arguments, message in cases:
        with pytest.raises(WrapError, match=message):
            FullyShardedDataParallel(module, **arguments)
    FullyShardedDataParallel(sparse, ignored_modules=[sparse[0]])


def test_what_cannot_be_ignored_or_sharded_is_named() -> None:
    """Wrong kinds of ignored things and sparse embeddings are refused when the module is wrapped."""
    run_ranks(2, _ignores_badly)


def _asks_roots() -> None:
    wrapped = _wrapped()
    assert wrapped._is_root is None
    wrapped(torch.ones(1, 4))
    inner = wrapped.module[0]
    assert (wrapped._is_root, inner._is_root) == (True, False)
    with pytest.raises(RuntimeError, match=r"only be called on the root"):
        inner.clip_grad_norm_(1.0)
    with pytest.raises(RuntimeError, match=r"not supported; call it on the root"), inner.no_sync():
        pass


def test_what_is_for_the_root_is_refused_below() -> None:
    """Inner wrappers know that they are, and say where to call."""
    run_ranks(2, _asks_roots)


def _steps_in_backward(strategy: str) -> None:
    plain, wrapped = _plain(), _wrapped(strategy)
    called: list[torch.Tensor] = []
    for parameter in wrapped.parameters():
        parameter._in_backward_optimizers = [torch.optim.SGD([parameter], lr=0.1)]  # type: ignore[attr-defined]
        if strategy != "NO_SHARD":
            parameter.register_post_accumulate_grad_hook(called.append)  # type: ignore[no-untyped-call]
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(3):
        for model in (plain, wrapped):
            model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert all(parameter.grad is None for parameter in wrapped.parameters())
    assert len(called) == (0 if strategy == "NO_SHARD" else 12)
    state = wrapped.state_dict()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value, msg=name)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_optimizers_step_in_backward(strategy: str) -> None:
    """Optimizers and hooks that torch lets people hang on parameters run when the reduced gradients are there."""
    run_ranks(2, _steps_in_backward, strategy)


def _shards_in_nodes() -> None:
    host = dist.get_rank() // 2
    name = socket.gethostname
    socket.gethostname = lambda: f"node-{host}"
    try:
        wrapped = _wrapped("HYBRID_SHARD")
    finally:
        socket.gethostname = name
    assert (wrapped.world_size, wrapped.rank) == (2, dist.get_rank() % 2)
    plain = _plain()
    for model in (plain, wrapped):
        model(torch.ones(2, 4)).square().sum().backward()
    with FullyShardedDataParallel.summon_full_params(wrapped, with_grads=True):
        for mine, theirs in zip(wrapped.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)


def test_hybrid_sharding_finds_the_nodes() -> None:
    """Without groups, hybrid strategies shard within hosts and replicate between them."""
    run_ranks(4, _shards_in_nodes)


def test_uneven_nodes_are_refused() -> None:
    """Nodes of different sizes have no grid."""
    assert rank_grid("abab") == [[0, 2], [1, 3]]
    with pytest.raises(WrapError, match=r"a: 2, b: 1; start them so, or give a mesh"):
        rank_grid("aab")
