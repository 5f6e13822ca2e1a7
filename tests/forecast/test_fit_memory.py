"""Memory plans on a simulated GPU: they fit, predictions agree, and an engine without a task chooses the same."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge import hardware, tasks
from narrowgauge.bench.compare import make_engine_step
from narrowgauge.bench.fit_memory import settle_memory
from narrowgauge.engine.fit_memory import MemoryFitter
from narrowgauge.errors import UsageError
from narrowgauge.forecast.memory.estimate import predict_memory
from narrowgauge.forecast.memory.layout import compute_layout
from narrowgauge.forecast.run import Scenario, complete_plan
from narrowgauge.forecast.time.reachable_rates import ReachableRates
from narrowgauge.forecast.time.roofline import predict_time
from narrowgauge.forecast.trace.fake_gpu import describe_device, simulate_gpu
from narrowgauge.forecast.trace.recorder import Recorder
from narrowgauge.forecast.trace.trace_step import Traced, trace_steps
from narrowgauge.forecast.trace.workspaces import Workspaces, get_cublas_bytes, times_products
from narrowgauge.ranks.world import SINGLE_PROCESS
from narrowgauge.recipe import parse
from narrowgauge.runs.fit_memory import plan_memory
from narrowgauge.runs.settings import make_settings
from narrowgauge.task import Task, make_plain_optimizers

H200 = hardware.find_gpu("h200")
LAYERS = 4


def language(batch: int = 32, kind: str = "gpt") -> Task:
    return tasks.find(f"{kind}:{LAYERS}x256", batch=batch, context=256)


@functools.cache
def traced(recipe: str, budget: str | int | None = None, batch: int = 32, accumulate: int = 1) -> Traced:
    return trace_steps(language(batch), parse(recipe), H200, accumulate=accumulate, memory_budget=budget)


@functools.cache
def find_range(recipe: str, batch: int = 32, accumulate: int = 1) -> tuple[int, int]:
    """Return the peaks of a later step with all blocks recomputed, and with all kept."""
    base = parse(recipe)
    every = [str(dataclasses.replace(base, checkpoint=mode, activations="bf16")) for mode in ("full", "none")]
    few, most = (predict_memory(traced(one, None, batch, accumulate)).total for one in every)
    return few, most


@pytest.mark.parametrize(
    ("recipe", "share"), [("bf16", 0.3), ("fp8", 0.3), ("fp8", 0.8), ("fp8-lean", 0.3), ("bf16-lean", 0.8)]
)
def test_a_plan_fits_and_its_peak_is_as_predicted(recipe: str, share: float) -> None:
    few, most = find_range(recipe)
    budget = int(few + share * (most - few))
    found = traced(recipe, budget)
    memory, plan = predict_memory(found), found.plan
    assert plan is not None and plan.fits and max(memory.total, memory.first_step) <= budget
    assert plan.peak == pytest.approx(memory.total, rel=0.01)
    assert set(plan.counts) not in ({"none"}, {"full"}), "between all kept and all recomputed"
    assert set(plan.blocks) == {f"blocks.{number}" for number in range(LAYERS)}
    assert memory.total > few, "the budget is used"
    assert plan.smallest <= 1.02 * few


def test_what_an_option_keeps_does_not_depend_on_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """With little room not all options are tried in one step, and none of the later ones in the last block, which hands
    its output to the head and seems to keep less."""
    seen: list[dict[str, float]] = []
    choose = MemoryFitter._choose

    def note(fitter: MemoryFitter) -> None:
        (kept,) = fitter._kept.values()
        seen.append({name: sizes[0] for name, sizes in kept.items()})
        choose(fitter)

    monkeypatch.setattr(MemoryFitter, "_choose", note)
    base, task = parse("fp8-lean[products=all]"), tasks.find("gpt:6x256", batch=32, context=128)
    modes = [base.replace(checkpoint=mode, activations="bf16") for mode in ("full", "none")]
    few, most = (predict_memory(trace_steps(task, recipe, H200)).total for recipe in modes)
    for share in (0.25, 0.5):
        trace_steps(task, base, H200, memory_budget=int(few + share * (most - few)))
    *tight, wide = seen
    assert len(wide) == 6
    for found in tight:
        assert len(found) > 3
        assert {name: pytest.approx(wide[name], abs=0.5) for name in found} == found


@pytest.mark.parametrize("recipe", ["bf16", "fp8-lean"])
def test_with_enough_memory_all_blocks_keep_everything(recipe: str) -> None:
    found = traced(recipe, "40GB")
    assert found.plan is not None and found.plan.counts == {"none": LAYERS} and found.plan.cost_ms == 0
    assert predict_memory(found).total == pytest.approx(find_range(recipe)[1], rel=0.01)


@pytest.mark.parametrize("recipe", ["bf16", "fp8-lean"])
def test_inputs_go_to_the_host_where_recomputation_does_not_suffice(recipe: str) -> None:
    few, _ = find_range(recipe)
    found = traced(recipe, int(0.985 * few))
    plan, memory = found.plan, predict_memory(found)
    assert plan is not None and plan.fits and plan.counts["offload"] > 0
    assert memory.total <= plan.budget < few and memory.total == pytest.approx(plan.peak, rel=0.02)
    assert memory.host % plan.counts["offload"] == 0 and memory.host > 0


@pytest.mark.parametrize("recipe", ["fp8", "bf16-lean"])
def test_a_budget_that_is_too_small_says_what_is_needed(recipe: str) -> None:
    few, _ = find_range(recipe)
    plan = traced(recipe, int(0.8 * few)).plan
    assert plan is not None and not plan.fits and plan.counts == {"offload": LAYERS}
    assert 0.8 * few < plan.smallest < few and "is too small: a step takes at least" in str(plan)


def test_the_predicted_cost_is_that_of_the_predicted_steps() -> None:
    """The plan's cost comes from shapes, the steps' from all their operations."""
    rates = ReachableRates(H200)
    task = tasks.find("gpt:4x2048", batch=8, context=1024)
    trace = functools.partial(trace_steps, task, gpu=H200)
    for recipe, budget in (("fp8-lean", "2.5GB"), ("bf16", "6.5GB"), ("fp8", "5.5GB")):
        found = trace(parse(recipe), memory_budget=budget)
        kept = trace(parse(f"{recipe}[checkpoint=none,activations=bf16]"))
        more_ms = predict_time(found, rates).step_ms - predict_time(kept, rates).step_ms
        assert found.plan is not None and found.plan.counts != {"none": 4}
        assert found.plan.cost_ms == pytest.approx(more_ms, rel=0.25, abs=0.05), recipe


def test_more_memory_costs_less_time() -> None:
    few, most = find_range("fp8")
    plans = [traced("fp8", int(few + share * (most - few))).plan for share in (0.15, 0.3, 0.8, 1.6)]
    costs = [plan.cost_ms for plan in plans if plan is not None]
    assert costs == sorted(costs, reverse=True) and costs[0] > 2 * costs[2] and costs[-1] == 0


def test_accumulation_counts_every_microbatch() -> None:
    few, most = find_range("bf16", 16, 2)
    budget = (few + most) // 2
    found = traced("bf16", budget, 16, 2)
    assert found.plan is not None and found.plan.fits and predict_memory(found).peak <= budget
    assert 0 < len(found.plan.counts) <= 3 and found.plan.counts != {"full": LAYERS}


def run_engine(batches: list[int], recipe: str, budget: Any, steps: int) -> list[Any]:
    """Train without a task's trace, as a user's loop does; return engine and plan after each step."""
    task, recorder, seen = language(), Recorder(Workspaces(H200), get_cublas_bytes(H200)), []
    with simulate_gpu(H200, meter=recorder.meter), recorder:
        with torch.device("cuda"):
            model = task.model()
        engine = ng.Engine(model, make_plain_optimizers(task, model), recipe, clip_norm=1.0, memory_budget=budget)
        if times_products(engine.recipe, engine.conversion.layers):
            recorder.meter.add_forever(get_cublas_bytes(H200))
        for step in range(steps):
            recorder.step = step
            size = batches[min(step, len(batches) - 1)]
            tokens, targets = (torch.zeros(size, 256, dtype=torch.long).to("cuda") for _ in range(2))
            recorder.phase = "forward"
            with engine.forward():
                loss = engine.model(tokens, targets)
            recorder.phase = "backward"
            engine.backward(loss)
            del loss
            recorder.phase = "step"
            engine.step()
            seen.append((engine.memory_settled, engine.memory_plan))
            recorder.phase = "forward"
            with engine.evaluating():  # keeps nothing, and changes no plan
                engine.model(tokens, targets)
    return seen


@pytest.mark.parametrize("recipe", ["bf16", "fp8-lean"])
def test_an_engine_chooses_the_plan_that_a_forecast_predicts(recipe: str) -> None:
    few, most = find_range(recipe)
    budget = int(0.5 * few + 0.5 * most)
    *_, (settled, plan) = run_engine([32], recipe, budget, 9)
    expected = traced(recipe, budget).plan
    assert settled and expected is not None
    assert plan.blocks == expected.blocks and plan.cost_ms == expected.cost_ms


def test_a_larger_batch_is_planned_again() -> None:
    budget = int(0.6 * find_range("bf16")[1])
    seen = run_engine([*[16] * 6, 32], "bf16", budget, 13)
    assert seen[5][0] and not seen[6][0] and seen[-1][0]
    before, after = seen[5][1], seen[-1][1]
    assert before.fits and after.fits and after.cost_ms > before.cost_ms
    assert after.blocks == traced("bf16", budget).plan.blocks  # type: ignore[union-attr]


def test_a_plan_that_turns_out_too_large_is_made_again() -> None:
    few, most = find_range("bf16")
    budget = int(0.5 * few + 0.5 * most)
    wrong = dataclasses.replace(traced("bf16", "40GB").plan, budget=budget)  # type: ignore[type-var]
    seen = run_engine([32], "bf16", wrong, 8)
    assert set(seen[0][1].blocks.values()) == {"none"} and not seen[1][0]
    settled, plan = seen[-1]
    assert settled and plan.fits and plan.blocks == traced("bf16", budget).plan.blocks  # type: ignore[union-attr]


def settle(budget: int) -> ng.Engine:
    """Return an engine after the steps that a benchmark runs before it measures."""
    task, recorder = language(), Recorder(Workspaces(H200), get_cublas_bytes(H200))
    with simulate_gpu(H200, meter=recorder.meter), recorder:
        with torch.device("cuda"):
            model = task.model()
        engine = ng.Engine(model, make_plain_optimizers(task, model), "bf16", clip_norm=1.0, memory_budget=budget)
        tokens, step = torch.zeros(32, 256, dtype=torch.long).to("cuda"), make_engine_step(task, engine)
        settle_memory(engine, lambda number: step((tokens, tokens)))
        return engine


def test_a_benchmark_waits_for_the_final_plan() -> None:
    few, most = find_range("bf16")
    engine = settle((few + most) // 2)
    assert engine.memory_settled and engine.memory_plan is not None and engine.memory_plan.fits
    with pytest.raises(UsageError, match=r"--fit: the budget of .* is too small: a step takes at least"):
        settle(few // 2)


class Stack(nn.Module):
    """Blocks that are not fused."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(512), nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in range(5)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def test_blocks_that_are_not_fused_are_planned_without_compile() -> None:
    task = Task(
        model=Stack, batch=lambda step, split: torch.zeros(8192, 512), loss=lambda model, x: model(x).square().mean(),
        name="stack", items_per_batch=8192,
    )  # fmt: skip
    kept, recomputed = (
        predict_memory(trace_steps(task, parse(recipe), H200, compile=False)).peak
        for recipe in ("bf16", "bf16[checkpoint=full]")
    )
    budget = (kept + recomputed) // 2
    found = trace_steps(task, parse("bf16"), H200, compile=False, memory_budget=budget)
    assert found.plan is not None and found.plan.fits and predict_memory(found).peak <= budget
    assert len(found.plan.counts) > 1 and found.plan.peak == pytest.approx(predict_memory(found).peak, rel=0.02)
    with pytest.raises(UsageError, match=r"torch.compile plans the memory .* compile=False"):
        trace_steps(task, parse("bf16"), H200, memory_budget=budget)


