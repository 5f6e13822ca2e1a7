"""No inf or NaN reaches a weight, from any source, under every recipe, through every kind of layer."""

import copy
import math

import pytest
import torch
from torch import nn

from narrowgauge import Engine
from narrowgauge.models.gpt import GPT, GPTConfig
from narrowgauge.models.llama import Llama, LlamaConfig

RECIPES = [
    "fp32",
    "bf16",
    "fp16",
    "fp8",
    "fp8[scaling=current]",
    "fp8[products=all]",
    "fp8[granularity=row]",
    "fp8[granularity=block]",
    "bf16-lean",
    "fp8-lean",
]
BAD = [math.inf, -math.inf, math.nan]
WIDTH, VOCAB = 32, 128


class Injector(nn.Module):
    """Writes a value into one element of its input, or of the gradient of its output."""

    def __init__(self):
        super().__init__()
        self.value, self.where = None, ""

    def forward(self, x):
        if self.value is None:
            return x
        return _Inject.apply(x, self.value, self.where)


class _Inject(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, value, where):
        ctx.value, ctx.where = value, where
        return set_one_element(x, value) if where == "activation" else x.clone()

    @staticmethod
    def backward(ctx, grad):
        return set_one_element(grad, ctx.value) if ctx.where == "gradient" else grad, None, None


def set_one_element(x, value):
    x = x.clone()
    x.view(-1)[x.numel() // 2] = value
    return x


def linears():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Injector(), nn.Linear(WIDTH, WIDTH, bias=False), nn.GELU())


