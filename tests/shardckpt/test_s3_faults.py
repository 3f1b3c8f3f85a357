"""Tests of S3 storage on bad days: a faulty proxy stands before the real server."""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np
import pytest

from shardckpt.catalogue import CatalogueBuilder, File, Tensor
from shardckpt.committed import prepare
from shardckpt.endpoints import FileSink, MemorySource
from shardckpt.errors import CheckpointError, CheckpointExistsError, StorageError
from shardckpt.manifest import MANIFEST_PATH
from shardckpt.plan import plan
from shardckpt.region import whole
from shardckpt.s3_store import PART_BYTES, S3Store
from shardckpt.storage import open_store
from shardckpt.transfer import TransferOptions, transfer
from tests.s3_proxy import IMPATIENT, Fault, Proxy, first, sometimes
from tests.s3_server import S3Root, S3Server
from tests.shardckpt.checkpoints import read_checkpoint, write_checkpoint

_RANDOM = np.random.default_rng(5)
ARRAYS = {
    "model.large": _RANDOM.standard_normal((4800, 1000)).astype(np.float32),
    **{f"model.small.{i}": np.full((i, 3), i, np.int64) for i in range(40)},
}
"""Two ranks write two parts each."""

OTHERS = {name: array + 1 for name, array in ARRAYS.items()}

BAD_DAYS: dict[str, tuple[tuple[Fault, ...], float]] = {
    "throttled": ((Fault.THROTTLE, Fault.ERROR), 0.3),
    "breaking before": ((Fault.RESET, Fault.HALF_SENT), 0.25),
    "breaking after": ((Fault.LOSE_ANSWER,), 0.25),
    "breaking within": ((Fault.CUT, Fault.SHORT), 0.3),
    "corrupting": ((Fault.CORRUPT,), 0.5),
    "slow": ((Fault.SLOW,), 0.1),
}
"""What strikes, and which share of the requests."""


