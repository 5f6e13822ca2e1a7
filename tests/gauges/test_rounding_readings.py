"""What block formats do to operands: measured in emulated runs, and predicted for FP32 and BF16 runs."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from narrowgauge import Engine, events, recipe
from narrowgauge.block_formats import BLOCK_FORMATS
from narrowgauge.gauges.examiner import Examiner
from narrowgauge.gauges.rules.block_rules import find_rounding_faults
from narrowgauge.gauges.rules.predict_block_formats import RECIPES, predict_block_formats
from narrowgauge.gauges.rules.step_rules import Step
from narrowgauge.gauges.watch.rounding_reader import BLOCK, SAMPLES, PredictedFormats, RoundingReader, sample_blocks
from narrowgauge.gauges.watch.rounding_readings import NO_NOISE_DB, RoundingReading, merge_readings
from narrowgauge.gauges.watch.watch import Watch
from narrowgauge.models.gpt import GPT, GPTConfig
from narrowgauge.recipe import EMULATED
from narrowgauge.scaling.block_error import FIELDS, measure_rounding
from narrowgauge.scaling.block_quantize import quantize_blocks

TRICKS = "emulated-nvfp4[gradient_rounding=stochastic,hadamard=random]"
OPERANDS = {
    ("input", "output"), ("weight", "output"), ("gradient", "grad_input"), ("weight", "grad_input"),
    ("gradient", "grad_weight"), ("input", "grad_weight"),
}  # fmt: skip


def make_engine(text, model=None):
    torch.manual_seed(0)
    model = model or GPT(GPTConfig(layers=2, width=64, heads=4, vocab=256, context=32))
    return Engine(model, torch.optim.AdamW(model.parameters(), 1e-3), text)


def run_steps(engine, steps=3):
    losses = []
    for step in range(steps):
        tokens = torch.randint(0, 256, (8, 33), generator=torch.Generator().manual_seed(step))
        with engine.forward():
            loss = engine.model(tokens[:, :-1], tokens[:, 1:])
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def measure_by_hand(x, name, rule="floor"):
    """Count value by value, in Python."""
    f, blocks = BLOCK_FORMATS[name], quantize_blocks(x, name, scale_rule=rule)
    read, scales = blocks.dequantize().double(), blocks.scales.float().double()
    tensor_scale = 1.0 if blocks.tensor_scale is None else blocks.tensor_scale.double().item()
    found = dict.fromkeys(FIELDS, 0.0)
    for row in range(x.shape[0]):
        for column in range(x.shape[1]):
            value, stored = x[row, column].double().item(), read[row, column].item()
            limit = scales[row, column // f.block].item() * tensor_scale * f.element.max
            found["nonzero"] += value != 0
            if not math.isfinite(stored):
                found["lost"] += 1
                continue
            found["flushed"] += value != 0 and stored == 0
            found["saturated"] += abs(value) > limit * (1 + 1e-5)
            found["signal"] += value**2
            found["noise"] += (value - stored) ** 2
    return [found[name] for name in FIELDS]


@pytest.mark.parametrize(("name", "rule"), [
    ("mxfp8_e4m3", "up"), ("mxfp8_e5m2", "floor"), ("mxfp4", "floor"), ("mxfp4", "up"), ("nvfp4", "floor"),
])  # fmt: skip
def test_counts_are_those_of_single_values(name, rule):
    torch.manual_seed(1)
    x = torch.randn(6, 80) * torch.randn(6, 80).mul(4).exp()
    x[0, :7], x[1] = 0.0, 0.0
    x[2, 3], x[2, 70] = math.inf, math.nan
    if name == "nvfp4":
        x[2] = 1.0  # one NaN would be the end of the tensor scale, and of every block
    found = measure_rounding(x, quantize_blocks(x, name, scale_rule=rule)).tolist()
    assert found == pytest.approx(measure_by_hand(x, name, rule), rel=1e-5)
    assert found[0] and found[1] + (name == "mxfp8_e5m2")
    if rule == "up":
        assert found[2] == 0


def test_values_at_the_limit_do_not_count_as_saturated():
    """The largest value of a tensor is 6 * 448 * its scale up to rounding."""
    for seed in range(50):
        x = torch.randn(1, 16, generator=torch.Generator().manual_seed(seed))
        scale = x.abs().amax() / 2688
        x = torch.where(x.abs() == x.abs().amax(), x, x.clamp(-scale, scale))
        assert measure_rounding(x, quantize_blocks(x, "nvfp4"))[2] == 0


def test_several_tensors_at_once_are_rounded_like_each_alone():
    x = torch.randn(5, 12, 32) * torch.tensor([1e-30, 1e-3, 1.0, 0.0, 1e30]).view(5, 1, 1)
    amax = x.abs().amax((1, 2), keepdim=True) * torch.tensor([1.0, 3.0, 1.0, 1.0, 7.0]).view(5, 1, 1)
    together = quantize_blocks(x, "nvfp4", amax=amax)
    rows = measure_rounding(x, together, dimensions=2)
    for index in range(5):
        alone = quantize_blocks(x[index], "nvfp4", amax=amax[index].item())
        assert torch.equal(together.codes[index], alone.codes)
        assert torch.equal(together.dequantize()[index], alone.dequantize())
        assert rows[index].tolist() == pytest.approx(measure_rounding(x[index], alone).tolist())


@pytest.mark.parametrize("shape", [(64, 3), (50, 8), (7, 5), (4096, 48), (96, 4096), (33, 1), (1, 1)])
def test_samples_are_whole_blocks_of_the_matrix(shape):
    x = torch.arange(1.0, 1 + math.prod(shape)).view(shape)
    found = sample_blocks(x)
    assert found.shape == (SAMPLES, BLOCK)
    blocks = {}
    for column in range(shape[1]):
        for first in range(0, shape[0], BLOCK):
            values = x[first : first + BLOCK, column].tolist()
            blocks[values[0]] = values + [0.0] * (BLOCK - len(values))
    taken = [row for row in found.tolist() if row[0]]
    assert all(blocks[row[0]] == row for row in taken)
    assert len(taken) == min(SAMPLES, len(blocks)) and len({row[0] for row in taken}) == len(taken)
    if len(blocks) > 10 * SAMPLES:  # also not the same few columns or rows
        columns = {(row[0] - 1) % shape[1] for row in taken}
        assert len(columns) > min(0.8 * SAMPLES, 0.9 * shape[1])


@pytest.mark.parametrize("text", [*EMULATED, TRICKS])
def test_emulated_runs_have_readings_of_every_operand(text):
    engine = make_engine(text)
    watch = Watch(engine, every=2)
    run_steps(engine)
    first, second = watch.snapshots(wait=True)
    assert (first.update, second.update) == (1, 3)
    layers = {f"blocks.{i}.{name}" for i in range(2) for name in ("qkv", "out", "up", "down")}
    found = {(one.operand, one.product, one.module) for one in second.rounding}
    assert found == {(*pair, layer) for pair in OPERANDS for layer in layers}
    for one in second.rounding:
        assert one.rounding == ("stochastic" if text == TRICKS and one.operand == "gradient" else "nearest")
        assert one.nonzero > 1000 and not one.lost
        assert abs(one.decibels - one.usual_decibels) < 5
        assert (one.saturated == 0) == (text == "emulated-mxfp8")


@pytest.mark.parametrize("text", ["fp32", "bf16"])
def test_the_sample_of_a_prediction_agrees_with_the_emulated_step(text):
    """The first forward of both has nearly the same operands; gradients differ by the rounding of the emulation."""
    predicted = make_engine(text)
    watch = Watch(predicted, 100, block_formats=True)
    run_steps(predicted, 1)
    by_format = {}
    for one in watch.snapshots(wait=True)[0].rounding:
        by_format.setdefault(RECIPES[one.format], {})[one.module, one.operand, one.product] = one
    assert list(by_format) == list(EMULATED)
    for name in EMULATED:
        engine = make_engine(name)
        own = Watch(engine, 100)
        run_steps(engine, 1)
        readings = own.snapshots(wait=True)[0].rounding
        assert {(one.module, one.operand, one.product) for one in readings} == set(by_format[name])
        for one in readings:
            other = by_format[name][one.module, one.operand, one.product]
            assert other.decibels == pytest.approx(one.decibels, abs=1.0), (other, one)
            assert other.flushed_share == pytest.approx(one.flushed_share, abs=0.04)
            assert other.saturated_share == pytest.approx(one.saturated_share, abs=0.03)


@pytest.mark.parametrize(("text", "asked"), [("bf16", True), ("fp32", True), (TRICKS, False), (TRICKS, True)])
def test_reading_changes_no_result(text, asked):
    plain = make_engine(text)
    torch.manual_seed(5)
    wanted = run_steps(plain, 4)
    engine = make_engine(text)
    watch = Watch(engine, 2, block_formats=asked)
    torch.manual_seed(5)
    assert run_steps(engine, 4) == wanted
    assert all(torch.equal(a, b) for a, b in zip(plain.inner.parameters(), engine.inner.parameters(), strict=True))
    assert watch.snapshots(wait=True)[0].rounding


@pytest.mark.parametrize("text", ["bf16", "fp32", "fp8", "fp16"])
def test_nothing_is_measured_unless_asked_for(text):
    engine = make_engine(text)
    watch = Watch(engine, 2)
    run_steps(engine, 1)
    assert not watch.snapshots(wait=True)[0].rounding
    if text in ("fp8", "fp16"):  # and never where the operands are rounded to another format already
        assert not PredictedFormats.of(engine.inner, engine.recipe).layers


def test_only_layers_that_a_format_would_round_are_measured():
    """48 is a multiple of NVFP4's blocks, but not of those of MX."""
    model = nn.Sequential(nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 24))
    engine = make_engine("bf16[keep=2]", model)
    watch = Watch(engine, 1, block_formats=True)
    with engine.forward():
        loss = engine.model(torch.randn(40, 48)).square().mean()
    engine.backward(loss)
    engine.step()
    found = watch.snapshots(wait=True)[0].rounding
    assert {(one.format, one.module) for one in found} == {("nvfp4", "0")}
    assert {(one.operand, one.product) for one in found} == OPERANDS


