"""Predicted memory compared with sums by hand, and with what an H200 allocated."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge import hardware, tasks
from narrowgauge.errors import UsageError
from narrowgauge.forecast.memory.estimate import Memory, fits, get_usable_bytes, list_leaner_recipes, predict_memory
from narrowgauge.forecast.memory.lifetimes import find_lifetimes
from narrowgauge.forecast.run import Scenario, advise, find_largest_batch
from narrowgauge.forecast.trace.trace_step import STEPS, Traced, trace_steps
from narrowgauge.recipe import Recipe, parse
from narrowgauge.task import Task

H200 = hardware.find_gpu("h200")
ROWS, INPUTS, HIDDEN, OUTPUTS = 2048, 512, 1024, 256
WEIGHTS = HIDDEN * INPUTS + OUTPUTS * HIDDEN
RESULTS = Path(__file__).parents[2] / "bench" / "results"


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(INPUTS, HIDDEN, bias=False), nn.Linear(HIDDEN, OUTPUTS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


def mlp() -> Task:
    return Task(
        model=Mlp, batch=lambda step, split: torch.zeros(ROWS, INPUTS), loss=lambda model, x: model(x).square().sum(),
        name="mlp", items_per_batch=ROWS,
    )  # fmt: skip


def gpt(**options: int) -> Task:
    return tasks.find("gpt:2x128", **{"batch": 8, "context": 128, **options})


def traced(task: Task, recipe: str = "fp32", **options: object) -> Traced:
    return trace_steps(task, parse(recipe), H200, **{"compile": False, **options})  # type: ignore[arg-type]


def memory(task: Task, recipe: str = "fp32", **options: object) -> Memory:
    return predict_memory(traced(task, recipe, **options))


def alive(found: Traced, phase: str) -> dict[str, int]:
    """Return the bytes by role that are alive after the last operation of a phase of the second step."""
    trace, lifetimes = found.trace, find_lifetimes(found.trace)
    last = max(index for index, op in enumerate(trace.ops) if (op.step, op.phase) == (STEPS - 1, phase))
    held: dict[str, int] = {}
    for index, come, go in lifetimes.events():
        for block in come:
            held[trace.blocks[block].role] = held.get(trace.blocks[block].role, 0) + trace.blocks[block].bytes
        for block in go:
            held[trace.blocks[block].role] -= trace.blocks[block].bytes
        if index == last:
            break
    return held


def test_only_weights_and_states_stay_between_steps() -> None:
    held = alive(traced(mlp()), "step")
    small = held["workspace"] + held["activations"] - 4 * ROWS * INPUTS  # the batch is still alive
    assert (held["weights"], held["moments"], held["gradients"]) == (4 * WEIGHTS, 8 * WEIGHTS, 0)
    assert 0 <= small < 4096, "counters, norms, the loss"


def test_forward_keeps_what_backward_reads_in_fp32() -> None:
    held = alive(traced(mlp()), "forward")
    kept = ROWS * (INPUTS + HIDDEN + OUTPUTS)  # the batch, relu's result, the input of the square
    assert 0 <= held["activations"] - 4 * kept < 4096
    assert held["gradients"] == 0 and held["weights"] == 4 * WEIGHTS


def test_forward_keeps_narrow_copies_in_bf16() -> None:
    held = alive(traced(mlp(), "bf16"), "forward")
    kept = 4 * ROWS * INPUTS + 2 * ROWS * (INPUTS + HIDDEN + OUTPUTS)  # the batch exists in both formats
    assert 0 <= held["activations"] - kept < 4096
    assert held["master"] == 4 * WEIGHTS, "the parameters are what is updated"
    assert held["weights"] == 2 * OUTPUTS * HIDDEN, "of autocast's copies backward needs the second"


def test_lean_states_are_eight_bytes_per_parameter() -> None:
    found = traced(mlp(), "bf16-lean")
    held = alive(found, "step")
    words, scales = 4 * WEIGHTS // 128, 2 * 4 * WEIGHTS // 128
    assert (held["weights"], held["master"]) == (2 * WEIGHTS, 2 * WEIGHTS + words)
    assert held["moments"] == 2 * WEIGHTS + scales
    assert predict_memory(found).largest["gradients"] == 2 * WEIGHTS


def test_components_add_up_to_the_total() -> None:
    found = memory(mlp())
    assert sum(found.components().values()) == found.total and found.exact and not found.notes
    assert found.largest["gradients"] == 4 * WEIGHTS
    assert found.between < found.total <= found.peak <= found.reserved
    assert found.when.phase == "backward" and 0 < found.when.share < 1
    assert found.workspace > 2 * (32 << 20), "two threads' cuBLAS workspaces"


def test_the_maximum_of_the_timeline_is_the_total() -> None:
    found = memory(gpt(), "bf16")
    labels = [label for label, _ in found.timeline]
    named = [label for label in labels if "blocks" in label]
    blocks = [label.removeprefix("forward, ") for label in named if label.startswith("forward")]
    assert named == [f"forward, {one}" for one in blocks] + [f"backward, {one}" for one in reversed(blocks)]
    assert labels[-1].startswith("step") and max(sum(parts.values()) for _, parts in found.timeline) == found.total
    activations = {label: parts["activations"] for label, parts in found.timeline}
    kept = [activations[f"forward, {one}"] for one in blocks]
    assert kept == sorted(kept) and activations[labels[-1]] < kept[0]


def test_gradients_of_two_users_are_added_in_place() -> None:
    class Fork(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x)
            return self.second(hidden) + self.second(hidden.sin())

    found = traced(dataclasses.replace(mlp(), model=Fork))
    sums = {index: op for index, op in enumerate(found.trace.ops) if op.accumulates}
    assert {op.writes[-1].shape for op in sums.values()} == {(ROWS, HIDDEN), (OUTPUTS, HIDDEN)}
    assert {op.writes[-1].block for op in sums.values()} == set(find_lifetimes(found.trace).reuses)


def test_recomputation_keeps_less() -> None:
    plain, selective, full = (
        memory(gpt(), f"bf16[checkpoint={mode}]").largest["activations"] for mode in ("none", "selective", "full")
    )
    assert full < 0.8 * plain and full < selective < plain
    eager = memory(gpt(), "fp32").largest["activations"]
    assert memory(gpt(), "fp32[checkpoint=full]").largest["activations"] < 0.8 * eager


def test_recomputation_of_blocks_keeps_exactly_the_residual_stream() -> None:
    rows, width = 8 * 128, 128
    more = [
        alive(trace_steps(tasks.find(f"gpt:{layers}x128", batch=8, context=128), parse("bf16[checkpoint=full]"), H200,
                          compile=False), "forward")["activations"]
        for layers in (2, 3)
    ]  # fmt: skip
    assert 0 <= more[1] - more[0] - 4 * rows * width < 2048, "and a few counters and tables"


def test_accumulation_holds_gradients_through_the_next_forward() -> None:
    once, twice = (traced(gpt(), "bf16", accumulate=count) for count in (1, 2))
    products = [
        sum(1 for op in found.trace.of_step(1) if (op.phase, op.kind) == ("forward", "product"))
        for found in (once, twice)
    ]
    assert twice.items == 2 * once.items == 2 * 8 * 128 and products[1] == 2 * products[0]
    assert alive(once, "forward")["gradients"] == 0
    assert alive(twice, "forward")["gradients"] == 4 * twice.parameters, "of the first microbatch"


def test_released_gradients_never_exist_at_once() -> None:
    whole, released = (traced(gpt(), f"bf16-lean[gradients={kind}]") for kind in ("bf16", "released"))
    most = [predict_memory(found).largest["gradients"] for found in (whole, released)]
    assert most[1] < 0.6 * most[0]
    assert alive(released, "backward")["gradients"] == 0 < alive(whole, "backward")["gradients"]


def test_fp8_keeps_bytes_where_bf16_keeps_two() -> None:
    wide, narrow = memory(gpt(batch=32), "bf16"), memory(gpt(batch=32), "fp8")
    assert narrow.largest["activations"] < 0.97 * wide.largest["activations"]
    assert memory(gpt(), "fp8-lean").weights > memory(gpt(), "bf16-lean").weights, "FP8 copies count as weights"


def test_compiling_drops_fused_tensors_and_is_marked_as_an_estimate() -> None:
    task = gpt(vocab=8192)
    eager, compiled = (memory(task, "fp32", compile=mode) for mode in (False, True))
    logits = 4 * 8 * 128 * 8192
    assert eager.total - compiled.total > 1.5 * logits, "log-softmax and its gradient are never in memory"
    assert eager.exact and not compiled.exact and "estimate" in compiled.notes[0]
    assert memory(task, "bf16", compile=True).exact, "our own blocks are not compiled"


def test_shards_divide_states_and_add_gathered_weights() -> None:
    found = traced(gpt(), "bf16")
    one, four = predict_memory(found), predict_memory(found, shards=4)
    for part in ("master", "moments"):
        assert getattr(four, part) == pytest.approx(getattr(one, part) / 4, rel=0.01)
    assert four.weights < 0.02 * one.weights, "of matrices a rank has no copies but those it gathers"
    assert four.workspace > one.workspace and four.activations == one.activations
    assert any("not traced" in note for note in four.notes)


def test_the_largest_batch_fits_and_one_more_does_not() -> None:
    small = hardware.find_gpu("T4")
    scenario = Scenario(task=tasks.find("gpt:2x128", batch=256, context=1024, vocab=8192), gpu=small, compile=False)
    recipe = parse("fp32")
    found = scenario.predict_memory(recipe)
    assert not fits(found, small)
    best = find_largest_batch(scenario, recipe, found)
    assert 64 < best < 256
    assert (
        scenario.predict_memory(recipe, best).peak
        <= get_usable_bytes(small)
        < scenario.predict_memory(recipe, best + 1).peak
    )
    assert "bf16" not in advise(scenario, parse("fp32[checkpoint=full]")), "a T4 has none"


def test_leaner_recipes_come_in_order_of_cost() -> None:
    names = [str(recipe) for recipe in list_leaner_recipes(parse("fp32"))]
    assert names[:3] == ["bf16", "fp32[checkpoint=selective]", "fp32[checkpoint=full]"]
    assert names[-1] == "bf16-lean[gradients=released]"
    assert [str(recipe) for recipe in list_leaner_recipes(parse("fp8-lean"))] == ["fp8-lean[gradients=released]"]


def test_a_model_that_needs_its_data_is_rejected_with_one_line() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x[x > 0][None].expand(4, INPUTS)).sum()

    task = Task(model=Mlp, batch=lambda step, split: torch.zeros(8, INPUTS), loss=loss, name="picky")
    with pytest.raises(UsageError, match="task picky under fp32 cannot be predicted without data"):
        memory(task)
    empty = Task(model=Mlp, batch=lambda step, split: None, loss=loss, name="empty")
    with pytest.raises(UsageError, match="a batch has no tensors"):
        memory(empty)


def test_ng_forecast_returns_forecasts_by_recipe() -> None:
    found = ng.forecast(mlp(), ["fp32", Recipe(compute="bf16")], gpu="a100")
    assert list(found) == ["fp32", "bf16"] and found.gpu.name == "A100-SXM4-80GB"
    assert found.parameters == WEIGHTS and found["bf16"].fits and found["bf16"].largest_batch is None
    with pytest.raises(UsageError, match=r"fp8 needs 8\.9 or later"):
        ng.forecast(mlp(), "fp8", gpu="a100")
    with pytest.raises(UsageError, match="shards=0 must be a whole number"):
        ng.forecast(mlp(), "fp32", shards=0)


BEFORE, ALL_KEPT = "fp8[first_forward=fp8]", "fp8[activations=bf16,first_forward=fp8]"
"""What "fp8" and "fp8[activations=bf16]" were when they were measured."""


def measured(file: str, name: str) -> int:
    """A peak measured on the H200 by ``bench``, minus what earlier models of the process left allocated."""
    return next(row["peak_bytes"] for row in json.loads((RESULTS / file).read_text()) if row["name"] == name)


@pytest.mark.parametrize(
    ("spec", "recipe", "file", "row"),
    [
        ("gpt2-124m", "bf16", "h200-fp8-gpt2-124m.json", "fused bf16"),
        ("gpt2-124m", BEFORE, "h200-fp8-gpt2-124m-activations.json", "fp8"),
        ("gpt2-124m", "fp8", "h200-fp8-gpt2-124m-first-forward-auto.json", "fp8"),
        ("gpt2-124m", ALL_KEPT, "h200-fp8-gpt2-124m-activations.json", "fp8[activations=bf16]"),
        ("gpt:8x4096", BEFORE, "h200-fp8-gpt-8x4096-activations.json", "fp8"),
        ("gpt:8x4096", "fp8", "h200-fp8-gpt-8x4096-first-forward-auto.json", "fp8"),
        ("gpt:8x4096", ALL_KEPT, "h200-fp8-gpt-8x4096-activations.json", "fp8[activations=bf16]"),
        ("gpt-1.3b", BEFORE, "h200-fp8-gpt-1.3b-activations.json", "fp8"),
        ("llama-1b", BEFORE, "h200-fp8-llama-1b-activations.json", "fp8"),
        ("llama-1b", ALL_KEPT, "h200-fp8-llama-1b-activations.json", "fp8[activations=bf16]"),
    ],
)
def test_predictions_match_what_an_h200_allocated(spec: str, recipe: str, file: str, row: str) -> None:
    found = memory(tasks.find(spec), recipe, compile=True)
    assert found.total == pytest.approx(measured(file, row), rel=0.01)


@pytest.mark.parametrize(
    ("spec", "file", "torchao"),
    [
        ("gpt2-124m", "h200-fp8-gpt2-124m-activations.json", 0.82),
        ("gpt:8x4096", "h200-fp8-gpt-8x4096-activations.json", 0.96),
        ("gpt-1.3b", "h200-fp8-gpt-1.3b-activations.json", 0.84),
        ("llama-1b", "h200-fp8-llama-1b-activations.json", 0.76),
    ],
)
def test_fp8_takes_less_than_torchao(spec: str, file: str, torchao: float) -> None:
    assert memory(tasks.find(spec), "fp8", compile=True).total < torchao * measured(file, "torchao-tensorwise")


def test_the_plan_of_a_7b_model_is_as_measured() -> None:
    """By ``bench/lean.py`` on an H200."""
    found = json.loads((RESULTS / "h200-lean-llama-7b-fp8-lean-16384-110gb.json").read_text())
    recipe = "fp8-lean[first_forward=fp8]"  # the default when it was measured
    forecast = ng.forecast("llama-7b", recipe, gpu="h200", batch=8, fit="110GB")[recipe]
    assert forecast.plan is not None and forecast.plan.counts == found["plan"]["options"]
    assert forecast.plan.peak == pytest.approx(found["plan"]["peak"], rel=0.01)


def test_compiled_predictions_are_close_to_what_an_h200_allocated() -> None:
    rows = json.loads((RESULTS / "h200-gpt2-124m-run1.json").read_text())["rows"]
    peak = next(row["peak_bytes"] for row in rows if row["name"] == "fp32")
    assert memory(tasks.find("gpt2-124m"), "fp32", compile=True).total == pytest.approx(peak, rel=0.02)