def same(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> bool:
    """Hold if all arrays are equal."""
    return found.keys() == expected.keys() and all(np.array_equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("day", BAD_DAYS)
def test_nothing_is_lost_and_nothing_is_wrong(day: str, s3_proxy: Proxy, s3_root: S3Root, s3_server: S3Server) -> None:
    """Whatever strikes some of the requests, a save and a load succeed, and no upload is left behind."""
    faults, share = BAD_DAYS[day]
    s3_proxy.choose = sometimes(*faults, share=share, only=("part", "put") if day == "corrupting" else ())
    store = open_store(s3_root.url, s3_proxy.options(s3_root, **IMPATIENT if day == "slow" else {}))
    write_checkpoint(store, ARRAYS)
    write_checkpoint(store, OTHERS, overwrite=True)
    assert same(read_checkpoint(store), OTHERS)
    assert s3_proxy.struck.total() >= 2
    assert s3_server.uploads(s3_root.prefix) == []
    assert len(store.list()) == 4


def test_an_answer_that_drips_is_asked_for_again(s3_proxy: Proxy, s3_root: S3Root) -> None:
    """A connection that gives a little all the time does not hold a load up for ever."""
    write_checkpoint(open_store(s3_root.url, s3_root.options), ARRAYS)
    s3_proxy.choose = first(Fault.TRICKLE, 1, "get")
    store = open_store(s3_root.url, s3_proxy.options(s3_root, deadline_s=6))
    out, reader = np.empty(4 << 20, np.uint8), store.open_reader("shard-00000-of-00002.safetensors")
    started = time.monotonic()
    reader.read_into(0, out)
    assert 2 <= time.monotonic() - started < 30
    assert s3_proxy.count("get") == 2


@pytest.mark.parametrize(
    ("operation", "fault", "text"),
    [
        ("part", Fault.THROTTLE, r"cannot write part \d of 's3://.*/shard-0000\d-of-00002.*SlowDown"),
        ("part", Fault.RESET, r"cannot write part \d of .*Connection(Closed|Reset)"),
        ("complete", Fault.ERROR, r"cannot complete 's3://.*/shard-00000.*InternalError"),
        ("put", Fault.SLOW, r"cannot write 's3://.*/chunks.*ReadTimeout"),
    ],
)
def test_a_failure_that_lasts_is_told_in_time(
    operation: str, fault: Fault, text: str, s3_proxy: Proxy, s3_root: S3Root, s3_server: S3Server
) -> None:
    """At the deadline the error names object, part, attempts and what came first; nothing is left behind."""
    s3_proxy.choose = first(fault, 1 << 30, operation)
    started = time.monotonic()
    with pytest.raises(StorageError, match=text) as caught:
        write_checkpoint(open_store(s3_root.url, s3_proxy.options(s3_root, deadline_s=1.5, **IMPATIENT)), ARRAYS)
    assert time.monotonic() - started < 30
    assert "gave up after" in str(caught.value)
    assert "the first failed with" in str(caught.value)
    assert "Check that the server is up and within reach, and whether it throttles" in str(caught.value)
    assert caught.value.path.startswith(s3_root.url)
    store = open_store(s3_root.url, s3_root.options)
    assert s3_server.uploads(s3_root.prefix) == []
    assert not store.exists(MANIFEST_PATH)
    write_checkpoint(store, ARRAYS)
    assert same(read_checkpoint(store), ARRAYS)


def test_a_server_that_goes_away_does_not_hold_up_the_error(
    s3_proxy: Proxy, s3_root: S3Root, s3_server: S3Server
) -> None:
    """Cleaning up is tried for one upload only when nothing answers; the next save at that place does it."""
    s3_proxy.choose = lambda request: Fault.RESET if s3_proxy.count("part") > 3 else None
    with pytest.raises(StorageError, match="gave up after"):
        write_checkpoint(open_store(s3_root.url, s3_proxy.options(s3_root, deadline_s=1)), ARRAYS, world_size=12)
    assert len({request.path for request in s3_proxy.requests if request.operation == "abort"}) == 1
    assert s3_server.uploads(s3_root.prefix) != []
    store = open_store(s3_root.url, s3_root.options)
    assert prepare(store, overwrite=False).leftovers != ()
    assert s3_server.uploads(s3_root.prefix) == []


def test_an_error_in_a_write_publishes_nothing(s3_proxy: Proxy, s3_root: S3Root, s3_server: S3Server) -> None:
    """A refusal in the middle of an overwrite comes at once; the old checkpoint is as it was."""
    store = open_store(s3_root.url, s3_root.options)
    write_checkpoint(store, ARRAYS)
    before, started = store.list(), time.monotonic()
    s3_proxy.choose = lambda asked: Fault.DENY if asked.operation == "part" and s3_proxy.count("part") == 3 else None
    with pytest.raises(StorageError, match=r"cannot write part \d of .*AccessDenied.*Check the credentials"):
        write_checkpoint(open_store(s3_root.url, s3_proxy.options(s3_root)), OTHERS, overwrite=True)
    assert time.monotonic() - started < 30
    assert store.list() == before
    assert s3_server.uploads(s3_root.prefix) == []
    assert same(read_checkpoint(store), ARRAYS)


def test_a_list_that_lags_behind_hides_no_checkpoint(s3_proxy: Proxy, s3_root: S3Root) -> None:
    """A checkpoint that no list shows yet is neither overwritten unasked nor mixed with a new one."""
    store = open_store(s3_root.url, s3_proxy.options(s3_root))
    assert store.list() == {}
    write_checkpoint(open_store(s3_root.url, s3_root.options), ARRAYS)
    s3_proxy.choose = sometimes(Fault.STALE, share=1, only=("list",))
    assert store.list() == {}
    with pytest.raises(CheckpointExistsError):
        write_checkpoint(store, OTHERS)
    assert same(read_checkpoint(store), ARRAYS)
    write_checkpoint(store, OTHERS, overwrite=True)
    assert same(read_checkpoint(store), OTHERS)


def test_a_checkpoint_that_appears_meanwhile_is_not_overwritten(s3_root: S3Root) -> None:
    """Of two saves to one place that see nothing there, the second to commit fails."""

    class Raced(S3Store):
        def put(self, path: str, data: bytes, *, is_new: bool = False) -> None:
            if path == MANIFEST_PATH:
                super().put(path, b"theirs")
            super().put(path, data, is_new=is_new)

    store = Raced(s3_root.url, s3_root.options)
    with pytest.raises(CheckpointExistsError, match=r"manifest\.json' appeared meanwhile: another save writes"):
        write_checkpoint(store, ARRAYS)
    assert store.get(MANIFEST_PATH, max_nbytes=100) == b"theirs"


def test_a_manifest_whose_answer_was_lost_is_known_again(s3_proxy: Proxy, s3_root: S3Root) -> None:
    """A conditional put that came through is no conflict with itself."""
    s3_proxy.choose = first(Fault.LOSE_ANSWER, 2, "put")
    store = open_store(s3_root.url, s3_proxy.options(s3_root))
    store.put("x", b"mine", is_new=True)
    assert s3_proxy.count("put") == 3
    with pytest.raises(CheckpointExistsError):
        store.put("x", b"again", is_new=True)
    assert store.get("x", max_nbytes=10) == b"mine"


def test_a_server_without_conditions_is_served_without_them(s3_proxy: Proxy, s3_root: S3Root) -> None:
    """There, whether a file is new is only looked up before it is put."""
    s3_proxy.choose = first(Fault.DECLINE, 1, "put")
    store = open_store(s3_root.url, s3_proxy.options(s3_root))
    store.put("x", b"mine", is_new=True)
    assert store.get("x", max_nbytes=10) == b"mine"
    with pytest.raises(CheckpointExistsError):
        store.put("x", b"again", is_new=True)


def test_what_came_damaged_is_found(s3_proxy: Proxy, s3_root: S3Root) -> None:
    """A bit that flips on the way to us is under a checksum too."""
    write_checkpoint(open_store(s3_root.url, s3_root.options), ARRAYS)
    s3_proxy.choose = lambda request: Fault.CORRUPT if request.operation == "get" and "shard" in request.path else None
    with pytest.raises(CheckpointError, match="damaged: "):
        read_checkpoint(open_store(s3_root.url, s3_proxy.options(s3_root)))


def test_requests_are_few_large_and_bounded(s3_proxy: Proxy, s3_root: S3Root) -> None:
    """A load asks for pieces of some MiB, small tensors together, several at a time but no more than workers."""
    store = open_store(s3_root.url, s3_proxy.options(s3_root))
    write_checkpoint(store, ARRAYS)
    assert s3_proxy.count("part") == 4
    assert 2 <= s3_proxy.most_at_once <= 8
    s3_proxy.requests.clear()
    s3_proxy.most_at_once = 0
    assert same(read_checkpoint(store), ARRAYS)
    shards = [request for request in s3_proxy.requests if request.operation == "get" and "shard" in request.path]
    nbytes = sum(array.nbytes for array in ARRAYS.values())
    assert len(shards) <= 2 * (nbytes // PART_BYTES + 2)
    assert 2 <= s3_proxy.most_at_once <= 8


def test_memory_of_an_upload_stays_within_the_budget(s3_root: S3Root) -> None:
    """However large the file, no more of it is held than the budget allows."""
    import tracemalloc  # here, as it slows down what it watches

    content = np.random.default_rng(1).integers(0, 256, 72 << 20, dtype=np.uint8)
    builders = [CatalogueBuilder(), CatalogueBuilder()]
    for builder in builders:
        builder.add_tensor(Tensor("x", "U8", content.shape))
        builder.add_file(File("x", content.nbytes, 0))
        builder.add_chunk(0, whole(content.shape), file=0, byte_offset=0)
    store = open_store(s3_root.url, s3_root.options)
    store.exists("x")
    copies = plan(builders[0].build(), builders[1].build())
    sink = FileSink(store, "x", b"", content.nbytes)
    tracemalloc.start()
    try:
        transfer(copies, [MemorySource(content)], [sink], options=TransferOptions(budget_bytes=32 << 20))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    sink.commit()
    assert store.list() == {"x": content.nbytes}
    assert 16 << 20 < peak < 34 << 20