def test_operands_of_fused_products_are_read():
    """Fused blocks call no modules: their products report the operands."""
    reader = RoundingReader(recipe("bf16"), PredictedFormats.of(nn.Sequential(nn.Linear(64, 64)), recipe("bf16")))
    x, grad = torch.randn(128, 64).bfloat16(), torch.randn(128, 64).bfloat16()
    with events.listening(reader):
        for product, first in (("output", x), ("grad_input", grad), ("grad_weight", grad), ("output", None)):
            for path in ("0", "elsewhere"):
                events.run_product(product, path, lambda *_: None, SimpleNamespace(hp=first), None)
    found = merge_readings(*(part if isinstance(part, list) else part.tolist() for part in reader.collect()))
    assert {one.module for one in found} == {"0"}
    counts = {(one.operand, one.product): one.nonzero for one in found if one.format == "nvfp4"}
    assert set(counts) == {pair for pair in OPERANDS if pair[0] != "weight"}
    assert set(counts.values()) == {128.0 * 64}, "each operand counts once, though two products report the gradient"


def test_events_of_a_reading_parse_back():
    one = make_reading(nonzero=10.0, flushed=3.0, signal=math.inf)
    assert RoundingReading.from_event(one.as_event()) == one
    for wrong in ([], one.as_event()[:-1], ["fp7", *one.as_event()[1:]], ["nvfp4", "up", *one.as_event()[2:]]):
        with pytest.raises(ValueError):
            RoundingReading.from_event(wrong)


