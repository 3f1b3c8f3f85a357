"""A unit: a wrapped module whose parameters are gathered together, and its buckets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from sharding.bucket import Bucket, BucketKind, BucketState, Member
from sharding.collectives import Collectives, Done, Work
from sharding.comm_hook import CommHook
from sharding.policy import ShardingStrategy
from sharding.settings import Settings

REPLICATED_BUCKET_BYTES = 25 << 20
"""Replicated parameters are gathered by nobody; smaller buckets let reductions begin while backward goes on."""


class Unit:
    """The parameters of one module that no unit below it has.

    Attributes:
        module: The wrapped module.
        buckets: Its parameters, by kind.
        strategy: When they are whole.
        precision: In which dtypes it computes and reduces.
        shards, replicas: The ranks that hold the other shards, and those that hold the same.
        world_size: Number of all these ranks.
        device: Where its buffers lie.
        is_in_backward: The runtime is computing gradients, or was when an exception came.
        comm_hook: What reduces in place of the runtime, or None.
        reduce_shards, reduce_replicas: The same ranks, for reductions; the runtime gives them an order of their own.
    """

    def __init__(self, module: nn.Module, members: Sequence[Member], settings: Settings, device: torch.device) -> None:
        """Sort the parameters into buckets and cut them.

        Collective:
            None; all ranks make the same units in the same order.
        """
        self.module = module
        self.strategy = settings.strategy
        self.precision = settings.precision
        self.shards = settings.groups.shards
        self.replicas = settings.groups.replicas
        self.reduce_shards: Collectives = self.shards
        self.reduce_replicas: Collectives = self.replicas
        self.world_size = self.shards.size * self.replicas.size
        self.device = device
        self.is_in_backward = False
        self.comm_hook: CommHook | None = None
        kinds: dict[BucketKind, list[Member]] = {}
        for member in members:
            assert member.original is not None
            kinds.setdefault(_kind(member.original, settings), []).append(member)
        cap = REPLICATED_BUCKET_BYTES if self.is_replicated and self.world_size > 1 else None
        self.buckets = [
            Bucket(kind, part, self.shards, device, keeps_whole=self.strategy.keeps_whole)
            for kind, group in kinds.items()
            for part in _capped(group, cap)
        ]

    @property
    def is_gathering(self) -> bool:
        """True if a gather is under way that nobody has waited for."""
        return any(bucket.state is BucketState.GATHERING for bucket in self.buckets)

    @property
    def is_partly_frozen(self) -> bool:
        """True if some bucket has no gradients, by whose coming it would be freed."""
        return not all(bucket.is_trainable for bucket in self.buckets)

    @property
    def is_first_rank(self) -> bool:
        """True on the first of all ranks that share or replicate it."""
        return self.shards.rank == self.replicas.rank == 0

    @property
    def is_replicated(self) -> bool:
        """True if every rank holds all of it, by strategy; a lone rank that shards holds the one shard."""
        return self.strategy is ShardingStrategy.NO_SHARD

    def gather(self) -> None:
        """Begin to gather all buckets."""
        for bucket in self.buckets:
            bucket.gather()

    def unshard(self) -> None:
        """Make all parameters whole."""
        self.gather()
        for bucket in self.buckets:
            bucket.unshard()

    def reshard(self) -> None:
        """Free the whole parameters."""
        for bucket in self.buckets:
            bucket.reshard()

    def begin_reduction(self, bucket: Bucket) -> Reduction:
        """Begin to reduce a bucket's gradients over all ranks that share or replicate it."""
        gradients, without = bucket.give_up_gradients()
        if self.comm_hook is not None:
            mine = self.comm_hook.mean(gradients, bucket.layout.shard_numel)
            return Reduction(bucket, gradients, mine, Done(), without, is_last_work=True, num_summed=1)
        count = self.world_size
        if self.reduce_shards.size == 1:
            work = self.reduce_replicas.all_reduce(gradients)
            return Reduction(bucket, gradients, gradients, work, without, is_last_work=True, num_summed=count)
        work = self.reduce_shards.reduce_scatter(gradients, bucket.pool)
        numel = bucket.layout.shard_numel
        mine = gradients.narrow(0, self.shards.rank * numel, numel)
        return Reduction(bucket, gradients, mine, work, without, is_last_work=False, num_summed=count)

    def is_reduced_within(self, reduction: Reduction, seconds: float) -> bool:
        """Wait for at most this long, and tell whether `finish_reduction` would not block any more.

        Other replicas may not have come so far; a rank that blocked for them could keep them from coming.
        """
        if not reduction.work.is_done_within(seconds):
            return False
        self._sum_replicas(reduction)
        return reduction.work.is_done_within(seconds)

    def finish_reduction(self, reduction: Reduction) -> None:
        """Wait for a bucket's reduction, and give its parameters their gradients."""
        self._sum_replicas(reduction)
        reduction.work.wait()
        reduction.bucket.give_gradients(reduction.mine, reduction.num_summed, reduction.without)
        if self.shards.size > 1:
            reduction.bucket.pool.give_back(reduction.buffer)

    def _sum_replicas(self, reduction: Reduction) -> None:
        """Go on from the sum over the shards to that over the replicas."""
        if reduction.is_last_work:
            return
        reduction.work.wait()
        reduction.work = self.reduce_replicas.all_reduce(reduction.mine)
        reduction.is_last_work = True


@dataclass(slots=True)
class Reduction:
    """A bucket's gradients under reduction; the buffer must live until the work is done."""

    bucket: Bucket
    buffer: torch.Tensor  # [numel]
    mine: torch.Tensor  # [shard_numel], this rank's part of the sum, mostly in `buffer`
    work: Work
    without: Sequence[int]  # parameters that have no gradient on this rank
    is_last_work: bool  # nothing comes after `work`
    num_summed: int  # by how much the sum is to be divided


def _capped(members: Sequence[Member], cap_bytes: int | None) -> list[list[Member]]:
    """Cut a list of parameters where more would exceed the cap; one bigger parameter stands alone."""
    parts: list[list[Member]] = [[]]
    nbytes = 0
    for member in members:
        assert member.original is not None
        if cap_bytes is not None and parts[-1] and nbytes + member.original.nbytes > cap_bytes:
            parts.append([])
            nbytes = 0
        parts[-1].append(member)
        nbytes += member.original.nbytes
    return parts


def _kind(parameter: nn.Parameter, settings: Settings) -> BucketKind:
    dtype, precision = parameter.dtype, settings.precision
    if not dtype.is_floating_point:
        return BucketKind(dtype, dtype, dtype, dtype, parameter.requires_grad)
    compute = precision.param_dtype or dtype
    reduce = precision.reduce_dtype or compute
    low = reduce if settings.strategy is ShardingStrategy.NO_SHARD else compute
    return BucketKind(
        dtype, compute, reduce, low if precision.keep_low_precision_grads else dtype, parameter.requires_grad
    )
