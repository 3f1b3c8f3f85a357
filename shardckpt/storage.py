"""The door to all storage: which kind of store serves a path or URL.

Knows the kinds by their URLs; refuses to know how they work.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from shardckpt.local_store import LocalStore
from shardckpt.store import TEMPORARY_SUFFIX, Bytes, Reader, Store, Writer

__all__ = ["TEMPORARY_SUFFIX", "Bytes", "Reader", "Store", "Writer", "open_store", "split_url"]


def open_store(url: str | os.PathLike[str], storage_options: Mapping[str, object] | None = None) -> Store:
    """Give the store for a path or an fsspec URL.

    Args:
        url: A local path, `file://...`, `s3://bucket/...`, or any URL that fsspec knows (`memory://`, `gs://`, ...).
        storage_options: Of the fsspec file system (those of s3fs for `s3://`); None for local paths.
    """
    text = os.fspath(url)
    if "://" not in text or text.startswith("file://"):
        return LocalStore(Path(text.removeprefix("file://")))
    if text.startswith(("s3://", "s3a://")):
        from shardckpt.s3_store import S3Store  # on demand: it loads botocore

        return S3Store(text, storage_options or {})
    from shardckpt.fsspec_store import FsspecStore  # on demand, as nothing else needs it

    return FsspecStore(text, storage_options or {})


def split_url(url: str | os.PathLike[str]) -> tuple[str, str]:
    """Split a path or URL into its folder and its last part."""
    text = os.fspath(url).rstrip("/")
    folder, slash, name = text.rpartition("/")
    return (folder or "/", name) if slash else (".", name)