def make_reading(**changes):
    fields = {"format": "nvfp4", "rule": "floor", "rounding": "nearest", "operand": "input", "product": "output"}
    numbers = {"nonzero": 1000.0, "flushed": 70.0, "saturated": 30.0, "lost": 0.0, "signal": 100.0, "noise": 1.0}
    return RoundingReading(**{**fields, "module": "layer", **numbers, **changes})


def test_ratios():
    assert make_reading().decibels == pytest.approx(20.0)
    assert make_reading(noise=0.0).decibels == NO_NOISE_DB
    assert make_reading(signal=0.0, noise=1.0).decibels == -NO_NOISE_DB
    assert make_reading(nonzero=0.0).flushed_share == make_reading(nonzero=0.0).saturated_share == 0.0
    assert make_reading(rounding="stochastic").usual_decibels == pytest.approx(17.4)


@pytest.mark.parametrize(("changes", "survives", "why"), [
    ({}, True, None),
    ({"saturated": 400.0}, True, None),
    ({"noise": 5.0}, True, "noise"),
    ({"flushed": 600.0}, True, "underflow"),
    ({"flushed": 950.0}, False, "underflow"),
    ({"lost": 16.0}, False, "not finite"),
])  # fmt: skip
def test_predictions_name_what_does_not_suit_the_format(changes, survives, why):
    good, bad = make_reading(module="other"), make_reading(**changes)
    (found,) = predict_block_formats([[good, bad], [good, make_reading()]], updates=[1, 100])
    assert (found.format, found.survives, found.updates) == ("nvfp4", survives, 100)
    assert [one.why for one in found.breaks] == ([why] if why else [])
    assert found.recipe == ("emulated-nvfp4[keep=layer]" if why else "emulated-nvfp4")
    assert recipe(found.recipe).emulate == "nvfp4"
    assert found.measured["operands"] == len(found.tensors) == 2
    assert {row["module"] for row in found.tensors} == {"layer", "other"}


