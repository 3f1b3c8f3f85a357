"""Which modules become units: policies, and the walk that applies them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, Protocol

from torch import nn

from sharding.errors import WrapError

WrapArguments = Mapping[str, object]


class LambdaPolicy(Protocol):
    """A policy as a function: called for every module, and with `recurse=True` before its children."""

    def __call__(self, module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        """Tell whether to look into the children (`recurse`), or whether to wrap the module."""


def always_wrap_policy(*args: object, **kwargs: object) -> bool:
    """Wrap every module."""
    return True


def transformer_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, transformer_layer_cls: Iterable[type[nn.Module]]
) -> bool:
    """Wrap the modules of the given classes."""
    return True if recurse else isinstance(module, tuple(transformer_layer_cls))


def lambda_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, lambda_fn: Callable[[nn.Module], bool]
) -> bool:
    """Wrap the modules for which `lambda_fn` is true."""
    return True if recurse else lambda_fn(module)


_EXCLUDED = (nn.ModuleList, nn.ModuleDict)
_FORCED_LEAVES = (nn.MultiheadAttention,)


def size_based_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    min_num_params: int = int(1e8),
    force_leaf_modules: Iterable[type[nn.Module]] | None = None,
    exclude_wrap_modules: Iterable[type[nn.Module]] | None = None,
) -> bool:
    """Wrap modules that have at least `min_num_params` parameters not yet in a unit.

    Args:
        module: The candidate.
        recurse: Whether the question is to look into its children.
        nonwrapped_numel: Its parameters that are in no unit yet.
        min_num_params: The least number for a unit.
        force_leaf_modules: Classes whose children are never wrapped; None for `MultiheadAttention`.
        exclude_wrap_modules: Classes that are never wrapped; None for module lists and dicts, which have no forward.
    """
    leaves = _FORCED_LEAVES if force_leaf_modules is None else tuple(force_leaf_modules)
    excluded = _EXCLUDED if exclude_wrap_modules is None else tuple(exclude_wrap_modules)
    is_large = nonwrapped_numel >= min_num_params
    if recurse:
        return is_large and not isinstance(module, leaves)
    return is_large and not isinstance(module, excluded)


class ModuleWrapPolicy:
    """Wraps the modules of some classes."""

    def __init__(self, module_classes: Iterable[type[nn.Module]]) -> None:
        self.module_classes = tuple(module_classes)

    def __call__(self, module: nn.Module, recurse: bool = False, nonwrapped_numel: int = -1) -> bool:
        """Tell as a function policy would."""
        return True if recurse else isinstance(module, self.module_classes)


class CustomPolicy:
    """Wraps the modules for which a function is true; a dict it returns overrides arguments for that unit."""

    def __init__(self, lambda_fn: Callable[[nn.Module], bool | dict[str, object]]) -> None:
        self.lambda_fn = lambda_fn


Policy = LambdaPolicy | ModuleWrapPolicy | CustomPolicy | functools.partial[bool] | Callable[..., bool]


def units_to_wrap(root: nn.Module, policy: Policy, ignored: set[nn.Module]) -> dict[nn.Module, WrapArguments]:
    """Give the modules below `root` that `policy` makes units, children before parents, with their own arguments.

    Args:
        root: Not itself among the result.
        policy: Any of the policies of this file.
        ignored: Modules that are not looked into.

    Raises:
        WrapError: If the policy is no policy, or gives something else than a bool or a dict.
    """
    if not isinstance(policy, CustomPolicy) and not callable(policy):
        raise WrapError(
            f"auto_wrap_policy is a {type(policy).__name__}; give a policy of `sharding.wrap`, or a function"
        )
    found: dict[nn.Module, WrapArguments] = {}
    skipped = {parameter for module in ignored for parameter in module.parameters(recurse=False)}
    _visit(root, policy, ignored, skipped, found, set(), is_root=True)
    return found


def _visit(
    module: nn.Module,
    policy: Policy,
    ignored: set[nn.Module],
    skipped: set[nn.Parameter],
    found: dict[nn.Module, WrapArguments],
    seen: set[nn.Module],
    *,
    is_root: bool = False,
) -> int:
    """Decide on a module after its children; give the number of its parameters that are now in a unit."""
    numel = sum(parameter.numel() for parameter in module.parameters() if parameter not in skipped)
    is_custom = isinstance(policy, CustomPolicy)
    wrapped = 0
    if not is_custom and not policy(module=module, recurse=True, nonwrapped_numel=numel):  # type: ignore[operator]
        return 0
    for child in module.children():
        if child not in ignored and child not in seen:
            seen.add(child)
            wrapped += _visit(child, policy, ignored, skipped, found, seen)
    if is_root:
        return wrapped
    if isinstance(policy, CustomPolicy):
        answer = policy.lambda_fn(module)
        if not isinstance(answer, (bool, dict)):
            raise WrapError(
                f"a CustomPolicy gave {answer!r} for {type(module).__name__}; it must give a bool or a dict"
            )
    else:
        answer = bool(policy(module=module, recurse=False, nonwrapped_numel=numel - wrapped))
    if answer is False:
        return wrapped
    found[module] = answer if isinstance(answer, dict) else {}
    return numel


def post_order(root: nn.Module) -> Iterator[nn.Module]:
    """Yield every module once, children before parents."""
    seen: set[nn.Module] = set()

    def visit(module: nn.Module) -> Iterator[nn.Module]:
        seen.add(module)
        for child in module.children():
            if child not in seen:
                yield from visit(child)
        yield module

    yield from visit(root)


def replace_child(root: nn.Module, child: nn.Module, by: nn.Module) -> None:
    """Put another module wherever `child` stands below `root`."""
    for module in list(root.modules()):
        if module is by:
            continue
        for name, found in list(module.named_children()):
            if found is child:
                setattr(module, name, by)


_Wrapping = tuple[Callable[..., nn.Module], Mapping[str, Any]]
_wrapping: ContextVar[_Wrapping | None] = ContextVar("wrapping", default=None)


@contextlib.contextmanager
def enable_wrap(*, wrapper_cls: Callable[..., nn.Module], **wrapper_kwargs: Any) -> Iterator[None]:
    """Let `wrap` wrap while the context is open.

    Args:
        wrapper_cls: `FullyShardedDataParallel`, or what else takes a module.
        wrapper_kwargs: Its arguments beside the module.
    """
    token = _wrapping.set((wrapper_cls, wrapper_kwargs))
    try:
        yield
    finally:
        _wrapping.reset(token)


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """Wrap a module as the `enable_wrap` around says; outside of one, give it back as it is.

    Args:
        module: To be wrapped.
        wrap_overrides: Arguments in place of the context's.

    Collective:
        As the wrapper's.
    """
    wrapping = _wrapping.get()
    if wrapping is None:
        return module
    wrapper, arguments = wrapping
    return wrapper(module, **{**arguments, **wrap_overrides})
