"""Tests of S3 storage on a real server: the contract of all stores, and what objects and uploads add to it."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from shardckpt.errors import CheckpointExistsError, CheckpointNotFoundError, FormatError, StorageError, UnsupportedError
from shardckpt.s3_store import MAX_PARTS, PART_BYTES, S3Store
from shardckpt.storage import Store, open_store
from tests.s3_proxy import Fault, Proxy, first
from tests.s3_server import BUCKET, PUBLIC_BUCKET, READ_ONLY_KEY, READ_ONLY_SECRET, S3Root, S3Server
from tests.shardckpt.test_storage import StorageContract

CONTENT = np.random.default_rng(3).integers(0, 256, 2 * PART_BYTES + 12_345, dtype=np.uint8)
"""Three parts."""


def write(store: Store, path: str, content: np.ndarray = CONTENT, step: int = 1 << 20) -> None:
    """Write a file front to back."""
    writer = store.create(path, nbytes=len(content))
    for at in range(0, len(content), step):
        writer.write(at, content[at : at + step])
    writer.finish()
    writer.commit()


class TestS3Store(StorageContract):
    """A prefix on a real server."""

    @pytest.fixture
    def store(self, s3_root: S3Root) -> Store:
        """Give an empty prefix."""
        return open_store(s3_root.url, s3_root.options)

    def test_ranges_may_be_written_in_any_order_by_many_threads(self, store: Store, s3_root: S3Root) -> None:
        """Each part is sent by the thread that fills it; the object has all bytes in their places."""
        writer = store.create("a.bin", nbytes=len(CONTENT))
        step = 777_777
        ranges = np.random.default_rng(4).permutation(np.arange(0, len(CONTENT), step))
        with ThreadPoolExecutor(6) as threads:
            list(threads.map(lambda at: writer.write(at, CONTENT[at : at + step]), ranges.tolist()))
        writer.finish()
        writer.commit()
        assert store.get("a.bin", max_nbytes=1 << 30) == CONTENT.tobytes()

    def test_an_upload_in_parts_carries_a_checksum_of_each(
        self, store: Store, s3_server: S3Server, s3_root: S3Root
    ) -> None:
        """The server has compared the bytes of every part with our CRC-32C."""
        write(store, "a.bin")
        found = s3_server.client().head_object(Bucket=BUCKET, Key=f"{s3_root.prefix}/a.bin", ChecksumMode="ENABLED")
        assert found["ChecksumCRC32C"].endswith("-3")
        assert store.get("a.bin", max_nbytes=1 << 30) == CONTENT.tobytes()

    def test_a_hole_between_parts_is_not_published(self, store: Store) -> None:
        """A byte that never came, wherever it is, is an error at the end, and nothing appears."""
        for hole in (0, PART_BYTES, len(CONTENT) - 1):
            writer = store.create("a.bin", nbytes=len(CONTENT))
            writer.write(0, CONTENT[:hole])
            writer.write(hole + 1, CONTENT[hole + 1 :])
            text = rf"a\.bin' has {len(CONTENT) - 1} bytes after the write, expected {len(CONTENT)}; save again"
            with pytest.raises(StorageError, match=text):
                writer.finish()
            writer.abort()
        assert store.list() == {}

    def test_an_abort_leaves_no_upload(self, store: Store, s3_server: S3Server, s3_root: S3Root) -> None:
        """Parts that were sent are gone, which a list of objects would not show."""
        writer = store.create("a.bin", nbytes=len(CONTENT))
        writer.write(0, CONTENT[: PART_BYTES + 1])
        assert s3_server.uploads(s3_root.prefix) == [f"{s3_root.prefix}/a.bin"]
        writer.abort()
        assert s3_server.uploads(s3_root.prefix) == []
        assert store.list() == {}

    def test_an_abort_after_the_commit_leaves_the_object(self, store: Store) -> None:
        """What is committed stays."""
        writer = store.create("a.bin", nbytes=1)
        writer.write(0, b"1")
        writer.finish()
        writer.commit()
        writer.abort()
        assert store.list() == {"a.bin": 1}

    def test_unfinished_uploads_are_found_and_dropped(self, store: Store, s3_server: S3Server, s3_root: S3Root) -> None:
        """A process that was killed leaves uploads; those of the names that are asked for go."""
        for path in ("one", "two", "folder/one"):
            store.create(path, nbytes=5).write(0, b"12")
        assert store.list() == {}
        assert store.discard_unfinished(lambda path: path == "one") == ("one",)
        assert set(s3_server.uploads(s3_root.prefix)) == {f"{s3_root.prefix}/two", f"{s3_root.prefix}/folder/one"}
        assert set(store.discard_unfinished(lambda path: True)) == {"two", "folder/one"}

    def test_a_put_that_must_be_new_never_overwrites(self, store: Store, s3_root: S3Root) -> None:
        """Of several that put at the same time one succeeds; the others are told, and the message says what to do."""
        outcomes: list[str] = []
        barrier = threading.Barrier(4)

        def put(number: int) -> None:
            other = open_store(s3_root.url, s3_root.options)
            other.exists("x")
            barrier.wait()
            try:
                other.put("manifest", bytes([number]), is_new=True)
                outcomes.append("put")
            except CheckpointExistsError as error:
                outcomes.append(str(error))

        with ThreadPoolExecutor(4) as threads:
            list(threads.map(put, range(4)))
        assert sorted(outcomes)[3] == "put"
        assert all("manifest' appeared meanwhile: another save" in text for text in sorted(outcomes)[:3])
        assert all("choose another destination" in text for text in sorted(outcomes)[:3])

    def test_an_object_replaced_while_it_is_read_is_an_error(self, store: Store) -> None:
        """A reader gives the bytes of the object that it opened, or none."""
        store.put("a.bin", b"old content")
        with contextlib.closing(store.open_reader("a.bin")) as reader:
            store.put("a.bin", b"new content")
            with pytest.raises(
                StorageError, match=r"a\.bin' was replaced while it was read; open the checkpoint again"
            ):
                reader.read(0, 3)

    def test_an_empty_range_asks_for_nothing(self, store: Store) -> None:
        """No bytes need no request, which could not name them."""
        store.put("empty", b"")
        assert store.open_reader("empty").read(0, 0) == b""

    def test_folder_markers_are_no_files(self, store: Store, s3_server: S3Server, s3_root: S3Root) -> None:
        """Consoles make empty objects that end with `/`."""
        s3_server.client().put_object(Bucket=BUCKET, Key=f"{s3_root.prefix}/", Body=b"")
        s3_server.client().put_object(Bucket=BUCKET, Key=f"{s3_root.prefix}/sub/", Body=b"")
        store.put("sub/x", b"1")
        assert store.list() == {"sub/x": 1}

    def test_a_prefix_is_not_that_of_its_neighbours(self, store: Store, s3_root: S3Root) -> None:
        """`run-1` does not hold what is in `run-10`."""
        open_store(f"{s3_root.url}-neighbour", s3_root.options).put("x", b"1")
        assert store.list() == {}


def test_lists_of_many_pages_are_whole(s3_proxy: Proxy, s3_root: S3Root, s3_server: S3Server) -> None:
    """More objects than an answer holds are all there, also when some answers fail."""
    store, client = open_store(s3_root.url, s3_proxy.options(s3_root)), s3_server.client()
    with ThreadPoolExecutor(4) as threads:
        keys = [f"{s3_root.prefix}/{number:04}" for number in range(1003)]
        list(threads.map(lambda key: client.put_object(Bucket=BUCKET, Key=key), keys))
    s3_proxy.choose = first(Fault.THROTTLE, 2, "list")
    assert list(store.list()) == [f"{number:04}" for number in range(1003)]
    assert s3_proxy.count("list") == 2 + 2


@pytest.mark.parametrize(
    ("nbytes", "part"),
    [
        (0, 8 << 20),
        (80 << 30, 9 << 20),
        (MAX_PARTS * PART_BYTES, PART_BYTES),
        (400 << 30, 41 << 20),
        (5 << 40, 525 << 20),
    ],
)
def test_parts_are_as_large_as_their_number_demands(nbytes: int, part: int) -> None:
    """No object of any size has more parts than S3 takes; only large ones have larger parts."""
    store = S3Store("s3://bucket/x", {})
    assert store.part_bytes(nbytes) == part
    assert -(-nbytes // part) <= MAX_PARTS


def test_refusals_come_at_once_and_say_what_to_do(s3_server: S3Server, s3_root: S3Root) -> None:
    """Wrong keys, too few rights and a missing bucket are not tried again."""
    store = open_store(s3_root.url, s3_root.options)
    store.put("x", b"1")
    wrong = open_store(s3_root.url, {**s3_root.options, "secret": "wrong"})
    reader = open_store(s3_root.url, {**s3_root.options, "key": READ_ONLY_KEY, "secret": READ_ONLY_SECRET})
    elsewhere = open_store("s3://no-such-bucket/x", s3_root.options)
    assert reader.get("x", max_nbytes=1) == b"1"
    with pytest.raises(StorageError, match=r"cannot find '.*/x': .*403.*Check the credentials and what they allow"):
        wrong.open_reader("x")
    with pytest.raises(StorageError, match=r"cannot write '.*/x': .*SignatureDoesNotMatch.*Check the credentials"):
        wrong.put("x", b"")
    with pytest.raises(StorageError, match=r"cannot create '.*/y': .*AccessDenied.*Check the credentials"):
        reader.create("y", nbytes=1)
    with pytest.raises(StorageError, match=r"cannot write 's3://no-such-bucket/x/y': .*NoSuchBucket.*Make the bucket"):
        elsewhere.put("y", b"")
    with pytest.raises(StorageError, match="NoSuchBucket"):
        elsewhere.list()
    with pytest.raises(CheckpointNotFoundError):
        elsewhere.open_reader("y")
    with pytest.raises(UnsupportedError, match=r"'s3://' names no bucket; expected s3://bucket/path"):
        open_store("s3://")


def test_a_public_bucket_is_read_without_credentials(s3_server: S3Server) -> None:
    """`anon` asks unsigned, and finds what everyone may read, but may not write."""
    options = {"endpoint_url": s3_server.endpoint_url, "anon": True}
    store = open_store(f"s3://{PUBLIC_BUCKET}", options)
    assert store.list()["beside"] == 10_000
    assert store.get("beside", max_nbytes=1 << 20) == b"1" * 10_000
    with pytest.raises(StorageError, match="Check the credentials"):
        store.put("x", b"")


def test_a_dropped_upload_is_told(s3_server: S3Server, s3_root: S3Root) -> None:
    """If somebody else ends an upload, the writer says so and nothing appears."""
    store = open_store(s3_root.url, s3_root.options)
    writer = store.create("x", nbytes=3)
    store.discard_unfinished(lambda path: True)
    with pytest.raises(StorageError, match=r"cannot write part 1 of '.*/x': .*NoSuchUpload.*dropped it.*save again"):
        writer.write(0, b"123")
    writer.abort()
    assert store.list() == {}


def test_reads_past_the_end_ask_for_nothing(s3_proxy: Proxy, s3_root: S3Root) -> None:
    """The size is known from the opening."""
    store = open_store(s3_root.url, s3_proxy.options(s3_root))
    store.put("x", b"123")
    reader = store.open_reader("x")
    with pytest.raises(FormatError, match="is truncated"):
        reader.read_into(2, np.empty(2, np.uint8))
    assert s3_proxy.count("get") == 0