def test_outliers_are_found_where_they_are():
    """One channel a thousand times as large hides the others in its blocks, in MXFP4 and NVFP4, but not in MXFP8.

    Blocks along tokens have one channel each, so grad_weight suffers nothing.
    """

    class Outlier(nn.Module):
        def forward(self, x):
            return torch.cat([x[..., :1] * 0 + 1000.0, x[..., 1:]], -1)

    model = nn.Sequential(nn.Linear(64, 16), Outlier(), nn.Linear(16, 64), nn.Linear(64, 32))
    engine = make_engine("fp32", model)
    examiner = Examiner(engine, 1, block_formats=True)
    with engine.forward():
        loss = engine.model(torch.randn(256, 64)).square().mean()
    engine.backward(loss)
    engine.step()
    examiner.check_step(Step(1, loss.item(), 1.0, 1.0, True))
    examiner.collect(wait=True)
    found = {one.format: one for one in examiner.predict()}
    assert list(found) == ["fp16", "fp8", "mxfp8", "mxfp4", "nvfp4"]
    by_product = {row["product"]: row for row in found["nvfp4"].tensors if row["operand"] == "input"
                  and row["module"] == "2"}  # fmt: skip
    assert by_product["output"]["flushed"] > 0.9 and by_product["grad_weight"]["flushed"] < 0.2
    assert not found["nvfp4"].survives and "keep=2" in found["nvfp4"].recipe
    assert [(one.module, one.kind) for one in found["nvfp4"].breaks] == [("2", "input")]


@pytest.mark.parametrize(("changes", "rule", "severity"), [
    ({}, None, None),
    ({"flushed": 600.0, "saturated": 300.0}, None, None),
    ({"nonzero": 0.0, "signal": 0.0, "noise": 0.0}, None, None),
    ({"lost": 3.0, "noise": 90.0}, None, None),
    ({"noise": 4.0}, "block-noise", "warning"),
    ({"flushed": 950.0}, "block-underflow", "serious"),
    ({"flushed": 950.0, "operand": "gradient", "rounding": "stochastic"}, None, None),
    ({"noise": 4.0, "operand": "gradient", "rounding": "stochastic"}, None, None),
    ({"noise": 9.0, "operand": "gradient", "rounding": "stochastic"}, "block-noise", "warning"),
])  # fmt: skip
def test_rules(changes, rule, severity):
    found = list(find_rounding_faults([make_reading(**changes)]))
    assert [(one.rule, one.severity) for one in found] == ([(rule, severity)] if rule else [])
    for one in found:
        assert "(emulated)" in one.detail and "keep=layer" in one.fix


class Blocks(nn.Module):
    """Inputs whose blocks have one large value each: NVFP4 flushes the rest."""

    def __init__(self, outlier):
        super().__init__()
        self.outlier, self.first, self.last = outlier, nn.Linear(64, 64), nn.Linear(64, 16)

    def forward(self, x):
        if self.outlier:
            x = torch.where(torch.arange(64) % 16 == 0, 1000.0, x)
        return self.last(self.first(x))


@pytest.mark.parametrize("outlier", [False, True])
def test_an_emulated_run_reports_lost_operands_after_three_snapshots(outlier):
    engine = make_engine("emulated-nvfp4", Blocks(outlier))
    examiner = Examiner(engine, 2)
    found = []
    for step in range(1, 8):
        with engine.forward():
            loss = engine.model(torch.randn(64, 64)).float().square().mean()
        engine.backward(loss)
        engine.step()
        found += examiner.check_step(Step(step, loss.item(), 1.0, 1.0, True))
        found += examiner.collect(wait=True)[2]
        if step < 7:
            assert not [one for one in found if one.rule.startswith("block")]
    blocks = [(one.rule, one.where, one.severity) for one in found if one.rule.startswith("block")]
    assert blocks == ([("block-underflow", "first (input, for output)", "serious")] if outlier else [])


@pytest.mark.parametrize("text", [*EMULATED, TRICKS])
def test_healthy_emulated_runs_have_no_findings(text):
    engine = make_engine(text)
    examiner = Examiner(engine, 2)
    for step, loss in enumerate(run_steps(engine, 10), 1):
        examiner.check_step(Step(step, loss, 1.0, 1.0, True))
    examiner.collect(wait=True)
    assert not examiner.findings
    assert [one.format for one in examiner.predict()] == ["fp16", "fp8"]


def test_a_resumed_run_keeps_its_measurements():
    engine = make_engine("bf16")
    examiner = Examiner(engine, 1, block_formats=True)
    run_steps(engine, 1)
    (snapshot,), _, _ = examiner.collect(wait=True)
    event = {"step": snapshot.update, **snapshot.as_event()}
    other = Examiner(make_engine("bf16"), 0)
    other.load_state_dict({}, [event])
    assert other.snapshots[0].rounding == snapshot.rounding
    assert [one.as_event() for one in other.predict()[2:]] == [one.as_event() for one in examiner.predict()[2:]]
