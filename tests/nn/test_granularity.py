"""A scale for each row or block: exact products of rounded operands, outliers that cost only their own, all recipes."""

import copy

import pytest
import torch
from model_families import LANGUAGE, VOCAB
from torch import nn

import narrowgauge as ng
from narrowgauge import Engine, UsageError
from narrowgauge.kernels.cast_row_scales import cast_row_scales_reference
from narrowgauge.models.gpt import GPT, GPTConfig
from narrowgauge.nn.convert import convert
from narrowgauge.nn.module_changes import find_change
from narrowgauge.nn.products.gemm import ALL_FP8, compute_grad_weight, multiply_fp8
from narrowgauge.nn.products.linear import ConvertedLinear
from narrowgauge.scaling.operand import Operand, get_granularity

BF16, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
ROW = "fp8[products=all,granularity=row]"
TENSOR = "fp8[products=all,scaling=current]"
FP8_RECIPES = ["fp8", "fp8-lean", "fp8[master=none]", "fp8[checkpoint=full]", "fp8[checkpoint=selective]"]


FINE = pytest.mark.parametrize("granularity", ["row", "block"])


def make_text(granularity, text="fp8"):
    name, _, fields = text.rstrip("]").partition("[")
    return f"{name}[{fields}{',' if fields else ''}products=all,granularity={granularity}]"


def make_gpt():
    torch.manual_seed(0)
    return GPT(GPTConfig(layers=2, width=64, heads=2, vocab=128, context=32))


def make_engine(text, model=None, rate=3e-3, **options):
    model = model or make_gpt()
    return Engine(model, torch.optim.AdamW(model.parameters(), rate), text, **options)


def run_step(engine, seed=0, microbatches=1, rows=4):
    for number in range(microbatches):
        tokens = torch.randint(0, 128, (rows, 33), generator=torch.Generator().manual_seed(seed + number))
        with engine.forward():
            loss = engine.model(tokens[:, :-1], tokens[:, 1:])
        engine.backward(loss)
    grads = [p.grad.clone() for p in engine.inner.parameters() if p.grad is not None]
    return loss.item(), grads, engine.step()


def find_decibels(value, exact):
    return 10 * torch.log10(exact.square().sum(-1) / (value.double() - exact).square().sum(-1))


def run_layer(text, x, grad, bias=True, weight=None):
    """Return output, grad_input, grad_weight and grad_bias of a linear layer, and its conversion."""
    torch.manual_seed(0)
    layer = nn.Linear(x.shape[-1], grad.shape[-1], bias=bias)
    if weight is not None:
        layer.weight.data.copy_(weight)
    model = nn.Sequential(layer)
    report = convert(model, text) if text else None
    x = x.clone().requires_grad_()
    model = model.double() if text is None else model
    out = model(x.double() if text is None else x)
    out.backward(grad.to(out.dtype))
    grads = [x.grad, layer.weight.grad] + ([layer.bias.grad] if bias else [])
    return [out.detach(), *grads], layer, report


def dequantize(lp, inv_scale):
    return lp.double() * inv_scale.double()