def test_a_model_without_blocks_has_nothing_to_choose() -> None:
    task = Task(
        model=lambda: nn.Linear(64, 64), batch=lambda step, split: torch.zeros(64, 64),
        loss=lambda model, x: model(x).square().mean(), name="layer", items_per_batch=64,
    )  # fmt: skip
    plan = trace_steps(task, parse("bf16"), H200, compile=False, memory_budget="1GB").plan
    assert plan is not None and plan.fits and plan.blocks == {} and "no blocks to recompute" in str(plan)
    plan = trace_steps(task, parse("bf16"), H200, compile=False, memory_budget="1MB").plan
    assert plan is not None and not plan.fits


def test_the_forecast_function_takes_a_budget() -> None:
    few, most = find_range("fp8")
    found = ng.forecast(language(), ["fp8"], gpu="h200", fit=(few + most) // 2)["fp8"]
    assert found.plan is not None and found.plan.peak == found.memory.peak <= (few + most) // 2 and found.fits
    assert found.plan.blocks == traced("fp8", (few + most) // 2).plan.blocks  # type: ignore[union-attr]
    assert ng.forecast(language(), "bf16", gpu="h200")["bf16"].plan is None
    small = ng.forecast(language(), "bf16", gpu="h200", fit="0.001")["bf16"]
    assert small.plan is not None and not small.fits and small.plan.budget == H200.memory_bytes // 1000
    with pytest.raises(UsageError, match="plans the memory of one GPU"):
        ng.forecast(language(), "bf16", gpu="h200", fit="1GB", gpus=4)
    with pytest.raises(UsageError, match="is not a size"):
        ng.forecast(language(), "bf16", gpu="h200", fit="much")


def test_a_run_is_planned_before_it_starts() -> None:
    few, most = find_range("bf16")
    task, told = language(), list[str]()

    def plan(fit: str, device: str = "cuda") -> Any:
        settings = make_settings(task, recipe="bf16", device=device, fit=fit)
        with hardware.assume(describe_device(H200)):
            return plan_memory(task, settings, SINGLE_PROCESS, told.append)

    budget = (few + most) // 2
    found = plan(f"{budget}B")
    assert found.blocks == traced("bf16", budget).plan.blocks and str(found) in told  # type: ignore[union-attr]
    assert plan("") is None
    with pytest.raises(
        UsageError, match=r"--fit 10MB: the budget of 10.0 MB is too small: a step takes at least .* smaller batch"
    ):
        plan("10MB")
    with pytest.raises(UsageError, match="train on a GPU"):
        plan_memory(task, make_settings(task, recipe="bf16", device="cpu", fit="1GB"), SINGLE_PROCESS, told.append)


def test_memory_and_roofline_predict_one_plan() -> None:
    few, most = find_range("bf16")
    scenario = Scenario(task=language(), gpu=H200, fit=(few + most) // 2)
    found = scenario.trace(parse("bf16"))
    plan = complete_plan(found, predict_memory(found))
    assert plan is not None and plan.blocks == traced("bf16", (few + most) // 2).plan.blocks  # type: ignore[union-attr]
    assert predict_time(found, ReachableRates(H200)).step_ms > 0


def test_options_are_tried_only_where_they_are_sure_to_fit() -> None:
    """With little more than recomputation needs, no step exceeds the budget, also not while options are tried."""
    few, _ = find_range("fp8-lean")
    for budget in (int(1.005 * few), int(1.05 * few), int(1.2 * few)):
        found = traced("fp8-lean", budget)
        layout = compute_layout(found)
        peaks = [layout.peak(step).total for step in range(1, found.steps)]  # the first has no FP8 scales
        assert found.plan is not None and found.plan.fits and max(peaks) <= budget, (budget, peaks)
