"""Requests to S3: from storage options to a client, tried again while that may help, failures as ours.

Knows options, credentials, processes and which errors pass; refuses to know what is asked of the server. Options are
those of s3fs, all else (AWS_* variables, profiles, roles, regions) is botocore's own way.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import botocore.session
import msgspec
from botocore import UNSIGNED
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    SSLError,
)
from botocore.exceptions import ConnectionError as BotoConnectionError
from botocore.parsers import ResponseParserError
from fsspec.config import conf as fsspec_defaults

from shardckpt.errors import CheckpointError, StorageError, UnsupportedError
from shardckpt.retry import GaveUp, RetryPolicy
from shardckpt.store import gave_up, missing

T = TypeVar("T")

Client = Any  # botocore makes its clients at run time and has no types

_CONFIG: Mapping[str, object] = {
    "connect_timeout": 30,  # also the longest that sending one part may take
    "read_timeout": 30,
    "max_pool_connections": 64,
    "retries": {"total_max_attempts": 1},  # trying again is the business of `RetryPolicy` alone
}

_TRANSIENT_CODES = frozenset(
    {
        "BadDigest",  # the bytes changed on their way
        "XAmzContentSHA256Mismatch",
        "IncompleteBody",
        "RequestTimeout",
        "SlowDown",
        "Throttling",
        "ThrottlingException",
        "RequestLimitExceeded",
        "OperationAborted",
        "ConditionalRequestConflict",
    }
)


class S3Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The storage options of `s3://`, named as in s3fs.

    Attributes:
        anon: Ask without credentials, for public buckets.
        endpoint_url: Of a server other than AWS.
        key: Access key ID; None for what botocore finds (AWS_* variables, profile, role of the machine).
        secret: Secret access key.
        token: Session token.
        profile: Of the AWS configuration files.
        use_ssl: False for plain HTTP where `endpoint_url` does not say.
        client_kwargs: For botocore's `create_client`, such as `region_name` and `verify`.
        config_kwargs: For botocore's `Config`, such as `connect_timeout`, `read_timeout` and `s3`.
        deadline_s: How long an operation is tried again. s3fs has neither this nor the next.
        part_copies: False to pass all bytes through this process where the server could copy them by itself.
    """

    anon: bool = False
    endpoint_url: str | None = None
    key: str | None = None
    secret: str | None = None
    token: str | None = None
    profile: str | None = None
    use_ssl: bool = True
    client_kwargs: dict[str, object] = {}
    config_kwargs: dict[str, object] = {}
    deadline_s: float = RetryPolicy().deadline_s
    part_copies: bool = True

    @classmethod
    def parse(cls, options: Mapping[str, object]) -> S3Options:
        """Give the options of a call, over those of fsspec's configuration (its files and FSSPEC_S3_* variables).

        Raises:
            UnsupportedError: If there is one that is not known, or of a wrong type.
        """
        try:
            return msgspec.convert({**fsspec_defaults.get("s3", {}), **options}, cls, strict=False)
        except msgspec.ValidationError as error:
            raise UnsupportedError(
                f"storage options of s3://: {error}; known are {', '.join(cls.__struct_fields__)}"
            ) from None


class S3Connection:
    """A client a process, and the one way to ask it something.

    A client must not cross a fork: parent and child would talk over the same sockets.

    Attributes:
        options: Whom it asks, and how.
        is_out_of_reach: True from when cleaning up after a failure failed too; nothing more is tried of that kind.
    """

    def __init__(self, options: S3Options) -> None:
        self.is_out_of_reach = False
        self.options = options
        self._retry = RetryPolicy(options.deadline_s)
        self._clients: dict[int, Client] = {}  # by process; the parent's is kept, as its sockets are not ours to close

    @property
    def deadline_s(self) -> float:
        """How long an operation is tried."""
        return self._retry.deadline_s

    def run(self, action: str, path: str, request: Callable[[Client], T], *, deadline_s: float | None = None) -> T:
        """Give what `request` gives, asked again while that may help.

        Args:
            action: What is done, for messages ("read", "write part 3 of" ...).
            path: What it is done to.
            request: Asks the client it is given; from the start each time.
            deadline_s: For less than the usual time.

        Raises:
            CheckpointNotFoundError: If the object or bucket is not there.
            StorageError: If it fails otherwise; at once, or at the deadline.
        """
        retry = self._retry if deadline_s is None else RetryPolicy(deadline_s)
        try:
            return retry.run(f"{action} {path!r}", lambda: request(self._client()), _is_transient)
        except CheckpointError:
            raise
        except GaveUp as error:
            raise gave_up(action, path, error) from error.first
        except Exception as error:
            raise _refused(action, path, error) from error

    def _client(self) -> Client:
        """Give this process's client. Two threads may both make one: one of them is dropped."""
        process = os.getpid()
        if process not in self._clients:
            self._clients[process] = _new_client(self.options)
        return self._clients[process]


def error_code(error: ClientError) -> str:
    """Give the code of a refusal ("NoSuchUpload" ...); the HTTP status for answers without a body."""
    return str(error.response.get("Error", {}).get("Code", ""))


def sends_checksums(client: Client) -> bool:
    """Tell whether uploads carry checksums; the `when_required` setting of botocore turns them off."""
    return bool(client.meta.config.request_checksum_calculation != "when_required")


def _new_client(options: S3Options) -> Client:
    session = botocore.session.Session(profile=options.profile)
    config = {**_CONFIG, **options.config_kwargs}
    if options.anon:
        config["signature_version"] = UNSIGNED
    arguments: dict[str, object] = {"use_ssl": options.use_ssl}
    named = {
        "endpoint_url": options.endpoint_url,
        "aws_access_key_id": None if options.anon else options.key,
        "aws_secret_access_key": None if options.anon else options.secret,
        "aws_session_token": None if options.anon else options.token,
    }
    arguments |= {name: value for name, value in named.items() if value is not None}
    return session.create_client("s3", config=Config(**config), **{**options.client_kwargs, **arguments})


def _is_transient(error: Exception) -> bool:
    """Tell whether the same request may succeed a little later."""
    match error:
        case ClientError():
            status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
            return status in (408, 429) or (status >= 500 and status != 501) or error_code(error) in _TRANSIENT_CODES
        case SSLError():
            return False
        case HTTPClientError() | BotoConnectionError() | IncompleteReadError() | ResponseParserError():
            return True
        case _:
            return isinstance(error, ConnectionError | TimeoutError)


def _refused(action: str, path: str, cause: Exception) -> CheckpointError:
    """Give our error for a failure that does not pass."""
    hint = "Check the path and access."
    match cause:
        case ClientError():
            status = int(cause.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
            if error_code(cause) == "NoSuchUpload":
                hint = "Another save to the same place dropped it, or a rule of the bucket; save again."
            elif error_code(cause) == "NoSuchBucket":
                hint = "Make the bucket, or check its name."
            elif status == 404:
                return missing(path)
            elif status == 403:
                hint = "Check the credentials and what they allow (docs/s3.md lists what is needed)."
        case NoCredentialsError():
            hint = "Give key and secret, a profile or AWS_* variables; or anon=True for a public bucket."
        case BotoCoreError():
            hint = "Check the storage options and the AWS configuration."
    error = StorageError(f"cannot {action} {path!r}: {type(cause).__name__}: {str(cause).rstrip('.')}. {hint}")
    error.path = path
    return error
