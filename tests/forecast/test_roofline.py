"""Predicted time: FLOPs and bytes computed by hand, peaks, costs, and an error for a measurement above the peak."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from narrowgauge import hardware, tasks
from narrowgauge.errors import NarrowgaugeError, UsageError
from narrowgauge.forecast.compare import compare_attention, compare_fusions
from narrowgauge.forecast.run import Scenario
from narrowgauge.forecast.time.measure import (
    _indices_below,
    _make_tensors,
    check_roofs,
    measure_calls,
    measure_roofs,
    measure_run,
)
from narrowgauge.forecast.time.reachable_rates import ReachableRates, check_below_peak
from narrowgauge.forecast.time.roofline import Cost, estimate_costs, predict_time
from narrowgauge.forecast.trace.trace_step import Traced, trace_steps
from narrowgauge.hardware import Device
from narrowgauge.peak_fractions import get_fraction
from narrowgauge.recipe import parse
from narrowgauge.task import Task

H200 = hardware.find_gpu("h200")
ROWS, INPUTS, OUTPUTS = 1 << 18, 512, 1024
BATCH, HEADS, LENGTH, SIZE = 2, 4, 256, 64


class Attend(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.zeros(BATCH, HEADS, LENGTH, SIZE))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(self.query, x, x, is_causal=True)


def linear() -> Task:
    return Task(
        model=lambda: nn.Sequential(nn.Linear(INPUTS, OUTPUTS, bias=False), nn.Linear(OUTPUTS, INPUTS, bias=False)),
        batch=lambda step, split: torch.zeros(ROWS, INPUTS), loss=lambda model, x: model(x).square().mean(),
        name="linear", items_per_batch=ROWS, flops_per_item=12.0 * INPUTS * OUTPUTS,
    )  # fmt: skip


def traced(task: Task, recipe: str = "bf16", **options: object) -> Traced:
    return trace_steps(task, parse(recipe), H200, **{"compile": False, **options})  # type: ignore[arg-type]


def costs(task: Task, recipe: str = "bf16", **options: object) -> list[Cost]:
    return estimate_costs(traced(task, recipe, **options), ReachableRates(H200))


def test_flops_and_bytes_of_a_linear_layer_are_exact() -> None:
    once = 2 * ROWS * INPUTS * OUTPUTS
    products = [cost for cost in costs(linear()) if cost.op.kind == "product"]
    by_phase = {phase: [c for c in products if c.op.phase == phase] for phase in ("forward", "backward")}
    assert [c.op.flops for c in by_phase["forward"]] == [once, once]
    assert [c.op.flops for c in by_phase["backward"]] == [once, once, once], "the first layer's input needs no gradient"
    operands = 2 * (ROWS * INPUTS + INPUTS * OUTPUTS + ROWS * OUTPUTS)
    assert {c.bytes for c in products} == {operands} and {c.op.format for c in products} == {"bf16"}
    assert products[0].intensity == once / operands
    assert [c.op.where for c in by_phase["forward"]] == ["0", "1"]
    assert {c.op.where for c in by_phase["backward"]} == {"0", "1"}


def test_flops_of_attention_are_exact_and_causal_counts_half() -> None:
    task = Task(
        model=Attend, batch=lambda step, split: torch.zeros(BATCH, HEADS, LENGTH, SIZE),
        loss=lambda model, x: model(x).float().sum(), name="attend",
    )  # fmt: skip
    found = {c.op.phase: c.op for c in costs(task) if c.op.kind == "attention"}
    square = BATCH * HEADS * LENGTH**2 * SIZE
    assert found["forward"].flops == 4 * square / 2 and found["forward"].causal
    assert found["backward"].flops == 10 * square / 2
    assert "cudnn" in found["forward"].name


def test_what_bounds_an_operation() -> None:
    found = costs(linear())
    product = next(cost for cost in found if cost.op.kind == "product")
    rate = H200.peak("bf16") * get_fraction("product.bf16")
    assert product.bound == "compute" and product.seconds >= product.op.flops / rate
    square = next(cost for cost in found if cost.op.name == "pow")
    assert square.bound == "memory" and square.seconds == pytest.approx(square.bytes / (0.8 * H200.bandwidth))
    assert any(cost.bound == "launch" for cost in found), "what is tiny takes a launch"


def test_the_ridge_point_is_where_compute_and_memory_take_equal_time() -> None:
    assert H200.ridge("bf16") == pytest.approx(989.4e12 / 4.8e12)
    assert H200.ridge("fp8") == pytest.approx(2 * H200.ridge("bf16"), rel=1e-3)


def test_a_step_is_the_sum_and_its_cost_follows() -> None:
    found = predict_time(traced(linear()), ReachableRates(H200))
    assert found.device_ms == pytest.approx(sum(found.by_kind.values())) == pytest.approx(sum(found.by_bound.values()))
    assert found.step_ms == max(found.device_ms, found.host_ms)
    assert found.items_per_s == pytest.approx(ROWS / found.step_ms * 1e3)
    assert found.mfu == pytest.approx(12.0 * INPUTS * OUTPUTS * found.items_per_s / H200.peak("bf16"))
    assert (
        found.bound == "compute"
        and predict_time(traced(tasks.find("digits")), ReachableRates(H200)).bound == "launches"
    )
    assert found.cost(3600 * found.items_per_s, 3.5) == pytest.approx(3.5)


@pytest.mark.parametrize(
    ("spec", "recipe", "measured_ms"), [("gpt2-124m", "bf16", 111.08), ("gpt2-124m", "fp8", 85.14)]
)
def test_steps_are_within_fifteen_percent_of_an_h200s(spec: str, recipe: str, measured_ms: float) -> None:
    found = predict_time(traced(tasks.find(spec), recipe, compile=True), ReachableRates(H200))
    assert found.step_ms == pytest.approx(measured_ms, rel=0.15) and found.bound == "compute"
    assert {"product", "attention", "norm", "activation", "loss", "optimizer"} <= set(found.by_kind)
    assert any(layer.path == "blocks.3.down" and layer.kind == "product" for layer in found.layers)


@pytest.mark.parametrize("recipe", ["fp32", "bf16", "fp8[products=all]"])
def test_an_update_moves_the_bytes_of_norms_and_states(recipe: str) -> None:
    """Bytes per parameter: 4 for the gradient's norm, 16 read and 12 written for AdamW."""
    task = tasks.find("gpt:2x128", batch=2, context=64, vocab=1024)
    found = predict_time(traced(task, recipe), ReachableRates(H200))
    moved = sum(layer.bytes for layer in found.layers if layer.kind == "optimizer")
    with torch.device("meta"):
        size = sum(p.numel() for p in task.model().parameters())
    assert moved == pytest.approx(32 * size, rel=0.01)


