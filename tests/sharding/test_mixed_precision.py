"""Mixed precision beside torch's own class: dtypes of gradients, and modules that are excepted."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp

import sharding
from sharding import FullyShardedDataParallel, MixedPrecision, ModuleWrapPolicy, ShardingStrategy
from tests.ranks import run_ranks

DTYPES = (
    (torch.bfloat16, None),
    (torch.bfloat16, torch.float32),
    (None, torch.bfloat16),
    (None, None),
)


class Normed(nn.Module):
    """A batch norm between linear modules, and a record of what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        y: torch.Tensor = self.last(torch.relu(self.norm(self.first(x))))
        return y


def _normed() -> Normed:
    torch.manual_seed(4)
    return Normed()


def _inputs(step: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


def _torchs(module: nn.Module, strategy: str, **options: object) -> nn.Module:
    with warnings.catch_warnings():  # of its own deprecations
        warnings.simplefilter("ignore")
        return fsdp.FullyShardedDataParallel(  # type: ignore[no-any-return]
            module,
            sharding_strategy=fsdp.ShardingStrategy[strategy],
            device_id=torch.device("cpu"),
            use_orig_params=True,
            **options,
        )


def _grads(model: nn.Module) -> dict[str, tuple[torch.dtype, torch.Tensor]]:
    """Give the gradients that this rank has some of, summed up."""
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and parameter.grad.numel():
            found[name.replace("_fsdp_wrapped_module.", "")] = (parameter.grad.dtype, parameter.grad.detach().clone())
    return found


def _keeps(strategy: str) -> None:
    """Gradients have torch's dtypes, also when they add up; then a sum of all is the same."""
    for param, reduce in DTYPES:
        options = {"param_dtype": param, "reduce_dtype": reduce, "keep_low_precision_grads": True}
        theirs = _torchs(
            nn.Sequential(_linear(), nn.Tanh(), _linear()), strategy, mixed_precision=fsdp.MixedPrecision(**options)
        )
        ours = FullyShardedDataParallel(
            nn.Sequential(_linear(), nn.Tanh(), _linear()),
            sharding_strategy=ShardingStrategy[strategy],
            mixed_precision=MixedPrecision(**options),  # type: ignore[arg-type]
        )
        for step in range(3):
            for model in (theirs, ours):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", FutureWarning)
                    model(_inputs(step)).float().square().mean().backward()
            dtypes = [{dtype for dtype, _ in _grads(model).values()} for model in (theirs, ours)]
            assert dtypes[0] == dtypes[1], (param, reduce, dtypes)
        totals = []
        for model in (theirs, ours):
            total = torch.stack([grad.double().sum() for _, grad in _grads(model).values()]).sum()
            dist.all_reduce(total)
            totals.append(total)
        torch.testing.assert_close(totals[0], totals[1], rtol=2e-2, atol=2e-2)


def _linear() -> nn.Linear:
    torch.manual_seed(2)
    return nn.Linear(6, 6)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_low_precision_gradients_are_kept_as_torch_keeps_them(strategy: str) -> None:
    """With `keep_low_precision_grads`, gradients have the dtypes and the sum of torch's, over three backwards."""
    run_ranks(2, _keeps, strategy)


def _shows_low_gradients() -> None:
    precision = MixedPrecision(param_dtype=torch.bfloat16, keep_low_precision_grads=True)
    model = FullyShardedDataParallel(_linear(), mixed_precision=precision)
    model(_inputs(0)).float().sum().backward()
    before = _grads(model)
    with model.summon_full_params(model, with_grads=True):
        assert model.weight.grad.shape == (6, 6)
        assert model.weight.grad.dtype == torch.bfloat16
    after = _grads(model)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name][1], after[name][1]) for name in before)
    model.clip_grad_norm_(1e-3)
    torch.optim.SGD(model.parameters(), lr=0.1, foreach=False).step()
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


def test_low_precision_gradients_are_summoned_and_clipped() -> None:
    """Gradients of another dtype than their parameters survive what is done with gradients between steps."""
    run_ranks(2, _shows_low_gradients)


