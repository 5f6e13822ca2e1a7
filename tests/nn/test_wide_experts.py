"""Experts as one function in BF16: compared with transformers' own code in FP32, in training, and in forecasts."""

import pytest
import torch
from test_experts import FAMILIES, built_in, differentiate, draw, first_experts, mixtral, olmoe

import narrowgauge as ng
from narrowgauge import hardware, tasks
from narrowgauge.forecast.trace.fake_gpu import describe_device
from narrowgauge.forecast.trace.trace_step import STEPS, trace_steps
from narrowgauge.nn.blocks.settings import OwnSettings
from narrowgauge.nn.convert import convert_layers, plan_conversion
from narrowgauge.nn.experts.find import find_experts
from narrowgauge.nn.experts.modules import FusedExperts, WideExperts
from narrowgauge.nn.experts.run_wide import run_wide
from narrowgauge.nn.module_changes import apply_change, find_change

H200 = describe_device(hardware.find_gpu("h200"))


@pytest.mark.parametrize("make", FAMILIES)
@pytest.mark.parametrize(("choices", "alive"), [(1, None), (2, None), (2, 3), (1, 1)])
def test_the_function_in_fp32_is_the_models_own_forward_and_backward(make, choices, alive):
    """With ragged counts, experts without tokens, and all tokens at one expert."""
    path, module, spec = first_experts(make())
    x, index, weights = draw(module, spec, choices=choices, alive=alive)
    stacks = getattr(module, spec.gate_up), getattr(module, spec.down)
    expected = differentiate(module(x, index, weights), x, weights, *stacks)
    output = run_wide(path, spec, x, index, weights, *stacks, torch.float32)
    made = differentiate(output, x, weights, *stacks)
    for one, other in zip(made, expected, strict=True):
        assert (one - other).abs().max() <= 1e-5 * other.abs().max()
    for expert in set(range(spec.count)) - set(index.flatten().tolist()):
        assert not made[3][expert].any() and not made[4][expert].any()


@pytest.mark.parametrize("make", [mixtral, olmoe])
def test_bf16_has_the_accuracy_of_bf16(make):
    path, module, spec = first_experts(make())
    x, index, weights = draw(module, spec, tokens=100)
    stacks = getattr(module, spec.gate_up), getattr(module, spec.down)
    exact = differentiate(run_wide(path, spec, x, index, weights, *stacks, torch.float32), x, weights, *stacks)
    made = differentiate(run_wide(path, spec, x, index, weights, *stacks), x, weights, *stacks)
    for one, other in zip(made, exact, strict=True):
        assert one.dtype is torch.float32 and (one - other).norm() < 0.01 * other.norm()


def test_some_gradients_only():
    path, module, spec = first_experts(mixtral())
    x, index, weights = draw(module, spec)
    stacks = getattr(module, spec.gate_up), getattr(module, spec.down)
    whole = differentiate(run_wide(path, spec, x, index, weights, *stacks), x, weights, *stacks)[1:]
    leaves = (x, weights, *stacks)
    for number, leaf in enumerate(leaves):
        for other in leaves:
            other.requires_grad_(other is leaf)
        (found,) = differentiate(run_wide(path, spec, x, index, weights, *stacks), leaf)[1:]
        assert torch.equal(found, whole[number])


def test_double_backward_is_refused():
    path, module, spec = first_experts(mixtral())
    x, index, weights = draw(module, spec)
    stacks = getattr(module, spec.gate_up), getattr(module, spec.down)
    out = run_wide(path, spec, x, index, weights, *stacks)
    with pytest.raises(ng.UsageError, match="double_backward"):
        torch.autograd.grad(out.sum(), x, create_graph=True)


@pytest.mark.parametrize("make", [mixtral, built_in])
def test_training_with_it_is_near_that_in_fp32(make):
    """Applied by hand: engines use it on GPUs only, where BF16 is faster."""
    losses = {}
    for name in ("fp32", "bf16"):
        torch.manual_seed(0)
        model = make()
        engine = ng.Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-3), recipe=name)
        if name == "bf16":
            for path, spec in find_experts(model).specs.items():
                module = model.get_submodule(path)
                apply_change(module, WideExperts(path, spec, OwnSettings.of(module)))
        tokens = torch.randint(0, 256, (2, 48), generator=torch.Generator().manual_seed(1))
        losses[name] = []
        for _ in range(5):
            with engine.forward():
                loss = model(tokens, tokens) if make is built_in else model(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
            losses[name].append(loss.item())
    assert losses["bf16"][-1] < losses["bf16"][0] - 0.2
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.01)


@pytest.mark.parametrize(
    ("recipe", "sizes", "expected"),
    [
        ("bf16", {}, WideExperts),
        ("bf16-lean", {}, WideExperts),
        ("fp8[products=all]", {}, FusedExperts),
        ("fp8[products=all]", {"intermediate_size": 192}, WideExperts),
        ("bf16", {"intermediate_size": 100}, None),
        ("bf16[keep=*.experts]", {}, None),
        ("fp32", {}, None),
        ("fp16", {}, None),
    ],
)
def test_which_recipes_use_it_on_a_gpu(recipe, sizes, expected):
    model = mixtral(**sizes)
    with hardware.assume(H200):
        conversion = convert_layers(model, recipe, H200)
    experts = model.model.layers[0].mlp.experts
    changes = [kind for kind in (WideExperts, FusedExperts) if find_change(experts, kind)]
    assert changes == ([] if expected is None else [expected])
    assert bool(conversion.wide_experts) is (expected is WideExperts)


def test_compiled_models_and_cpus_do_not():
    cpu = hardware.detect("cpu")
    assert not plan_conversion(mixtral(), ng.recipe("bf16"), cpu).wide_experts


def test_forecasts_of_bf16_know_it():
    """Three products of each of a layer's two stacks, of slots: pairs, and up to 127 empty ones for each expert."""
    task = tasks.find("moe-tiny")
    traced = trace_steps(task, ng.recipe("bf16"), hardware.find_gpu("h200"))
    products = [op for op in traced.trace.of_step(STEPS - 1) if "multiply_wide" in op.name]
    config = task.model().config
    assert len(products) == 6 * config.layers and all(op.kind == "product" for op in products)
    pairs = task.items_per_batch * config.chosen
    for op in products:
        size = config.width * config.hidden * (2 if op.where.endswith("gate_up_proj") else 1)
        assert 2 * pairs * size <= op.flops <= 2 * (pairs + 127 * config.experts) * size, op
