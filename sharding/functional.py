"""`fully_shard`: makes units of modules in place, and the step that does it for one module."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from sharding.agreement import agree, describe
from sharding.assignment import Ignored, assign
from sharding.bucket import Member
from sharding.errors import WrapError
from sharding.full_precision import except_from_precision
from sharding.hooks import Hooks, hooks_below, hooks_of
from sharding.mesh import groups_for
from sharding.policy import BackwardPrefetch, MixedPrecision, ShardingStrategy
from sharding.settings import Settings
from sharding.unit import Unit
from sharding.wrap import Policy, WrapArguments, units_to_wrap


def fully_shard(
    module: nn.Module,
    *,
    strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD,
    mixed_precision: MixedPrecision | None = None,
    process_group: dist.ProcessGroup | tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None,
    mesh: DeviceMesh | None = None,
    auto_wrap_policy: Policy | None = None,
    ignored_modules: Iterable[nn.Module] = (),
    ignored_states: Iterable[nn.Parameter | nn.Module] = (),
    backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
    forward_prefetch: bool = False,
    device: torch.device | None = None,
) -> nn.Module:
    """Shard a module's parameters over the ranks, in place; its class and its interface stay.

    Call it on inner modules first, or give a policy that picks them: each call makes one unit of the parameters that
    no unit has yet. Afterwards `module.parameters()` are this rank's spans; make the optimizer from them.

    Args:
        module: With equal weights on all ranks.
        strategy: When parameters are whole.
        mixed_precision: Dtypes of computation and reduction; None for the parameters' own.
        process_group: The ranks; for hybrid strategies a pair (shards, replicas). None for all.
        mesh: In place of `process_group`: one axis, or (replicas, shards).
        auto_wrap_policy: Which modules below become units of their own.
        ignored_modules, ignored_states: What stays as it is.
        backward_prefetch, forward_prefetch: How early gathers are issued.
        device: Where shards lie; None for where the parameters are.

    Returns:
        `module`.

    Raises:
        WrapError: If the arguments do not fit the module.

    Collective:
        All ranks call, with the same module.
    """
    groups = groups_for(strategy, process_group, mesh)
    precision = mixed_precision or MixedPrecision()
    settings = Settings(strategy, precision, groups, backward_prefetch, forward_prefetch, device)
    ignored = Ignored.of(ignored_modules, ignored_states)
    for owner, (members, arguments) in plan_units(module, auto_wrap_policy, ignored, settings).items():
        make_unit(owner, members, settings.override(arguments))
    return module


def plan_units(
    root: nn.Module, policy: Policy | None, ignored: Ignored, settings: Settings
) -> dict[nn.Module, tuple[list[Member], WrapArguments]]:
    """Give what will be units, `root` last, with their parameters and what a policy says of their settings.

    With a policy, modules that mixed precision excepts are among them, and get hooks that cast around them.

    Raises:
        WrapError: On all ranks, if they differ in this, or if one of them cannot.

    Collective:
        All ranks of the groups; blocks. Small: ranks compare digests.
    """
    groups, exceptions = settings.groups, settings.precision.exceptions
    try:
        candidates = units_to_wrap(root, policy, ignored.modules) if policy is not None else {}
        if policy is not None and exceptions:
            candidates = except_from_precision(root, candidates, exceptions, but=ignored.modules)
        members = assign(root, [*candidates, root], ignored)
    except Exception as error:
        with contextlib.suppress(WrapError):
            agree(groups, [], f"a rank could not shard its module, {type(error).__name__}: {error}")
        raise
    agree(groups, describe(members.values()))
    return {owner: (found, candidates.get(owner, {})) for owner, found in members.items()}


def reset(module: nn.Module) -> None:
    """Forget a step that an exception cut short: parameters are sharded again, its gradients are dropped.

    The next forward of the root does it by itself; call it to take states or to end training before that. Gradients of
    earlier steps stay.

    Raises:
        StateError: If a step failed, and some rank does not come within the store's timeout.

    Collective:
        After a failure all ranks call, and meet in the store; see [Note: after a failure] in `sharding.watch`.
    """
    for hooks in hooks_below(module):
        if hooks.runtime is not None:
            hooks.runtime.reset()


def make_unit(module: nn.Module, members: Sequence[Member], settings: Settings) -> Hooks:
    """Make a module a unit of the given parameters, which are cut, and give its hooks.

    Raises:
        WrapError: If it is a unit already, or parameters are on the meta device.
    """
    if hooks_of(module) is not None:
        raise WrapError(f"this {type(module).__name__} is a unit already; wrap it once")
    devices = {member.original.device for member in members if member.original is not None}
    meta = [member.places[0].fqn for member in members if member.original is not None and member.original.is_meta]
    if meta:
        raise WrapError(f"parameter {meta[0]!r} is on the meta device; materialise it, or give param_init_fn")
    device = settings.device or next(iter(devices), torch.device("cpu"))
    hooks = Hooks(Unit(module, members, settings, device), settings)
    module.sharding_hooks = hooks  # type: ignore[assignment]  # a plain attribute, no submodule
    return hooks
