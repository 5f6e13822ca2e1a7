"""Experts of a model's first block: their forward in BF16, their backward in FP8, with scales that are recorded."""

import pytest
import torch
from test_experts import draw, first_experts, mixtral, olmoe, sqnr

import narrowgauge as ng
from narrowgauge.nn.experts.modules import FusedExperts
from narrowgauge.nn.experts.plan import make_experts_plan
from narrowgauge.nn.experts.run import run_experts
from narrowgauge.nn.experts.run_wide import run_wide
from narrowgauge.nn.module_changes import find_change
from narrowgauge.scaling.tensor import TensorScales

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TOKENS = torch.randint(0, 256, (2, 48), generator=torch.Generator().manual_seed(1))
WIDE = {"auto": (True, False), "mostly-bf16": (True, False), "bf16": (True, True), "fp8": (False, False)}


def make_engine(recipe, make=olmoe, layers=6):
    torch.manual_seed(0)
    model = make(num_hidden_layers=layers).train()
    return ng.Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-3), recipe=recipe)


def run_step(engine, microbatches=1):
    for _ in range(microbatches):
        with engine.forward():
            loss = engine.model(input_ids=TOKENS, labels=TOKENS).loss
        engine.backward(loss)
    grads = {name: p.grad.clone() for name, p in engine.model.named_parameters() if p.grad is not None}
    assert engine.step().applied
    return float(loss.detach()), grads


@pytest.mark.parametrize("make", [olmoe, mixtral])
@pytest.mark.parametrize("field", WIDE)
def test_the_forward_of_the_first_block(field, make):
    engine = make_engine(f"fp8[products=all,first_forward={field}]", make)
    plans = [change.plan for module in engine.model.modules() if (change := find_change(module, FusedExperts))]
    assert len(plans) == 6 and (plans[0].wide_up, plans[0].wide_down) == WIDE[field]
    assert not any(plan.wide_up or plan.wide_down for plan in plans[1:])
    choices = {layer.path: layer.choice for layer in engine.conversion.layers if layer.part_of == "experts"}
    for path, spec in engine.conversion.experts.items():
        for name, wide in zip((spec.gate_up, spec.down), WIDE[field], strict=True):
            first = ".0." in path
            assert choices[f"{path}.{name}"] == ("bf16" if wide and first else "fp8", "fp8", "fp8")
    for _ in range(2):
        run_step(engine, 2)
    scales = engine.conversion.scales
    sites = scales.sites
    recorded = {name: float(scales.history[0, row]) for row, name in enumerate(sites) if "experts" in name}
    assert len(recorded) == 36 and all(value > 0 for value in recorded.values()), "every tensor was recorded"
    for path, spec in list(engine.conversion.experts.items())[:1]:
        for name in (spec.gate_up, spec.down):
            assert sites[f"{path}.{name}.input"].scale != 1 and sites[f"{path}.{name}.weight"].scale != 1


def test_few_blocks_and_frozen_experts_stay_in_fp8():
    plans = [find_change(m, FusedExperts) for m in make_engine("fp8[products=all]", layers=5).model.modules()]
    assert not any(change.plan.wide_up for change in plans if change)
    torch.manual_seed(0)
    model = olmoe(num_hidden_layers=6).train()
    path, module, spec = first_experts(model)
    getattr(module, spec.gate_up).requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    engine = ng.Engine(model, torch.optim.AdamW(trained, lr=1e-3), recipe="fp8[products=all]")
    assert not find_change(engine.model.get_submodule(path), FusedExperts).plan.wide_up


@pytest.mark.parametrize("mode", ["delayed", "current"])
@pytest.mark.parametrize("wide", [(True, False), (True, True)])
def test_forward_has_the_bits_of_bf16_and_backward_the_accuracy_of_fp8(wide, mode):
    _, module, spec = first_experts(olmoe())
    x, index, weights = draw(module, spec, tokens=300, choices=3, alive=6)
    stacks = getattr(module, spec.gate_up), getattr(module, spec.down)
    names = {f"e.{name}.{kind}": E4M3 for name in (spec.gate_up, spec.down) for kind in ("input", "weight")}
    names |= {f"e.{name}.grad_output": E5M2 for name in (spec.gate_up, spec.down)}
    scales = TensorScales(names, "cpu", mode=mode, in_backward=[name for name in names if "grad" in name])
    plan = make_experts_plan(module, "e", spec, scales, False, *wide)
    inputs = x, weights, *stacks
    grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(3))
    exact = run_wide("", spec, x, index, weights, *stacks)
    wanted = torch.autograd.grad(exact, inputs, grad)
    for _ in range(3):
        out = run_experts(plan, x, index, weights, *stacks)
        assert torch.equal(out, exact) if all(wide) else sqnr(out.detach(), exact.detach()) > 26
        made = torch.autograd.grad(out, inputs, grad)
        assert all(sqnr(one, other) > 20 for one, other in zip(made, wanted, strict=True))
        scales.update()
    assert (scales.history[0] > 0).all() and not scales.counts[:, 0].any()
    with torch.no_grad():
        before = scales.amax.clone()
        again = run_experts(plan, x, index, weights, *stacks)
        assert torch.equal(scales.amax, before) and sqnr(again, exact.detach()) > 26


@pytest.mark.parametrize("recipe", ["fp8[products=all]", "fp8-lean[products=all]"])
def test_recomputation_changes_no_bit(recipe):
    plain, again = (make_engine(recipe.replace("]", f",checkpoint={mode}]")) for mode in ("none", "full"))
    for _ in range(2):
        (loss, grads), (other, others) = run_step(plain, 2), run_step(again, 2)
        assert loss == other and all(torch.equal(grads[name], others[name]) for name in grads)
    assert torch.equal(plain.conversion.scales.history, again.conversion.scales.history)