@pytest.mark.parametrize("gradients", [E5M2, E4M3])
@pytest.mark.parametrize("of", [BF16, torch.float32])
@pytest.mark.parametrize("rows", [(32,), (5,), (3, 7)])
def test_products_are_exact_for_the_rounded_operands(rows, of, gradients):
    """BF16 results are rounded once; grad_weight, in FP32, is the exact sum but for the order of terms."""
    x, grad = torch.randn(*rows, 48).to(of), torch.randn(*rows, 80)
    text = ROW if gradients is E5M2 else ROW.replace("]", ",gradients_format=e4m3]")
    (out, grad_input, grad_weight, grad_bias), layer, report = run_layer(text, x, grad)
    assert {site.granularity for site in report.scales.sites.values()} == {"row"}
    count = -(-(x.numel() // 48) // 16) * 16
    padded = [torch.zeros(count, width) for width in (48, 80)]
    for whole, part in zip(padded, (x, grad.to(BF16)), strict=True):
        part = part.reshape(-1, part.shape[-1])
        whole[: len(part)] = part
    kinds = E4M3, gradients, E4M3
    source, g, w = (
        cast_row_scales_reference(t, kind) for t, kind in zip((*padded, layer.weight.detach()), kinds, strict=True)
    )
    used = x.numel() // 48
    bias = layer.bias.detach().to(BF16).double()
    wanted = dequantize(source.lp, source.inv_scale) @ dequantize(w.lp, w.inv_scale).t() + bias
    torch.testing.assert_close(out.reshape(-1, 80).double(), wanted[:used], rtol=2**-8, atol=1e-4)
    wanted = dequantize(g.lp, g.inv_scale) @ dequantize(w.lp_t, w.inv_scale_t).t()
    torch.testing.assert_close(grad_input.reshape(-1, 48).double(), wanted[:used], rtol=2**-7, atol=1e-4)
    wanted = dequantize(g.lp_t, g.inv_scale_t) @ dequantize(source.lp_t, source.inv_scale_t).t()
    torch.testing.assert_close(grad_weight.double(), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grad_bias, grad.to(BF16).float().reshape(-1, 80).sum(0))
    assert out.dtype is BF16 and grad_input.dtype is of and grad_weight.dtype is torch.float32


def test_an_outlier_costs_only_its_own_row():
    """One scale per tensor flushes the other rows of E4M3; a scale for each row does not."""
    torch.manual_seed(1)
    x, grad = torch.randn(64, 128), torch.randn(64, 96)
    x[3], grad[5] = x[3] * 2.0**18, grad[5] * 2.0**18
    both = ",gradients_format=e4m3]"
    exact, _, _ = run_layer(None, x, grad, bias=False)
    by_tensor, _, flushed = run_layer(TENSOR.replace("]", both), x, grad, bias=False)
    by_row, _, kept = run_layer(ROW.replace("]", both), x, grad, bias=False)
    output, grad_input, grad_weight = (
        (find_decibels(mine, wanted), find_decibels(theirs, wanted))
        for mine, theirs, wanted in zip(by_row[:3], by_tensor[:3], exact[:3], strict=True)
    )
    usual = torch.arange(64) != 3
    assert output[0][usual].min() > 20 > 10 > output[1][usual].max()
    assert grad_input[0][torch.arange(64) != 5].min() > 15 > 5 > grad_input[1][torch.arange(64) != 5].max()
    assert grad_weight[0].mean() > grad_weight[1].mean() + 3  # tokens are summed: the outliers dominate every row
    sites, other = kept.scales.sites, flushed.scales.sites
    for name in ("0.input", "0.grad_output"):
        assert sites[name].counts.sum() < other[name].counts.sum() / 5
    assert not kept.scales.counts[:, 0].any()


def test_rows_are_at_least_as_accurate_as_tensors_and_e4m3_gradients_more():
    torch.manual_seed(0)
    x, grad = torch.randn(256, 128) * torch.randn(256, 1).exp(), torch.randn(256, 96) * torch.randn(256, 1).exp()
    exact, *_ = run_layer(None, x, grad)
    found = []
    for text in (TENSOR, ROW, ROW.replace("]", ",gradients_format=e4m3]")):
        made, *_ = run_layer(text, x, grad)
        found.append([find_decibels(a, b).mean().item() for a, b in zip(made[:3], exact[:3], strict=True)])
    tensor, row, e4m3 = found
    assert all(b > a for a, b in zip(tensor, row, strict=True)), found
    assert row[0] > 28 and min(row) > 24 and min(e4m3) > 28, found
    assert all(b > a + 2 for a, b in zip(row[1:], e4m3[1:], strict=True)), found


@pytest.mark.parametrize("pair", [("row", "row"), ("row", "tensor"), ("tensor", "row"), ("tensor", "tensor")])
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_products_take_any_pair(pair, dtype):
    torch.manual_seed(0)
    operands = []
    for granularity, (rows, kind) in zip(pair, ((48, E5M2), (32, E4M3)), strict=True):
        made = cast_row_scales_reference(torch.randn(rows, 64), kind)
        inverse = made.inv_scale if granularity == "row" else torch.tensor(0.25)
        assert get_granularity(inverse, made.lp) == granularity
        operands.append((made.lp, inverse))
    (a, inv_a), (b, inv_b) = operands
    wanted = dequantize(a, inv_a) @ dequantize(b, inv_b).t()
    into = torch.empty(48, 32, dtype=dtype)
    assert multiply_fp8(a, b, inv_a, inv_b, dtype, into=into) is into
    tolerance = 2**-8 if dtype is BF16 else 1e-5
    torch.testing.assert_close(into.double(), wanted, rtol=tolerance, atol=1e-4)
    bias = torch.randn(32, dtype=BF16)
    if dtype is BF16:
        torch.testing.assert_close(
            multiply_fp8(a, b, inv_a, inv_b, bias=bias).double(), wanted + bias.double(), rtol=2**-7, atol=1e-2
        )


def test_an_operand_of_rows_is_sliced_but_not_transposed():
    made = cast_row_scales_reference(torch.randn(32, 48), E4M3)
    whole = Operand(None, made.lp, made.lp_t, made.inv_scale, made.inv_scale_t)
    part = whole.slice_rows(slice(16, 32))
    assert part.rows == 16 and torch.equal(part.inv_scale, made.inv_scale[16:])
    assert part.lp_t.shape == (48, 16) and part.transposed_inv_scale is made.inv_scale_t
    assert whole.transposed() is whole and whole.has_fine_scales and not Operand().has_fine_scales
    with pytest.raises(AssertionError, match="cast it from the original"):
        whole._replace(lp_t=None).transposed()
    grad = cast_row_scales_reference(torch.randn(32, 16), E5M2)
    grad = Operand(None, grad.lp, grad.lp_t, grad.inv_scale, grad.inv_scale_t)
    product = compute_grad_weight(grad, whole, ALL_FP8)
    parts = [slice(0, 16), slice(16, 32)]
    summed = sum(compute_grad_weight(grad.slice_rows(one), whole.slice_rows(one), ALL_FP8) for one in parts)
    torch.testing.assert_close(product, summed)


@FINE
def test_rows_of_zeros_stay_zeros(granularity):
    x, grad = torch.randn(16, 32), torch.randn(16, 48)
    x[3], x[:, 5], grad[4], grad[:, 6] = 0, 0, 0, 0
    (out, grad_input, grad_weight), *_ = run_layer(make_text(granularity), x, grad, bias=False)
    assert not out[3].any() and not grad_input[4].any() and not grad_weight[6].any() and not grad_weight[:, 5].any()
    assert torch.isfinite(grad_weight).all() and out[2].any() and grad_input[2].any()
    made, *_ = run_layer(make_text(granularity), torch.zeros(16, 32), torch.zeros(16, 48), bias=False)
    assert not any(one.any() for one in made)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("where", ["input", "grad", "weight"])
def test_inf_and_nan_show_in_every_product_with_their_row(where, bad):
    tensors = {"input": torch.randn(16, 32), "grad": torch.randn(16, 48), "weight": torch.randn(48, 32)}
    tensors[where][3, 4] = bad
    (out, grad_input, grad_weight), _, report = run_layer(
        ROW, tensors["input"], tensors["grad"], bias=False, weight=tensors["weight"]
    )
    broken = {"input": (out[3], grad_weight[:, 4]), "grad": (grad_input[3], grad_weight[4])}
    broken["weight"] = out[:, 3], grad_input[:, 4]
    for values in broken[where]:
        assert values.isnan().all()
    fine = [
        one for one in (out, grad_input, grad_weight) if not any(one.isnan().sum() == v.numel() for v in broken[where])
    ]
    assert all(torch.isfinite(one).all() for one in fine)
    assert report.scales.find_nonfinite().any()


def test_other_widths_stay_in_bf16_and_empty_inputs_pass():
    model = nn.Sequential(nn.Linear(20, 32), nn.Linear(32, 32))
    report = convert(model, ROW)
    assert [layer.part_of for layer in report.layers] == ["kept", "linear"]
    assert "20 inputs are not a multiple of 16" in report.layers[0].reason
    out = model[1](torch.zeros(0, 32, requires_grad=True))
    out.sum().backward()
    assert out.shape == (0, 32) and not model[1].weight.grad.any()


@FINE
@pytest.mark.parametrize("base", FP8_RECIPES)
@pytest.mark.parametrize("gradients", ["e5m2", "e4m3"])
def test_every_fp8_recipe_trains(base, gradients, granularity):
    text = make_text(granularity, base).replace("]", f",gradients_format={gradients}]")
    engine, plain = make_engine(text), make_engine("bf16" if "lean" not in base else "bf16-lean")
    losses = [[run_step(one)[0] for _ in range(5)] for one in (engine, plain)]
    assert losses[0][-1] < losses[0][0] and losses[0] == pytest.approx(losses[1], rel=0.02)
    sites = engine.conversion.scales.sites
    assert {site.granularity for name, site in sites.items() if "blocks" in name} == {granularity}
    assert sites["lm_head.weight"].granularity == "tensor"
    assert sites["blocks.0.up.grad_output"].dtype is {"e5m2": E5M2, "e4m3": E4M3}[gradients]


@FINE
@pytest.mark.parametrize("family", ["gpt2", "llama", "nano", "bert"])
def test_other_models_train(family, granularity):
    engine = make_engine(make_text(granularity), LANGUAGE[family]().train(), 1e-2)
    ids, losses = torch.randint(0, VOCAB, (4, 32), generator=torch.Generator().manual_seed(0)), []
    for _ in range(4):
        with engine.forward():
            out = engine.model(input_ids=ids, labels=ids)
            loss = out.loss if hasattr(out, "loss") else out[1]
        engine.backward(loss)
        assert engine.step().applied
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert not engine.conversion.blocks
    assert any(site.granularity == granularity for site in engine.conversion.scales.sites.values())


@FINE
def test_layers_with_a_common_input_cast_it_once(monkeypatch, granularity):
    from narrowgauge.scaling import fine_scales

    name = f"cast_{granularity}_scales"
    shapes, original = [], getattr(fine_scales, name)
    monkeypatch.setattr(fine_scales, name, lambda x, *rest: shapes.append(tuple(x.shape)) or original(x, *rest))
    model = LANGUAGE["llama"]().eval()
    convert(model, make_text(granularity))
    with torch.no_grad():
        model(input_ids=torch.zeros(3, 16, dtype=torch.int64))
    inputs = [shape for shape in shapes if shape[0] == 48]
    assert len(inputs) == 2 * 4, "of q, k and v together, of out, of gate and up together, of down"


@FINE
@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("base", ["fp8", "fp8-lean"])
def test_recomputation_changes_no_bit(mode, base, granularity):
    plain, again = (make_engine(make_text(granularity, f"{base}[checkpoint={kind}]")) for kind in ("none", mode))
    for seed in range(2):
        (loss, grads, _), (other, others, _) = run_step(plain, seed, 2), run_step(again, seed, 2)
        assert loss == other and all(torch.equal(a, b) for a, b in zip(grads, others, strict=True))
    assert torch.equal(plain.conversion.scales.history, again.conversion.scales.history)


@FINE
def test_microbatches_add_up(granularity):
    text = make_text(granularity)
    engine = make_engine(text, rate=0.0, accumulate=2)
    _, both, _ = run_step(engine, 0, 2)
    alone = [run_step(make_engine(text, rate=0.0), seed)[1] for seed in (0, 1)]
    for summed, *parts in zip(both, *alone, strict=True):
        torch.testing.assert_close(summed, (parts[0] + parts[1]) / 2, rtol=1e-2, atol=1e-3 * summed.abs().max())


@FINE
def test_a_bad_batch_is_skipped(granularity):
    class Scale(nn.Module):
        factor = 1.0

        def forward(self, x):
            return x * self.factor

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), Scale(), nn.Linear(32, 32))
    engine = make_engine(make_text(granularity), model)
    before = copy.deepcopy(model.state_dict())
    for factor, applied in ((torch.inf, False), (torch.nan, False), (1.0, True)):
        model[1].factor = factor
        with engine.forward():
            loss = engine.model(torch.randn(16, 32)).float().square().mean()
        engine.backward(loss)
        assert engine.step().applied is applied
        same = all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert same is not applied


