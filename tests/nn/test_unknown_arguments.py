"""Calls of fused blocks that no fused form knows run as written, with one warning, and are in the conversion report."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from model_families import NanoBlock
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge import Engine
from narrowgauge.nn.fused import blocks

WIDTH = 64


class Positioned(NanoBlock):
    """Takes positions that it adds, a bias of attention's scores, and a name of its implementation."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 4, False)

    def forward(
        self, x: Tensor, pos: Tensor | None = None, attention_bias: Tensor | None = None, implementation: str = "sdpa"
    ) -> Tensor:
        x = x if pos is None else x + pos
        batch, length, width = x.shape
        parts = self.c_attn(self.ln_1(x)).split(width, 2)
        q, k, v = (part.view(batch, length, self.n_head, -1).transpose(1, 2) for part in parts)
        assert implementation == "sdpa"
        bias = None if attention_bias is None else attention_bias.to(q.dtype)
        mixed = F.scaled_dot_product_attention(q, k, v, bias, is_causal=bias is None)
        x = x + self.c_proj(mixed.transpose(1, 2).reshape(batch, length, width))
        made: Tensor = x + self.c_out(F.gelu(self.c_fc(self.ln_2(x))))
        return made


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Positioned() for _ in range(3))

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        for block in self.blocks:
            x = block(x, **kwargs)
        return x


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths of blocks that ran fused."""
    found: list[str] = []
    run_block = blocks.run_block
    monkeypatch.setattr(blocks, "run_block", lambda plan, *args: found.append(plan.path) or run_block(plan, *args))
    return found


def make(recipe: str) -> tuple[nn.Module, Engine]:
    torch.manual_seed(0)
    model = Model()
    return model, Engine(model, torch.optim.AdamW(model.parameters()), recipe, fused=True)


def step(model: nn.Module, engine: Engine, x: Tensor, **kwargs: Any) -> float:
    with engine.forward():
        loss = model(x, **kwargs).float().square().mean()
    engine.backward(loss)
    assert engine.step().applied
    return loss.item()


@pytest.mark.parametrize("recipe", ["bf16", "fp8[products=all]"])
def test_one_warning_names_the_argument(recipe: str, calls: list[str]) -> None:
    model, engine = make(recipe)
    x, pos = torch.randn(2, 12, WIDTH), torch.randn(2, 12, WIDTH)
    calls.clear()
    with pytest.warns(ng.errors.SlowRecipeWarning, match="whenever they are called with pos") as caught:
        step(model, engine, x, pos=pos)
    assert len(caught) == 1 and not calls
    step(model, engine, x, pos=pos)  # not again
    with engine.evaluating(), torch.no_grad():
        model(x, pos=pos)
    step(model, engine, x)
    assert calls == ["blocks.0", "blocks.1", "blocks.2"]


def test_evaluation_tells_nothing() -> None:
    model, engine = make("fp8[products=all]")
    with engine.evaluating(), torch.no_grad():
        model(torch.randn(2, 12, WIDTH), pos=torch.randn(2, 12, WIDTH))


@pytest.mark.parametrize("recipe", ["bf16", "fp8[products=all]"])
def test_a_bias_of_attention_and_a_default_run_fused(recipe: str, calls: list[str]) -> None:
    x, bias = torch.randn(2, 12, WIDTH), torch.randn(1, 4, 12, 12)
    losses = []
    for fused in (False, True):
        torch.manual_seed(0)
        model = Model()
        engine = Engine(model, torch.optim.AdamW(model.parameters()), recipe, fused=fused)
        calls.clear()
        losses.append(step(model, engine, x, attention_bias=bias, implementation="sdpa"))
        assert len(calls) == (3 if fused else 0)
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


def test_a_copy_tells_again() -> None:
    model, engine = make("fp8[products=all]")
    twin = copy.deepcopy(model)
    with pytest.warns(ng.errors.SlowRecipeWarning):
        step(model, engine, torch.randn(2, 12, WIDTH), pos=torch.randn(2, 12, WIDTH))
    with pytest.warns(ng.errors.SlowRecipeWarning):
        twin(torch.randn(2, 12, WIDTH), pos=torch.randn(2, 12, WIDTH))


def as_rows(model: nn.Module, engine: Engine, x: Tensor) -> float:
    """A step on tokens without a batch, as models with packed sequences have them."""
    with engine.forward():
        loss = sum((block(x) for block in model.blocks), torch.zeros(())).float().square().mean()  # type: ignore[union-attr]
    engine.backward(loss)
    assert engine.step().applied
    return loss.item()


class Unbatched(Positioned):
    def forward(self, x: Tensor, pos: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return super().forward(x if x.dim() == 3 else x[None], pos).view(x.shape)


@pytest.mark.parametrize("recipe", ["bf16", "fp8[products=all]"])
@pytest.mark.parametrize("why", ["rows", "hook", "part", "argument"])
def test_the_report_says_which_blocks_ran_as_written(recipe: str, why: str, calls: list[str]) -> None:
    torch.manual_seed(0)
    model = Model()
    model.blocks = nn.ModuleList(Unbatched() for _ in range(3))
    engine = Engine(model, torch.optim.AdamW(model.parameters()), recipe, fused=True)
    x = torch.randn(2, 12, WIDTH)
    step(model, engine, x)
    before = str(engine.conversion), engine.conversion.summary()
    assert "ran as written" not in before[0] + before[1] and "3 blocks fused" in before[1]
    calls.clear()
    last: nn.Module = model.blocks[2]
    handle = last.c_fc.register_forward_hook(lambda *_: None) if why == "hook" else None  # type: ignore[union-attr]
    part = last.c_fc
    if why == "part":
        last.c_fc = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
    expected = {
        "rows": "their hidden state has 2 dimensions", "hook": "replaced, hooked", "part": "replaced, hooked",
        "argument": "called with pos",
    }  # fmt: skip
    with pytest.warns(ng.errors.SlowRecipeWarning, match=expected[why]) as caught:
        for _ in range(2):
            if why == "rows":
                as_rows(model, engine, x[0])
            else:
                step(model, engine, x, **({"pos": torch.randn(2, 12, WIDTH)} if why == "argument" else {}))
    assert len(caught) == 1
    count = 1 if why in ("hook", "part") else 3
    assert len(calls) == 2 * (3 - count)
    assert f"3 blocks fused ({count} ran as written)" in engine.conversion.summary()
    line = str(engine.conversion).splitlines()[-1]
    assert line.startswith("ran as written: blocks.") and expected[why] in line
    if handle is not None:
        handle.remove()
    last.c_fc = part
    step(model, engine, x)
    assert (str(engine.conversion), engine.conversion.summary()) == before
