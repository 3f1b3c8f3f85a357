"""The examples in docstrings do what they show."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from types import ModuleType

import pytest

import shardckpt
import sharding


def _modules() -> list[str]:
    packages: tuple[ModuleType, ...] = (shardckpt, sharding)
    return [
        info.name for package in packages for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    ]


@pytest.mark.parametrize("name", _modules())
def test_examples_do_what_they_show(name: str) -> None:
    """Every `>>>` of the module gives what stands below it."""
    results = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert results.failed == 0
