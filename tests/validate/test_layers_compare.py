"""Comparison of one step by module: SQNR computed by hand, planted faults with their causes, many kinds of models."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from narrowgauge import Engine, random_state, tasks
from narrowgauge.errors import UsageError
from narrowgauge.formats import round_to
from narrowgauge.kernels.cast_block_scales import cast_block_scales_reference, expand_scales
from narrowgauge.kernels.cast_row_scales import cast_row_scales_reference
from narrowgauge.recipe import parse
from narrowgauge.task import Task
from narrowgauge.validate.layers.compare import compare_step
from narrowgauge.validate.layers.isolated import Formats
from narrowgauge.validate.layers.sqnr import Tally, cap, format_decibels, round_to_format

FP32 = parse("fp32")


def task_of(build, draw, loss=None):
    """A task of a model and its inputs; the loss is a mean square unless one is given."""

    def batch(step, split):
        return draw(torch.Generator().manual_seed(step))

    return Task(model=build, batch=batch, loss=loss or (lambda model, x: model(x).float().square().mean()))


def normal(*shape):
    return lambda generator: torch.randn(*shape, generator=generator)


def row(layers, module):
    return next(row for row in layers.rows if row.module == module)


@pytest.fixture(scope="module")
def gpt(tmp_path_factory):
    text = tmp_path_factory.mktemp("data") / "code.txt"
    text.write_text("def keep(self, name):\n    return self.kept[name]\n" * 100)
    return tasks.find("gpt:2x64", batch=4, context=32, data=str(text))


@pytest.fixture(scope="module")
def in_bf16(gpt):
    return compare_step(gpt, parse("bf16"), FP32)


@pytest.fixture(scope="module")
def in_fp8(gpt):
    return compare_step(gpt, parse("fp8"), FP32)


def test_sqnr_is_signal_over_noise():
    tally = Tally()
    tally.add(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5]))
    assert tally.decibels == pytest.approx(20.0)  # 25 / 0.25
    tally.add(torch.tensor([5.0]), torch.tensor([10.0]), scale=2.0)
    assert tally.decibels == pytest.approx(10 * math.log10(50 / 0.25))


def test_sqnr_of_equal_nonfinite_or_missing_tensors():
    one, inf = torch.ones(3), torch.tensor([1.0, math.inf, math.nan])
    cases = [(one, one, math.inf), (one, inf, -math.inf), (inf, inf, math.inf), (torch.zeros(3), one, -200.0)]
    for reference, candidate, expected in cases:
        tally = Tally()
        tally.add(reference, candidate)
        assert tally.decibels == expected
    assert Tally().decibels is None
    assert [cap(x) for x in (None, math.inf, -math.inf, 31.5)] == [None, 200.0, -200.0, 31.5]
    assert [format_decibels(x) for x in (None, math.inf, -math.inf, 31.46)] == ["", "equal", "not finite", "31.5"]


@pytest.mark.parametrize("format", ["fp16", "bf16", "fp8_e4m3", "fp8_e5m2"])
def test_rounding_with_and_without_the_exponent_range(format):
    x = torch.randn(2000, generator=torch.Generator().manual_seed(0)) * torch.logspace(-9, 4, 2000)
    held = round_to_format(x, format)
    assert torch.equal(held.double(), torch.from_numpy(round_to(x.numpy(), format, saturate=format.startswith("fp8"))))
    tiny = round_to_format(x * 1e-20, format, limited=False)
    assert (
        (tiny - x * 1e-20).abs() <= (x * 1e-20).abs() * 2.0 ** -{"fp16": 11, "bf16": 8, "fp8_e4m3": 4}.get(format, 3)
    ).all()


def test_fp32_compared_with_itself_is_equal(gpt):
    layers = compare_step(gpt, FP32, FP32)
    assert layers.total == math.inf
    assert layers.loss_error == 0
    assert layers.worst == []
    assert {cell for one in layers.to_table()[1] for cell in one[2:]} == {"equal", ""}


def test_linear_layer_matches_manual_computation():
    layers = compare_step(
        task_of(lambda: nn.Sequential(nn.Linear(64, 32, bias=False)), normal(128, 64)), parse("bf16"), FP32
    )
    torch.manual_seed(0)
    weight = nn.Linear(64, 32, bias=False).weight.detach()
    x = torch.randn(128, 64, generator=torch.Generator().manual_seed(0))
    y, low = x @ weight.t(), (x.bfloat16().float() @ weight.bfloat16().float().t()).bfloat16().float()
    found = row(layers, "0").output
    assert found.own == pytest.approx(10 * math.log10(y.square().sum() / (low - y).square().sum()), abs=0.01)
    assert found.end_to_end == found.own
    assert row(layers, "0").grad_input.own is None  # its input requires no gradient


def test_bf16_sqnr(in_bf16):
    linears = [one for one in in_bf16.rows if one.kind == "Linear"]
    assert len(linears) == 9
    for one in linears:
        assert 45 < one.output.own < 56
        assert 45 < one.grad_input.own < 56
        assert 45 < one.grad_weight.own < 58
    assert row(in_bf16, "blocks.0.norm1").output.own == math.inf  # FP32 in, FP32 out
    assert row(in_bf16, "tok").grad_input.own is row(in_bf16, "tok").grad_input.end_to_end is None
    assert {worst.reason for worst in in_bf16.worst} == {"rounding"}
    assert 1e-8 < abs(in_bf16.loss_error) < 1e-3


def test_errors_accumulate_along_the_step(in_bf16):
    first, last = row(in_bf16, "blocks.0.qkv"), row(in_bf16, "blocks.1.down")
    assert first.output.end_to_end == pytest.approx(first.output.own, abs=0.01)  # no error before it
    assert last.output.end_to_end < last.output.own - 2
    assert first.grad_input.end_to_end < first.grad_input.own - 2
    head = row(in_bf16, "lm_head")
    assert head.grad_input.end_to_end == pytest.approx(head.grad_input.own, abs=0.5)  # backward starts here


def test_error_of_narrow_weights_in_a_lean_recipe():
    class Gain(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 16))

        def forward(self, x):
            return x * self.weight  # in FP32, as x is

    layers = compare_step(
        task_of(lambda: nn.Sequential(Gain()), normal(8, 16)), parse("bf16[master=split]"), FP32, seed=3
    )
    first = layers.worst[0]
    assert (first.module, first.quantity, first.reason) == ("0", "output", "rounding")
    assert 50 < first.decibels < 60
    assert first.advice.endswith("keep=0 would make the weight gradients equal to the reference")


def test_tied_weight_has_one_end_to_end_and_two_own_gradients(in_bf16):
    table, head = row(in_bf16, "tok").grad_weight, row(in_bf16, "lm_head").grad_weight
    assert table.end_to_end == head.end_to_end
    assert table.own == math.inf
    assert 45 < head.own < 58


def test_fp8_sqnr(in_fp8):
    inside = [one for one in in_fp8.rows if one.kind == "Linear" and one.module != "lm_head"]
    for one in inside:
        assert 25 < one.output.own < 32
        assert 22 < one.grad_input.own < one.output.own - 2  # E5M2 has one bit less
    assert {worst.quantity for worst in in_fp8.worst} == {"grad_input"}
    assert "E5M2" in in_fp8.worst[0].advice


@pytest.mark.parametrize("cast", [cast_row_scales_reference, cast_block_scales_reference])
def test_fine_scales_are_those_of_the_casts(cast):
    """A layer alone is rounded with the scales of its rows or blocks, along the dimension that each product sums."""
    torch.manual_seed(0)
    granularity = "row" if cast is cast_row_scales_reference else "block"
    tensors = {"input": torch.randn(3, 60, 200), "grad": torch.randn(3, 60, 150), "weight": torch.randn(150, 200)}
    square = {"square": True} if granularity == "block" else {}
    for quantity, operands in (
        ("output", ("input", "weight")), ("grad_input", ("grad", "weight")), ("grad_weight", ("grad", "input"))
    ):  # fmt: skip
        formats = Formats(quantity, *["fp8_e4m3"] * 3, None, "current", granularity=granularity)
        for name in operands:
            x = tensors[name].reshape(-1, tensors[name].shape[-1])
            made = cast(x, torch.float8_e4m3fn, **(square if name == "weight" else {}))
            last = quantity == "output" or (quantity, name) == ("grad_input", "grad")
            inverse, shape = (made.inv_scale, x.shape) if last else (made.inv_scale_t, x.t().shape)
            wanted = expand_scales(inverse, *shape).expand(shape)
            found = torch.as_tensor(formats.scale(name, tensors[name])).expand(tensors[name].shape).reshape(x.shape)
            torch.testing.assert_close(found.reciprocal(), wanted if last else wanted.t())


@pytest.mark.parametrize("recipe", ["bf16", "fp8"])
def test_unfused_step_is_as_accurate_as_fused(gpt, recipe, request):
    grads = []
    for name, fused in (("fp32", False), (recipe, True)):
        torch.manual_seed(0)
        model = gpt.model()
        engine = Engine(model, torch.optim.AdamW(model.parameters()), name, fused=fused)
        with engine.forward():
            loss = gpt.loss(model, gpt.batch(0, "train"))
        engine.backward(loss)
        grads.append(torch.cat([p.grad.flatten().double() for p in model.parameters()]))
    tally = Tally()
    tally.add(*grads)
    layers = request.getfixturevalue(f"in_{recipe}")
    assert layers.total == pytest.approx(tally.decibels, abs=1.5)


def test_json_and_table(in_fp8):
    described = json.loads(json.dumps(in_fp8.describe(), allow_nan=False))
    assert len(described["rows"]) == len(in_fp8.rows)
    norm = next(one for one in described["rows"] if one["module"] == "norm")
    assert norm["class"] == "LayerNorm"
    assert norm["output"]["own"] == 200.0
    assert norm["output"]["end_to_end"] == pytest.approx(row(in_fp8, "norm").output.end_to_end)
    assert described["worst"][0]["gain"] == in_fp8.worst[0].gain
    columns, rows = in_fp8.to_table()
    assert all(len(one) == len(columns) == 8 for one in rows)
    assert all(isinstance(cell, str) for one in rows for cell in one)


class Difference(nn.Module):
    """A layer that subtracts nearly equal values, between layers that do not."""

    def __init__(self):
        super().__init__()
        self.before = nn.Linear(32, 32)
        self.difference = nn.Linear(32, 16, bias=False)
        self.after = nn.Linear(16, 16)
        with torch.no_grad():
            self.difference.weight.zero_()
            for output in range(16):
                self.difference.weight[output, 2 * output : 2 * output + 2] = torch.tensor([1.0, -1.0])

    def forward(self, x):
        return self.after(self.difference(10 + 0.1 * torch.tanh(self.before(x)).float()))


@pytest.mark.parametrize("recipe", ["bf16", "fp8"])
def test_planted_cancellation(recipe):
    layers = compare_step(task_of(Difference, normal(64, 32)), parse(recipe), FP32)
    first = layers.worst[0]
    assert (first.module, first.quantity, first.reason) == ("difference", "output", "cancellation")
    assert first.decibels < 25
    assert first.gain > 5
    assert f"keep=difference would improve the weight gradients by {first.gain:.1f} dB" in first.advice
    assert all(other.reason != "cancellation" for other in layers.worst if other.module in ("before", "after"))


class SequentialSum(nn.Module):
    """Adds 512 numbers one by one, in the dtype of its input."""

    def forward(self, x):
        total = x[:, 0]
        for index in range(1, x.shape[1]):
            total = total + x[:, index]
        return total


def test_planted_accumulation():
    def build():
        model = nn.Sequential(nn.Linear(16, 512), nn.Softplus(), nn.Linear(512, 512), SequentialSum())
        with torch.no_grad():
            model[2].weight.abs_()
        return model

    layers = compare_step(task_of(build, normal(16, 16)), parse("bf16"), FP32)
    first = layers.worst[0]
    assert (first.module, first.quantity, first.reason) == ("3", "output", "accumulation")
    assert first.decibels < row(layers, "2").output.own - 6
    assert "intermediate results" in first.advice


def small_gradients(model, x):
    return model(x).float().square().mean() * 1e-5


def test_gradients_below_fp16_range_and_the_loss_scale_that_fixes_them():
    task = task_of(lambda: nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 16)), normal(64, 32), small_gradients)
    unscaled = compare_step(task, parse("fp16[loss_scale=none]"), FP32)
    assert {worst.reason for worst in unscaled.worst} == {"range"}
    assert "the gradient of its output is below FP16's normal range" in unscaled.worst[0].advice
    assert "use a larger loss scale or bf16" in unscaled.worst[0].advice
    scaled = compare_step(task, parse("fp16"), FP32)
    assert scaled.loss_scale == 65536
    assert scaled.total > 60 > 20 > unscaled.total
    assert {worst.reason for worst in scaled.worst} == {"rounding"}


def test_outputs_above_fp16_range():
    def build():
        model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
        with torch.no_grad():
            model[1].weight *= 1e6
        return model

    layers = compare_step(task_of(build, normal(32, 16)), parse("fp16[loss_scale=none]"), FP32)
    first = layers.worst[0]
    assert (first.module, first.quantity, first.decibels) == ("1", "output", -math.inf)
    assert first.reason == "range"
    assert "its result exceeds FP16's largest number" in first.advice
    assert row(layers, "1").not_finite > 0
    assert layers.to_table()[1][1][:3] == ["1", "Linear", "not finite"]
    json.dumps(layers.describe(), allow_nan=False)


def test_keeping_an_overflowing_module_makes_gradients_finite():
    def build():
        model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 4))
        with torch.no_grad():
            model[1].weight *= 1e6
        return model

    layers = compare_step(task_of(build, normal(32, 16)), parse("fp16[loss_scale=none]"), FP32)
    assert layers.total == -math.inf
    assert layers.worst[0].module == "1"
    assert layers.worst[0].gain == math.inf
    assert "keep=1 would make the weight gradients finite" in layers.worst[0].advice
    assert layers.describe()["worst"][0]["gain"] == 200.0


def test_dynamic_loss_scale_is_lowered_until_the_step_is_finite():
    task = task_of(lambda: nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 16)), normal(64, 32))
    task = task_of(task.model, normal(64, 32), lambda model, x: model(x).float().square().sum() * 10)
    layers = compare_step(task, parse("fp16"), FP32)
    assert 1 <= layers.loss_scale < 65536
    assert layers.total > 50
    assert all(one.not_finite == 0 for one in layers.rows)


class ContextDependent(nn.Module):
    """Runs only inside its parent's forward."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))
        self.open = False

    def forward(self, x):
        if not self.open:
            raise RuntimeError("not now")
        return x * self.scale


