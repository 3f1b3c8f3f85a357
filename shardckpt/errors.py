"""Every error that shardckpt raises on purpose.

    CheckpointError
    ├── CheckpointNotFoundError   (FileNotFoundError)  nothing committed at that place
    ├── CheckpointExistsError     (FileExistsError)    the destination is taken
    ├── FormatError               (ValueError)         a file is not what it should be
    │   └── CorruptError                               its bytes are not those that were saved
    ├── CoverageError             (ValueError)         chunks leave a hole in, or overlap in, a tensor
    ├── MismatchError             (ValueError)         the checkpoint and what is asked of it do not fit
    ├── UnsupportedError          (TypeError)          a value or option that cannot be served
    ├── StorageError              (OSError)            reading or writing failed
    │   └── NoSpaceError                               there is not enough room
    ├── RankFailedError           (RuntimeError)       another rank failed; raised alike on all ranks
    └── PreemptedError            (RuntimeError)       the run was told to stop, and is saved

Messages say what is wrong, where, what was expected and found, and what to do; the facts are attributes too.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable


class CheckpointError(Exception):
    """Root of all errors of this package."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no committed checkpoint, or no such tensor or file in it."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class CheckpointExistsError(CheckpointError, FileExistsError):
    """The destination exists and was not to be overwritten."""


class FormatError(CheckpointError, ValueError):
    """A file does not follow its format: truncated, foreign, hostile or from a later version."""


class CorruptError(FormatError):
    """A checksum does not match: the bytes are not those that were saved."""


class CoverageError(CheckpointError, ValueError):
    """The chunks of a tensor do not tile it: a hole, or an overlap."""


class MismatchError(CheckpointError, ValueError):
    """Names, shapes, dtypes or world sizes of two sides differ."""


class UnsupportedError(CheckpointError, TypeError):
    """A value, dtype or option which the format or the runtime cannot serve."""


class StorageError(CheckpointError, OSError):
    """An operation on storage failed.

    Attributes:
        path: The file or object, if known.
    """

    path: str = ""

    @classmethod
    def wrap(cls, action: str, path: str, cause: BaseException) -> StorageError:
        """Give the error for `cause`, raised while doing `action` ("read", "write" ...) on `path`."""
        number = cause.errno if isinstance(cause, OSError) else None
        kind = NoSpaceError if number in (errno.ENOSPC, errno.EDQUOT) else cls
        hint = "Free some room or choose another destination." if kind is NoSpaceError else "Check the path and access."
        error = kind(f"cannot {action} {path!r}: {type(cause).__name__}: {cause}. {hint}")
        error.errno = number
        error.path = path
        return error


class NoSpaceError(StorageError):
    """The destination has no room for what is to be written."""


class RankFailedError(CheckpointError, RuntimeError):
    """One or more ranks failed; every rank raises this same error.

    Attributes:
        ranks: The ranks at fault.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class PreemptedError(CheckpointError, RuntimeError):
    """A rank was told to stop; the state is saved.

    Attributes:
        step: Of the checkpoint.
    """

    def __init__(self, message: str, step: int = 0) -> None:
        super().__init__(message)
        self.step = step


def listing(items: Iterable[str], limit: int = 5) -> str:
    """Join quoted items for a message, cut after `limit` with a count of the rest."""
    shown = list(items)
    text = ", ".join(repr(item) for item in shown[:limit])
    return text if len(shown) <= limit else f"{text}, ... and {len(shown) - limit} more"
