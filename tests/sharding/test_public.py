"""The public names of the runtime, and what importing it costs."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

import sharding
from tests.ranks import run_ranks


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


def _refused() -> list[str]:
    found = []
    for options in (
        {"cpu_offload": sharding.CPUOffload(offload_params=True)},
        {"limit_all_gathers": False},
    ):
        with pytest.raises(sharding.UnsupportedError) as caught:
            sharding.FullyShardedDataParallel(nn.Linear(2, 2), **options)  # type: ignore[arg-type]
        found.append(str(caught.value))
    return found


def test_options_that_are_not_served_are_refused_with_the_reason() -> None:
    """Nothing that is asked for is ignored in silence."""
    (messages,) = run_ranks(1, _refused)
    for message, name in zip(messages, ("cpu_offload", "limit_all"), strict=True):
        assert message.startswith(name)
        assert "leave it out" in message


def _asked() -> None:
    asked = {
        "sharding_strategy": sharding.ShardingStrategy.SHARD_GRAD_OP,
        "backward_prefetch": sharding.BackwardPrefetch.BACKWARD_POST,
        "forward_prefetch": True,
        "mixed_precision": sharding.MixedPrecision(reduce_dtype=torch.float64),
    }
    model = sharding.FullyShardedDataParallel(nn.Linear(2, 2), **asked)  # type: ignore[arg-type]
    assert {name: getattr(model, name) for name in asked} == asked
    assert model.cpu_offload == sharding.CPUOffload(offload_params=False)
    assert model.compute_device == torch.device("cpu")
    assert (model.rank, model.world_size) == (0, 1)


def test_the_wrapper_says_what_was_asked_for() -> None:
    """Libraries read the constructor's arguments back, under their names."""
    run_ranks(1, _asked)
