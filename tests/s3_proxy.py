"""A proxy in front of a real S3 server that does what networks and servers do on bad days."""

from __future__ import annotations

import contextlib
import enum
import http.client
import random
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.s3_server import S3Root, S3Server

_FORWARD_TIMEOUT_S = 60
_SLOW_S = 3


IMPATIENT: dict[str, object] = {"config_kwargs": {"read_timeout": 2}}
"""The options of who does not wait for slow answers."""


class Fault(enum.Enum):
    """What happens to one request."""

    THROTTLE = "503 Slow Down, nothing is done"
    ERROR = "500, nothing is done"
    DENY = "403, nothing is done"
    DECLINE = "501, nothing is done"
    RESET = "the connection breaks before the server hears of it"
    LOSE_ANSWER = "the server does it, then the connection breaks"
    CUT = "the connection breaks in the middle of the answer"
    SHORT = "the answer ends in the middle, in good order"
    HALF_SENT = "half of what is sent reaches the server, then both connections break"
    CORRUPT = "a bit of what is sent is flipped; of the answer if nothing is sent"
    SLOW = "the answer takes long"
    TRICKLE = "the answer comes drop by drop"
    STALE = "the answer is the first one that was given to such a request"


@dataclass(frozen=True)
class Request:
    """What the client asks.

    Attributes:
        operation: "get", "head", "put", "part", "copy part", "create", "complete", "abort", "delete", "list" or
            "uploads".
        path: Bucket and key.
        range: The Range header, or "".
    """

    operation: str
    path: str
    range: str


Choose = Callable[[Request], Fault | None]


def sometimes(*faults: Fault, share: float, only: tuple[str, ...] = (), seed: int = 0) -> Choose:
    """Give a choice that strikes a share of the requests, of these operations or of all, with one of the faults."""
    chance, lock = random.Random(seed), threading.Lock()

    def choose(request: Request) -> Fault | None:
        with lock:
            is_hit = chance.random() < share and (not only or request.operation in only)
            return chance.choice(faults) if is_hit else None

    return choose


def first(fault: Fault, number: int, *only: str) -> Choose:
    """Give a choice that strikes the first requests of these operations."""
    left, lock = [number], threading.Lock()

    def choose(request: Request) -> Fault | None:
        with lock:
            if left[0] == 0 or request.operation not in only:
                return None
            left[0] -= 1
            return fault

    return choose


@dataclass
class Proxy:
    """A running proxy.

    Attributes:
        port: On the loopback address.
        choose: Says what happens to each request; may be changed at any time.
        requests: All that were made.
        struck: How often each fault happened.
        most_at_once: The largest number of requests under way at one time.
        nbytes: Bytes of all bodies, in both directions.
    """

    port: int
    choose: Choose
    requests: list[Request] = field(default_factory=list)
    struck: Counter[Fault] = field(default_factory=Counter)
    most_at_once: int = 0
    nbytes: int = 0

    def options(self, root: S3Root, **change: object) -> dict[str, object]:
        """Give the storage options of `root` by way of this proxy."""
        return {**root.options, "endpoint_url": f"http://127.0.0.1:{self.port}", **change}

    def count(self, operation: str) -> int:
        """Give the number of requests of a kind."""
        return sum(request.operation == operation for request in self.requests)


@contextlib.contextmanager
def running_proxy(server: S3Server, choose: Choose = lambda request: None) -> Iterator[Proxy]:
    """Run a proxy in front of a server."""
    with _Listener(server.port, choose) as listener:
        thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield listener.proxy
        finally:
            listener.shutdown()
            thread.join()