def _excepts(in_place: bool) -> None:
    """Batch norm sees float32, the rest bfloat16; outputs and running means equal torch's."""
    options = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16, "buffer_dtype": torch.bfloat16}
    precision, never = MixedPrecision(**options), ModuleWrapPolicy([nn.Conv2d])  # type: ignore[arg-type]
    wrap = sharding.fully_shard if in_place else FullyShardedDataParallel
    with pytest.warns(UserWarning, match=r"BatchNorm1d.*wrapped as separate FSDP units.*empty tuple"):
        ours = wrap(_normed(), mixed_precision=precision, auto_wrap_policy=never)
    policy = fsdp.wrap.ModuleWrapPolicy([nn.Conv2d])
    theirs = _torchs(_normed(), "FULL_SHARD", mixed_precision=fsdp.MixedPrecision(**options), auto_wrap_policy=policy)
    if not in_place:
        assert isinstance(ours.norm, FullyShardedDataParallel)
        assert ours.norm.mixed_precision == MixedPrecision()
        assert not isinstance(ours.first, FullyShardedDataParallel)
    seen: list[torch.dtype] = []
    inner = ours.norm if in_place else ours.norm.module  # type: ignore[union-attr]
    inner.register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))  # type: ignore[union-attr]
    for step in range(2):
        outputs = []
        for model in (ours, theirs):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                outputs.append(model(_inputs(step)))
                outputs[-1].float().square().mean().backward()
        assert outputs[0].dtype == outputs[1].dtype == torch.bfloat16
        torch.testing.assert_close(outputs[0], outputs[1])
    assert set(seen) == {torch.float32}
    mine = {name.replace("_fsdp_wrapped_module.", ""): buffer for name, buffer in ours.named_buffers()}
    for name, buffer in theirs.named_buffers():
        torch.testing.assert_close(mine[name.replace("_fsdp_wrapped_module.", "")], buffer)


@pytest.mark.parametrize("in_place", [False, True])
def test_excepted_modules_run_in_full_precision_as_torchs_do(in_place: bool) -> None:
    """Batch norms, which `MixedPrecision` excepts by default, become units of their own, and say so."""
    run_ranks(2, _excepts, in_place)


def _excepts_nothing() -> None:
    for precision in (MixedPrecision(), MixedPrecision(param_dtype=torch.bfloat16, _module_classes_to_ignore=())):
        model = FullyShardedDataParallel(
            _normed(), mixed_precision=precision, auto_wrap_policy=ModuleWrapPolicy([nn.Conv2d])
        )
        assert FullyShardedDataParallel.fsdp_modules(model) == [model]


def test_nothing_is_excepted_where_nothing_is_mixed() -> None:
    """Without another dtype, or with an empty tuple, no unit is added and nobody is warned."""
    run_ranks(1, _excepts_nothing)


def _excepts_inside_of_units() -> None:
    """An excepted module inside of a unit, and one that a policy also picks, end up in one unit each."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6)), nn.LayerNorm(6))
    precision = MixedPrecision(param_dtype=torch.bfloat16, _module_classes_to_ignore=(nn.LayerNorm,))
    with pytest.warns(UserWarning, match="LayerNorm"):
        wrapped = FullyShardedDataParallel(
            model, mixed_precision=precision, auto_wrap_policy=ModuleWrapPolicy([nn.LayerNorm, nn.Sequential])
        )
    units = FullyShardedDataParallel.fsdp_modules(wrapped)
    assert [type(unit.module).__name__ for unit in units] == ["Sequential", "Sequential", "LayerNorm", "LayerNorm"]
    assert [unit.mixed_precision.param_dtype for unit in units] == [torch.bfloat16] * 2 + [None] * 2
    wrapped(_inputs(0)).float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in wrapped.parameters() if p.numel())


def test_excepted_modules_nest() -> None:
    """Policies and exceptions together make each module one unit, inner ones first."""
    run_ranks(2, _excepts_inside_of_units)