def test_fusions_and_fused_attention_save_time() -> None:
    scenario = Scenario(task=tasks.find("gpt:2x128", batch=8, context=512, vocab=8192), gpu=H200)
    recipe = parse("bf16")
    own = scenario.trace(recipe)
    attention = compare_attention(scenario, recipe, own)
    assert attention is not None and attention.backend == "cudnn"
    scores = 8 * 2 * 512 * 512
    assert attention.plain_ms > attention.fused_ms and attention.plain_peak - attention.fused_peak > 2 * 2 * scores
    savings = {saving.name: saving for saving in compare_fusions(scenario, recipe, own)}
    logits = 8 * 512 * 8192
    assert savings["head and loss"].saved_ms > 8 * logits / H200.bandwidth * 1e3
    digits = tasks.find("digits")
    assert compare_fusions(Scenario(task=digits, gpu=H200), recipe, traced(digits)) == []
    assert compare_attention(Scenario(task=digits, gpu=H200), recipe, traced(digits)) is None


@pytest.mark.parametrize(
    "fields", ["granularity=row", "granularity=block", "gradients_format=e4m3,activations=8bit", "scaling=current"]
)
def test_fields_of_fp8_do_not_stop_a_comparison_with_bf16(fields: str) -> None:
    scenario = Scenario(task=tasks.find("gpt:2x128", batch=2, context=64, vocab=512), gpu=H200)
    recipe = parse(f"fp8[products=all,{fields}]")
    savings = compare_fusions(scenario, recipe, scenario.trace(recipe))
    assert bool(savings) is (recipe.granularity == "tensor"), "with a scale for each row or block, layers are not fused"


def test_casts_with_a_scale_for_each_row_or_block_are_counted() -> None:
    found = {}
    for fields in ("scaling=current", "granularity=row", "granularity=block"):
        all_costs = costs(linear(), f"fp8[products=all,{fields}]")
        products = [cost for cost in all_costs if cost.op.kind == "product"]
        assert {cost.op.format for cost in products} == {"fp8"} and len(products) == 5
        found[fields] = sum(cost.op.flops for cost in products), sum(c.bytes for c in all_costs if c.op.kind == "cast")
    (flops, moved), (same, more), (again, once) = found.values()
    assert flops == same == again and more == pytest.approx(moved, rel=0.02), "6 bytes per element"
    assert once == pytest.approx(moved * 4 / 6, rel=0.05), "4 bytes per element"


