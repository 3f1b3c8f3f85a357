"""What the ranks of a step agree on, and how all of them hear of it when one cannot go on.

[Note: agreed order] A collective that another rank does not issue hangs; one that another rank issues with another
size corrupts memory or ends the process, inside the backend. So ranks take every decision that leads to a collective
in one order, and each decision has a text. A rank acts at once on what followed last time, after the same decisions;
that was agreed. Before anything else it announces the text in the store of `torch.distributed`, and waits until all
ranks have announced the same. A rank that blocks looks whether another has announced what it did not: then all raise
the same error. So a step like the one before sends no message, and the first one sends one a decision.

[Note: after a failure] A rank that cannot go on says why in the store; ranks that block find it there. Collectives
that only some ranks issued are then left in the backend. Before the next step all ranks meet in the store, compare
what each issued on each group, and each issues, with zeros, what it had not.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from sharding.collectives import Collectives, Done, Group, Store, Work, shared_store
from sharding.errors import StateError
from sharding.pool import Pool

SLICE_S = 0.5
"""A blocked rank looks into the store this often."""

PATIENCE_S = 10.0
"""A rank that waits longer says so in the log; with TORCH_DISTRIBUTED_DEBUG set to INFO or DETAIL, after a second."""

_MAX_REMEMBERED = 100_000  # decisions; more are forgotten, all at once, on all ranks

_log = logging.getLogger("sharding")


@dataclass(frozen=True, slots=True)
class Entry:
    """A collective that was issued: what another rank needs to issue the same."""

    verb: str  # a method of `Group`
    numel: int  # of the larger of its tensors
    dtype: torch.dtype


@dataclass(slots=True)
class Order:
    """What was issued on one group.

    Attributes:
        name: The same on all ranks of the group.
        group: The group; no one else issues on it.
        count: How many collectives were issued before `entries`.
        entries: Those of the last two rounds.
        begun: How many of them are of the round before.
        works: Those that nobody has waited for.
    """

    name: str
    group: Group
    count: int = 0
    entries: list[Entry] = field(default_factory=list)
    begun: int = 0
    works: list[Pending] = field(default_factory=list)

    def begin_round(self) -> None:
        """Forget the round before the last."""
        self.count += self.begun
        del self.entries[: self.begun]
        self.begun = len(self.entries)

    def issue(self, entry: Entry, call: Callable[[], Work], watch: Watch, label: str) -> Work:
        """Issue a collective, and keep it under watch."""
        watch.raise_failure()
        work = call()
        self.entries.append(entry)
        if isinstance(work, Done):
            return work
        self.works = [other for other in self.works if not other.is_over]
        pending = Pending(work, watch, f"{entry.verb} of {label}")
        self.works.append(pending)
        return pending

    def issue_zeros(self, entry: Entry, device: torch.device) -> None:
        """Issue what other ranks did, with zeros, and wait for it."""
        whole = torch.zeros(entry.numel, dtype=entry.dtype, device=device)
        match entry.verb:
            case "all_gather":
                self.group.all_gather(whole, whole[: entry.numel // self.group.size].clone()).wait()
            case "reduce_scatter":
                self.group.reduce_scatter(whole, Pool()).wait()
            case _:
                self.group.all_reduce(whole).wait()


class Watch:
    """The agreement of the ranks that run one tree of units.

    Attributes:
        failure: Why the step cannot go on, on any rank; empty if it can.
    """

    def __init__(self, shards: Group, replicas: Group, device: torch.device) -> None:
        """Find the ranks, and a place of their own in the store.

        Collective:
            All ranks of the groups; blocks.
        """
        token: object = shards.gather_objects(uuid.uuid4().hex)[0]
        token = replicas.gather_objects(token)[0]
        rows = shards.gather_objects(replicas.ranks) if replicas.size > 1 else [shards.ranks]
        self._ranks = sorted({rank for row in rows if isinstance(row, list) for rank in row})
        self._rank = Group.own_rank()
        self._store: Store | None = shared_store() if len(self._ranks) > 1 else None
        self._token = str(token)
        self._epoch = 0
        self._device = device
        self._orders: list[Order] = []
        self._position = 0  # decisions taken in this epoch
        self._announced = -1  # the last position at which this rank announced
        self._text = ""  # the last decision
        self._expected: dict[tuple[int, int], str] = {}
        self._last_round = self._round = 0  # hashes of the decisions
        self.failure = ""

    def watched(self, group: Group, orders: dict[object, Order], name: str, label: str) -> Collectives:
        """Give a group of the same ranks that issues under watch, in an order of its own.

        Args:
            group: The ranks.
            orders: Those made before; one group and name share one order.
            name: What the order is for.
            label: What is gathered or reduced, for messages.

        Collective:
            All ranks of the group, if the order is new; blocks.
        """
        if group.size == 1:
            return group
        key = (name, group.process_group)
        if key not in orders:
            orders[key] = Order(f"{name}{len(orders)}", group.twin())
            self._orders.append(orders[key])
        return Watched(orders[key], self, label)

    # Decisions

    def begin_round(self, text: str) -> None:
        """Begin what ranks repeat: a forward, and perhaps a backward."""
        self.decide(text)
        self._last_round, self._round = self._round, 0
        for order in self._orders:
            order.begin_round()

    def decide(self, text: str) -> None:
        """Go on if all ranks do the same next; see [Note: agreed order].

        Raises:
            StateError: On all ranks, if one does something else, or cannot go on.
        """
        self.raise_failure()
        if self._store is None:
            return
        self._text = text
        key = (self._last_round, self._round)
        if self._expected.get(key) != text:
            self._announce(text)
            if len(self._expected) >= _MAX_REMEMBERED:
                self._expected.clear()
            self._expected[key] = text
        self._position += 1
        self._round = hash((self._round, text))

    def _announce(self, text: str) -> None:
        store, position = self._the_store, self._position
        self._look()
        before, self._announced = self._announced, position
        said = f"rank {self._rank}: {text}"
        first = store.compare_set(self._key(f"first/{position}"), "", said).decode()
        if first.partition(": ")[2] != text:
            self._stop(_mismatch(first, said))
        store.set(self._key("said"), f"{position} {said}")
        if store.add(self._key(f"count/{position}"), 1) == len(self._ranks):
            store.set(self._key(f"agreed/{position}"), "1")
            for name in ("first", "count", "agreed"):
                store.delete_key(self._key(f"{name}/{before}"))
        agreed = self._key(f"agreed/{position}")
        self.wait(lambda seconds: _is_set_within(store, agreed, seconds), f"all ranks to announce: {text}")

    def _look(self) -> None:
        """Raise if another rank failed, or announced a decision that this rank took without a word."""
        self._listen()
        self.raise_failure()
        store = self._the_store
        if not store.check([self._key("said")]):
            return
        position, _, said = store.get(self._key("said")).decode().partition(" ")
        is_passed = self._announced < int(position) < self._position
        if is_passed:
            self._stop(_mismatch(f"rank {self._rank}: {self._text}", said))
        is_ahead = int(position) > self._announced == self._position
        if is_ahead and not store.check([self._key(f"agreed/{self._position}")]):
            self._stop(_mismatch(f"rank {self._rank}: {self._text}", said))

    # Waiting

    def wait(self, is_done_within: Callable[[float], bool], what: str) -> None:
        """Wait, looking after the other ranks meanwhile.

        Raises:
            StateError: If a rank cannot go on, or the store's timeout is over.
        """
        begun = time.monotonic()
        patience = 1.0 if os.environ.get("TORCH_DISTRIBUTED_DEBUG", "OFF") in ("INFO", "DETAIL") else PATIENCE_S
        while not is_done_within(SLICE_S):
            self._look()
            waited = time.monotonic() - begun
            if waited > self._the_store.timeout.total_seconds():
                self._stop(f"rank {self._rank} waited {waited:.0f} s for {what}")
            if waited > patience:
                patience *= 2
                self._tell(what, waited)

    def _tell(self, what: str, waited: float) -> None:
        """Log what this rank waits for, and what the others do."""
        store = self._the_store
        store.set(self._key(f"waits/{self._rank}"), what)
        others = [
            f"rank {rank} waited for {store.get(key).decode()}"
            for rank in self._ranks
            if rank != self._rank and store.check([key := self._key(f"waits/{rank}")])
        ]
        rest = "; ".join(others) or "no other rank has said that it waits"
        _log.warning("rank %d has waited %.0f s for %s; %s", self._rank, waited, what, rest)

    # Failure

    def fail(self, cause: str) -> None:
        """Tell all ranks that this one cannot go on; the first word counts."""
        if self.failure:
            return
        self.failure = cause
        if self._store is not None:
            with contextlib.suppress(RuntimeError):  # the rank that serves it may be the one that died
                self.failure = self._store.compare_set(self._key("failed"), "", cause).decode()

    def raise_failure(self) -> None:
        """Raise if the step cannot go on.

        Raises:
            StateError: With the same text on all ranks.
        """
        if self.failure:
            raise StateError(
                f"this step cannot go on: {self.failure}. All ranks stop here; the next forward starts anew, or call "
                "reset(model) on all ranks"
            )

    def _stop(self, cause: str) -> None:
        self.fail(cause)
        self.raise_failure()

    def _listen(self) -> None:
        if not self.failure and self._store is not None and self._store.check([self._key("failed")]):
            self.failure = self._store.get(self._key("failed")).decode()

    def renew(self) -> None:
        """Meet all ranks after a failure, and bring the groups into step; see [Note: after a failure].

        Raises:
            StateError: If a rank does not come within the store's timeout.

        Collective:
            All ranks call; blocks. Nothing to do if there was no failure.
        """
        self._listen()
        if not self.failure:
            return
        if self._store is not None:
            self._even_out()
        self._epoch += 1
        self._position, self._announced = 0, -1
        self._expected.clear()
        self._last_round = self._round = 0
        for order in self._orders:
            order.works.clear()
            order.entries.clear()
            order.begun = 0
        self.failure = ""

    def _even_out(self) -> None:
        store = self._the_store
        issued = {
            order.name: (order.count, [(e.verb, e.numel, str(e.dtype).removeprefix("torch.")) for e in order.entries])
            for order in self._orders
        }
        store.set(self._key(f"issued/{self._rank}"), json.dumps(issued))
        for rank in self._ranks:
            key = self._key(f"issued/{rank}")
            begun = time.monotonic()
            while not _is_set_within(store, key, SLICE_S):
                if time.monotonic() - begun > store.timeout.total_seconds():
                    raise StateError(f"rank {rank} did not come to begin anew after: {self.failure}; restart all ranks")
        for order in self._orders:
            mine = order.count + len(order.entries)
            for rank in order.group.ranks:
                count, entries = json.loads(store.get(self._key(f"issued/{rank}")))[order.name]
                for verb, numel, dtype in entries[max(0, mine - count) :]:
                    order.issue_zeros(Entry(verb, numel, getattr(torch, dtype)), self._device)
                    mine += 1
            for work in order.works:
                work.settle()
            order.count = mine

    @property
    def _the_store(self) -> Store:
        assert self._store is not None
        return self._store

    def _key(self, name: str) -> str:
        return f"sharding/{self._token}/{self._epoch}/{name}"


class Watched:
    """The ranks of an order, for one unit: issues its collectives under watch."""

    def __init__(self, order: Order, watch: Watch, label: str) -> None:
        self._order = order
        self._watch = watch
        self._label = label
        self.size = order.group.size

    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor) -> Work:
        """Fill `whole` as `Group.all_gather` does, once all ranks are known to do so next.

        Collective:
            All ranks of the group; blocks only where the ranks did something else last time.
        """
        self._watch.decide(f"gather {self._label}, {whole.numel()} elements of {whole.dtype}")
        entry = Entry("all_gather", whole.numel(), whole.dtype)
        return self._order.issue(entry, lambda: self._order.group.all_gather(whole, shard), self._watch, self._label)

    def reduce_scatter(self, whole: torch.Tensor, pool: Pool) -> Work:
        """Sum `whole` as `Group.reduce_scatter` does; that it comes was decided when backward began."""
        entry = Entry("reduce_scatter", whole.numel(), whole.dtype)
        group = self._order.group
        return self._order.issue(entry, lambda: group.reduce_scatter(whole, pool), self._watch, self._label)

    def all_reduce(self, tensor: torch.Tensor) -> Work:
        """Sum `tensor` as `Group.all_reduce` does; that it comes was decided when backward began."""
        entry = Entry("all_reduce", tensor.numel(), tensor.dtype)
        return self._order.issue(entry, lambda: self._order.group.all_reduce(tensor), self._watch, self._label)


class Pending:
    """A collective under way and under watch."""

    def __init__(self, work: Work, watch: Watch, what: str) -> None:
        self._work = work
        self._watch = watch
        self._what = what
        self.is_over = False

    def wait(self) -> None:
        """Block until it is done.

        Raises:
            StateError: On all ranks, if one of them cannot go on.
        """
        if self.is_over:
            return
        try:
            if not self._work.is_done_within(0.001):
                self._watch.wait(self._work.is_done_within, f"the {self._what}")
            self._work.wait()
        except RuntimeError as error:
            if isinstance(error, StateError):
                raise
            self._watch.fail(f"the {self._what} failed, perhaps because a rank died: {error}")
            self._watch.raise_failure()
        self.is_over = True

    def is_done_within(self, seconds: float) -> bool:
        """Wait for at most this long, and tell whether it is done."""
        return self.is_over or self._work.is_done_within(seconds)

    def settle(self) -> None:
        """Wait for the end, whatever the other ranks say: they are known to have issued it."""
        if not self.is_over:
            self._work.wait()
        self.is_over = True


def _is_set_within(store: Store, key: str, seconds: float) -> bool:
    """Poll the store for a key: its own wait cannot be told apart from a lost connection."""
    deadline = time.monotonic() + seconds
    pause = 0.0002
    while not store.check([key]):
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(pause * 2, 0.05)
    return True


def _mismatch(first: str, other: str) -> str:
    """Say what two ranks do, from where their texts part."""
    (who, _, one), (whose, _, two) = first.partition(": "), other.partition(": ")
    parting = next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), 0)
    at = max(0, parting - 60)
    return (
        f"ranks run different units. {who.capitalize()}: {one[at : at + 200]}. {whose.capitalize()}: "
        f"{two[at : at + 200]}. Run the same modules, in the same order, on every rank"
    )
