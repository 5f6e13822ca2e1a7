"""Stacked experts: recognized by what they compute, compared with transformers' own code, in FP32 and in FP8."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import narrowgauge as ng
from narrowgauge.models.moe import MoE, MoEConfig
from narrowgauge.nn.experts.find import compute_plain, find_experts
from narrowgauge.nn.experts.modules import FusedExperts
from narrowgauge.nn.experts.plan import make_experts_plan, make_fp32_plan
from narrowgauge.nn.experts.routers import find_routers
from narrowgauge.nn.experts.run import run_experts
from narrowgauge.nn.fused.modules import FusedBlock
from narrowgauge.nn.fused.norm import ConvertedNorm
from narrowgauge.nn.keep_fp32 import KeptInFp32
from narrowgauge.nn.module_changes import find_change
from narrowgauge.scaling.tensor import TensorScales

transformers = pytest.importorskip("transformers")
SIZES = {"hidden_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 256}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32}


def mixtral(**changes):
    sizes = SIZES | {"num_key_value_heads": 2, "intermediate_size": 256, "num_local_experts": 4} | changes
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes))


def olmoe(**changes):
    sizes = SIZES | {"num_key_value_heads": 4, "intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 3}
    config = transformers.OlmoeConfig(**(sizes | changes), eos_token_id=None, pad_token_id=None)
    return transformers.OlmoeForCausalLM(config)


def qwen3(**changes):
    sizes = SIZES | {"num_key_value_heads": 2, "moe_intermediate_size": 128, "num_experts": 8, "head_dim": 32}
    return transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(**(sizes | changes), num_experts_per_tok=2, intermediate_size=256)
    )


def deepseek(**changes):
    sizes = SIZES | LATENT | {"num_key_value_heads": 4, "intermediate_size": 256, "moe_intermediate_size": 128}
    groups = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
    return transformers.DeepseekV3ForCausalLM(
        transformers.DeepseekV3Config(**(sizes | groups | changes), first_k_dense_replace=1)
    )


def built_in(**changes):
    sizes = {"layers": 2, "width": 128, "heads": 4, "kv_heads": 2, "experts": 8, "chosen": 2, "hidden": 128}
    return MoE(MoEConfig(**(sizes | changes), context=64, vocab=256))


FAMILIES = [mixtral, olmoe, qwen3, deepseek, built_in]


def first_experts(model):
    found = find_experts(model)
    path, spec = next(iter(found.specs.items()))
    return path, model.get_submodule(path), spec


def draw(module, spec, tokens=50, choices=2, alive=None, seed=0):
    """Return tokens, experts and weights as leaves; only the first ``alive`` experts are chosen."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, spec.width, generator=generator).requires_grad_()
    index = torch.rand(tokens, alive or spec.count, generator=generator).topk(choices).indices
    weights = torch.rand(tokens, choices, generator=generator).requires_grad_()
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) / math.sqrt(parameter.shape[-1])
    return x, index, weights


def differentiate(output, *leaves, seed=9):
    direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(seed))
    return [output.detach(), *torch.autograd.grad((output.float() * direction).sum(), leaves)]


@pytest.mark.parametrize("make", FAMILIES)
@pytest.mark.parametrize(("choices", "alive"), [(1, None), (2, None), (2, 3), (1, 1)])
def test_the_function_in_fp32_is_the_model_own_forward_and_backward(make, choices, alive):
    """With ragged counts, experts without tokens, and all tokens at one expert."""
    _, module, spec = first_experts(make())
    x, index, weights = draw(module, spec, choices=choices, alive=alive)
    stacks = getattr(module, spec.gate_up), getattr(module, spec.down)
    expected = differentiate(module(x, index, weights), x, weights, *stacks)
    made = differentiate(run_experts(make_fp32_plan(spec), x, index, weights, *stacks), x, weights, *stacks)
    for one, other in zip(made, expected, strict=True):
        assert (one - other).abs().max() <= 1e-5 * other.abs().max()
    used = set(index.flatten().tolist())
    for expert in set(range(spec.count)) - used:
        assert not made[3][expert].any() and not made[4][expert].any()


def sqnr(made, exact):
    return 10 * math.log10(float(exact.double().square().sum() / (made.double() - exact.double()).square().sum()))


