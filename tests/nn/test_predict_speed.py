"""The predicted speed of converted models against measurements on an H200, and the line about models that FP8 slows."""

import math
import re
from dataclasses import replace

import pytest
import torch
from torch import nn

from narrowgauge import hardware, tasks
from narrowgauge.errors import SlowRecipeWarning
from narrowgauge.forecast.trace.fake_gpu import describe_device
from narrowgauge.hardware import find_gpu
from narrowgauge.nn import fusable_blocks
from narrowgauge.nn import predict_speed as prediction
from narrowgauge.nn.convert import convert, plan_conversion
from narrowgauge.nn.matrix_inventory import Matrix
from narrowgauge.nn.predict_speed import predict_speed
from narrowgauge.nn.speed_advice import NEGLIGIBLE_GAIN, explain_slow, no_speed_warnings
from narrowgauge.recipe import parse

pytestmark = pytest.mark.filterwarnings("error::narrowgauge.errors.SlowRecipeWarning")
H200 = find_gpu("h200")
DEVICE = describe_device(H200)


def gpt(layers, width, vocabulary=50304):
    return layers * [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)] + [(vocabulary, width)]


def llama(layers, width, keys, hidden, vocabulary):
    attention = [(width, width), (keys, width), (keys, width), (width, width)]
    return layers * [*attention, (hidden, width), (hidden, width), (width, hidden)] + [(vocabulary, width)]


def mixture(layers, width, keys, experts, hidden, vocabulary):
    """Stacked experts have three dimensions."""
    attention = [(width, width), (keys, width), (keys, width), (width, width)]
    fed = [(experts, width), (experts, 2 * hidden, width), (experts, width, hidden)]
    return layers * [*attention, *fed] + [(vocabulary, width)]


SHAPES = {
    "transformers Qwen3 10x2048": llama(10, 2048, 1024, 6144, 151936),
    "transformers Llama 16x2048": llama(16, 2048, 512, 8192, 128256),
    "nanoGPT 12x768": gpt(12, 768),
    "built-in gpt2-124m (12x768)": gpt(12, 768),
    "built-in gpt-1.3b (24x2048)": gpt(24, 2048),
    "built-in gpt:8x4096": gpt(8, 4096),
    "transformers OLMoE 4x2048": mixture(4, 2048, 2048, 64, 1024, 50304),
    "transformers Mixtral 2x4096": mixture(2, 4096, 1024, 8, 14336, 32000),
}
"""Outputs and inputs of the models that were measured."""
ACTIVE = {64: 8, 8: 2}
"""Experts of a token, by their number."""
ROW = re.compile(r"^    (\S.*?) {2,}(fp8|bf16)( by layers|, blocks fused)(, \w+)? +([\d.]+) +([\d.]+) +docs/", re.M)
MEASURED = ROW.findall(prediction.__doc__)


def matrices(shapes, kind, form="fp8"):
    def describe(i, shape):
        if len(shape) == 3:
            return Matrix(
                f"{i}.experts", shape, "experts", (form,) * 3, "", math.prod(shape), ACTIVE[shape[0]] / shape[0]
            )
        here, which = ("linear", "fp32") if shape[0] in ACTIVE else (kind, form)  # a router stays in FP32
        return Matrix(f"layer{i}.weight", shape, here, (which,) * 3, "", math.prod(shape), 1.0)

    return [describe(i, shape) for i, shape in enumerate(shapes)]


def test_the_table_of_measurements_is_complete():
    assert len(MEASURED) == 14
    assert {model for model, *_ in MEASURED} == set(SHAPES)
    slower = [ratio for *_, ratio, _ in MEASURED if float(ratio) < 1]
    assert len(slower) == 2


@pytest.mark.parametrize(("model", "form", "how", "compiled", "measured", "stated"), MEASURED)
def test_predictions_are_on_the_measured_side(model, form, how, compiled, measured, stated):
    kind = "linear" if "layers" in how else "block"
    speed = predict_speed(matrices(SHAPES[model], kind, form), H200, compiled="uncompiled" not in compiled)
    ratio = speed.as_converted
    assert f"{ratio:.2f}" == stated  # the table in the source
    assert (ratio > 1) == (float(measured) > 1)
    assert ratio == pytest.approx(float(measured), rel=0.26 if float(measured) < 1 else 0.08)