@pytest.fixture
def s3_proxy(s3_server: S3Server) -> Iterator[Proxy]:
    """Give a proxy in front of the server that does nothing wrong yet."""
    with running_proxy(s3_server) as proxy:
        yield proxy


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, server_port: int, choose: Choose) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target_port = server_port
        self.proxy = Proxy(self.server_address[1], choose)
        self.first_answers: dict[str, tuple[Any, bytes]] = {}
        self.lock = threading.Lock()
        self.at_once = 0

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of broken connections: they are what this is for."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Listener

    def log_message(self, *_: object) -> None:
        """Log nothing."""

    def do_any(self) -> None:
        """Serve one request."""
        sent = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        asked = _request_of(self.command, self.path, self.headers)
        with self.server.lock:
            self.server.proxy.nbytes += len(sent)
            self.server.proxy.requests.append(asked)
            fault = self.server.proxy.choose(asked)
            if fault:
                self.server.proxy.struck[fault] += 1
            self.server.at_once += 1
            self.server.proxy.most_at_once = max(self.server.proxy.most_at_once, self.server.at_once)
        try:
            self._serve(fault, sent, asked.operation)
        finally:
            with self.server.lock:
                self.server.at_once -= 1

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do_any  # noqa: N815  # named by the base class

    def _serve(self, fault: Fault | None, sent: bytes, operation: str) -> None:
        match fault:
            case Fault.THROTTLE:
                self._refuse(503, "SlowDown")
            case Fault.ERROR:
                self._refuse(500, "InternalError")
            case Fault.DENY:
                self._refuse(403, "AccessDenied")
            case Fault.DECLINE:
                self._refuse(501, "NotImplemented")
            case Fault.RESET:
                self._break()
            case Fault.HALF_SENT:
                self._forward_half(sent)
                self._break()
            case _:
                is_changed = fault is Fault.CORRUPT and sent
                answer, body = self._forward(_flipped(sent) if is_changed else sent)
                with self.server.lock:
                    self.server.proxy.nbytes += len(body)
                    first_answer = self.server.first_answers.setdefault(operation, (answer, body))
                if fault is Fault.STALE:
                    answer, body = first_answer
                self._relay(answer, _flipped(body) if fault is Fault.CORRUPT and not sent else body, fault)

    def _forward(self, sent: bytes) -> tuple[http.client.HTTPResponse, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.target_port, timeout=_FORWARD_TIMEOUT_S)
        with contextlib.closing(connection):
            self._send_head(connection)
            connection.send(sent)
            answer = connection.getresponse()
            return answer, answer.read()

    def _forward_half(self, sent: bytes) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.target_port, timeout=_FORWARD_TIMEOUT_S)
        with contextlib.closing(connection):
            self._send_head(connection)
            connection.send(sent[: len(sent) // 2])
            time.sleep(0.05)

    def _send_head(self, connection: http.client.HTTPConnection) -> None:
        connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            if name.lower() not in ("expect", "connection"):
                connection.putheader(name, value)
        connection.endheaders()

    def _relay(self, answer: http.client.HTTPResponse, body: bytes, fault: Fault | None) -> None:
        if fault is Fault.LOSE_ANSWER:
            self._break()
            return
        if fault is Fault.SLOW:
            time.sleep(_SLOW_S)
        self.send_response(answer.status, answer.reason)
        for name, value in answer.getheaders():
            if name.lower() not in ("connection", "transfer-encoding", "content-length", "date", "server"):
                self.send_header(name, value)
        length = answer.getheader("Content-Length", str(len(body)))
        self.send_header("Content-Length", length if self.command == "HEAD" else str(len(body)))
        self.end_headers()
        self._send_body(body, fault)

    def _send_body(self, body: bytes, fault: Fault | None) -> None:
        match fault:
            case Fault.CUT:
                self.wfile.write(body[: len(body) // 2])
                self._break()
            case Fault.SHORT:
                self.wfile.write(body[: len(body) // 2])
                self.close_connection = True
            case Fault.TRICKLE:
                for at in range(0, len(body), 4096):
                    self.wfile.write(body[at : at + 4096])
                    time.sleep(0.05)
            case _:
                self.wfile.write(body)

    def _refuse(self, status: int, code: str) -> None:
        text = f"<Error><Code>{code}</Code><Message>injected</Message></Error>"
        body = b"" if self.command == "HEAD" else text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _break(self) -> None:
        """Reset the connection."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True


def _request_of(method: str, target: str, headers: Message) -> Request:
    url = urlsplit(target)
    query = parse_qs(url.query, keep_blank_values=True)
    is_key = url.path.count("/") > 1
    match method:
        case "PUT":
            operation = "part" if "partNumber" in query else "put"
            operation = f"copy {operation}" if "x-amz-copy-source" in headers else operation
        case "POST":
            operation = "create" if "uploads" in query else "complete"
        case "DELETE":
            operation = "abort" if "uploadId" in query else "delete"
        case "GET" if not is_key or "list-type" in query:
            operation = "uploads" if "uploads" in query else "list"
        case _:
            operation = method.lower()
    return Request(operation, url.path, headers.get("Range", ""))


def _flipped(data: bytes) -> bytes:
    if not data:
        return data
    changed = bytearray(data)
    changed[len(changed) // 2] ^= 1
    return bytes(changed)