@pytest.mark.parametrize("mode", ["delayed", "current"])
@pytest.mark.parametrize(("gradients", "least"), [(torch.float8_e5m2, 20.0), (torch.float8_e4m3fn, 23.0)])
def test_fp8_has_the_accuracy_of_fp8(mode, gradients, least):
    _, module, spec = first_experts(olmoe())
    x, index, weights = draw(module, spec, tokens=300, choices=3, alive=6)
    stacks = getattr(module, spec.gate_up), getattr(module, spec.down)
    names = {
        f"e.{name}.{kind}": torch.float8_e4m3fn for name in (spec.gate_up, spec.down) for kind in ("input", "weight")
    }
    names |= {f"e.{name}.grad_output": gradients for name in (spec.gate_up, spec.down)}
    scales = TensorScales(names, "cpu", mode=mode, in_backward=[name for name in names if "grad" in name])
    plan = make_experts_plan(module, "e", spec, scales, lean=False)
    exact = differentiate(compute_plain("swiglu", x, index, weights, *stacks), x, weights, *stacks)
    for _ in range(3):  # the first scales are current
        made = differentiate(run_experts(plan, x, index, weights, *stacks), x, weights, *stacks)
        assert all(sqnr(one, other) > least for one, other in zip(made, exact, strict=True))
        scales.update()
    assert scales.delayed is (mode == "delayed")
    assert (scales.history[0] > 0).all() and not scales.counts[:, 0].any()


@pytest.mark.parametrize("make", FAMILIES)
def test_conversion_finds_experts_and_keeps_routers_in_fp32(make):
    model = make()
    conversion = ng.convert(model, "fp8[products=all]")
    experts = [module for module in model.modules() if find_change(module, FusedExperts)]
    assert len(experts) == len(conversion.experts) == (1 if make is deepseek else 2)
    formats = {m.path: m.formats for m in conversion.matrices}
    for path, spec in conversion.experts.items():
        assert formats[f"{path}.{spec.gate_up}"] == formats[f"{path}.{spec.down}"] == ("fp8",) * 3
    routers = find_routers(model)
    assert len(routers) == len(experts)
    for path, router in routers.items():
        assert find_change(router, KeptInFp32) and formats[path] == ("fp32",) * 3


@pytest.mark.parametrize("recipe", ["bf16", "fp8[products=all]"])
@pytest.mark.parametrize("make", [mixtral, deepseek])
def test_router_logits_do_not_depend_on_the_recipe(make, recipe):
    """Under autocast alone they would be rounded to BF16."""
    model = make()
    path, router = next(iter(find_routers(model).items()))
    x = torch.randn(40, 128)
    exact = copy.deepcopy(router)(x)
    engine = ng.Engine(model, torch.optim.AdamW(model.parameters()), recipe=recipe)
    with engine.forward():
        made = model.get_submodule(path)(x.bfloat16().float())
        exact = router.__class__.forward(copy.deepcopy(router), x.bfloat16().float())
    first, second = (one[0] if isinstance(one, tuple) else one for one in (made, exact))
    assert first.dtype is torch.float32
    torch.testing.assert_close(first, second)


class Listed(nn.Module):
    """A mixture whose experts are modules."""

    def __init__(self, experts=16, dictionary=False):
        super().__init__()
        parts = [nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(experts)]
        self.experts = (
            nn.ModuleDict({str(i): part for i, part in enumerate(parts)}) if dictionary else nn.ModuleList(parts)
        )
        self.router = nn.Linear(64, experts, bias=False)
        self.shared_expert = nn.Linear(64, experts)

    def forward(self, x):
        weights = self.router(x).softmax(-1)
        parts = self.experts.values() if isinstance(self.experts, nn.ModuleDict) else self.experts
        return sum(weights[..., i : i + 1] * part(x) for i, part in enumerate(parts))


@pytest.mark.parametrize("dictionary", [False, True])
@pytest.mark.parametrize("recipe", ["bf16", "fp8[products=all]"])
def test_routers_beside_experts_in_a_list_stay_in_fp32(recipe, dictionary):
    model = nn.Sequential(Listed(16, dictionary), nn.Linear(64, 16))
    assert list(find_routers(model)) == ["0.router"]
    engine = ng.Engine(model, torch.optim.AdamW(model.parameters()), recipe=recipe)
    x = torch.randn(8, 64)
    with engine.forward():
        made = model[0].router(x)
        assert model[0].experts["0" if dictionary else 0](x).dtype is torch.bfloat16
    assert made.dtype is torch.float32
    torch.testing.assert_close(made, F.linear(x, model[0].router.weight))
    assert {m.path: m.formats for m in engine.conversion.matrices}["0.router"] == ("fp32",) * 3


