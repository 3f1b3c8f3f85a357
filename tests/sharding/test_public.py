"""The public names of the runtime, and what importing it costs."""

from __future__ import annotations

import subprocess
import sys

import sharding


def test_every_public_name_is_there_twice_alike() -> None:
    """Each name of `__all__` resolves, to the same object each time, whatever modules have been imported since."""
    first = {name: getattr(sharding, name) for name in sharding.__all__}
    assert {name: getattr(sharding, name) for name in sharding.__all__} == first
    assert all(type(value).__name__ != "module" for value in first.values())
    assert sorted(sharding.__all__) == sharding.__all__


def test_no_public_name_is_a_module_of_the_package() -> None:
    """A submodule would take the place of a function of its name as soon as it is imported."""
    code = (
        "import sharding, pkgutil\n"
        "modules = {info.name for info in pkgutil.iter_modules(sharding.__path__)}\n"
        "assert not modules & set(sharding.__all__), modules & set(sharding.__all__)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_layout_needs_no_torch() -> None:
    """Offline tools ask the layout where an element lies without importing torch."""
    code = "import sys, sharding.layout; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
