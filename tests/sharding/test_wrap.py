"""Policies against torch's own, on the same trees of modules."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import pytest
import torch.distributed.fsdp.wrap as theirs
from torch import nn

import sharding.wrap as ours
from sharding import CustomPolicy, FullyShardedDataParallel, ModuleWrapPolicy, ShardingStrategy, WrapError
from sharding.wrap import enable_wrap, units_to_wrap, wrap
from tests.ranks import run_ranks
from tests.sharding.models import Block, net


class _Marked(nn.Module):
    """What torch puts around a module that its policy picks."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.inner = module


class _Tree(nn.Module):
    """Modules of several sizes and depths; one stands at two places, one shares a weight, one is no unit alone."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(6, 6)
        self.front = nn.Sequential(nn.Linear(2, 6), shared, nn.ReLU())
        self.layers = nn.ModuleList(nn.Sequential(Block(4), nn.Linear(4, 4)) for _ in range(2))
        self.named = nn.ModuleDict({"small": nn.Linear(1, 1), "again": shared})
        self.tied = nn.Linear(6, 6, bias=False)
        self.tied.weight = shared.weight


def _picked_by_torch(root: nn.Module, policy: Callable[..., bool]) -> list[str]:
    """Let torch wrap a copy, and give the names of what it wrapped."""
    tree = copy.deepcopy(root)
    ignored: set[nn.Parameter] = set()
    if isinstance(policy, theirs._Policy):
        targets = policy._run_policy(tree, set(), {})
        targets.pop(tree, None)
        return sorted(name for name, module in tree.named_modules(remove_duplicate=False) if module in targets)
    theirs._recursive_wrap(
        tree,
        auto_wrap_policy=policy,
        wrapper_cls=_Marked,
        ignored_modules=set(),
        ignored_params=ignored,
        only_wrap_children=True,
    )
    marked = [name for name, module in tree.named_modules(remove_duplicate=False) if isinstance(module, _Marked)]
    return sorted(".".join(part for part in name.split(".") if part != "inner") for name in marked)


def _picked_by_us(root: nn.Module, policy: ours.Policy) -> list[str]:
    units = units_to_wrap(root, policy, set())
    return sorted(name for name, module in root.named_modules(remove_duplicate=False) if module in units)


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


_PAIRS = {
    "always": (ours.always_wrap_policy, theirs.always_wrap_policy),
    "classes": (ours.ModuleWrapPolicy([Block, nn.Linear]), theirs.ModuleWrapPolicy([Block, nn.Linear])),
    "transformer": tuple(
        functools.partial(of.transformer_auto_wrap_policy, transformer_layer_cls={Block}) for of in (ours, theirs)
    ),
    "lambda": tuple(functools.partial(of.lambda_auto_wrap_policy, lambda_fn=_is_linear) for of in (ours, theirs)),
    "custom": (ours.CustomPolicy(_is_linear), theirs.CustomPolicy(_is_linear)),
    **{
        f"size {size}": tuple(
            functools.partial(of.size_based_auto_wrap_policy, min_num_params=size) for of in (ours, theirs)
        )
        for size in (1, 10, 40, 60, 100, 250, 10_000)
    },
}


@pytest.mark.parametrize("name", _PAIRS)
def test_policies_pick_what_those_of_torch_pick(name: str) -> None:
    """On a tree with nested, shared and excluded modules."""
    our_policy, their_policy = _PAIRS[name]
    assert _picked_by_us(_Tree(), our_policy) == _picked_by_torch(_Tree(), their_policy)


def test_policies_of_torch_pick_the_same_here() -> None:
    """Functions of torch's module are policies too."""
    policy = functools.partial(theirs.size_based_auto_wrap_policy, min_num_params=60)
    assert _picked_by_us(_Tree(), policy) == _picked_by_torch(_Tree(), policy)
    assert _picked_by_us(_Tree(), theirs.ModuleWrapPolicy([Block])) == ["layers.0.0", "layers.1.0"]


def test_children_come_before_parents_and_ignored_modules_not_at_all() -> None:
    """The order is that in which units are made; what is below an ignored module counts for no size."""
    tree = _Tree()
    units = list(
        units_to_wrap(tree, ModuleWrapPolicy([Block, nn.Linear, nn.Sequential]), set(tree.layers[0].modules()))
    )
    assert units.index(tree.front[0]) < units.index(tree.front)
    assert tree.layers[0] not in units
    assert tree.layers[1] in units
    size = functools.partial(ours.size_based_auto_wrap_policy, min_num_params=60)
    assert tree.layers[0] not in units_to_wrap(tree, size, set(tree.layers[0][0].modules()))
    assert tree.layers[0] in units_to_wrap(tree, size, set()) or tree.layers[0][0] in units_to_wrap(tree, size, set())


def test_what_is_no_policy_is_refused() -> None:
    """With what to give instead."""
    with pytest.raises(WrapError, match=r"auto_wrap_policy is a set; give a policy of `sharding.wrap`, or a function"):
        units_to_wrap(_Tree(), {Block}, set())  # type: ignore[arg-type]  # what is tested
    with pytest.raises(WrapError, match="gave 3 for Linear; it must give a bool or a dict"):
        units_to_wrap(_Tree(), CustomPolicy(lambda module: 3), set())  # type: ignore[arg-type, return-value]


def _wrapping() -> None:
    model = FullyShardedDataParallel(net(), auto_wrap_policy=ModuleWrapPolicy([Block]))
    assert len(FullyShardedDataParallel.fsdp_modules(model)) == 4
    assert FullyShardedDataParallel.fsdp_modules(model, root_only=True) == [model]
    assert all(isinstance(block, FullyShardedDataParallel) for block in model.module.blocks)
    with pytest.raises(WrapError, match="this Net is a unit already; wrap it once"):
        FullyShardedDataParallel(model.module)
    prefetching = CustomPolicy(lambda module: {"process_group": None} if isinstance(module, Block) else False)
    with pytest.raises(NotImplementedError, match="cannot override 'process_group' for one unit; leave it out"):
        FullyShardedDataParallel(net(), auto_wrap_policy=prefetching)
    wrong = CustomPolicy(lambda module: {"sharding_strategy": "FULL_SHARD"} if isinstance(module, Block) else False)
    with pytest.raises(WrapError, match="gave sharding_strategy='FULL_SHARD', a str; give its enum"):
        FullyShardedDataParallel(net(), auto_wrap_policy=wrong)


def test_picked_modules_get_a_wrapper_each() -> None:
    """Once; what a `CustomPolicy` cannot override is refused with the reason."""
    run_ranks(1, _wrapping)


def _wraps_by_context() -> None:
    assert isinstance(wrap(nn.Linear(2, 2)), nn.Linear)
    with enable_wrap(wrapper_cls=FullyShardedDataParallel, sharding_strategy=ShardingStrategy.NO_SHARD):
        outer = wrap(nn.Linear(2, 2))
        inner = wrap(nn.Linear(2, 2), sharding_strategy=ShardingStrategy.FULL_SHARD)
    assert isinstance(outer, FullyShardedDataParallel)
    assert isinstance(inner, FullyShardedDataParallel)
    assert outer.sharding_strategy is ShardingStrategy.NO_SHARD
    assert inner.sharding_strategy is ShardingStrategy.FULL_SHARD
    assert isinstance(wrap(nn.Linear(2, 2)), nn.Linear)


def test_wrap_does_what_the_context_around_says() -> None:
    """Inside it wraps with the context's arguments, or its own in their place; outside it gives the module back."""
    run_ranks(1, _wraps_by_context)
