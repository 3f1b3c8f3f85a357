"""Tests of how `s3://` is reached: options, variables, profiles, and what is asked with them."""

from __future__ import annotations

from pathlib import Path

import fsspec.config
import pytest

from shardckpt.errors import StorageError, UnsupportedError
from shardckpt.s3_client import S3Options
from shardckpt.storage import open_store
from tests.s3_server import BUCKET, KEY, SECRET, S3Root, S3Server

AWS_VARIABLES = (
    *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_ENDPOINT_URL"),
    *("AWS_ENDPOINT_URL_S3", "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE", "AWS_REQUEST_CHECKSUM_CALCULATION"),
)


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keep the settings of whoever runs the tests out of them."""
    for name in AWS_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


def works(url: str, options: dict[str, object] | None = None) -> bool:
    """Write and read something, and hold if that works."""
    store = open_store(url, options)
    store.put("x", b"content")
    return store.get("x", max_nbytes=100) == b"content"


def test_the_aws_variables_are_enough(s3_root: S3Root, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any option, keys and endpoint come from the environment."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server.endpoint_url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    assert works(s3_root.url)
    assert works(s3_root.url.replace("s3://", "s3a://"))


def test_a_profile_names_keys_and_endpoint(s3_root: S3Root, s3_server: S3Server, tmp_path: Path) -> None:
    """`profile` is one of the AWS configuration files; one that is not there is told."""
    (tmp_path / "credentials").write_text(f"[mine]\naws_access_key_id={KEY}\naws_secret_access_key={SECRET}\n")
    (tmp_path / "config").write_text(f"[profile mine]\nendpoint_url={s3_server.endpoint_url}\n")
    assert works(s3_root.url, {"profile": "mine"})
    with pytest.raises(StorageError, match=r"ProfileNotFound.*\(other\).*Check the storage options and the AWS config"):
        open_store(s3_root.url, {"profile": "other"}).exists("x")


def test_arguments_of_botocore_are_passed_on(s3_root: S3Root, s3_server: S3Server) -> None:
    """`client_kwargs` and `config_kwargs` are botocore's own, as with s3fs."""
    client = {"endpoint_url": s3_server.endpoint_url, "aws_access_key_id": KEY, "aws_secret_access_key": SECRET}
    config = {"s3": {"addressing_style": "path"}, "connect_timeout": 3}
    assert works(s3_root.url, {"client_kwargs": {**client, "region_name": "eu-west-1"}, "config_kwargs": config})


def test_options_of_fsspec_files_are_taken(s3_root: S3Root, monkeypatch: pytest.MonkeyPatch) -> None:
    """What fsspec's configuration sets for s3 holds, unless the call says otherwise."""
    monkeypatch.setitem(fsspec.config.conf, "s3", {"secret": "wrong", "key": KEY})
    assert S3Options.parse(s3_root.options).secret == SECRET
    assert works(s3_root.url, {name: value for name, value in s3_root.options.items() if name != "key"})


def test_text_is_taken_for_flags_and_numbers() -> None:
    """A command line gives text only."""
    options = S3Options.parse({"anon": "true", "deadline_s": "2.5"})
    assert (options.anon, options.deadline_s) == (True, 2.5)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"keys": "x"}, "unknown field `keys`; known are anon, endpoint_url, key,"),
        ({"anon": "perhaps"}, r"Expected `bool`.* `\$.anon`; known are"),
        ({"client_kwargs": 3}, r"Expected `object`, got `int`.*client_kwargs"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, object], text: str) -> None:
    """A misspelt option is told with the names that there are."""
    with pytest.raises(UnsupportedError, match=rf"storage options of s3://: .*{text}"):
        open_store("s3://bucket/x", options)


def test_no_credentials_at_all_is_told(s3_root: S3Root, s3_server: S3Server) -> None:
    """The message lists the ways to give them."""
    store = open_store(s3_root.url, {"endpoint_url": s3_server.endpoint_url})
    with pytest.raises(StorageError, match=r"NoCredentialsError.*Give key and secret, a profile or AWS_\* variables"):
        store.put("x", b"")


def test_checksums_can_be_left_to_those_who_demand_them(
    s3_root: S3Root, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`when_required` sends none, for servers that do not know them; the bytes are signed instead."""
    for setting in ({"config_kwargs": {"request_checksum_calculation": "when_required"}}, {}):
        if not setting:
            monkeypatch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "when_required")
        store = open_store(s3_root.url, {**s3_root.options, **setting})
        writer = store.create("x", nbytes=3)
        writer.write(0, b"123")
        writer.finish()
        writer.commit()
        found = s3_server.client().head_object(Bucket=BUCKET, Key=f"{s3_root.prefix}/x", ChecksumMode="ENABLED")
        assert not [name for name in found if name.startswith("ChecksumCRC32C")]
        assert store.get("x", max_nbytes=3) == b"123"