@pytest.mark.parametrize("name", ["h200", "h100", "l40s", "b200"])
def test_fused_blocks_gain_on_every_gpu_with_fp8_and_compiling_never_hurts(name):
    gpu = find_gpu(name)
    for shapes in SHAPES.values():
        fused = predict_speed(matrices(shapes, "block"), gpu, compiled=False)
        assert fused.as_converted > 1.1 * fused.in_bf16 > 1.1 or (len(shapes[-2]) == 3 and fused.in_bf16 > 1)
        if len(shapes[-2]) == 3:
            continue
        alone = predict_speed(matrices(shapes, "linear"), gpu, compiled=False)
        assert alone.as_converted < alone.if_compiled < fused.as_converted
        assert predict_speed(matrices(shapes, "linear"), gpu, compiled=True).in_bf16 == pytest.approx(1)


def test_wider_layers_gain_more_and_shares_are_of_flops():
    found = [predict_speed(matrices(gpt(4, width), "linear"), H200, compiled=True).as_converted
             for width in (128, 256, 512, 1024, 2048, 4096)]  # fmt: skip
    assert found == sorted(found)
    half = [*matrices([(1024, 1024)], "block"), *matrices([(1024, 1024)], "linear", "bf16")]
    speed = predict_speed(half, H200, compiled=True)
    assert (speed.fp8_share, speed.fused_share) == (0.5, 0.5)


def test_measured_products_count_more_than_the_table():
    layers = matrices(gpt(2, 1024), "block")
    slow = predict_speed(layers, H200, compiled=False, measured={m.path: 1.0 for m in layers})
    assert slow.as_converted == pytest.approx(slow.in_bf16)


def test_experts_count_as_often_as_tokens_use_them():
    one = [Matrix("experts.w", (8, 1024, 512), "experts", ("bf16",) * 3, "", 8 * 1024 * 512, 2 / 8)]
    two = [Matrix(f"{i}.weight", (1024, 512), "linear", ("bf16",) * 3, "", 1024 * 512, 1.0) for i in range(2)]
    layer = matrices([(2048, 2048)], "block")
    speeds = [predict_speed(layer + others, H200, compiled=False) for others in (one, two)]
    assert speeds[0].as_converted == pytest.approx(speeds[1].as_converted)
    assert speeds[0].fp8_share == pytest.approx(speeds[1].fp8_share)


def test_nothing_multiplied_nothing_predicted():
    assert predict_speed([], H200, compiled=True) is None
    assert predict_speed([Matrix("e.weight", (8, 8), "embedding", (), "", 64)], H200, compiled=True) is None


def plan(model, recipe="fp8", device=DEVICE):
    with hardware.assume(device):
        return plan_conversion(model, parse(recipe), device)


def stack(width, depth=2, outputs=None):
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(width, outputs or width) for _ in range(depth)))


def test_models_whose_blocks_are_fused_hear_nothing(monkeypatch):
    monkeypatch.setattr(fusable_blocks, "find_difference", lambda *_: None)  # tested elsewhere, and slow
    monkeypatch.setattr("narrowgauge.nn.blocks.find._known", {})
    with torch.device("meta"):
        model = tasks.find("gpt:2x2048").model()
    report = plan(model)
    assert report.blocks == ["blocks.0", "blocks.1"]
    assert report.predict_speed().fused_share == 1
    for compiled in (False, True):
        assert explain_slow(report, compiled=compiled, can_compile=False) is None
    assert report.scales is None  # nothing was converted
    assert type(model.blocks[0]).__name__ == "Block"