def test_heads_beside_as_many_blocks_are_no_routers():
    blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(12))
    model = nn.ModuleDict({"blocks": blocks, "head": nn.Linear(64, 12)})
    assert not find_routers(model)


@pytest.mark.parametrize("make", FAMILIES)
@pytest.mark.parametrize(
    "recipe", ["fp8[products=all]", "fp8-lean[products=all]", "fp8[products=all,gradients_format=e4m3]"]
)
def test_training_is_near_that_in_fp32(make, recipe):
    losses = {}
    for name in ("fp32", recipe):
        torch.manual_seed(0)
        model = make()
        engine = ng.Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-3), recipe=name)
        tokens = torch.randint(0, 256, (2, 48), generator=torch.Generator().manual_seed(1))
        losses[name] = []
        for _ in range(5):
            with engine.forward():
                if make is built_in:
                    loss = model(tokens, tokens)
                else:
                    loss = model(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
            losses[name].append(loss.item())
    exact, made = losses.values()
    assert made[-1] < made[0] - 0.2
    assert made == pytest.approx(exact, rel=0.01)


class Experts(nn.Module):
    """Experts with names of their own."""

    def __init__(self, clip=None, bias=False, transposed=False):
        super().__init__()
        self.number_of_experts, self.size, self.clip, self.transposed = 4, 128, clip, transposed
        shape = (4, 128, 512) if transposed else (4, 512, 128)
        self.first, self.second = nn.Parameter(torch.randn(shape)), nn.Parameter(torch.randn(4, 128, 256))
        if bias:
            self.offset = nn.Parameter(torch.randn(4, 128))

    def forward(self, tokens, which, weights):
        out = torch.zeros_like(tokens)
        for expert in range(self.number_of_experts):
            place, choice = torch.where(which == expert)
            matrix = self.first[expert].t() if self.transposed else self.first[expert]
            gate, up = F.linear(tokens[place], matrix).chunk(2, -1)
            hidden = F.gelu(gate, approximate="tanh") * up
            made = F.linear(hidden if self.clip is None else hidden.clamp(max=self.clip), self.second[expert])
            out = out.index_add(0, place, made * weights[place, choice, None])
        return out


def test_experts_are_recognized_by_what_they_compute():
    found = find_experts(nn.ModuleDict({"some": Experts()}))
    spec = found.specs["some"]
    assert (spec.activation, spec.count, spec.width, spec.inner) == ("geglu-tanh", 4, 128, 256)
    assert (spec.gate_up, spec.down) == ("first", "second")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"clip": 0.5}, "something else"),
        ({"clip": 7.0}, "something else"),
        ({"bias": True}, "two stacks"),
        ({"transposed": True}, "two stacks"),
    ],
)
def test_other_experts_stay_as_they_are(changes, reason):
    model = nn.ModuleDict({"some": Experts(**changes)})
    found = find_experts(model)
    assert not found.specs and reason in found.reasons["some"]
    conversion = ng.convert(model, "fp8[products=all]")
    assert not find_change(model["some"], FusedExperts) and not conversion.experts
    assert any(reason in matrix.reason for matrix in conversion.matrices)


def test_a_forward_that_was_replaced_stays():
    experts = Experts()
    experts.forward = lambda tokens, which, weights: tokens
    assert "replaced" in find_experts(nn.ModuleDict({"some": experts})).reasons["some"]


def test_experts_with_odd_widths_say_why_they_are_in_bf16():
    conversion = ng.convert(mixtral(intermediate_size=192), "fp8[products=all]")
    matrix = next(m for m in conversion.matrices if m.path.endswith("experts.down_proj"))
    assert matrix.formats == ("bf16",) * 3 and "192 inner columns are not a multiple of 128" in matrix.reason
    assert not conversion.experts


def test_frozen_experts_get_no_gradients():
    model = mixtral()
    path, module, spec = first_experts(model)
    getattr(module, spec.gate_up).requires_grad_(False)
    engine = ng.Engine(
        model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]), recipe="fp8[products=all]"
    )
    tokens = torch.randint(0, 256, (1, 32))
    with engine.forward():
        loss = model(input_ids=tokens, labels=tokens).loss
    engine.backward(loss)
    changed = model.get_submodule(path)
    assert getattr(changed, spec.gate_up).grad is None and getattr(changed, spec.down).grad.any()
    engine.step()


