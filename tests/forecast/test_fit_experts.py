"""Memory plans of models with mixtures of experts, on a simulated GPU."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import pytest

from narrowgauge import hardware, tasks
from narrowgauge.engine.fit_memory import MemoryFitter
from narrowgauge.forecast.memory.estimate import predict_memory
from narrowgauge.forecast.time.reachable_rates import ReachableRates
from narrowgauge.forecast.time.roofline import predict_time
from narrowgauge.forecast.trace.trace_step import Traced, trace_steps
from narrowgauge.recipe import parse
from narrowgauge.task import Task
from narrowgauge.tasks import user_model

H200 = hardware.find_gpu("h200")
LAYERS = 4
SIZES: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 256, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "use_cache": False,
    "num_key_value_heads": 4,
}  # fmt: skip
FAMILIES: Mapping[str, dict[str, Any]] = {
    "Mixtral": {"intermediate_size": 512, "num_local_experts": 4, "output_router_logits": True},
    "Olmoe": {"intermediate_size": 128, "num_experts": 16, "num_experts_per_tok": 4},
    "DeepseekV3": {
        "intermediate_size": 512, "moe_intermediate_size": 128, "n_routed_experts": 8, "num_experts_per_tok": 2,
        "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 64, "kv_lora_rank": 64,
        "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 64,
    },
}  # fmt: skip


def make_task(kind: str) -> Task:
    if kind in FAMILIES:
        pytest.importorskip("transformers")
        model = f"transformers:{kind}ForCausalLM"
        return user_model.make_task(model, SIZES | FAMILIES[kind], 16, 256, small=False)
    return tasks.find(kind, batch=32, context=256)


BUILT_IN = f"moe:{LAYERS}x256x8"


@functools.cache
def trace(kind: str, recipe: str, budget: int | None = None, accumulate: int = 1) -> Traced:
    return trace_steps(make_task(kind), parse(recipe), H200, accumulate=accumulate, memory_budget=budget)


@functools.cache
def find_range(kind: str, recipe: str, accumulate: int = 1) -> tuple[int, int]:
    """Return the peaks of a later step with all blocks recomputed, and with all kept."""
    every = (str(parse(recipe).replace(checkpoint=mode, activations="bf16")) for mode in ("full", "none"))
    few, most = (predict_memory(trace(kind, one, None, accumulate)).total for one in every)
    return few, most


@pytest.mark.parametrize(
    ("kind", "recipe", "share"),
    [
        *((BUILT_IN, recipe, 0.5) for recipe in ("bf16", "fp8", "fp8-lean", "bf16-lean")),
        *((BUILT_IN, "fp8-lean", share) for share in (0.3, 0.8)),
        (f"moe:{LAYERS}x256x8+1", "fp8", 0.5),
        ("Mixtral", "fp8-lean", 0.6),
        ("Olmoe", "bf16", 0.6),
        ("DeepseekV3", "fp8", 0.6),
    ],
)
def test_a_plan_fits_and_its_peak_is_as_predicted(kind: str, recipe: str, share: float) -> None:
    few, most = find_range(kind, recipe)
    assert most > 1.2 * few, "recomputation frees something"
    budget = int(few + share * (most - few))
    found = trace(kind, recipe, budget)
    memory, plan = predict_memory(found), found.plan
    assert plan is not None and plan.fits and max(memory.total, memory.first_step) <= budget
    assert plan.peak == pytest.approx(memory.total, rel=0.01)
    assert len(plan.blocks) == LAYERS and set(plan.counts) not in ({"none"}, {"full"})
    assert memory.total > few and plan.smallest <= 1.02 * few


@pytest.mark.parametrize("recipe", ["bf16", "fp8-lean", "fp8[activations=8bit]"])
def test_with_enough_memory_blocks_with_experts_keep_everything(recipe: str) -> None:
    """How activations of dense blocks are kept has no effect on them."""
    found = trace(BUILT_IN, recipe, 40_000_000_000)
    assert found.plan is not None and found.plan.counts == {"none": LAYERS} and found.plan.cost_ms == 0
    assert predict_memory(found).total == pytest.approx(find_range(BUILT_IN, recipe)[1], rel=0.01)


def test_a_budget_that_is_too_small_says_what_is_needed() -> None:
    few, _ = find_range(BUILT_IN, "fp8")
    plan = trace(BUILT_IN, "fp8", int(0.8 * few)).plan
    assert plan is not None and not plan.fits and plan.smallest == pytest.approx(few, rel=0.02)
    assert "is too small: a step takes at least" in str(plan)


def test_what_each_option_keeps() -> None:
    """Measured in trial steps: the mixture is most of it, and of the half only the first norm is recomputed."""
    seen: list[dict[str, tuple[float, float]]] = []
    choose = MemoryFitter._choose

    def note(fitter: MemoryFitter) -> None:
        seen.extend(fitter._kept.values())
        choose(fitter)

    few, most = find_range(BUILT_IN, "fp8-lean")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemoryFitter, "_choose", note)
        trace_steps(make_task(BUILT_IN), parse("fp8-lean"), H200, memory_budget=2 * most)
    (kept,) = seen
    assert set(kept) == {"none", "selective", "offload"}
    assert 0 < kept["selective"][0] < kept["none"][0] and kept["offload"][0] < 0
    values = 32 * 256 * 256
    assert LAYERS * kept["none"][0] * values == pytest.approx(most - few, rel=0.5)


def test_accumulated_microbatches() -> None:
    few, most = find_range(BUILT_IN, "fp8-lean", 2)
    budget = int(few + 0.5 * (most - few))
    found = trace(BUILT_IN, "fp8-lean", budget, 2)
    once = trace(BUILT_IN, "fp8-lean", budget).plan
    assert found.plan is not None and once is not None and found.plan.fits
    assert predict_memory(found).total == pytest.approx(found.plan.peak, rel=0.01)


@pytest.mark.parametrize("recipe", ["fp8-lean", "bf16"])
def test_the_predicted_cost_is_near_that_of_the_predicted_steps(recipe: str) -> None:
    """For widths at which kernels take longer than their launches."""
    rates, task = ReachableRates(H200), tasks.find("moe:2x1024x8", batch=8, context=1024)
    modes = [parse(recipe).replace(checkpoint=mode, activations="bf16") for mode in ("full", "none")]
    full, none = (trace_steps(task, mode, H200) for mode in modes)
    more_ms = predict_time(full, rates).step_ms - predict_time(none, rates).step_ms
    plan = trace_steps(task, parse(recipe), H200, memory_budget=int(1.01 * predict_memory(full).total)).plan
    assert plan is not None and plan.counts.get("full", 0) >= 1 and plan.cost_ms is not None
    cost_ms = plan.cost_ms * 2 / plan.counts["full"]
    assert cost_ms == pytest.approx(more_ms, rel=0.4)
