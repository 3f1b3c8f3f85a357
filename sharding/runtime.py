"""The forward and backward machine of a tree of units: hooks, order, prefetch and the end of backward.

[Note: one step] Before a unit's forward its parameters are made whole; after it they are freed, if the strategy says
so. A hook on the outputs makes them whole again when backward reaches them. Each whole parameter's gradient goes to
the unit's reduce buffer as soon as autograd has summed it; when a bucket is complete, its reduction starts. When
backward ends, all reductions are waited for, and the spans have their gradients.

[Note: order of collectives] Gathers follow the order in which units run. Reductions follow the reverse of the order
in which units first ran in forward, whatever the order in which gradients come; a bucket that lacks gradients on some
rank is filled at the end, see [Note: gradients that no rank has]. Gathers and reductions have process groups of their
own. So every rank issues the same sequence on each group, as long as it runs the same units.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch

from sharding.bucket import Bucket
from sharding.collectives import Group
from sharding.policy import BackwardPrefetch
from sharding.pool import Pool
from sharding.unit import Reduction, Unit
from sharding.watch import Order, Watch

MAX_REDUCTIONS = 2
"""Reductions under way at a time: more would hold more reduce buffers."""

STALL_S = 1.0
"""In the middle of backward, a reduction is waited for no longer than this."""


class Runtime:
    """What the units under one root share.

    Attributes:
        units: All units, in the order of their modules.
        is_syncing: False in `no_sync`: gradients stay whole and wait.
        pool: The memory of reductions.
    """

    def __init__(
        self, labels: Mapping[Unit, str], *, backward_prefetch: BackwardPrefetch | None, forward_prefetch: bool
    ) -> None:
        self.units = units = list(labels)
        self._labels = labels
        self.is_syncing = True
        self.pool = Pool()
        self._backward_prefetch = backward_prefetch
        self._forward_prefetch = forward_prefetch
        self._outermost: Unit | None = None  # the unit whose forward is under way, around all others
        self._is_in_backward = False
        self._order: list[Unit] = []  # units as their forwards ended since the last backward, with multiplicity
        self._last_order: list[Unit] = []  # of the forward before
        self._entered: dict[Unit, None] = {}  # units as their forwards began first
        self._uses: Counter[Unit] = Counter()  # forwards of each unit through which backward has not gone yet
        self._cursor = 0  # how far back in `_order` backward has come
        self._to_reduce: list[tuple[Unit, Bucket]] = []  # in the agreed order; see [Note: order of collectives]
        self._reductions: list[tuple[Unit, Reduction]] = []
        self._max_reductions = MAX_REDUCTIONS
        self._watch = Watch(units[0].shards, units[0].replicas, units[0].device)
        orders: dict[object, Order] = {}
        for unit, label in labels.items():
            unit.reduce_shards = self._watch.watched(unit.shards, orders, "reductions", label)
            replicas = "means" if unit.shards.size > 1 else "reductions"
            unit.reduce_replicas = self._watch.watched(unit.replicas, orders, replicas, label)
            gathers = self._watch.watched(unit.shards, orders, "gathers", label)
            for bucket in unit.buckets:
                bucket.gathers = gathers
                bucket.pool = self.pool

    # Forward

    def pre_forward(self, unit: Unit, is_root: bool) -> None:
        """Make a unit whole, and start the gather of the one that ran next in the last forward."""
        if is_in_autograd():  # a checkpointed region runs again
            unit.unshard()
            return
        if is_root or self._outermost is None or self._outermost is unit:
            self._begin_forward(unit)
        self._entered.setdefault(unit)
        unit.unshard()
        if self._forward_prefetch:
            position = len(self._order)
            following = [other for other in self._last_order[position : position + 2] if other is not unit]
            if following:
                following[0].gather()

    def _begin_forward(self, unit: Unit) -> None:
        if self._watch.failure or self._outermost is not None or self._is_in_backward:
            self.reset()
        self._outermost = unit
        self._watch.begin_round(f"forward of {self._labels[unit]}")

    def fail_forward(self, unit: Unit, error: BaseException) -> None:
        """Tell all ranks of an exception that leaves the outermost unit; the model may still handle one inside."""
        if unit is self._outermost and not is_in_autograd():
            self._watch.fail(
                f"on rank {Group.own_rank()} the forward of {self._labels[unit]} raised {type(error).__name__}: {error}"
            )

    def post_forward(
        self, unit: Unit, is_root: bool, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
    ) -> None:
        """Free a unit's parameters, and watch for backward to reach its outputs, and to leave by its inputs.

        Args:
            unit: It has run.
            is_root: True if no unit is above it.
            inputs: Tensors whose gradients come last in its backward, if that is to be watched.
            outputs: Those whose gradients come first.
        """
        if outputs:
            _on_gradients(outputs[:], lambda: self.pre_backward(unit), after=1)
            self._uses[unit] += 1
            _on_gradients(inputs, lambda: self._leave(unit), after=len(inputs))
        if is_in_autograd():
            return
        self._order.append(unit)
        is_outermost = unit is self._outermost
        if unit.strategy.reshards_after_forward and not (is_outermost and outputs):
            unit.reshard()
        if is_outermost:
            self._end_forward(needs_backward=bool(outputs))

    def _end_forward(self, *, needs_backward: bool) -> None:
        self._outermost = None
        self._last_order = list(self._order)
        if not needs_backward:
            self._order.clear()
        for other in self.units:
            if not needs_backward or other.is_gathering:
                other.reshard()

    # Backward

    def pre_backward(self, unit: Unit) -> None:
        """Make a unit whole again, and start the gather of the one that backward reaches next."""
        if not self._is_in_backward:
            self._begin_backward()
        unit.unshard()
        position = next(
            (i for i in range(min(self._cursor, len(self._order)) - 1, -1, -1) if self._order[i] is unit), -1
        )
        if position < 0:
            return
        self._cursor = position
        if position > 0 and self._backward_prefetch is BackwardPrefetch.BACKWARD_PRE:
            self._order[position - 1].gather()

    def _leave(self, unit: Unit) -> None:
        """Free a unit when backward has gone through all of its uses."""
        self._uses[unit] -= 1
        if not self._uses[unit]:
            unit.reshard()

    def _begin_backward(self) -> None:
        self._is_in_backward = True
        self._cursor = len(self._order)
        used = set(self._order or self._last_order)
        # What is entered first has its last gradient last: the outermost unit, whose embedding comes first.
        entered = [unit for unit in reversed(self._entered) if unit in used]
        self._to_reduce = [(unit, b) for unit in entered for b in reversed(unit.buckets) if b.is_trainable]
        for unit in self.units:
            unit.is_in_backward = True
            for bucket in unit.buckets:
                bucket.begin_backward()
        torch.autograd.Variable._execution_engine.queue_callback(_End(self))
        self._watch.decide(self._announcement("backward", self._to_reduce if self.is_syncing else []))

    def _announcement(self, what: str, reductions: Sequence[tuple[Unit, Bucket]]) -> str:
        """Say what will be reduced."""
        texts = [f"{self._labels[unit]} ({bucket.layout.numel} elements)" for unit, bucket in reductions]
        return f"{what} that reduces {', '.join(texts) or 'nothing'}"

    def take_gradient(self, unit: Unit, bucket: Bucket, index: int) -> None:
        """Take one parameter's gradient; when a bucket has all, free it and reduce what is next in order."""
        if not self._is_in_backward:
            self._begin_backward()
        if not bucket.take_gradient(index):
            return
        bucket.reshard()
        if self._backward_prefetch is BackwardPrefetch.BACKWARD_POST and self._cursor > 0:
            self._order[self._cursor - 1].gather()
        while self.is_syncing and self._to_reduce and self._to_reduce[0][1].is_complete:
            self._reduce(*self._to_reduce.pop(0))

    def _reduce(self, unit: Unit, bucket: Bucket) -> None:
        self._reductions.append((unit, unit.begin_reduction(bucket)))
        while len(self._reductions) > self._max_reductions:
            unit, reduction = self._reductions[0]
            if not unit.is_reduced_within(reduction, STALL_S):
                self._max_reductions *= 2  # a rank that lacks gradients reduces at the end, and gathers until then
                return
            unit.finish_reduction(reduction)
            del self._reductions[0]

    def end_backward(self) -> None:
        """Reduce what is left, wait for everything, and free all parameters."""
        for unit in self.units:
            unit.reshard()
        if self.is_syncing:
            first = {bucket for _, bucket in self._to_reduce}
            # Gradients of earlier steps without sync, or that came twice.
            others = [(u, b) for u in reversed(self.units) for b in u.buckets if b.has_gradients and b not in first]
            self._watch.decide(self._announcement("end of backward", others))
            for unit, bucket in (*self._to_reduce, *others):
                self._reduce(unit, bucket)
            for unit, reduction in self._reductions:
                unit.finish_reduction(reduction)
        changed = [(bucket, bucket.end_backward()) for unit in self.units for bucket in unit.buckets]
        self._clear()
        for bucket, indexes in changed:
            bucket.call_hooks(indexes)

    def reset(self) -> None:
        """Forget a step that an exception cut short: whole parameters, the order, gradients of a backward under way."""
        if self._outermost is not None or self._is_in_backward:
            self._watch.fail(f"rank {Group.own_rank()} began anew in the middle of a step")
        self._watch.renew()
        for _, reduction in self._reductions:
            reduction.work.wait()
        for unit in self.units:
            for bucket in unit.buckets:
                bucket.forget()
        self._entered.clear()
        self.pool.clear()
        self._clear()

    def fail_backward(self) -> None:
        """Drop the gradients of a backward that an exception ended, and tell all ranks."""
        for unit in self.units:
            for bucket in unit.buckets:
                bucket.drop_gradients()  # now: gradients that people clear before the next step must not come back
        self._watch.fail(f"an exception ended the backward of rank {Group.own_rank()}; see its traceback")

    def _clear(self) -> None:
        self._reductions.clear()
        self._to_reduce.clear()
        self._order.clear()
        self._uses.clear()
        self._outermost = None
        self._is_in_backward = False
        for unit in self.units:
            unit.is_in_backward = False


class _End:
    """What autograd calls when a backward ends; if it goes without having been called, an exception ended that."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime: Runtime | None = runtime

    def __call__(self) -> None:
        """End the backward."""
        assert self._runtime is not None
        self._runtime.end_backward()
        self._runtime = None

    def __del__(self) -> None:
        """Tell all ranks."""
        if self._runtime is not None:
            with contextlib.suppress(Exception):  # nobody is there to catch it
                self._runtime.fail_backward()


def _on_gradients(tensors: Sequence[torch.Tensor], function: Callable[[], None], *, after: int) -> None:
    """Call a function once in each backward, when `after` of the tensors' gradients have come."""
    remaining, backward = after, -1

    def count(gradient: torch.Tensor) -> None:
        nonlocal remaining, backward
        if backward != (current := torch._C._current_graph_task_id()):
            remaining, backward = after, current
        remaining -= 1
        if remaining == 0:
            function()

    for tensor in tensors:
        tensor.register_hook(count)  # type: ignore[no-untyped-call]


def is_in_autograd() -> bool:
    """Tell whether the autograd engine is running on this thread."""
    return torch._C._current_graph_task_id() >= 0