@FINE
def test_an_evaluation_records_nothing_and_rounds_as_training_does(granularity):
    engine = make_engine(make_text(granularity))
    tokens = torch.randint(0, 128, (4, 33))
    with torch.no_grad(), engine.forward():
        loss = engine.model(tokens[:, :-1], tokens[:, 1:])
    assert not engine.conversion.scales.amax.any() and not engine.conversion.scales.counts.any()
    with engine.forward():
        trained = engine.model(tokens[:, :-1], tokens[:, 1:])
    assert trained.item() == loss.item() and engine.conversion.scales.amax.any()


@FINE
def test_frozen_weights_may_be_stored_with_one_scale(granularity):
    losses = []
    for frozen in ("keep", "fp8"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        model[2].weight.requires_grad_(False)
        engine = make_engine(make_text(granularity, f"fp8[frozen={frozen}]"), model, 1e-2)
        x, found = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)), []
        for _ in range(5):
            with engine.forward():
                loss = engine.model(x).float().sub(x).square().mean()
            engine.backward(loss)
            engine.step()
            found.append(loss.item())
        losses.append(found)
    assert engine.conversion.stored == ["2"]
    assert losses[0][-1] < losses[0][0] and losses[0] == pytest.approx(losses[1], rel=0.02)


@FINE
def test_checkpoints_have_no_fine_scales_and_fit_every_granularity(granularity):
    text = make_text(granularity)
    row, tensor = make_engine(text), make_engine("fp8[products=all]")
    for engine in (row, tensor):
        run_step(engine), run_step(engine)
    mine, theirs = row.state_dict()["tensor_scales"], tensor.state_dict()["tensor_scales"]
    assert {name: getattr(value, "shape", 0) for name, value in mine.items() if name != "sites"} == {
        name: getattr(value, "shape", 0) for name, value in theirs.items() if name != "sites"
    }
    again = make_engine(text)
    again.load_state_dict(row.state_dict())
    again.inner.load_state_dict(row.inner.state_dict())
    assert run_step(again, 5)[0] == run_step(row, 5)[0]
    for target, source in ((make_engine(text), tensor), (make_engine("fp8[products=all]"), row)):
        state = source.state_dict()
        state["recipe"] = str(target.recipe)
        target.load_state_dict(state)
        target.inner.load_state_dict(source.inner.state_dict())
        assert run_step(target, 5)[0] == pytest.approx(run_step(source, 5)[0], rel=1e-2)