class NestedArguments(nn.Module):
    """Nested outputs and keyword-only arguments."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16) / 4)

    def forward(self, *, given):
        left, right = given["left"], given["right"]
        return left @ self.weight, (torch.tanh(right), None)


class Unusual(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(8, 16)
        self.twice = nn.Linear(16, 16)
        self.nested, self.context_dependent = NestedArguments(), ContextDependent()
        self.unused = nn.Linear(4, 4)
        self.by_function = nn.Linear(16, 16, bias=False)
        self.over = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(16, 8, bias=False)
        self.head.weight = self.table.weight
        self.last = nn.Parameter(torch.ones(8))
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, tokens):
        self.steps += 1
        x = F.dropout(self.drop(self.twice(self.over(1.0 * self.twice(self.table(tokens))))), 0.25)
        left, (right, _) = self.nested(given={"left": x, "right": 2 * x})
        x = F.linear(left + right, self.by_function.weight)
        self.context_dependent.open = True
        x = self.context_dependent(x)
        self.context_dependent.open = False
        return self.head(x) * self.last * self.steps


@pytest.mark.parametrize("recipe", ["bf16", "fp8", "fp16", "bf16-lean"])
def test_unusual_model(recipe):
    def tokens(generator):
        return torch.randint(0, 8, (4, 12), generator=generator)

    heard = []
    layers = compare_step(task_of(Unusual, tokens), parse(recipe), FP32, tell=heard.append)
    low = 15 if recipe == "fp8" else 30
    assert layers.total > low  # masks are the same, and the buffer starts where it was
    assert row(layers, "twice").calls == 2
    assert row(layers, "twice").output.own > low
    assert row(layers, "nested").grad_input.end_to_end > low
    assert row(layers, "nested").grad_weight.own > low
    assert row(layers, "table").grad_input.own is None
    assert row(layers, "context_dependent").output.own is None
    assert row(layers, "context_dependent").output.end_to_end > low
    assert row(layers, "context_dependent").grad_input.end_to_end > low
    assert "not now" in row(layers, "context_dependent").note
    assert row(layers, "by_function").grad_weight.end_to_end > low
    assert row(layers, "by_function").note == "its forward is not called"
    assert row(layers, "unused").grad_weight.end_to_end is None
    assert row(layers, "(model)").output.end_to_end > low
    assert "(model)" not in [worst.module for worst in layers.worst]  # the worst are inside
    assert "drop" not in [one.module for one in layers.rows]
    assert sum(text.startswith("running the step with") for text in heard) == len(layers.worst)


def test_grad_input_is_the_contribution_of_the_module():
    class Fork(nn.Module):
        def __init__(self):
            super().__init__()
            self.before, self.small, self.large = (nn.Linear(16, 16) for _ in range(3))

        def forward(self, x):
            x = self.before(x)
            return self.small(x) + 100 * self.large(x)

    layers = compare_step(task_of(Fork, normal(64, 16)), parse("fp8[keep=before+large]"), FP32)
    assert row(layers, "large").grad_input.own == math.inf
    small = row(layers, "small").grad_input
    assert 20 < small.own < 30
    assert small.end_to_end == pytest.approx(small.own, abs=2)  # not the sum of both, which the large one dominates


def test_single_module_model_cannot_be_kept_by_path():
    layers = compare_step(task_of(lambda: nn.Linear(16, 16), normal(8, 16)), parse("bf16"), FP32)
    assert [worst.module for worst in layers.worst] == ["(model)"]
    assert layers.worst[0].gain is None


def test_lstm_attention_and_convolution():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv1d(4, 16, 3, padding=1)
            self.norm = nn.BatchNorm1d(16)
            self.lstm = nn.LSTM(16, 16, batch_first=True)
            self.attention = nn.MultiheadAttention(16, 2, dropout=0.5, batch_first=True)

        def forward(self, x):
            x = self.lstm(self.norm(self.conv(x)).transpose(1, 2))[0]
            return self.attention(x, x, x, need_weights=False)[0]

    layers = compare_step(task_of(Mixed, normal(4, 4, 10)), parse("bf16"), FP32)
    for module in ("conv", "norm", "lstm", "attention"):
        assert row(layers, module).output.own > 35
        assert row(layers, module).output.end_to_end > 30
    assert layers.total > 25


def test_digits():
    pytest.importorskip("sklearn")
    layers = compare_step(tasks.find("digits", batch=8), parse("bf16"), FP32)
    assert [one.module for one in layers.rows] == ["conv1", "conv2", "conv3", "head"]
    assert all(45 < one.output.own < 56 for one in layers.rows)


def test_hugging_face_model():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=64, n_positions=16)

    def tokens(generator):
        ids = torch.randint(0, 64, (2, 16), generator=generator)
        return {"input_ids": ids, "labels": ids.clone()}

    task = task_of(lambda: transformers.GPT2LMHeadModel(config), tokens, lambda model, batch: model(**batch).loss)
    layers = compare_step(task, parse("fp8"), FP32)
    for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"):
        for block in (0, 1):
            one = row(layers, f"transformer.h.{block}.{name}")
            assert one.kind == "Conv1D"
            assert 25 < one.output.own < 32
            assert one.output.end_to_end > 15
            assert 20 < one.grad_input.own < 30
    assert not any(one.note for one in layers.rows)
    assert layers.total > 15


def test_reference_with_loss_scale_is_refused(gpt):
    with pytest.raises(UsageError, match="use fp32, tf32 or bf16"):
        compare_step(gpt, parse("fp8"), parse("fp16"))


def test_random_states_are_restored():
    before = random_state.capture()
    compare_step(task_of(lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), normal(4, 8)), parse("bf16"), FP32)
    assert random_state.are_equal(before, random_state.capture())


def test_experts_have_the_error_of_fp8_and_its_cause(tmp_path):
    text = tmp_path / "code.txt"
    text.write_text("def keep(self, name):\n    return self.kept[name]\n" * 100)
    task = tasks.find("moe:2x128x4", batch=2, context=32, data=str(text))
    layers = compare_step(task, parse("fp8[products=all]"), FP32)
    experts, router = row(layers, "blocks.0.mixture.experts"), row(layers, "blocks.0.mixture.router")
    for quantity in ("output", "grad_input", "grad_weight"):
        assert 18 < getattr(experts, quantity).own < 32
        assert getattr(router, quantity).own > 100  # in FP32
    worst = next(one for one in layers.worst if one.module.endswith("mixture.experts"))
    assert worst.reason == "rounding" and "FP8 E5M2" in worst.advice
