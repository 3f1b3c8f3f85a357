"""Tests of the error tree."""

from __future__ import annotations

import errno

import pytest

from shardckpt import errors
from shardckpt.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    NoSpaceError,
    RankFailedError,
    StorageError,
    listing,
)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_has_an_error_of_its_own(number: int) -> None:
    """A full disk or quota says to free room, and keeps errno and path."""
    error = StorageError.wrap("write", "a/b", OSError(number, "full"))
    assert isinstance(error, NoSpaceError)
    assert (error.errno, error.path) == (number, "a/b")
    assert str(error).startswith("cannot write 'a/b': OSError")
    assert str(error).endswith("Free some room or choose another destination.")


def test_other_failures_of_storage_say_to_check_path_and_access() -> None:
    """Errors of any kind are wrapped, with the action, the path and the cause."""
    error = StorageError.wrap("read", "a/b", TimeoutError("no answer"))
    assert type(error) is StorageError
    assert str(error) == "cannot read 'a/b': TimeoutError: no answer. Check the path and access."


def test_every_error_is_also_the_builtin_that_callers_expect() -> None:
    """Each class derives from the root and from one builtin."""
    leaves = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, CheckpointError)]
    assert all(len(kind.__mro__) > len(CheckpointError.__mro__) + 1 for kind in leaves if kind is not CheckpointError)
    assert issubclass(CheckpointNotFoundError, FileNotFoundError)
    assert str(CheckpointNotFoundError("nothing there")) == "nothing there"


def test_a_rank_failure_names_its_ranks() -> None:
    """The ranks at fault are an attribute too."""
    assert RankFailedError("rank 2 failed", (2,)).ranks == (2,)


def test_long_listings_are_cut_with_a_count() -> None:
    """More than five items are cut to a number of the rest."""
    assert listing("abc") == "'a', 'b', 'c'"
    assert listing(map(str, range(42))) == "'0', '1', '2', '3', '4', ... and 37 more"