def test_compiled_code_moves_fewer_bytes() -> None:
    task = tasks.find("gpt:2x128", batch=8, context=128, vocab=8192)
    eager, compiled = (predict_time(traced(task, "fp32", compile=mode), ReachableRates(H200)) for mode in (False, True))
    assert compiled.bytes < 0.9 * eager.bytes and compiled.flops == pytest.approx(eager.flops, rel=0.01)
    assert compiled.host_ms < eager.host_ms


def test_other_gpus_use_the_fractions_of_an_h200_and_say_so() -> None:
    a100 = ReachableRates(hardware.find_gpu("a100"))
    assert a100.source == "from an H200's shares of the peak" and ReachableRates(H200).source == "measured on an H200"
    assert a100.product("bf16") == pytest.approx(312e12 * get_fraction("product.bf16"))
    assert a100.product("fp8") == pytest.approx(312e12 * get_fraction("product.fp8")), "it has no FP8: BF16's peak"
    assert a100.attention("flash", "bf16", 128) > a100.attention("flash", "bf16", 64) > 0
    own = ReachableRates(H200, {"bf16": 772e12, "copy": H200.bandwidth * get_fraction("memory.plain_copy")})
    assert own.source == "measured on this GPU"
    assert own.product("bf16") == pytest.approx(
        772e12 * get_fraction("product.bf16") / get_fraction("square_product.bf16")
    )
    assert own.memory() == pytest.approx(ReachableRates(H200).memory())


def test_a_measurement_above_the_peak_is_an_error() -> None:
    assert check_below_peak("copy", 4.19e12, H200.bandwidth, H200) == pytest.approx(0.873, abs=1e-3)
    with pytest.raises(NarrowgaugeError, match=r"4.9e\+12 per second on H200, above the datasheet's 4.8e\+12"):
        check_below_peak("copy", 4.9e12, H200.bandwidth, H200)
    with pytest.raises(NarrowgaugeError, match="rate of fp8"):
        check_roofs({"copy": 4e12, "fp8": 2.1e15}, H200)


def test_unaligned_rows_cost_six_times_as_much_in_eager_mode_and_a_copy_compiled() -> None:
    def head(words: int, compile: bool) -> float:
        task = Task(
            model=lambda: nn.Linear(1024, words, bias=False), name="head", items_per_batch=8192,
            batch=lambda step, split: torch.zeros(8192, 1024), loss=lambda model, x: model(x).float().square().mean(),
        )  # fmt: skip
        return predict_time(traced(task, "bf16", compile=compile), ReachableRates(H200)).by_kind["product"]

    assert 5 < head(8191, False) / head(8192, False) < 7
    assert 1.02 < head(8191, True) / head(8192, True) < 3


def cpu() -> Device:
    return Device(kind="cpu", name="some CPU", torch_device="cpu", capability=None, memory_bytes=None, native=("fp32",),
                  gpu=None, features=())  # fmt: skip


def test_operations_can_be_run_again_on_their_own() -> None:
    small = Task(
        model=lambda: nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8)), name="small",
        batch=lambda step, split: torch.zeros(16, 32), loss=lambda model, x: model(x).square().mean(),
    )  # fmt: skip
    found = costs(small, "fp32")
    seconds = measure_calls(found, cpu())
    assert len(seconds) > 10 and all(math.isnan(value) or value > 0 for value in seconds.values())
    product = next(cost for cost in found if cost.op.kind == "product")
    assert product.op.call is not None and seconds[product.op.call] > 0


def test_indices_reach_the_whole_table_and_stay_within_it() -> None:
    """Eight rows of a table would fit into a GPU's cache, and would seem faster than memory."""
    reader = Task(
        model=lambda: nn.Sequential(nn.Embedding(1000, 16), nn.Linear(16, 3)), name="reader",
        batch=lambda step, split: torch.zeros(4000, dtype=torch.long),
        loss=lambda model, ids: nn.functional.cross_entropy(model(ids), ids),
    )  # fmt: skip
    calls = {cost.op.name: cost.op.call for cost in costs(reader, "fp32") if cost.op.call is not None}
    looked_up = calls["embedding"]
    assert _indices_below(looked_up) == _indices_below(calls["embedding_dense_backward"]) == 1000
    ids = _make_tensors(looked_up.args, cpu(), 1000)[1]
    assert ids.unique().numel() == 1000 and ids.max() == 999
    assert _indices_below(calls["nll_loss_forward"]) == 3


def test_peak_rates_can_be_measured_and_a_run_needs_a_gpu() -> None:
    roofs = measure_roofs(cpu(), size=64, copied=1 << 20)
    assert set(roofs) == {"copy", "fp32"} and min(roofs.values()) > 0
    with pytest.raises(UsageError, match="needs a GPU"):
        measure_run(linear(), parse("fp32"), cpu())
