"""Experts on a GPU, in FP8 and BF16: kernels beside their references, training beside FP32, nothing that waits."""

import math

import pytest
import torch

import narrowgauge as ng
from narrowgauge.kernels.experts import activation, products, rows, wide
from narrowgauge.kernels.experts.slots import assign_reference, assign_slots

transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def route(tokens, experts, choices, alive=None, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.rand(tokens, alive or experts, generator=generator, device="cuda").topk(choices).indices


def draw(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").bfloat16()


def scalar(value):
    return torch.tensor(value, device="cuda")


@pytest.mark.parametrize(
    ("tokens", "experts", "choices"),
    [(1, 8, 1), (16384, 64, 8), (8192, 8, 2), (1000, 256, 8), (777, 3, 2), (5000, 1, 1)],
)
def test_slots_equal_their_reference(tokens, experts, choices):
    index = route(tokens, experts, choices)
    for made, expected in zip(assign_slots(index, experts), assign_reference(index, experts), strict=True):
        assert torch.equal(made, expected)


@pytest.mark.parametrize(("width", "depth"), [(2048, 1024), (256, 128), (768, 384), (1408, 2048)])
@pytest.mark.parametrize(("a_dtype", "alive"), [(E4M3, None), (E5M2, 5)])
def test_products_equal_their_references(width, depth, a_dtype, alive):
    experts = 16
    slots = assign_slots(route(1500, experts, 4, alive), experts)
    used = int(slots.starts[-1])
    empty = (slots.pairs < 0)[:, None]
    a = draw(slots.size, depth).masked_fill(empty, 0).to(a_dtype)
    b = draw(experts * width, depth, seed=2).to(E4M3)
    inverse = scalar(0.5), scalar(0.25)
    made = products.multiply(a, b, slots, *inverse, width)[:used].float()
    expected = products.multiply_reference(a, b, slots.experts, *inverse, width, False)[:used].float()
    assert (made - expected).norm() <= 5e-3 * expected.norm()
    turned = draw(depth, experts * width, seed=3).to(E4M3)
    c = draw(slots.size, width, seed=4).masked_fill(empty, 0).to(a_dtype)
    if width % products.ALIGNMENT == 0:
        made = products.multiply(c, turned, slots, *inverse, depth, columns=True)[:used].float()
        expected = products.multiply_reference(c, turned, slots.experts, *inverse, depth, True)[:used].float()
        assert (made - expected).norm() <= 5e-3 * expected.norm()
    a_t, c_t = (x.view(torch.uint8).t().contiguous().view(x.dtype) for x in (a, c))
    for dtype, tolerance in ((torch.float32, 1e-3), (torch.bfloat16, 5e-3)):
        made = products.multiply_slots(c_t, a_t, slots.starts, *inverse, dtype)
        expected = products.multiply_slots_reference(c_t, a_t, slots.starts, *inverse, dtype)
        assert (made.float() - expected.float()).norm() <= tolerance * expected.float().norm()
        if alive is not None:
            assert not made[alive:].any()


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("width", [2048, 144])
def test_rows_equal_their_references(dtype, width):
    slots = assign_slots(route(3000, 16, 4, 11), 16)
    x = draw(3000, width)
    x[3, 5], x[9, 1] = 300.0, 1e-6
    scale = scalar(2.0)
    stats = [(torch.zeros((), device="cuda"), torch.zeros(2, dtype=torch.int64, device="cuda")) for _ in range(2)]
    made = rows.gather_cast(x, slots, scale, dtype, *stats[0], transposed=True)
    gathered = rows.gather_reference(x, slots.pairs, slots.choices)
    expected = rows.round_reference(gathered, scale, dtype, *stats[1])
    assert torch.equal(made[0].view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(made[1].view(torch.uint8), expected.view(torch.uint8).t())
    assert torch.equal(stats[0][0], stats[1][0]) and torch.equal(stats[0][1], stats[1][1])
    again = rows.gather_cast(x, slots, scale, dtype, rows=False, transposed=True)
    assert again[0] is None and torch.equal(again[1].view(torch.uint8), made[1].view(torch.uint8))
    y = draw(slots.size, width, seed=5)
    torch.testing.assert_close(
        rows.sum_slots(y, slots, torch.float32), rows.sum_slots_reference(y, slots.of_pairs, torch.float32)
    )


@pytest.mark.parametrize("kind", ["swiglu", "geglu", "geglu-tanh"])
@pytest.mark.parametrize("width", [1024, 144])
def test_activation_equals_its_reference(kind, width):
    slots = assign_slots(route(2000, 16, 4, 11), 16)
    empty = (slots.pairs < 0)[:, None]
    u, grad = (draw(slots.size, n, seed=n).masked_fill(empty, math.nan) for n in (2 * width, width))
    weights = torch.rand(2000, 4, device="cuda")
    scale, forward_scale = scalar(32.0), scalar(16.0)
    amax = [torch.zeros((), device="cuda") for _ in range(2)]
    made = activation.activate_experts(kind, u, weights, slots, forward_scale, amax[0]).float()
    plain = activation._activate(
        kind, u.cpu(), weights.cpu(), slots.pairs.cpu(), forward_scale.cpu(), None, None
    ).float()
    apart = (made.cpu() - plain).abs()
    assert (apart <= 0.13 * plain.abs() + 2**-9).all() and (apart > 0).float().mean() < 0.01
    counts = torch.zeros(2, dtype=torch.int64, device="cuda")
    found = activation.activate_experts_backward(
        kind, grad, u, weights, slots, scale, E5M2, forward_scale, amax[1], counts
    )
    expected = activation._backward(
        kind, grad.cpu(), u.cpu(), weights.cpu(), slots.pairs.cpu(), scale.cpu(), E5M2, forward_scale.cpu(), None, None
    )
    for one, other in zip(found[:3], expected[:3], strict=True):
        apart = (one.float().cpu() - other.float()).abs()
        assert (apart <= 0.26 * other.float().abs() + 2**-9).all() and (apart > 0).float().mean() < 0.01
    of_weights = expected[3].sum(0)[slots.of_pairs.cpu().long()]
    torch.testing.assert_close(found[3].cpu(), of_weights, rtol=2e-3, atol=2e-3)
    assert amax[0] > 0 and amax[1] > 0 and not counts[0]


def make_model(family):
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "vocab_size": 512,
        "use_cache": False,
    }
    with torch.device("cuda"):
        if family == "olmoe":
            config = transformers.OlmoeConfig(
                **sizes, num_key_value_heads=4, intermediate_size=128, num_experts=16, num_experts_per_tok=4,
                eos_token_id=None, pad_token_id=None,
            )  # fmt: skip
            return transformers.OlmoeForCausalLM(config)
        if family == "mixtral":
            config = transformers.MixtralConfig(
                **sizes, num_key_value_heads=2, intermediate_size=512, num_local_experts=4
            )
            return transformers.MixtralForCausalLM(config)
        config = transformers.Qwen3MoeConfig(
            **sizes, num_key_value_heads=2, moe_intermediate_size=128, intermediate_size=512, num_experts=8,
            num_experts_per_tok=2, head_dim=64,
        )  # fmt: skip
        return transformers.Qwen3MoeForCausalLM(config)


def train(family, recipe, steps=8):
    model = make_model(family)
    engine = ng.Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), recipe=recipe, clip_norm=1.0)
    tokens = torch.randint(0, 512, (4, 128), device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    losses = []
    for _ in range(steps):
        with engine.forward():
            loss = model(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses, engine


@pytest.mark.parametrize("family", ["olmoe", "mixtral", "qwen3"])
@pytest.mark.parametrize(
    "recipe",
    [
        "fp8[products=all]",
        "fp8-lean[products=all]",
        "fp8[products=all,scaling=current]",
        "fp8[products=all,first_forward=mostly-bf16]",
        "fp8[products=all,first_forward=bf16]",
    ],
)
def test_training_is_near_that_in_fp32(family, recipe):
    exact, _ = train(family, "fp32")
    made, engine = train(family, recipe)
    assert len(engine.conversion.experts) == 2
    assert made[-1] < made[0] - 0.5 and made == pytest.approx(exact, rel=0.02)


@pytest.mark.parametrize("family", ["olmoe", "mixtral", "qwen3"])
@pytest.mark.parametrize("recipe", ["bf16", "bf16-lean"])
def test_training_in_bf16_is_near_that_in_fp32(family, recipe):
    exact, _ = train(family, "fp32")
    made, engine = train(family, recipe)
    assert len(engine.conversion.wide_experts) == 2
    assert made[-1] < made[0] - 0.5 and made == pytest.approx(exact, rel=0.01)


@pytest.mark.parametrize("alive", [None, 5])
@pytest.mark.parametrize(("width", "depth"), [(2048, 1024), (72, 40)])
def test_products_in_bf16_equal_their_references(width, depth, alive):
    slots = assign_slots(route(1500, 16, 4, alive), 16)
    used = int(slots.starts[-1])
    a, stack = draw(slots.size, depth).masked_fill((slots.pairs < 0)[:, None], 0), draw(16, width, depth, seed=2)
    b = draw(slots.size, width, seed=3).masked_fill((slots.pairs < 0)[:, None], 0)
    for made, expected in (
        (wide.multiply_wide(a, stack, slots, True), wide.multiply_wide_reference(a, stack, slots.starts, True)),
        (wide.multiply_wide(b, stack, slots, False), wide.multiply_wide_reference(b, stack, slots.starts, False)),
    ):
        assert (made[:used].float() - expected[:used].float()).norm() <= 5e-3 * expected.float().norm()
    made, expected = (
        f(b, a, s) for f, s in ((wide.multiply_slots_wide, slots), (wide.multiply_slots_wide_reference, slots.starts))
    )
    assert (made.float() - expected.float()).norm() <= 5e-3 * expected.float().norm()
    assert alive is None or not made[alive:].any()


@pytest.mark.parametrize("kind", ["swiglu", "geglu", "geglu-tanh", "reglu"])
@pytest.mark.parametrize("width", [1024, 144])
def test_passes_in_bf16_equal_their_references(kind, width):
    slots = assign_slots(route(2000, 16, 4, 11), 16)
    empty = (slots.pairs < 0)[:, None]
    u, grad = (draw(slots.size, n, seed=n).masked_fill(empty, math.nan) for n in (2 * width, width))
    weights, x = torch.rand(2000, 4, device="cuda"), draw(2000, width)
    assert torch.equal(wide.gather(x, slots), rows.gather_reference(x, slots.pairs, 4))
    made = wide.activate_wide(kind, u, weights, slots)
    expected = wide.activate_wide_reference(kind, u, weights, slots.pairs)
    torch.testing.assert_close(made, expected, rtol=2**-7, atol=1e-4)
    found = wide.activate_wide_backward(kind, grad, u, weights, slots)
    of_u, again, dots = wide.activate_wide_backward_reference(kind, grad, u, weights, slots.pairs)
    for one, other in zip(found, (of_u, again, dots[slots.of_pairs.long()]), strict=True):
        torch.testing.assert_close(one, other, rtol=2**-7, atol=1e-3 if one.dtype is torch.bfloat16 else 1e-2)
    assert torch.equal(found[1], made)


@pytest.mark.parametrize(
    "recipe",
    [
        "fp8[products=all]",
        "bf16",
        "fp8[products=all,first_forward=mostly-bf16]",
        "fp8[products=all,first_forward=bf16]",
    ],
)
@pytest.mark.parametrize("family", ["olmoe", "mixtral"])
def test_a_step_does_not_wait_for_the_gpu(family, recipe):
    _, engine = train(family, recipe, 3)
    assert len(engine.conversion.blocks) == 2
    tokens = torch.randint(0, 512, (4, 128), device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with engine.forward():
            loss = engine.model(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
