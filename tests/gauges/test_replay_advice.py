"""Advice of replay: every row of its table is reached by a real fault, and says what this op did wrong."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from replay_steps import capture_and_replay
from torch import Tensor, nn

from narrowgauge.gauges.replay import advice_table
from narrowgauge.gauges.replay.advice import CONDITIONS, advise, find_row
from narrowgauge.gauges.replay.nonfinite_flow import Origin
from narrowgauge.gauges.replay.op_locations import OpLocation
from narrowgauge.gauges.replay.result import Replay

WIDTH = 4


class Head(nn.Module):
    """A projection and one function of it."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.project = nn.Linear(3, WIDTH)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.project(x))


def shifted(value: float, function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Apply a function to a tensor that is ``value`` everywhere and has a gradient."""
    return lambda x: function(x - x.detach() + value)


def matrix(diagonal: list[float], function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: function((x - x.detach())[:WIDTH] + torch.diag(torch.tensor(diagonal)))


def never(x: Tensor) -> Tensor:
    return x.masked_fill(torch.ones_like(x, dtype=torch.bool), -torch.inf)


FAULTS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "mean of nothing": (lambda x: x[:0].mean(), "a selection is empty"),
    "all ignored": (lambda x: F.nll_loss(x, torch.full((5,), -100)), "ignore_index"),
    "impossible target": (lambda x: F.nll_loss(x * 3e38 * 0.1 + 3e38, torch.zeros(5).long(), reduction="sum"),
                          "probability 0"),
    "ctc": (lambda x: F.ctc_loss(F.log_softmax(x[:, None], -1), torch.tensor([[1, 1, 1]]), (4,), (3,)) * 0
            + F.ctc_loss(F.log_softmax(x[:, None], -1), torch.tensor([[1, 1, 1, 1]]), (5,), (4,)), "zero_infinity"),
    "masked row": (lambda x: F.log_softmax(never(x), -1), "fully masked row"),
    "inf times zero": (lambda x: never(x) @ (x - x).t(), "0 * inf"),
    "log of 0": (shifted(0, torch.log2), "log of 0"),
    "log of -3": (shifted(-3, torch.log10), "log of a negative"),
    "log, backward": (lambda x: torch.where(x > 9e9, (x * 0).log().clamp(-5), x * 1), "derivative of log "),
    "log1p of -1": (shifted(-1, torch.log1p), "log1p of -1"),
    "log1p of -2": (shifted(-2, torch.log1p), "below -1"),
    "log1p, backward": (lambda x: torch.where(x > 9e9, torch.log1p(x * 0 - 1).clamp(-5), x * 1), "infinite at -1"),
    "logit of 1": (shifted(1, torch.logit), "logit of 0 or 1"),
    "logit of 3": (shifted(3, torch.logit), "no probability"),
    "logit, backward": (lambda x: torch.logit(x * 0 + 1).clamp(-5, 5), "derivative of logit"),
    "xlogy": (shifted(0, lambda x: torch.xlogy(x + 1, x)), "while its factor is not"),
    "xlogy of -1": (shifted(-1, lambda x: torch.xlogy(x, x)), "argument is negative"),
    "entropy, backward": (shifted(0, lambda x: torch.xlogy(x, x)), "where both are 0"),
    "lgamma": (shifted(-2, torch.lgamma), "negative integers"),
    "digamma": (shifted(0, torch.digamma), "gamma functions are infinite"),
    "lgamma, backward": (lambda x: torch.lgamma(x * 0).clamp(max=7), "derivative of a gamma"),
    "root of -4": (shifted(-4, torch.sqrt), "root of a negative"),
    "rsqrt of -4": (shifted(-4, torch.rsqrt), "root of a negative"),
    "rsqrt of 0": (shifted(0, torch.rsqrt), "rsqrt of 0"),
    "root, backward": (lambda x: (x * 0).sqrt() + x, "inside the root, not outside"),
    "hypot, backward": (lambda x: torch.hypot(x * 0, x * 0) + x, "does not exist at 0"),
    "exp2": (shifted(500, torch.exp2), "exp overflows"),
    "cosh": (shifted(500, torch.cosh), "exp overflows"),
    "root as power": (shifted(-4, lambda x: x**0.25), "fractional power"),
    "0 to the -2": (shifted(0, lambda x: x**-2), "negative power of 0"),
    "large power": (shifted(1e15, lambda x: x**4), "the power exceeds"),
    "power, backward": (lambda x: (x * 0) ** 0.3 + x, "exponent below 1"),
    "0/0": (shifted(0, lambda x: x / x.norm(dim=-1, keepdim=True)), "0/0 is NaN: numerator"),
    "7/0": (shifted(0, lambda x: 7 / x), "division by 0"),
    "remainder": (shifted(0, lambda x: torch.remainder(x + 5, x)), "remainder of a division"),
    "acosh of 0.5": (shifted(0.5, torch.acosh), "from 1 upwards"),
    "acosh, backward": (shifted(1, torch.acosh), "derivative of acosh"),
    "asin of 1.1": (shifted(1.1, torch.asin), "from -1 to 1"),
    "acos, backward": (shifted(-1, torch.acos), "derivative of acos"),
    "atanh of 1": (shifted(1, torch.atanh), "infinite at -1 and 1: clamp the argument inside, for"),
    "erfinv of 2": (shifted(2, torch.erfinv), "defined between -1 and 1"),
    "atanh, backward": (lambda x: torch.atanh(x * 0 + 1).clamp(max=5), "derivative of atanh"),
    "one value": (lambda x: x[:, :1].std(-1), "correction=0"),
    "norm without epsilon": (lambda x: F.group_norm(x * 0, 2, eps=0), "FP32 statistics"),
    "equal eigenvalues": (matrix([2.0, 2, 1, 5], lambda m: torch.linalg.eigh(m)[1]), "two eigenvalues"),
    "equal singular values": (matrix([3.0, 3, 1, 5], lambda m: torch.linalg.svd(m)[0]), "two eigenvalues"),
    "singular matrix": (matrix([2.0, 2, 1, 0], lambda m: torch.linalg.slogdet(m)[1]), "matrix is singular"),
    "product": (lambda x: (x * 1e25) @ (x * 1e25).t(), "scale the inputs or weights down"),
    "an infinite number": (lambda x: x + float("inf"), "number that is an argument"),
    "sum": (shifted(2e38, lambda x: x.sum()), "range of FP32"),
    "sum in fp16": (lambda x: x + (x.half() * 0 + 6e4).cumsum(-1), "compute it in FP32, or scale the inputs"),
    "cast": (lambda x: (x * 1e9).to(torch.float16), "target format"),
    "logdet": (matrix([1.0, 1, 1, -1], torch.logdet), "NaN was written as a constant"),
}  # fmt: skip
OTHERS = {
    ("aten._scaled_dot_product_flash_attention", "aten._scaled_dot_product_flash_attention", "forward", "nan"),
    ("LinalgEighBackward0", "aten.linalg_eigh", "forward", "nan"),
    ("gradient norm", "gradient norm", "backward", "inf"),
}
"""Op, kernel, phase and kind of faults that need a GPU or another kind of capture."""


@cache
def find(name: str) -> Replay:
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # std of one value
        batch = torch.randn(5, 3, generator=torch.Generator().manual_seed(3))
        return capture_and_replay(lambda: Head(FAULTS[name][0]), Path(folder), batch)


def make_origin(found: Replay, op: str | None = None, phase: str | None = None, module: str = "head") -> Origin:
    place = OpLocation(module, None)
    kernel, kind = op or str(found.kernel), str(found.kind)
    return Origin(1, kind, False, place, phase or str(found.phase), kernel, None, found.inputs, found.output or {})


@pytest.mark.parametrize("name", FAULTS)
def test_advice_fits_the_fault(name: str) -> None:
    found = find(name)
    assert FAULTS[name][1] in str(found.advice), (found.op, found.kernel, found.phase, found.kind, found.advice)


def test_every_row_is_reached() -> None:
    reached = [find_row(str(found.op), make_origin(found)) for found in map(find, FAULTS)]
    for op, kernel, phase, kind in OTHERS:
        reached.append(find_row(op, Origin(1, kind, False, OpLocation("head", None), phase, kernel)))
    missed = [(row.ops[0], row.phase, row.kind, row.when) for row in advice_table.ROWS if row not in reached]
    assert not missed


def test_rows_are_well_formed() -> None:
    for row in advice_table.ROWS:
        assert row.phase in (None, "forward", "backward") and row.kind in (None, "nan", "inf"), row
        assert row.when is None or row.when in CONDITIONS, row
        assert "\n" not in row.advice and not row.advice.endswith("."), row
        for op in row.ops:
            assert f"use {op} " not in row.advice, "an op is never the advice against itself"
    keys = [(op, row.phase, row.kind, row.when) for row in advice_table.ROWS for op in row.ops]
    assert len(keys) == len(set(keys)), "two rows for the same fault"


@pytest.mark.parametrize("op", ["aten.my_log", "aten.logistic", "aten.exposure", "aten.sumac", "DivineBackward0"])
def test_a_part_of_a_name_is_not_enough(op: str) -> None:
    origin = Origin(1, "nan", False, OpLocation("head", None), "forward", op)
    assert find_row(op, origin) is None and advise(op, origin, False) == advice_table.GENERAL


def make_overflow(module: str, phase: str, dtype: str) -> Origin:
    entry = {"name": "self", "shape": [2], "dtype": dtype, "min": 1.0, "max": 6e4, "amax": 6e4}
    return Origin(1, "inf", False, OpLocation(module, None), phase, "aten.mul", None, [entry], entry)


@pytest.mark.parametrize("module", ["(loss)", "(model)", "(hook)"])
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_keep_is_only_advised_for_modules_with_a_path(module: str, phase: str) -> None:
    text = advise("aten.mul", make_overflow(module, phase, "float16"), True)
    assert "keep=" not in text and ".float()" in text and "bf16" in text
    assert "keep=blocks.3.up in the recipe" in advise("aten.mul", make_overflow("blocks.3.up", phase, "float16"), True)
    assert "finite in FP32" not in advise("aten.mul", make_overflow("blocks.3.up", phase, "float16"), False)


def test_bf16_is_not_advised_to_a_bf16_run() -> None:
    text = advise("aten.mul", make_overflow("up", "forward", "bfloat16"), True)
    assert "keep=up" in text and "use bf16" not in text


class Amplify(nn.Module):
    """Multiplies gradients by 3e4: too much for FP16 under a large loss scale."""

    def forward(self, x: Tensor) -> Tensor:
        return x.half() * 3e4 - x.half().detach() * 3e4


def test_a_fixed_loss_scale_is_mentioned(tmp_path: Path) -> None:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).float().sum() * 1e-2

    batch = torch.randn(5, 3, generator=torch.Generator().manual_seed(3))
    make = lambda: nn.Sequential(nn.Linear(3, 3), Amplify())  # noqa: E731
    found = capture_and_replay(make, tmp_path, batch, loss, "fp16[loss_scale=8192]")
    assert found.phase == "backward" and "loss scale is fixed at 8192" in str(found.advice), found.advice
    assert "keep=" not in str(found.advice)
    forward = make_overflow("up", "forward", "float16")
    assert "loss scale" not in advise("aten.mul", forward, True, 8192.0), "no scale helps in forward"
    assert "loss scale" not in advise("SqrtBackward0", make_overflow("up", "backward", "float16"), False, 8192.0)
