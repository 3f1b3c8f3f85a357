"""Tests of copies that a real S3 server makes by itself: what passes through the client is counted in a proxy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load

from shardckpt.checksum import crc32c
from shardckpt.storage import Store, open_store
from tests.s3_proxy import Fault, Proxy, first, running_proxy
from tests.s3_server import BUCKET, S3Server
from tests.shardckpt.checkpoints import read_checkpoint, write_checkpoint
from tests.shardckpt.cli.invocation import run

_MIB = 1 << 20
_RANDOM = np.random.default_rng(8)


def values(nbytes: int) -> NDArray[np.float32]:
    """Give random numbers."""
    return _RANDOM.integers(0, 1 << 30, nbytes // 4, dtype=np.int32).view(np.float32)


ARRAYS: Mapping[str, NDArray[np.generic]] = {
    "model.embed": values(40 * _MIB),
    "model.norm": values(1000),
    **{f"model.layers.{i}": values(3 * _MIB) for i in range(8)},
    "model.head": values(30 * _MIB + 20),
}
NBYTES = sum(array.nbytes for array in ARRAYS.values())


@dataclass(frozen=True)
class Place:
    """A checkpoint of four ranks on a server, behind a proxy that counts.

    Attributes:
        url: Of the folder that it is in, as "four".
        options: Storage options by way of the proxy.
        proxy: Counts.
    """

    url: str
    options: dict[str, object]
    proxy: Proxy

    def store(self, path: str, **change: object) -> Store:
        """Open a folder."""
        return open_store(f"{self.url}/{path}", {**self.options, **change})

    def run(self, verb: str, target: str, *more: object, exit_code: int = 0, source: str = "four") -> str:
        """Run a command on the checkpoint; gives what it said."""
        self.proxy.nbytes = 0
        self.proxy.requests.clear()
        options = [f"--storage-option={name}={value}" for name, value in self.options.items()]
        arguments = (verb, f"{self.url}/{source}", f"{self.url}/{target}", *more, *options)
        return run(*arguments, exit_code=exit_code).output


@pytest.fixture(scope="module")
def place(s3_server: S3Server) -> Iterator[Place]:
    """Write the checkpoint, once for all tests of this file."""
    url = f"s3://{BUCKET}/part-copies"
    write_checkpoint(open_store(f"{url}/four", s3_server.options), ARRAYS, world_size=4)
    with running_proxy(s3_server) as proxy:
        yield Place(url, {**s3_server.options, "endpoint_url": f"http://127.0.0.1:{proxy.port}"}, proxy)


@pytest.fixture(autouse=True)
def _sound(place: Place) -> None:
    """Begin without faults."""
    place.proxy.choose = lambda request: None


def assert_equal(found: Mapping[str, NDArray[np.generic]]) -> None:
    """Compare with what was saved, bit by bit."""
    assert list(found) == list(ARRAYS)
    for name, array in ARRAYS.items():
        assert found[name].tobytes() == array.tobytes(), name


def test_a_reshard_passes_little_through_the_client(place: Place) -> None:
    """From 4 ranks to 2, most bytes are copied by the server, and every checksum of the new checkpoint is right."""
    place.run("reshard", "two", "--to", 2)
    assert place.proxy.nbytes < 0.25 * NBYTES  # reading and writing it all would be 2.0
    assert place.proxy.count("copy part") >= 4
    assert_equal(read_checkpoint(place.store("two")))


def test_a_reshard_to_more_ranks_cuts_chunks_on_the_server(place: Place) -> None:
    """From 4 ranks to 6 chunks are cut, and the server tells the checksums of their parts."""
    place.run("reshard", "six", "--to", 6)
    assert place.proxy.nbytes < 1.1 * NBYTES
    assert_equal(read_checkpoint(place.store("six")))


def test_a_consolidation_passes_little_through_the_client(place: Place) -> None:
    """The one file has every tensor, most of it copied by the server."""
    place.run("consolidate", "one/model.safetensors")
    assert place.proxy.nbytes < 0.25 * NBYTES
    data = place.store("one").get("model.safetensors", max_nbytes=2 * NBYTES)
    found = load(data)
    assert_equal({name: found[name.removeprefix("model.")] for name in ARRAYS})


def test_a_copy_passes_little_through_the_client(place: Place) -> None:
    """The files of the copy are those of the checkpoint, to the byte."""
    place.run("cp", "copy")
    assert place.proxy.nbytes < 0.5 * NBYTES  # 5 MiB of each file fill up the part that its header is in
    source, copy = place.store("four"), place.store("copy")
    assert source.list() == copy.list()
    assert all(source.get(path, max_nbytes=NBYTES) == copy.get(path, max_nbytes=NBYTES) for path in source.list())


def test_nothing_is_handed_over_where_that_is_turned_off(place: Place) -> None:
    """With part_copies=false, and between different accounts, all bytes pass through the client."""
    place.run("cp", "by-hand", "--storage-option", "part_copies=false")
    assert place.proxy.count("copy part") == 0
    assert place.proxy.nbytes > 2 * NBYTES
    assert not place.store("x").can_copy_from(place.store("x", key="other"))
    assert not place.store("x").can_copy_from(open_store("memory://x"))
    assert place.store("x").can_copy_from(place.store("y"))


def test_damage_is_found_in_what_the_server_copies(place: Place) -> None:
    """A flipped bit deep in a chunk is refused by the checksum that the server tells, and nothing is published."""
    place.run("cp", "damaged")
    store = place.store("damaged")
    path = "shard-00000-of-00004.safetensors"
    data = bytearray(store.get(path, max_nbytes=NBYTES))
    data[-7 * _MIB] ^= 1
    store.put(path, bytes(data))
    for verb, target, more in (
        ("cp", "bad", ()),
        ("reshard", "bad", ("--to", 2)),
        ("consolidate", "bad/x.safetensors", ()),
    ):
        output = place.run(verb, target, *more, exit_code=1, source="damaged")
        assert "damaged: " in output
        assert path in output
    assert place.store("bad").list() == {}


def test_passing_failures_of_copies_are_tried_again(place: Place) -> None:
    """Throttled, and done though the answer was lost: the part is copied again, and the result is right."""
    for fault in (Fault.THROTTLE, Fault.LOSE_ANSWER):
        place.proxy.choose = first(fault, 2, "copy part")
        place.run("reshard", "again", "--to", 2, "--overwrite")
    assert place.proxy.struck[Fault.LOSE_ANSWER] == place.proxy.struck[Fault.THROTTLE] == 2
    assert_equal(read_checkpoint(place.store("again")))


def test_a_server_that_cannot_copy_parts_is_told_of(place: Place) -> None:
    """The message names the option that does without."""
    place.proxy.choose = first(Fault.DECLINE, 100, "copy part")
    assert "part_copies=false" in place.run("reshard", "none", "--to", 2, exit_code=1)


def test_a_source_that_changes_meanwhile_is_refused(place: Place) -> None:
    """A part is copied from the object that was opened, or not at all."""
    store, target = place.store("changing"), place.store("changed")
    data = ARRAYS["model.embed"].view(np.uint8)
    store.put("a", data[: 6 * _MIB].tobytes())
    reader, writer = store.open_reader("a"), target.create("b", nbytes=6 * _MIB)
    writer.expect_copies([(0, 6 * _MIB)])
    store.put("a", data[6 * _MIB : 12 * _MIB].tobytes())
    with pytest.raises(Exception, match="was replaced while it was read; open the checkpoint again"):
        writer.copy_from(reader, 0, 0, 6 * _MIB)
    writer.abort()
    assert target.list() == {}


@pytest.mark.parametrize("setting", ["when_supported", "when_required"])
def test_the_checksum_of_a_copied_part_is_known_either_way(place: Place, setting: str) -> None:
    """A server that tells none of what it copied, as in an upload without checksums, is read after."""
    target = place.store(setting, config_kwargs={"request_checksum_calculation": setting})
    data = ARRAYS["model.embed"].view(np.uint8)[: 18 * _MIB]
    target.put("a", data.tobytes())
    with closing(target.open_reader("a")) as reader:
        writer = target.create("b", nbytes=18 * _MIB)
        writer.expect_copies([(0, 17 * _MIB)])
        place.proxy.requests.clear()
        assert writer.copy_from(reader, 3, 0, 17 * _MIB) == crc32c(data[3 : 17 * _MIB + 3])
    assert place.proxy.count("get") == (0 if setting == "when_supported" else 3)
    writer.write(17 * _MIB, data[-_MIB:])
    writer.finish()
    writer.commit()
    found = target.get("b", max_nbytes=1 << 30)
    assert found == data[3 : 17 * _MIB + 3].tobytes() + data[-_MIB:].tobytes()