@FINE
def test_a_copy_of_a_converted_model_computes_the_same(granularity):
    engine = make_engine(make_text(granularity))
    run_step(engine)
    tokens = torch.randint(0, 128, (4, 33))
    copied = copy.deepcopy(engine.inner)
    assert find_change(copied.blocks[0].up, ConvertedLinear).plan.input.granularity == granularity
    with torch.no_grad():
        pair = [one(tokens[:, :-1], tokens[:, 1:]).item() for one in (engine.inner, copied)]
    assert pair[0] == pair[1]


def test_the_report_says_why_blocks_are_not_fused():
    engine = make_engine(ROW)
    assert not engine.conversion.blocks
    (line,) = engine.conversion.explain_unfused()
    assert line.startswith("not fused: blocks.0 and 1 more: fused blocks cast with one scale per tensor")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "fp8[granularity=row,scaling=delayed]",
            "granularity=row computes scales from the tensor itself, so scaling=del",
        ),
        ("fp8[scaling=none,granularity=row]", "so scaling=none has no effect"),
        ("fp8[granularity=row,activations=8bit]", "activations=8bit is for fused blocks"),
        ("fp8-lean[granularity=row,offload=activations]", "offload=activations is for fused blocks"),
        ("bf16[granularity=row]", "granularity=row has no effect on bf16: it belongs to fp8"),
        ("fp8[granularity=block,scaling=delayed]", "granularity=block computes scales from the tensor itself"),
        ("fp8[granularity=column]", "expected one of tensor, row, block"),
    ],
)
def test_what_makes_no_sense_is_refused(text, message):
    with pytest.raises(UsageError, match=message):
        ng.recipe(text)


@FINE
def test_granularity_implies_current_scaling(granularity):
    field = f"granularity={granularity}"
    made = ng.recipe(f"fp8[{field}]")
    assert made.scaling == "current" and str(made) == f"fp8[{field}]"
    assert made == ng.recipe(f"fp8[scaling=current,{field}]") == ng.recipe("fp8").replace(granularity=granularity)
    assert str(made.replace(granularity="tensor")) == "fp8[scaling=current]"
    assert str(ng.recipe("fp8-lean").replace(granularity=granularity, margin=1)) == f"fp8-lean[{field},margin=1]"
