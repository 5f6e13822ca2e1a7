"""Hosted, the engine in another library's loop: unscaling, clipping, skipped updates, accumulation, state."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from hosting import batches, engine_run, same, tiny, weights

import narrowgauge as ng
from narrowgauge.integrations.hosted import Hosted, import_library


def make(recipe="fp16", **options):
    model = tiny.make_model()
    return Hosted(model, tiny.make_optimizer(model), recipe, **options)


def backward(engine, batch, share=1.0):
    with engine.forward():
        loss = F.cross_entropy(engine.model(batch[0]), batch[1])
    engine.backward(loss * share)
    return loss.item()


@pytest.mark.parametrize("recipe", ["fp32", "fp16"])
def test_unscaling_before_the_step_changes_no_bit(recipe):
    expected, _ = engine_run(recipe, batches())
    engine, losses = make(recipe), []
    for batch in batches():
        losses.append(backward(engine, batch))
        engine.unscale()
        engine.unscale()
        engine.step()
    assert same(losses, expected)


def test_unscaled_gradients_match_plain_torch():
    engine, plain = make("fp16"), tiny.make_model()
    batch = batches(1)[0]
    backward(engine, batch)
    F.cross_entropy(plain(batch[0]), batch[1]).backward()
    engine.unscale()
    for own, exact in zip(engine.inner.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, exact.grad, rtol=0.02, atol=1e-4)
    norm = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()])
    assert engine.step().grad_norm == pytest.approx(norm.item(), rel=0.01)


@pytest.mark.parametrize("recipe", ["fp32", "bf16", "fp16"])
def test_clipping_by_value_does_not_hide_an_inf(recipe):
    engine = make(recipe)
    before = weights(engine.inner)
    backward(engine, batches(1)[0])
    engine.named["3.weight"].grad[0, 0] = torch.inf
    engine.unscale()
    torch.nn.utils.clip_grad_value_(engine.inner.parameters(), 0.1)
    assert all(p.grad.isfinite().all() for p in engine.inner.parameters())
    assert not engine.step().applied
    assert torch.equal(weights(engine.inner), before)
    assert engine.guard.first_bad() == ["3.weight"]


def test_the_bad_parameter_is_named_after_clipping_by_a_nan_norm():
    engine = make("fp16", max_consecutive_skips=2)
    with pytest.raises(ng.TrainingStalled, match=r"first in 5\.bias\. Weights"):
        for batch in batches(2):
            backward(engine, batch)
            engine.named["5.bias"].grad[0] = torch.nan
            engine.unscale()
            torch.nn.utils.clip_grad_norm_(engine.inner.parameters(), 1.0)
            engine.step()


def test_clipping_during_an_accumulation_keeps_later_gradients_scaled():
    expected, _ = engine_run("fp16", batches(4), accumulate=2)
    engine, losses = make("fp16"), []
    for number, batch in enumerate(batches(4)):
        losses.append(backward(engine, batch, 0.5))
        engine.unscale()
        if number % 2:
            engine.step()
    assert same(losses, expected)


@pytest.mark.parametrize("recipe", ["fp16", "fp8"])
def test_precision_state_resumes_bit_exactly(recipe):
    data = batches(6, bad=[1])
    expected, _ = engine_run(recipe, data)
    engine = make(recipe)
    for batch in data[:3]:
        backward(engine, batch)
        engine.step()
    fresh = make(recipe)
    fresh.inner.load_state_dict(engine.inner.state_dict())
    fresh.optimizers[0].load_state_dict(engine.optimizers[0].state_dict())
    fresh.load_precision_state_dict(engine.precision_state_dict())
    assert fresh.skipped == 1
    losses = []
    for batch in data[3:]:
        losses.append(backward(fresh, batch))
        fresh.step()
    assert same(losses, expected[3:])


@pytest.mark.parametrize(
    ("recipe", "options", "message"),
    [
        ("bf16", {"accumulate": 2}, "accumulate belongs to the library that runs the loop"),
        ("bf16", {"clipnorm": 2}, "unknown option 'clipnorm'"),
        ("bf16[gradients=released]", {}, "steps during backward"),
        ("bf17", {}, "unknown recipe 'bf17'"),
    ],
)
def test_bad_options_give_one_line_errors(recipe, options, message):
    with pytest.raises(ng.UsageError, match=message) as caught:
        make(recipe, **options)
    assert "\n" not in str(caught.value)


def test_a_foreign_state_is_refused():
    with pytest.raises(ng.UsageError, match="is not narrowgauge's"):
        make("fp16").load_precision_state_dict({"scale": 65536.0})


def test_a_missing_library_gives_a_one_line_error():
    with pytest.raises(ng.UsageError, match=r"^no_such_library is not installed: pip install it$"):
        import_library("no_such_library", "it")


def test_importing_the_integrations_imports_no_library():
    code = (
        "import sys, narrowgauge.integrations.lightning, narrowgauge.integrations.accelerate\n"
        "import narrowgauge.integrations.transformers\n"
        "assert not {'lightning', 'accelerate', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