def hidden_linears():
    """Only a converted layer reads the injected value, and its cast saturates it."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Injector(), nn.Linear(WIDTH, WIDTH))


class InGpt(nn.Module):
    """A fused model whose embedding output an injector can change."""

    def __init__(self, kind):
        super().__init__()
        if kind == "gpt":
            self.body = GPT(GPTConfig(layers=2, width=WIDTH, heads=2, context=16, vocab=VOCAB))
        else:
            self.body = Llama(
                LlamaConfig(layers=2, width=WIDTH, heads=2, kv_heads=1, hidden=64, context=16, vocab=VOCAB)
            )
        self.injector = Injector()
        self.body.tok = nn.Sequential(self.body.tok, self.injector)

    def forward(self, ids):
        return self.body(ids, ids)


def run(engine, factor=1.0, seed=0):
    torch.manual_seed(seed)
    model = engine.model
    with engine.forward():
        if isinstance(model, InGpt):
            loss = model(torch.randint(0, VOCAB, (2, 16)))
        else:
            loss = model(torch.randn(16, WIDTH)).float().square().mean()
        loss = loss * factor
    engine.backward(loss)


def make(build, recipe, **options):
    torch.manual_seed(0)
    model = build()
    return Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-2), recipe, **options)


def find_injector(model):
    return next(module for module in model.modules() if isinstance(module, Injector))


def everything(engine):
    state = engine.state_dict()
    return {name: value.clone() for name, value in state["model"].items()}, copy.deepcopy(state["optimizers"])


def assert_untouched(before, engine):
    weights, states = everything(engine)
    for name, value in weights.items():
        assert torch.equal(value, before[0][name]), name
    for old, new in zip(before[1], states, strict=True):
        for index, state in old["state"].items():
            for key, value in state.items():
                same = torch.equal(value, new["state"][index][key]) if torch.is_tensor(value) else True
                assert same, (index, key)


MODELS = {"linears": linears, "hidden": hidden_linears, "gpt": lambda: InGpt("gpt"), "llama": lambda: InGpt("llama")}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("model", MODELS)
def test_a_bad_value_skips_the_update_and_the_next_good_one_is_applied(model, recipe):
    engine = make(MODELS[model], recipe)
    injector = find_injector(engine.model)
    run(engine)
    assert engine.step().applied
    for seed, where in enumerate(("loss", "activation", "gradient"), 1):
        run(engine, seed=seed)
        assert engine.step().applied
        before, scales, skipped = everything(engine), scales_of(engine), engine.skipped
        for count, value in enumerate(BAD, 1):
            if where != "loss":
                injector.value, injector.where = value, where
            run(engine, value if where == "loss" else 1.0)
            injector.value = None
            report = engine.step()
            assert not report.applied and not math.isfinite(report.grad_norm), (where, value)
            assert engine.skipped == skipped + count
            assert_untouched(before, engine)
            assert all(torch.equal(one, other) for one, other in zip(scales, scales_of(engine), strict=True))
    run(engine, seed=9)
    assert engine.step().applied
    assert all(value.isfinite().all() for value in engine.state_dict()["model"].values())


def scales_of(engine):
    scales = engine.conversion.scales
    return [] if scales is None else [scales.scale.clone(), scales.history.clone(), scales.inv_scale.clone()]


@pytest.mark.parametrize("recipe", ["bf16", "fp8", "fp8-lean"])
@pytest.mark.parametrize("bad", [0, 1, 2])
@pytest.mark.parametrize("where", ["activation", "gradient"])
def test_one_bad_microbatch_skips_the_update(recipe, bad, where):
    engine = make(hidden_linears, recipe, accumulate=3)
    injector = find_injector(engine.model)
    for update in range(3):
        for index in range(3):
            injector.value, injector.where = (math.inf if update == 1 and index == bad else None), where
            run(engine, seed=3 * update + index)
            report = engine.step()
        assert report.applied == (update != 1)


@pytest.mark.parametrize("value", BAD)
def test_released_gradients_are_not_stepped_after_a_bad_cast(value):
    engine = make(hidden_linears, "fp8-lean[gradients=released]")
    run(engine)
    assert engine.step().applied
    before = everything(engine)
    injector = find_injector(engine.model)
    injector.value, injector.where = value, "activation"  # seen in forward, before any parameter is stepped
    run(engine)
    injector.value = None
    assert not engine.step().applied
    assert_untouched(before, engine)


def test_the_cast_with_the_bad_value_is_named():
    from narrowgauge import TrainingStalled

    engine = make(hidden_linears, "fp8", max_consecutive_skips=2)
    run(engine)
    engine.step()
    injector = find_injector(engine.model)
    injector.value, injector.where = math.inf, "activation"
    with pytest.raises(TrainingStalled, match=r"2\.input \(cast to FP8\)"):
        for _ in range(3):
            run(engine)
            engine.step()
    injector.value = None
    run(engine)
    assert engine.step().applied, "the error can be caught, and training continues"
    assert engine.state_dict()


def test_scales_are_usable_after_a_skipped_first_update():
    """There is no history yet: without a scale, all gradients of 1e-6 would be flushed to zero."""
    engine = make(hidden_linears, "fp8")
    run(engine, math.nan)
    assert not engine.step().applied
    for seed in range(3):
        run(engine, 1e-6, seed)
        assert engine.step().applied
    flushed = engine.conversion.scales.counts[:, 1].sum()
    assert flushed < 0.2 * 3 * 16 * WIDTH * len(engine.conversion.scales.sites)


@pytest.mark.parametrize("recipe", ["fp32", "bf16", "fp8", "bf16-lean"])
@pytest.mark.parametrize("size", [1e25, 1e-25])
def test_norms_cover_the_range_of_fp32(recipe, size):
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.0) if "lean" not in recipe else
                    torch.optim.AdamW(model.parameters(), lr=0.0), recipe)  # fmt: skip
    x = torch.randn(16, WIDTH)
    for _ in range(2):
        with engine.forward():
            loss = model(x).float().sum() * size
        engine.backward(loss)
        report = engine.step()
    plain = copy.deepcopy(x).sum(0).expand(WIDTH, WIDTH).norm().item() * size
    assert report.applied and report.grad_norm == pytest.approx(plain, rel=0.05)