def test_evaluation_records_nothing_and_keeps_no_graph():
    model = olmoe()
    engine = ng.Engine(model, torch.optim.AdamW(model.parameters()), recipe="fp8[products=all]")
    scales = engine.conversion.scales
    with torch.no_grad(), engine.forward():
        loss = model(input_ids=torch.zeros(1, 8, dtype=torch.int64), labels=torch.zeros(1, 8, dtype=torch.int64)).loss
    assert not scales.amax.any() and not loss.requires_grad


@pytest.mark.parametrize("make", FAMILIES)
def test_blocks_are_fused_up_to_their_experts(make):
    """Conversion has compared the fused half with the block in FP32, outputs and gradients, or it would not use it."""
    model = make()
    conversion = ng.convert(model, "fp8[products=all]")
    assert len(conversion.blocks) == 2 and not conversion.unfused
    halves = [change.plan.spec for block in conversion.blocks if (change := find_block(model, block))]
    assert [spec.order for spec in halves].count("half") == len(conversion.experts)
    for spec in halves:
        assert bool(spec.mlp) is (spec.order == "half") and not (spec.mlp and spec.ups)
        assert spec.attention.kind == ("own" if make is deepseek else "rotary")  # latent attention


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_norms_of_queries_over_all_heads_are_part_of_the_rotary_kernel(kv_heads):
    model = olmoe(num_key_value_heads=kv_heads)
    conversion = ng.convert(model, "fp8[products=all]")
    spec = find_block(model, conversion.blocks[0]).plan.spec.attention
    assert (spec.kind, spec.kv_heads, spec.q_norm.path) == ("rotary", kv_heads, "self_attn.q_norm")
    assert len(model.model.layers[0].self_attn.q_norm.weight) == 128


def test_norms_in_the_models_own_attention_run_as_one_kernel():
    """Those of DeepSeek's latents are like the block's norms."""
    model = deepseek(q_lora_rank=128)
    ng.convert(model, "fp8[products=all]")
    layer = model.model.layers[0]
    assert find_change(layer.self_attn.q_a_layernorm, ConvertedNorm)
    assert not find_change(layer.post_attention_layernorm, ConvertedNorm)


def find_block(model, path):
    return find_change(model.get_submodule(path), FusedBlock)


def run_step(engine, tokens):
    with engine.forward():
        loss = engine.model(input_ids=tokens, labels=tokens).loss
    engine.backward(loss)
    return loss.item()


def test_hooks_inside_the_mixture_are_called_and_hooks_on_other_parts_too():
    """Router logits are recorded by hooks in transformers; a hook on a part that is not called stops the fusion."""
    tokens = torch.randint(0, 256, (1, 16))
    model = mixtral(output_router_logits=True)
    engine = ng.Engine(model, torch.optim.AdamW(model.parameters()), recipe="fp8[products=all]")
    with engine.forward():
        made = model(input_ids=tokens, labels=tokens)
    assert len(made.router_logits) == 2 and made.aux_loss > 0 and made.aux_loss.requires_grad
    engine.backward(made.loss)
    seen = []
    layer = model.model.layers[0]
    layer.post_attention_layernorm.register_forward_hook(lambda *_: seen.append("norm"))
    layer.mlp.experts.register_forward_hook(lambda *_: seen.append("experts"))
    run_step(engine, tokens)
    assert seen == ["norm", "experts"]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(("recipe", "least"), [("bf16", 35), ("fp8[products=all]", 15)])
def test_gradient_checkpointing_gives_the_same_gradients(reentrant, recipe, least):
    grads = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = olmoe()
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        engine = ng.Engine(model, torch.optim.AdamW(model.parameters()), recipe=recipe)
        tokens = torch.randint(0, 256, (1, 32), generator=torch.Generator().manual_seed(1))
        run_step(engine, tokens)
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert sqnr(grads[1], grads[0]) > least  # one is fused and one is not: they round differently


@pytest.mark.parametrize(("recipe", "least"), [("bf16", 35), ("fp8[products=all]", 15)])
def test_a_step_is_accumulated_over_microbatches(recipe, least):
    """Two halves of a batch give the gradients of the whole, up to rounding."""
    grads = []
    tokens = torch.randint(0, 256, (4, 32), generator=torch.Generator().manual_seed(1))
    for parts in (1, 2):
        torch.manual_seed(0)
        model = olmoe(output_router_logits=False)
        engine = ng.Engine(model, torch.optim.AdamW(model.parameters()), recipe=recipe, accumulate=parts)
        for part in tokens.chunk(parts):
            run_step(engine, part)
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert sqnr(grads[1], grads[0]) > least
