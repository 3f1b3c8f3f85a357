"""`FullyShardedDataParallel`: the interface of torch's class of that name, over units."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from sharding import clip
from sharding.assignment import Ignored
from sharding.bucket import Member
from sharding.comm_hook import CommHook
from sharding.errors import StateError, UnsupportedError, WrapError
from sharding.fsdp_states import StatefulWrapper
from sharding.functional import make_unit, plan_units
from sharding.hooks import Hooks, hooks_below
from sharding.initial import materialise, synchronise
from sharding.mesh import groups_for
from sharding.policy import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from sharding.settings import Settings
from sharding.wrap import Policy, WrapArguments, replace_child


class FullyShardedDataParallel(StatefulWrapper):
    """Shards a module over ranks; the interface of `torch.distributed.fsdp.FullyShardedDataParallel`.

    Differences, where torch leaves a choice: parameters keep their identity for the optimizer as one 1-D span each
    (as torch's `use_orig_params=True`, in whatever way that is set), and parameters of different dtypes and of
    different `requires_grad` may share a unit.
    """

    wrapped_name = "_fsdp_wrapped_module"

    def __init__(
        self,
        module: nn.Module,
        process_group: dist.ProcessGroup | tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: Policy | None = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: int | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
        device_mesh: DeviceMesh | None = None,
    ) -> None:
        """Make units of `module` and, with a policy, of modules below it.

        Args:
            module: The module to shard.
            process_group: As for `fully_shard`.
            sharding_strategy: None for FULL_SHARD.
            cpu_offload: Not supported yet, other than `CPUOffload(False)`.
            auto_wrap_policy: Which modules below become units.
            backward_prefetch: When backward issues the next gather.
            mixed_precision: Dtypes of computation and reduction.
            ignored_modules: Modules that stay as they are.
            param_init_fn: Materialises a module whose parameters are on the meta device; None for `reset_parameters`.
            device_id: Where the shards lie.
            sync_module_states: Give every rank the weights and buffers of rank 0 first.
            forward_prefetch: Issue the next gather early in forward.
            limit_all_gathers: True; at most one gather is ahead of its use in any case, so False is refused.
            use_orig_params: Either; see the class.
            ignored_states: Parameters, or modules, that stay as they are.
            device_mesh: In place of `process_group`.

        Collective:
            All ranks call, with the same module.
        """
        super().__init__()
        if cpu_offload is not None and cpu_offload.offload_params:
            raise UnsupportedError("cpu_offload is not supported yet; leave it out")
        if not limit_all_gathers:
            raise UnsupportedError(
                "limit_all_gathers=False: this runtime never runs more than one gather ahead; leave it out"
            )
        device = None if device_id is None else torch.device(device_id)
        strategy = sharding_strategy or ShardingStrategy.FULL_SHARD
        groups = groups_for(strategy, process_group, device_mesh)
        precision = mixed_precision or MixedPrecision()
        settings = Settings(strategy, precision, groups, backward_prefetch, forward_prefetch, device)
        ignored = Ignored.of(ignored_modules or (), ignored_states or ())
        materialise(module, ignored, param_init_fn, device or torch.device("cpu"))
        units = plan_units(module, auto_wrap_policy, ignored, settings)
        if sync_module_states:
            synchronise(module, ignored, groups)
        self._take(module, _wrap(module, units, settings))

    def _take(self, module: nn.Module, hooks: Hooks) -> None:
        self._fsdp_wrapped_module = module
        self._hooks = hooks

    @property
    def module(self) -> nn.Module:
        """The wrapped module."""
        return self._fsdp_wrapped_module

    @property
    def sharding_strategy(self) -> ShardingStrategy:
        """When parameters are whole."""
        return self._hooks.unit.strategy

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The ranks that share the shards."""
        return self._hooks.unit.shards.process_group

    @property
    def rank(self) -> int:
        """This rank among those that share the shards."""
        return self._hooks.unit.shards.rank

    @property
    def world_size(self) -> int:
        """Number of ranks that share the shards."""
        return self._hooks.unit.shards.size

    @property
    def mixed_precision(self) -> MixedPrecision:
        """Dtypes of computation and reduction."""
        return self._hooks.unit.precision

    @property
    def cpu_offload(self) -> CPUOffload:
        """Where shards rest: with the parameters, in any case."""
        return CPUOffload(offload_params=False)

    @property
    def backward_prefetch(self) -> BackwardPrefetch | None:
        """When backward issues the next gather."""
        return self._hooks.settings.backward_prefetch

    @property
    def forward_prefetch(self) -> bool:
        """Whether forward issues the next gather early."""
        return self._hooks.settings.forward_prefetch

    @property
    def compute_device(self) -> torch.device:
        """Where parameters are whole."""
        unit = self._hooks.unit
        return unit.buckets[0].shard.device if unit.buckets else self._hooks.settings.device or torch.device("cpu")

    def check_is_root(self) -> bool:
        """Tell whether no unit is above this one; makes it the root if none has been."""
        self._hooks.start()
        return self._hooks.is_root

    @property
    def _is_root(self) -> bool | None:
        """As torch's: None until the first forward."""
        return self._hooks.is_root if self._hooks.runtime is not None else None

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FullyShardedDataParallel]:
        """Give all wrappers in `module`, or only those with none above."""
        found = [one for one in module.modules() if isinstance(one, FullyShardedDataParallel)]
        if not root_only:
            return found
        below = {inner for one in found for inner in one.modules() if inner is not one}
        return [one for one in found if one not in below]

    def __getattr__(self, name: str) -> Any:
        """Pass on to the wrapped module what this one does not have."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == self.wrapped_name:
                raise
            return getattr(self._fsdp_wrapped_module, name)

    def __getitem__(self, key: int) -> object:
        """Pass on to a wrapped `Sequential` or list."""
        return self._fsdp_wrapped_module[key]  # type: ignore[index]  # as the wrapped module allows

    def forward(self, *args: object, **kwargs: object) -> object:
        """Run the wrapped module."""
        return self._fsdp_wrapped_module(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave gradients unreduced, whole, until the next backward outside of this context."""
        if not self.check_is_root():
            raise UnsupportedError("no_sync() on inner FSDP instances is not supported; call it on the root")
        runtime = self._hooks.start()
        before, runtime.is_syncing = runtime.is_syncing, False
        try:
            yield
        finally:
            runtime.is_syncing = before

    def register_comm_hook(self, state: object, hook: Callable[..., object]) -> None:
        """Have all units' gradients reduced by a function, such as those of `torch.distributed`'s communication hooks.

        It is called once for each bucket of a unit, when the bucket's gradients are complete, in one order on all
        ranks: `hook(state, gradients)` under NO_SHARD, and on a lone rank, makes their mean in place;
        `hook(state, gradients, part)` fills this rank's part. What it gives is taken for the mean, and not divided.
        All ranks must have gradients for the same parameters; nobody watches what a hook waits for.

        Args:
            state: Passed to the hook; one for all units.
            hook: Reduces one flat tensor.

        Raises:
            UnsupportedError: If this is not the root, or a strategy is hybrid.
            StateError: If there is one already.
            WrapError: If it cannot be called.

        Collective:
            None after the first forward; before it, makes the root, for which all ranks call.
        """
        if not callable(hook):
            raise WrapError(f"The communication hook must be callable but got {hook!r}; give a function")
        if not self.check_is_root():
            raise UnsupportedError(
                "register_comm_hook can only be called on a root instance; this one is inside another"
            )
        units = [hooks.unit for hooks in hooks_below(self)]
        hybrid = [unit.strategy.name for unit in units if unit.strategy.is_hybrid]
        if hybrid:
            raise UnsupportedError(
                f"Communication hook is not supported for hybrid strategies: {hybrid[0]} reduces over two groups; use "
                "FULL_SHARD, SHARD_GRAD_OP or NO_SHARD"
            )
        if any(unit.comm_hook is not None for unit in units):
            raise StateError("A communication hook is already registered; make one hook that does what both do")
        for unit in units:
            unit.comm_hook = CommHook(state, hook)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients so that their norm, over all parameters and ranks, is at most `max_norm`.

        Args:
            max_norm: The ceiling.
            norm_type: p of the p-norm; infinity for the largest absolute value.

        Returns:
            The norm before, the same on all ranks. # []

        Collective:
            All ranks; blocks. Only on the root.
        """
        if not self.check_is_root():
            raise UnsupportedError(
                "clip_grad_norm_() should only be called on the root FSDP instance; this one is inside of another"
            )
        return clip.clip_grad_norm(self, [h.unit for h in hooks_below(self)], max_norm, norm_type)


def _wrap(root: nn.Module, units: Mapping[nn.Module, tuple[list[Member], WrapArguments]], settings: Settings) -> Hooks:
    """Make units as planned, put wrappers around those below `root`, and give the hooks of `root`, which is last."""
    for module, (members, arguments) in units.items():
        hooks = make_unit(module, members, settings.override(arguments))
        if module is not root:
            replace_child(root, module, _wrapper(module, hooks))
    return hooks


def _wrapper(module: nn.Module, hooks: Hooks) -> FullyShardedDataParallel:
    """Give the wrapper around a module that is a unit already."""
    wrapper = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
    StatefulWrapper.__init__(wrapper)
    wrapper._take(module, hooks)
    return wrapper
