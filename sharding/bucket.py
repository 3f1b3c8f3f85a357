"""One flat buffer of parameters of one kind, in all its states.

A bucket owns three buffers: the shard (this rank's elements, in the parameters' own dtype), the whole (all elements,
in the dtype of computation, there only while needed), and the reduce buffer (whole gradients, there only in
backward). It refuses to know modules' hooks, prefetching and strategies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto

import torch
from torch import nn

from sharding.collectives import Collectives, Group, Work
from sharding.errors import StateError
from sharding.layout import BucketLayout, Slot, align_numel, lay_out
from sharding.names import Place
from sharding.pool import Pool


class BucketState(Enum):
    """What holds memory, and what the modules' parameters are.

    | state | whole buffer | modules see |
    |---|---|---|
    | SHARDED | freed; with `keeps_whole`, as last gathered | spans of the shard |
    | GATHERING | allocated, being filled | spans of the shard |
    | WHOLE | filled | views of the whole buffer |
    | SUMMONED | freed | whole tensors of the shard's dtype, for people, under the identity of the spans |
    """

    SHARDED = auto()
    GATHERING = auto()
    WHOLE = auto()
    SUMMONED = auto()


@dataclass(frozen=True, slots=True)
class BucketKind:
    """What the parameters of one bucket have in common."""

    dtype: torch.dtype  # of the shard
    compute_dtype: torch.dtype  # of the whole buffer
    reduce_dtype: torch.dtype  # of gradient reduction
    grad_dtype: torch.dtype  # of `.grad`
    requires_grad: bool


@dataclass(slots=True)
class Member:
    """One parameter of a bucket and the places where modules hold it; `places[0]` gives its name."""

    places: list[Place]
    original: nn.Parameter | None  # let go when the bucket has its elements
    shard: nn.Parameter = field(init=False)  # [span], a view of the bucket's shard
    whole: nn.Parameter = field(init=False)  # global shape, a view of the bucket's whole buffer


class Bucket:
    """Parameters of one kind, laid end to end and cut over a group of ranks.

    Attributes:
        kind: What they have in common.
        members: The parameters, in order.
        layout: Where each lies.
        gathers: The ranks it is cut over, for gathers; the runtime gives them an order of their own.
        pool: Where reduce buffers of what is cut come from; the runtime gives one to all buckets.
        shard: This rank's elements. # [shard_numel]
        state: See `BucketState`.
    """

    def __init__(
        self,
        kind: BucketKind,
        members: Sequence[Member],
        group: Group,
        device: torch.device,
        *,
        keeps_whole: bool = False,
    ) -> None:
        """Cut the parameters; the originals' memory is let go as each is copied.

        Args:
            kind: What they have in common.
            members: The parameters.
            group: The ranks to cut them over.
            device: Where the buffers lie.
            keeps_whole: Never free the whole buffer; the shard is a part of it where both have one dtype.

        Collective:
            None; all ranks of the group make the same buckets.
        """
        self.kind = kind
        self.members = list(members)
        self.group = group
        self.gathers: Collectives = group
        self.pool = Pool()
        slots = [Slot(m.places[0].fqn, tuple(m.original.shape)) for m in members if m.original is not None]
        dtypes = {kind.dtype, kind.compute_dtype, kind.reduce_dtype}
        self.layout: BucketLayout = lay_out(
            slots, world_size=group.size, align=align_numel(dtype.itemsize for dtype in dtypes)
        )
        self.state = BucketState.SHARDED
        # A group of one that computes in the parameters' dtype needs no second buffer: shard and whole are one.
        self.is_always_whole = group.size == 1 and kind.compute_dtype == kind.dtype
        self._keeps_whole = keeps_whole or self.is_always_whole
        self._allocate(device)
        self._work: Work | None = None
        self._version = -1  # of the shard when it was gathered
        self._on_gradient: Callable[[int], Callable[[torch.Tensor], None]] | None = None
        self._own_hooks: list[Callable[[torch.Tensor], None]] = []  # what `_on_gradient` gave
        self._is_watched = [False] * len(self.members)  # `_on_gradient` was asked for its hook
        self._gradients: torch.Tensor | None = None  # [numel], reduce dtype
        self._has_gradient = [False] * len(self.members)  # its place in `_gradients` is filled
        self._has_arrived = [False] * len(self.members)  # since all had last arrived, or backward began; or is frozen
        self._is_complete = False
        self._kept: list[torch.Tensor | None] = []  # `.grad` of parameters that are always whole, during backward
        self._reduced: list[tuple[torch.Tensor, Sequence[int]]] = []  # [shard_numel] each, and what has no gradient
        with torch.no_grad():
            self._make_parameters()
        self._free_whole()

    def _allocate(self, device: torch.device) -> None:
        """Make the shard and the whole buffer."""
        kind, numel = self.kind, self.layout.shard_numel
        is_part = self._keeps_whole and not self.is_always_whole and kind.compute_dtype == kind.dtype
        self._shard = torch.zeros(0 if is_part else numel, dtype=kind.dtype, device=device)
        self._whole = self._shard  # [numel] compute dtype, its memory often freed
        if not self.is_always_whole:
            self._whole = torch.zeros(self.layout.numel, dtype=kind.compute_dtype, device=device)
        if is_part:  # `.data`, for a version counter of its own
            self._shard = self._whole.data.narrow(0, self.group.rank * numel, numel)

    @property
    def shard(self) -> torch.Tensor:
        """This rank's elements, as people left them. # [shard_numel]

        [Note: replaced spans] `module.half()`, `module.to(device)` and `parameter.data = ...` give a span other memory,
        of which the shard knows nothing. So before the shard is read, what stands elsewhere is copied to its place.

        Raises:
            StateError: If spans were replaced by what fits no shard.
        """
        if not self.is_summoned and self.members and not all(map(self._is_in_place, range(len(self.members)))):
            self._put_in_place()
        return self._shard

    def _is_in_place(self, index: int) -> bool:
        shard = self.members[index].shard
        return shard.dtype is self.kind.dtype and shard.data_ptr() == self._addresses[index]

    @torch.no_grad()
    def _put_in_place(self) -> None:
        """Copy spans that stand elsewhere into the shard, in a new dtype or on a new device if all do so."""
        first = self.members[0].shard
        for index, member in enumerate(self.members):
            start, stop = self.span(index)
            if (member.shard.dtype, member.shard.device) != (first.dtype, first.device):
                raise StateError(
                    f"{member.places[0].fqn!r} is now {member.shard.dtype} on {member.shard.device}, others of its "
                    f"unit are {first.dtype} on {first.device}; convert the outermost module"
                )
            if member.shard.numel() != stop - start:
                raise StateError(
                    f"the data of {member.places[0].fqn!r} was replaced by a tensor of shape "
                    f"{tuple(member.shard.shape)}, this rank holds {stop - start} elements of it; "
                    "replace it inside of summon_full_params"
                )
        values = [member.shard.data for member in self.members]
        if not self.is_always_whole:
            self.reshard()
        if (first.dtype, first.device) != (self.kind.dtype, self._shard.device):
            self._convert(first.dtype, first.device)
        for index, (member, value) in enumerate(zip(self.members, values, strict=True)):
            view = self._local_view(index)
            view.copy_(value.view(view.shape))
            member.shard.data = view
            self._addresses[index] = view.data_ptr()
        self._version = -1

    def _convert(self, dtype: torch.dtype, device: torch.device) -> None:
        """Give the buffers another dtype; that of computation and reduction follow where they were the parameters'."""
        old = self.kind
        compute, reduce = (dtype if other == old.dtype else other for other in (old.compute_dtype, old.reduce_dtype))
        self.kind = replace(old, dtype=dtype, compute_dtype=compute, reduce_dtype=reduce)
        self._allocate(device)
        for index, member in enumerate(self.members):
            if not self.is_always_whole:
                member.whole.data = self._global_view(index)
        self._free_whole()

    @property
    def is_trainable(self) -> bool:
        """True if some parameter takes a gradient; it may change after the bucket was made."""
        return any(member.shard.requires_grad for member in self.members)

    @property
    def is_complete(self) -> bool:
        """True if every parameter's gradient has come in this backward, and they are not yet given up."""
        return self._is_complete

    @property
    def is_summoned(self) -> bool:
        """True while people look at its parameters."""
        return self.state is BucketState.SUMMONED

    @property
    def has_gradients(self) -> bool:
        """True if some parameter has a gradient that is not yet reduced."""
        return any(self._has_gradient)

    def _make_parameters(self) -> None:
        self._addresses: list[int] = []  # where each span lies
        for index, member in enumerate(self.members):
            view = self._local_view(index)
            self._addresses.append(view.data_ptr())
            start, stop = self.span(index)
            if member.original is not None and start < stop:
                view.copy_(member.original.detach().reshape(-1)[start:stop].view(view.shape))
            member.original = None
            member.shard = member.whole = nn.Parameter(view, requires_grad=self.kind.requires_grad)
            self._show(member, member.shard)
            if self.is_always_whole:
                continue
            member.whole = nn.Parameter(self._global_view(index), requires_grad=self.kind.requires_grad)

    def span(self, index: int) -> tuple[int, int]:
        """Give the span of a parameter that this rank holds."""
        return self.layout.span(index, self.group.rank)

    def _span_of(self, shard: torch.Tensor, index: int) -> torch.Tensor:
        """Give the view of a parameter's span in a buffer laid out like the shard. # [span]"""
        start, stop = self.span(index)
        begin = self.layout.starts[index] + start - self.group.rank * self.layout.shard_numel
        return shard.narrow(0, begin if start < stop else 0, stop - start)

    def _local_view(self, index: int) -> torch.Tensor:
        """Give what the optimizer sees of a parameter: its span, or in a group of one the parameter in its shape."""
        span = self._span_of(self._shard, index)
        return span.view(self.layout.slots[index].shape) if self.group.size == 1 else span

    def _global_view(self, index: int) -> torch.Tensor:
        """Give the view of a parameter in the whole buffer. # [global shape]"""
        # `.data` gives the views a version counter of their own: gloo raises that of its output from another thread,
        # and autograd would take it for a change of a saved tensor.
        slot = self.layout.slots[index]
        return self._whole.data.narrow(0, self.layout.starts[index], slot.numel).view(slot.shape)

    def watch(self, hook_for: Callable[[int], Callable[[torch.Tensor], None]]) -> None:
        """Have a hook called when autograd has summed a whole parameter's gradient, also of one unfrozen later.

        Args:
            hook_for: Gives the hook of the parameter with that number.
        """
        self._on_gradient = hook_for
        self._follow_requires_grad()

    def _follow_requires_grad(self) -> None:
        """Let whole parameters take gradients where people have said so of the spans."""
        for index, member in enumerate(self.members):
            requires_grad = member.shard.requires_grad
            if member.whole.requires_grad != requires_grad:
                member.whole.requires_grad_(requires_grad)
            if requires_grad and not self._is_watched[index] and self._on_gradient is not None:
                self._is_watched[index] = True
                hook = self._on_gradient(index)
                self._own_hooks.append(hook)
                member.whole.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    # Parameters

    def gather(self) -> None:
        """Begin to fill the whole buffer; nothing to do if it is filled, or being filled, from the shard as it is."""
        if self.state is BucketState.SHARDED:
            self._shard = self.shard  # see [Note: replaced spans]
        if self.is_always_whole and self.state is not BucketState.WHOLE:
            self._follow_requires_grad()
            self.state = BucketState.WHOLE
        if self.is_always_whole or self.is_summoned:
            return
        if self.state is not BucketState.SHARDED and self._version == self._shard._version:
            return
        self.reshard()
        self.state = BucketState.GATHERING
        if self._keeps_whole and self._version == self._shard._version:
            return
        self._whole.untyped_storage().resize_(self._whole.numel() * self._whole.element_size())
        self._version = self._shard._version
        source = self._shard if self.kind.compute_dtype == self.kind.dtype else self._shard.to(self.kind.compute_dtype)
        self._work = self.gathers.all_gather(self._whole, source.detach())

    def unshard(self) -> None:
        """Make the parameters whole: wait for the gather, and let modules see them."""
        self.gather()
        if self.state is not BucketState.GATHERING:
            return
        if self._work is not None:
            self._work.wait()
            self._work = None
        self._follow_requires_grad()
        for member in self.members:
            self._show(member, member.whole)
        self.state = BucketState.WHOLE

    def reshard(self) -> None:
        """Free the whole buffer, and let modules see their spans."""
        if self.state is BucketState.SHARDED or self.is_summoned:
            return
        if self._work is not None:
            self._work.wait()
            self._work = None
        if self.state is BucketState.WHOLE:
            for member in self.members:
                self._show(member, member.shard)
        self._free_whole()
        self.state = BucketState.SHARDED

    def forget(self) -> None:
        """Free the whole buffer, and take nothing in it for gathered: a rank that failed may have sent zeros."""
        self.reshard()
        self._version = -1

    def summon(self, values: Sequence[torch.Tensor]) -> None:
        """Let modules and the optimizer see these whole tensors in place of the spans, until `dismiss`."""
        self.reshard()
        for member, value in zip(self.members, values, strict=True):
            member.shard.grad = None  # it would not fit
            member.shard.data = value
        self.state = BucketState.SUMMONED

    def dismiss(self, *, writeback: bool) -> None:
        """End `summon`; with `writeback`, keep this rank's part of what was changed."""
        for index, member in enumerate(self.members):
            view, (start, stop) = self._local_view(index), self.span(index)
            if writeback:
                view.copy_(member.shard.data.reshape(-1)[start:stop].view(view.shape))
            member.shard.grad = None
            member.shard.data = view
        self.state = BucketState.SHARDED

    def collect(self, locals_: Sequence[torch.Tensor | None], dtype: torch.dtype) -> torch.Tensor:
        """Give a buffer laid out like the shard with what this rank holds of each parameter, zeros for None."""
        buffer = torch.zeros(self.layout.shard_numel, dtype=dtype, device=self._shard.device)
        for index, local in enumerate(locals_):
            if local is not None:
                self._span_of(buffer, index).copy_(local.reshape(-1))
        return buffer

    def gather_values(self, shard: torch.Tensor) -> list[torch.Tensor]:
        """Gather a buffer laid out like the shard, and give each parameter's whole tensor.

        Collective:
            All ranks of the group; blocks.
        """
        whole = torch.empty(self.layout.numel, dtype=shard.dtype, device=shard.device)
        self.group.all_gather(whole, shard.detach()).wait()
        slots = zip(self.layout.starts, self.layout.slots, strict=True)
        return [whole.narrow(0, start, slot.numel).view(slot.shape).clone() for start, slot in slots]

    def _free_whole(self) -> None:
        if not self._keeps_whole:
            self._whole.untyped_storage().resize_(0)

    @staticmethod
    def _show(member: Member, parameter: nn.Parameter) -> None:
        for place in member.places:
            place.module._parameters[place.name] = parameter

    # Gradients

    def begin_backward(self) -> None:
        """Set aside the gradients of earlier steps where autograd would add to them."""
        self._await_gradients()
        self._is_complete = False
        if self.is_always_whole:
            self._kept = [member.shard.grad for member in self.members]
            for member in self.members:
                member.shard.grad = None

    def _await_gradients(self) -> None:
        self._has_arrived = [not member.shard.requires_grad for member in self.members]

    def end_backward(self) -> list[int]:
        """Give the spans the gradients of this backward, beside those of earlier ones, and tell which got some."""
        changed: set[int] = set()
        if self._reduced:
            self._version = -1  # an optimizer may change the shard in ways that torch does not count
        for member, kept in zip(self.members, self._kept, strict=False):
            set_gradient(member.shard, kept)
        for reduced, without in self._reduced:
            for index, member in enumerate(self.members):
                if index in without or not member.shard.requires_grad:
                    continue
                changed.add(index)
                view = self._span_of(reduced, index).view(member.shard.shape)
                if member.shard.grad is None:
                    set_gradient(member.shard, view)
                else:
                    member.shard.grad.add_(view)
        self._kept, self._reduced = [], []
        return sorted(changed)

    def call_hooks(self, indexes: Sequence[int]) -> None:
        """Call what people hung on spans for when their gradients are there, and step optimizers that lie in them."""
        for index in indexes:
            shard = self.members[index].shard
            for hook in list((shard._post_accumulate_grad_hooks or {}).values()):
                if hook not in self._own_hooks:
                    hook(shard)
            for optimizer in getattr(shard, "_in_backward_optimizers", ()):
                optimizer.step()
                optimizer.zero_grad()

    def take_gradient(self, index: int) -> bool:
        """Move a whole parameter's gradient into the reduce buffer, adding to what is there, and free it.

        Returns:
            True if with this one all parameters' gradients have come, again.
        """
        parameter = self.members[index].whole
        gradient = parameter.grad
        if gradient is None:
            return False
        if gradient.layout is not torch.strided:
            raise StateError(
                f"the gradient of {self.layout.slots[index].fqn!r} is sparse, which cannot be cut over ranks; let its "
                "module give dense ones, or name it in ignored_modules"
            )
        parameter.grad = None
        if self._gradients is None:
            self._gradients = self._make_gradients()
        slot = self.layout.slots[index]
        place = self._gradients.narrow(0, self.layout.starts[index], slot.numel).view(slot.shape)
        if self._has_gradient[index]:
            place.add_(gradient)
        else:
            place.copy_(gradient)
        self._has_gradient[index] = self._has_arrived[index] = True
        if not all(self._has_arrived):
            return False
        # A module that runs twice under reentrant checkpoints gets all its gradients twice.
        self._await_gradients()
        self._is_complete = True
        return True

    def _make_gradients(self) -> torch.Tensor:
        dtype, device = self.kind.reduce_dtype, self._shard.device
        if self.group.size == 1:  # the sum stays in it, and is the parameters' `.grad`
            return torch.empty(self.layout.numel, dtype=dtype, device=device)
        return self.pool.take(self.layout.numel, dtype, device)

    def give_up_gradients(self) -> tuple[torch.Tensor, list[int]]:
        """Give the reduce buffer away, and the parameters that have no gradient on this rank. # [numel]

        [Note: gradients that no rank has] Where there is no gradient the buffer holds -0.0, and no gradient does so at
        the first element of a rank's part of it. Of all sums only that of -0.0 alone is -0.0. So each rank sees in the
        sum whether any rank had a gradient, and no message says so.
        """
        if self._gradients is None:
            self._gradients = self._make_gradients()
        without = [index for index, has_gradient in enumerate(self._has_gradient) if not has_gradient]
        gradients, self._gradients = self._gradients, None
        self._mark_gaps(gradients)
        firsts = [first for index, has in enumerate(self._has_gradient) if has for first in self._firsts(index)]
        if firsts:
            gradients[torch.tensor(firsts, device=gradients.device)] += 0.0
        self._has_gradient = [False] * len(self.members)
        self._is_complete = False
        return gradients, without

    def _firsts(self, index: int) -> list[int]:
        """Give where each rank's part of a parameter begins in the whole buffer."""
        start, numel, shard = self.layout.starts[index], self.layout.slots[index].numel, self.layout.shard_numel
        cuts = range((start // shard + 1) * shard, start + numel, shard) if numel else ()
        return [start, *cuts] if numel else []

    def drop_gradients(self) -> None:
        """Forget gradients of a backward that was cut short, and those that waited for reduction."""
        self._gradients = None
        self._reduced = []
        for member, kept in zip(self.members, self._kept, strict=False):
            set_gradient(member.shard, kept)
        self._kept = []
        self._has_gradient = [False] * len(self.members)
        for member in () if self.is_always_whole else self.members:
            member.whole.grad = None

    def _mark_gaps(self, gradients: torch.Tensor) -> None:
        """Put -0.0 in the padding, and in the places of parameters without a gradient."""
        position = 0
        for index, has_gradient in enumerate(self._has_gradient):
            start = self.layout.starts[index]
            gradients[position:start] = -0.0
            position = start + self.layout.slots[index].numel if has_gradient else start
        gradients[position:] = -0.0

    def give_gradients(self, summed: torch.Tensor, count: int, without: Sequence[int]) -> None:
        """Keep mean gradients until backward ends: autograd may still be adding to `.grad` of whole parameters.

        Args:
            summed: The sum over the ranks, which may be scaled in place where it is the whole buffer. # [shard_numel]
            count: Number of ranks.
            without: The parameters for which this rank had none.
        """
        nowhere = [index for index in without if self._is_marked(summed, index)]  # before small ones turn to -0.0
        cast = summed.to(self.kind.grad_dtype)
        is_ours = cast is not summed or summed.numel() == self.layout.numel
        mean = cast.mul_(1 / count) if is_ours else cast.mul(1 / count)  # a new tensor: the whole buffer goes
        self._reduced.append((mean, nowhere))

    def _is_marked(self, summed: torch.Tensor, index: int) -> bool:
        """Tell whether no rank had a gradient for a parameter, as far as its elements here tell."""
        first = self._span_of(summed, index)[:1]
        first = first.real if first.is_complex() else first
        return bool((torch.signbit(first) & (first == 0)).all())


def set_gradient(parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """Set `.grad`, also in another dtype than the parameter's, which torch lets only `.data` have."""
    if gradient is None or gradient.dtype == parameter.dtype:
        parameter.grad = gradient
        return
    parameter.grad = torch.empty_like(parameter)
    parameter.grad.data = gradient
