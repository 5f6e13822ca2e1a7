"""Forecasts of models that are not built in: learned attention bias, speech, mixtures of experts, convolutions."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrowgauge import hardware
from narrowgauge.errors import UsageError
from narrowgauge.forecast.memory.estimate import predict_memory
from narrowgauge.forecast.run import Scenario
from narrowgauge.forecast.time.reachable_rates import ReachableRates
from narrowgauge.forecast.time.roofline import predict_time
from narrowgauge.forecast.trace.trace_step import STEPS, Traced, trace_steps
from narrowgauge.recipe import parse
from narrowgauge.task import Task
from narrowgauge.tasks import user_model

RECIPES = ("fp32", "tf32", "fp16", "bf16", "fp8", "bf16-lean", "fp8-lean")
SMALL_EXPERTS = {"num_hidden_layers": 2, "hidden_size": 128, "vocab_size": 500, "num_attention_heads": 4,
                 "num_key_value_heads": 2, "intermediate_size": 64}  # fmt: skip
MODELS: dict[str, tuple[dict[str, Any], int | None]] = {
    "T5ForConditionalGeneration": ({"num_layers": 2, "num_decoder_layers": 2, "vocab_size": 500}, 64),
    "WhisperForConditionalGeneration": ({"encoder_layers": 2, "decoder_layers": 2, "vocab_size": 60000}, 64),
    "MixtralForCausalLM": (SMALL_EXPERTS, 64),
    "OlmoeForCausalLM": ({**SMALL_EXPERTS, "num_experts": 8, "pad_token_id": 0}, 64),
    "Qwen3MoeForCausalLM": ({**SMALL_EXPERTS, "num_experts": 8, "moe_intermediate_size": 64}, 64),
    "ResNetForImageClassification": ({"depths": [1, 1, 1, 1]}, None),
}
EXPERTS, CHOSEN, TOKENS, WIDTH = 8, 2, 512, 64


def trace(model: str, recipe: str, **fields: Any) -> Traced:
    pytest.importorskip("transformers")
    given, context = MODELS[model]
    task = user_model.make_task(f"transformers:{model}", {**given, **fields}, 4, context, small=False)
    return Scenario(task=task, gpu=hardware.find_gpu("h200")).trace(parse(recipe))


CASES = [
    (model, recipe)
    for model in MODELS
    for recipe in {"ResNet": RECIPES, "OlmoeF": ("bf16", "fp8-lean"), "Whispe": ("bf16",)}.get(
        model[:6], ("bf16", "fp8")
    )
]


@pytest.mark.parametrize(("model", "recipe"), CASES)
def test_models_that_are_not_built_in_are_predicted_in_every_recipe(model: str, recipe: str) -> None:
    traced = trace(model, recipe)
    memory = predict_memory(traced)
    products = [op for op in traced.trace.of_step(STEPS - 1) if op.kind in ("product", "convolution")]
    assert memory.total > 4 * traced.parameters
    assert products and all(op.where for op in products), "every product has a layer"
    balanced = [note for note in memory.notes if "every expert was given the same number" in note]
    assert len(balanced) == (model.startswith(("Mixtral", "Olmoe", "Qwen3Moe")))


def test_a_learned_bias_is_not_sent_to_cudnn() -> None:
    ops = [op for op in trace("T5ForConditionalGeneration", "bf16").trace.ops if op.kind == "attention"]
    encoder = {op.name for op in ops if op.where.startswith("encoder")}
    assert encoder == {
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_efficient_attention_backward",
    }
    assert any("cudnn" in op.name for op in ops), "cross attention has no learned bias"


def test_a_loop_over_experts_computes_as_much_as_grouped_products() -> None:
    flops = {}
    for implementation in ("eager", "grouped_mm"):
        traced = trace("Qwen3MoeForCausalLM", "bf16", experts_implementation=implementation)
        flops[implementation] = sum(
            op.flops for op in traced.trace.of_step(STEPS - 1) if op.kind == "product" and "experts" in op.where
        )
    assert flops["eager"] == pytest.approx(flops["grouped_mm"], rel=0.01)


class Routed(nn.Module):
    """Experts in the ways that people write them; ``way`` chooses one."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(CHOSEN, dim=-1)
        out = torch.zeros_like(x)
        if self.way == "counts":  # sort tokens by expert, split by counts
            order = chosen.flatten().argsort()
            counts = torch.bincount(chosen.flatten(), minlength=EXPERTS).tolist()
            parts = x[order // CHOSEN].split(counts)
            done = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True) if len(part)])
            return out.index_add(0, order // CHOSEN, done)
        if self.way == "scatter":
            counted = chosen.new_zeros((len(x), EXPERTS)).scatter_(1, chosen, 1).sum(dim=0).cpu().numpy()
            rows, start = x[chosen.flatten().argsort() // CHOSEN], 0
            made = []
            for expert, count in zip(self.experts, counted, strict=True):
                if count == 0:
                    continue
                made.append(expert(rows[start : start + count]))
                start += count
            return torch.cat(made)
        for number, expert in enumerate(self.experts):
            if self.way == "where":
                rows, place = torch.where(chosen == number)
                out = out.index_add(0, rows, expert(x[rows]) * weights[rows, place, None])
            elif self.way == "mask":
                mask = (chosen == number).any(dim=-1)
                if mask.any():
                    out[mask] = out[mask] + expert(x[mask])
            else:
                mask = F.one_hot(chosen, EXPERTS).permute(2, 1, 0)[number]
                place, rows = mask.nonzero(as_tuple=True)
                if rows.numel() == 0:
                    continue
                out = out.index_add(0, rows, expert(x[rows]) * weights[rows, place, None])
        return out


def trace_task(model: nn.Module) -> Traced:
    task = Task(
        model=lambda: model.to(torch.get_default_device()),
        batch=lambda step, split: torch.zeros(TOKENS, WIDTH),
        loss=lambda model, x: model(x).float().square().mean(),
        name="experts",
    )
    return trace_steps(task, parse("fp32"), hardware.find_gpu("h200"), compile=False)


@pytest.mark.parametrize("way", ["counts", "scatter", "where", "mask", "one_hot"])
def test_every_expert_gets_the_same_number_of_tokens(way: str) -> None:
    with torch.device("meta"):
        model = Routed(way)
    traced = trace_task(model)
    forward = [op for op in traced.trace.of_step(STEPS - 1) if op.kind == "product" and op.phase == "forward"]
    per_expert = {op.where: op.flops for op in forward if "experts" in op.where}
    assert len(per_expert) == EXPERTS
    assert set(per_expert.values()) == {2.0 * TOKENS * CHOSEN / EXPERTS * WIDTH * WIDTH}
    assert traced.balances_experts
    assert any("every expert" in note for note in predict_memory(traced).notes)


class Selects(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y[y > 0]


def test_sizes_that_no_router_determines_are_rejected() -> None:
    with torch.device("meta"):
        model = Selects()
    with pytest.raises(UsageError, match="cannot be predicted without data"):
        trace_task(model)


PUBLISHED_IMAGES_PER_S = 2470
"""ResNet-50 on one A100. The rate of convolutions is fitted to it, so this holds the fit, not its accuracy."""


def test_convolutions_are_not_optimistic_and_are_said_to_be_an_estimate() -> None:
    pytest.importorskip("transformers")
    task = user_model.make_task("transformers:ResNetForImageClassification", {}, 256, None, small=False)
    gpu = hardware.find_gpu("a100")
    found = predict_time(Scenario(task=task, gpu=gpu, compile=False).trace(parse("fp16")), ReachableRates(gpu))
    assert found.items_per_s == pytest.approx(PUBLISHED_IMAGES_PER_S, rel=0.05)
    assert any("convolutions" in note and "estimate" in note for note in found.notes)