def test_layer_by_layer_and_uncompiled_is_said_with_the_way_out():
    report = plan(stack(768, 8))
    line = explain_slow(report, compiled=False, can_compile=True)
    assert "\n" not in line
    assert re.match(r"FP8 trains this model at about 0\.\d times the speed of BF16 with torch\.compile", line)
    assert "100% of its matrix products run layer by layer" in line
    assert re.search(r"use compile=True \(predicted: 1\.\d times\)", line)
    assert explain_slow(report, compiled=True, can_compile=True) is None
    sharded = explain_slow(report, compiled=False, can_compile=False)
    assert "compile=True" not in sharded
    assert "use bf16 instead of fp8" in sharded


def test_wide_layers_gain_without_compiling():
    assert explain_slow(plan(stack(8192)), compiled=False, can_compile=True) is None


@pytest.mark.parametrize(
    ("model", "recipe", "reason"),
    [
        (lambda: stack(64), "fp8", "so small that casts to FP8 take longer"),
        (lambda: stack(64), "fp8[products=all]", "so small that casts to FP8 take longer"),
        (lambda: stack(1001), "fp8", "1001 inputs are not a multiple of 16"),
        (lambda: stack(1024), "fp8[keep=*]", "kept in FP32 by keep=*"),
        (lambda: nn.Conv2d(64, 64, 3, device="meta"), "fp8", "convolutions run in BF16"),
    ],
)
def test_no_gain_is_said_with_its_largest_cause(model, recipe, reason):
    for compiled in (False, True):
        line = explain_slow(plan(model(), recipe), compiled=compiled, can_compile=True)
        assert line.startswith("FP8 gains nothing for this model: ")
        assert reason in line
        assert "bf16" in line
        assert "\n" not in line


def test_other_recipes_cpus_and_unknown_gpus_hear_nothing():
    small = stack(64)
    assert explain_slow(plan(small, "bf16"), compiled=False, can_compile=True) is None
    unknown = replace(DEVICE, gpu=None)
    assert explain_slow(plan(small, device=unknown), compiled=False, can_compile=True) is None
    with torch.device("cpu"):
        report = convert(nn.Linear(64, 64), "fp8")  # a warning would be an error
    assert report.predict_speed() is None


def test_convert_warns_where_it_is_called_unless_you_compile(monkeypatch):
    monkeypatch.setattr("narrowgauge.nn.products.choose_formats.measure_costs", lambda *_: None)
    with pytest.warns(SlowRecipeWarning, match="compile=True") as caught:
        convert(stack(768), "fp8", DEVICE)
    assert [warning.filename for warning in caught] == [__file__]
    convert(stack(768), "fp8", DEVICE, compile=True)
    with no_speed_warnings():
        convert(stack(768), "fp8", DEVICE)
    with hardware.assume(DEVICE):  # a simulated GPU: forecasts tell times themselves
        convert(stack(768), "fp8", DEVICE)


def test_the_thresholds_leave_the_measured_models_alone():
    for shapes in SHAPES.values():
        fused = predict_speed(matrices(shapes, "block"), H200, compiled=False)
        assert fused.as_converted > 1.2 * NEGLIGIBLE_GAIN * fused.in_bf16


@pytest.mark.parametrize(("model", "measured"), [("OLMoE 4x2048", 1.10), ("Mixtral 2x4096", 1.08)])
def test_experts_in_bf16(model, measured):
    """docs/results.md has the measurements."""
    speed = predict_speed(matrices(SHAPES[f"transformers {model}"], "block"), H200, compiled=False)
    assert speed.in_bf16 == pytest.approx(measured, rel=0.05)


def test_models_with_experts_hear_nothing(monkeypatch):
    """The number of experts was once taken for outputs: casts to FP8 seemed to take longer than products."""
    transformers = pytest.importorskip("transformers", minversion="5.0")
    monkeypatch.setattr(fusable_blocks, "find_difference", lambda *_: None)
    monkeypatch.setattr("narrowgauge.nn.blocks.find._known", {})
    config = transformers.OlmoeConfig(num_hidden_layers=1, num_experts=16, intermediate_size=1024, use_cache=False)
    with torch.device("meta"):
        model = transformers.OlmoeForCausalLM(config)
    report = plan(model)
    speed = report.predict_speed()
    assert speed.fused_share > 0.99
    assert speed.as_converted > 1.3
    assert explain_slow(report, compiled=False, can_compile=True) is None
