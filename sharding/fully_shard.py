"""Making units of modules: `fully_shard` and `FullyShardedDataParallel`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from sharding import clip, names, state_dict
from sharding.bucket import Member
from sharding.errors import UnsupportedError, WrapError
from sharding.mesh import Groups, groups_for
from sharding.names import Place, Wrapper
from sharding.policy import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from sharding.runtime import Runtime
from sharding.unit import Unit
from sharding.wrap import Policy, units_to_wrap


@dataclass(frozen=True)
class Settings:
    """What a call of `fully_shard` or the constructor asked for.

    Attributes:
        strategy: When parameters are whole.
        precision: In which dtypes it computes and reduces.
        groups: The ranks that share and that replicate shards.
        backward_prefetch: When the next gather is issued in backward; None for not before it is needed.
        forward_prefetch: Whether the next gather is issued early in forward.
        device: Where shards lie; None for where the parameters are.
    """

    strategy: ShardingStrategy
    precision: MixedPrecision
    groups: Groups
    backward_prefetch: BackwardPrefetch | None
    forward_prefetch: bool
    device: torch.device | None


class Hooks:
    """The hooks that make a module a unit, and its place in the runtime.

    Attributes:
        unit: Its parameters.
        settings: What was asked for.
        runtime: What the units under one root share; None until the first forward.
        is_root: True if no unit is above.
    """

    def __init__(self, unit: Unit, settings: Settings) -> None:
        self.unit = unit
        self.settings = settings
        self.runtime: Runtime | None = None
        self.is_root = False
        module = unit.module
        module.register_forward_pre_hook(self._pre_forward, prepend=True, with_kwargs=True)
        module.register_forward_hook(self._post_forward, prepend=False)
        for bucket in unit.buckets:
            for index, member in enumerate(bucket.members):
                if bucket.is_trainable:
                    member.whole.register_post_accumulate_grad_hook(self._gradient_hook(bucket, index))

    def start(self) -> Runtime:
        """Give the runtime, making this unit the root if there is none yet.

        Collective:
            The first call on each rank makes process groups: all ranks of the groups call.
        """
        if self.runtime is None:
            hooks = hooks_below(self.unit.module)
            settings = self.settings
            self.runtime = Runtime(
                [one.unit for one in hooks],
                backward_prefetch=settings.backward_prefetch,
                forward_prefetch=settings.forward_prefetch,
            )
            for one in hooks:
                one.runtime, one.is_root = self.runtime, one is self
            _cast_buffers(self.unit.module, settings.precision)
        return self.runtime

    @torch._dynamo.disable
    def _pre_forward(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        self.start().pre_forward(self.unit, self.is_root)
        return self._cast_inputs((args, kwargs))

    @torch._dynamo.disable
    def _post_forward(self, module: nn.Module, args: tuple[object, ...], output: object) -> None:
        self.start().post_forward(self.unit, self.is_root, output)

    def _gradient_hook(self, bucket: object, index: int) -> Callable[[torch.Tensor], None]:
        @torch._dynamo.disable
        def take(parameter: torch.Tensor) -> None:
            self.start().take_gradient(self.unit, bucket, index)  # type: ignore[arg-type]  # a Bucket

        return take

    def _cast_inputs(self, inputs: tuple[tuple[object, ...], dict[str, object]]) -> object:
        precision = self.unit.precision
        dtype = precision.param_dtype
        is_asked = precision.cast_forward_inputs or (self.is_root and precision.cast_root_forward_inputs)
        if dtype is None or not is_asked:
            return None

        def cast(value: object) -> object:
            is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
            return value.to(dtype) if is_float else value  # type: ignore[attr-defined]  # a tensor

        return pytree.tree_map(cast, inputs)


def hooks_of(module: nn.Module) -> Hooks | None:
    """Give the hooks of a module that is a unit, or None."""
    found = getattr(module, "sharding_hooks", None)
    return found if isinstance(found, Hooks) and found.unit.module is module else None


def hooks_below(root: nn.Module) -> list[Hooks]:
    """Give the hooks of all units in `root`, itself included, parents before children."""
    return [found for module in root.modules() if (found := hooks_of(module)) is not None]


def fully_shard(
    module: nn.Module,
    *,
    strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD,
    mixed_precision: MixedPrecision | None = None,
    process_group: dist.ProcessGroup | tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None,
    mesh: dist.DeviceMesh | None = None,
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
    settings = Settings(
        strategy, mixed_precision or MixedPrecision(), groups, backward_prefetch, forward_prefetch, device
    )
    ignored = _Ignored.of(ignored_modules, ignored_states)
    candidates = units_to_wrap(module, auto_wrap_policy, ignored.modules) if auto_wrap_policy is not None else {}
    members = _assign(module, [*candidates, module], ignored)
    for candidate in [*candidates, module]:
        _make_unit(candidate, members[candidate], settings)
    return module


@dataclass(frozen=True)
class _Ignored:
    """Modules and parameters that stay as they are; buffers of ignored modules too."""

    modules: set[nn.Module]
    parameters: set[nn.Parameter]

    @classmethod
    def of(cls, modules: Iterable[nn.Module], states: Iterable[nn.Parameter | nn.Module]) -> _Ignored:
        """Collect all that is below the given modules, and the given parameters."""
        states = list(states)
        given = [*modules, *(state for state in states if isinstance(state, nn.Module))]
        below = {module for one in given for module in one.modules()}
        parameters = {parameter for module in below for parameter in module.parameters(recurse=False)}
        return cls(below, parameters | {state for state in states if isinstance(state, nn.Parameter)})


def _make_unit(module: nn.Module, members: Sequence[Member], settings: Settings) -> Hooks:
    if hooks_of(module) is not None:
        raise WrapError(f"this {type(module).__name__} is a unit already; wrap it once")
    devices = {member.original.device for member in members if member.original is not None}
    device = settings.device or next(iter(devices), torch.device("cpu"))
    meta = [member.places[0].fqn for member in members if member.original is not None and member.original.is_meta]
    if meta:
        raise WrapError(f"parameter {meta[0]!r} is on the meta device; materialise it, or give param_init_fn")
    unit = Unit(
        module,
        members,
        strategy=settings.strategy,
        precision=settings.precision,
        shards=settings.groups.shards,
        replicas=settings.groups.replicas,
        device=device,
    )
    hooks = Hooks(unit, settings)
    module.sharding_hooks = hooks  # type: ignore[assignment]  # a plain attribute, no submodule
    return hooks


def _assign(root: nn.Module, owners: Sequence[nn.Module], ignored: _Ignored) -> dict[nn.Module, list[Member]]:
    """Give every parameter below `root` that no unit has to one of `owners`.

    That is the innermost around it; for a tied parameter the innermost around all of its places.
    """
    taken = {id(m.shard) for hooks in hooks_below(root) for b in hooks.unit.buckets for m in b.members}
    chains: dict[int, tuple[nn.Parameter, list[Place], list[nn.Module]]] = {}
    inside = {owner: set(owner.modules()) for owner in owners}  # inner ones first
    for place, parameter in names.named_parameters(root):
        if id(parameter) in taken or parameter in ignored.parameters:
            continue
        around = [owner for owner in owners if place.module in inside[owner]]
        _, places, common = chains.setdefault(id(parameter), (parameter, [], around))
        places.append(place)
        common[:] = [owner for owner in common if owner in around]
    members: dict[nn.Module, list[Member]] = {owner: [] for owner in owners}
    for parameter, places, common in chains.values():
        members[common[0]].append(Member(places, parameter))
    return members


def _cast_buffers(root: nn.Module, precision: MixedPrecision) -> None:
    if precision.buffer_dtype is None:
        return
    for buffer in root.buffers():
        if buffer.is_floating_point():
            buffer.data = buffer.data.to(precision.buffer_dtype)


class FullyShardedDataParallel(Wrapper):
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
        device_mesh: dist.DeviceMesh | None = None,
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
        settings = Settings(
            strategy, mixed_precision or MixedPrecision(), groups, backward_prefetch, forward_prefetch, device
        )
        ignored = _Ignored.of(ignored_modules or (), ignored_states or ())
        _materialise(module, ignored, param_init_fn, device)
        if sync_module_states:
            _synchronise(module, groups)
        candidates = units_to_wrap(module, auto_wrap_policy, ignored.modules) if auto_wrap_policy is not None else {}
        members = _assign(module, [*candidates, module], ignored)
        for candidate, arguments in candidates.items():
            own = replace(settings, **_overrides(arguments))
            _replace_child(module, candidate, _wrapper(candidate, _make_unit(candidate, members[candidate], own)))
        self._take(module, _make_unit(module, members[module], settings))

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

    def check_is_root(self) -> bool:
        """Tell whether no unit is above this one; makes it the root if none has been."""
        self._hooks.start()
        return self._hooks.is_root

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FullyShardedDataParallel]:
        """Give all wrappers in `module`, or only those with none above."""
        found = [one for one in module.modules() if isinstance(one, FullyShardedDataParallel)]
        if not root_only:
            return found
        below = {inner for one in found for inner in one.modules() if inner is not one}
        return [one for one in found if one not in below]

    def __getattr__(self, name: str) -> object:
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
        runtime = self._hooks.start()
        before, runtime.is_syncing = runtime.is_syncing, False
        try:
            yield
        finally:
            runtime.is_syncing = before

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
            raise UnsupportedError("clip_grad_norm_ is for the root; call it on the outermost module")
        return clip.clip_grad_norm(self, [h.unit for h in hooks_below(self)], max_norm, norm_type)

    def state_dict(
        self, *, destination: dict[str, object] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, object]:  # type: ignore[override]
        """Give the full state by name, on every rank, as the module without sharding would.

        Collective:
            All ranks; blocks.
        """
        full = state_dict.full_state_dict(self)
        target: dict[str, object] = {} if destination is None else destination
        target.update({f"{prefix}{name}": value for name, value in full.items()})
        return target

    def load_state_dict(
        self, state_dict_: dict[str, torch.Tensor], strict: bool = True, assign: bool = False
    ) -> object:  # type: ignore[override]
        """Load a full state dict, which every rank has.

        Collective:
            None.
        """
        return state_dict.load_full_state_dict(self, state_dict_, strict=strict)


def _wrapper(module: nn.Module, hooks: Hooks) -> FullyShardedDataParallel:
    """Give the wrapper around a module that is a unit already."""
    wrapper = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
    Wrapper.__init__(wrapper)
    wrapper._take(module, hooks)
    return wrapper


def _replace_child(root: nn.Module, child: nn.Module, by: nn.Module) -> None:
    for module in list(root.modules()):
        if module is by:
            continue
        for name, found in list(module.named_children()):
            if found is child:
                setattr(module, name, by)


_OVERRIDABLE = {
    "sharding_strategy": "strategy",
    "mixed_precision": "precision",
    "backward_prefetch": "backward_prefetch",
    "forward_prefetch": "forward_prefetch",
}


def _overrides(arguments: object) -> dict[str, object]:
    assert isinstance(arguments, dict)
    unknown = [name for name in arguments if name not in _OVERRIDABLE]
    if unknown:
        raise UnsupportedError(f"a CustomPolicy cannot override {unknown[0]!r}; it can {', '.join(_OVERRIDABLE)}")
    return {_OVERRIDABLE[name]: value for name, value in arguments.items()}


def _materialise(
    root: nn.Module, ignored: _Ignored, init: Callable[[nn.Module], None] | None, device: torch.device | None
) -> None:
    """Give modules with parameters on the meta device real ones."""
    for module in root.modules():
        own = [p for p in module.parameters(recurse=False) if p.is_meta and p not in ignored.parameters]
        if not own:
            continue
        if init is not None:
            init(module)
        elif callable(reset := getattr(module, "reset_parameters", None)):
            module.to_empty(device=device or torch.device("cpu"), recurse=False)
            with torch.no_grad():
                reset()


def _synchronise(module: nn.Module, groups: Groups) -> None:
    """Give every rank what rank 0 has."""
    for tensor in (*module.parameters(), *module.buffers()):
        groups.shards.broadcast(tensor.detach())
        groups.replicas.broadcast(tensor.detach())
