"""Layouts of buckets against an owner counted element by element."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharding.layout import ALIGN_BYTES, BucketLayout, LocalSpan, Slot, align_numel, lay_out


@st.composite
def layouts(draw: st.DrawFn) -> BucketLayout:
    """Give layouts of up to six slots: scalars, empty ones, and cut anywhere, between rows, or nowhere."""
    slots = []
    for index in range(draw(st.integers(0, 6))):
        shape = tuple(draw(st.lists(st.integers(0, 6), max_size=3)))
        numel = math.prod(shape)
        row = math.prod(shape[1:]) if shape else 1
        granularity = draw(st.sampled_from([1, max(row, 1) if numel else 1, max(numel, 1)]))
        slots.append(Slot(f"p{index}", shape, granularity))
    return lay_out(slots, world_size=draw(st.integers(1, 9)), align=draw(st.sampled_from([1, 2, 4, 8])))


def _owners(layout: BucketLayout) -> list[list[tuple[int, int]]]:
    """Give, for every slot, the rank and the offset in its shard of each element, as the rule says."""
    return [
        [divmod(start + element, layout.shard_numel) for element in range(slot.numel)]
        for start, slot in zip(layout.starts, layout.slots, strict=True)
    ]


@given(layouts())
def test_spans_are_the_elements_that_a_rank_owns(layout: BucketLayout) -> None:
    """`span` and `local_spans` agree with the owner of each element, for every rank."""
    owners = _owners(layout)
    for rank in range(layout.world_size):
        expected = []
        for slot, owned in enumerate(owners):
            mine = [element for element, (owner, _) in enumerate(owned) if owner == rank]
            start, stop = layout.span(slot, rank)
            assert list(range(start, stop)) == mine
            if mine:
                expected.append(LocalSpan(slot, start, stop, owned[start][1]))
        assert list(layout.local_spans(rank)) == expected


@given(layouts())
def test_slots_are_aligned_disjoint_and_in_order(layout: BucketLayout) -> None:
    """Each starts at a multiple of the alignment after the end of the one before; all end within the buffer."""
    assert layout.shard_numel % layout.align == 0
    position = 0
    for start, slot in zip(layout.starts, layout.slots, strict=True):
        assert start >= position
        assert start % layout.align == 0
        position = start + slot.numel
    assert position <= layout.numel == layout.world_size * layout.shard_numel


@given(layouts())
def test_no_boundary_between_ranks_cuts_a_granule(layout: BucketLayout) -> None:
    """Every span begins and ends at a multiple of its slot's granularity."""
    for index, slot in enumerate(layout.slots):
        for rank in range(layout.world_size):
            start, stop = layout.span(index, rank)
            assert start % slot.granularity == 0
            assert stop % slot.granularity == 0


@given(st.lists(st.integers(0, 500), max_size=8), st.integers(1, 9), st.sampled_from([1, 4, 8]))
def test_padding_is_small_where_cuts_may_fall_anywhere(numels: list[int], world_size: int, align: int) -> None:
    """Below one alignment a slot and one a rank."""
    layout = lay_out([Slot(str(i), (n,)) for i, n in enumerate(numels)], world_size=world_size, align=align)
    assert layout.numel - sum(numels) <= (align - 1) * len(numels) + world_size * align - 1


@given(st.lists(st.integers(1, 60), min_size=1, max_size=5), st.integers(1, 5))
def test_slots_that_stay_whole_take_the_least_shard(numels: list[int], world_size: int) -> None:
    """With slots of any sizes, none cut, laid in order, no smaller shard would hold them."""
    layout = lay_out([Slot(str(i), (n,), n) for i, n in enumerate(numels)], world_size=world_size)

    def fits(capacity: int) -> bool:
        rank, free = 0, capacity
        for numel in numels:
            if numel > free:
                rank, free = rank + 1, capacity
            free -= numel
        return rank < world_size and max(numels) <= capacity

    assert layout.shard_numel == next(size for size in range(1, sum(numels) + 1) if fits(size))


def test_the_alignment_is_16_bytes_in_the_narrowest_dtype() -> None:
    """Wider ones are aligned then too; dtypes wider than it align to one element."""
    assert ALIGN_BYTES == 16
    assert [align_numel(sizes) for sizes in ([4], [4, 2], [1, 8], [16], [32])] == [4, 8, 16, 1, 1]


@pytest.mark.parametrize(
    ("slot", "world_size", "align", "message"),
    [
        (Slot("w", (3, 4), 5), 2, 1, r"granularity 5 of 'w' does not divide its 12 elements; use 1"),
        (Slot("w", (3, 4), 0), 2, 1, r"granularity 0 of 'w' does not divide"),
        (Slot("w", (3, 4)), 0, 1, "world_size and align must be positive, found 0 and 1"),
        (Slot("w", (3, 4)), 2, -1, "world_size and align must be positive, found 2 and -1"),
    ],
)
def test_counts_that_make_no_sense_are_refused(slot: Slot, world_size: int, align: int, message: str) -> None:
    """The message names the slot, what was found, and what to use."""
    with pytest.raises(ValueError, match=message):
        lay_out([slot], world_size=world_size, align=align)
