"""Accelerate under a recipe: losses, accumulation, clipping and checkpoints match the engine's."""

import pytest
import torch
import torch.nn.functional as F
from hosting import RECIPES, STEPS, batches, engine_run, same, tiny, weights

import narrowgauge as ng

accelerate = pytest.importorskip("accelerate")

from narrowgauge.integrations.accelerate import adopt, engine_of, prepare  # noqa: E402


def make(recipe, accumulate=1, **options):
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    model = tiny.make_model()
    model, optimizer = prepare(accelerator, model, tiny.make_optimizer(model), recipe=recipe, **options)
    return accelerator, model, optimizer


def train(run, data, clip=None):
    accelerator, model, optimizer = run
    losses = []
    for points, labels in data:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(points), labels)
            accelerator.backward(loss)
            if clip is not None and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("recipe", [*RECIPES, "bf16-lean"])
def test_losses_match_the_engine(recipe):
    assert same(train(make(recipe), batches()), engine_run(recipe, batches())[0])


@pytest.mark.parametrize("recipe", ["bf16", "fp16"])
def test_accumulation_matches_the_engine(recipe):
    expected, _ = engine_run(recipe, batches(), accumulate=3)
    assert same(train(make(recipe, accumulate=3), batches()), expected)


def test_clipping_sees_unscaled_gradients():
    accelerator, model, optimizer = run = make("fp16")
    plain = tiny.make_model()
    points, labels = batches()[0]
    F.cross_entropy(plain(points), labels).backward()
    exact = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()])
    accelerator.backward(F.cross_entropy(model(points), labels))
    norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
    assert norm.item() == pytest.approx(exact.item(), rel=0.01)
    clipped = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    assert clipped.item() == pytest.approx(0.5, rel=1e-4)
    optimizer.step()
    assert engine_of(accelerator).report.grad_norm == pytest.approx(0.5, rel=1e-4)
    # The same clipping, rounded differently: torch multiplies twice, the engine divides once.
    train(run, batches()[1:], clip=0.5)
    _, engine = engine_run("fp16", batches(), clip_norm=0.5)
    torch.testing.assert_close(weights(model), weights(engine.model), rtol=1e-3, atol=1e-4)


def test_clip_norm_matches_the_engine():
    expected, _ = engine_run("fp16", batches(), clip_norm=0.5)
    assert same(train(make("fp16", clip_norm=0.5), batches()), expected)


@pytest.mark.parametrize("recipe", ["fp32", "fp16"])
def test_an_overflow_skips_update_and_schedule(recipe):
    accelerator, model, optimizer = make(recipe)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1, 0.5)
    schedule = accelerator.prepare(schedule)
    points, labels = batches(1, bad=[0])[0]
    before = weights(model)
    accelerator.backward(F.cross_entropy(model(points), labels))
    optimizer.step()
    schedule.step()
    assert torch.equal(weights(model), before)
    assert optimizer.step_was_skipped
    assert engine_of(accelerator).skipped == 1
    assert accelerator.scaler.get_scale() == (32768 if recipe == "fp16" else 1)
    assert schedule.get_last_lr() == [tiny.LEARNING_RATE]


@pytest.mark.parametrize("recipe", ["bf16", "fp16", "fp8", "fp8-lean"])
def test_state_survives_save_state(recipe, tmp_path):
    data = batches(STEPS, bad=[1])
    expected, _ = engine_run(recipe, data)
    first = make(recipe)
    losses = train(first, data[:3])
    first[0].save_state(tmp_path)
    second = make(recipe)
    second[0].load_state(tmp_path)
    assert engine_of(second[0]).skipped == 1
    assert same(losses + train(second, data[3:]), expected)


def test_evaluation_runs_under_the_recipe():
    accelerator, model, _ = make("bf16")
    points, _labels = batches(1)[0]
    with torch.no_grad():
        logits = model(points)
        with engine_of(accelerator).evaluating():
            expected = tiny.make_model()(points)
    assert logits.dtype is torch.float32
    assert torch.equal(logits, expected.float())


def test_evaluations_of_fp8_multiply_in_bf16():
    accelerator, model, _ = make("fp8")
    points, _labels = batches(1)[0]
    engine = engine_of(accelerator)
    with engine.evaluating():
        expected = engine.inner(points).float()
    with torch.no_grad():
        as_trained = model(points)
        model.eval()
        evaluated = model(points)
        model.train()
    assert torch.equal(evaluated, expected)
    assert not torch.equal(as_trained, expected)


def test_preparing_again_keeps_the_engine():
    accelerator, model, optimizer = make("fp16")
    engine = engine_of(accelerator)
    assert accelerator.prepare(model, optimizer) == (model, optimizer)
    assert engine_of(accelerator) is engine


def test_mistakes_give_one_line_errors():
    model = tiny.make_model()
    optimizer = tiny.make_optimizer(model)
    accelerator = accelerate.Accelerator(cpu=True)
    with pytest.raises(ng.UsageError, match="has no recipe"):
        engine_of(accelerator)
    with pytest.raises(ng.UsageError, match=r"expected an accelerate\.Accelerator, got Sequential"):
        adopt(model)
    with pytest.raises(ng.UsageError, match="got 1 models and 2 optimizers"):
        prepare(accelerator, model, optimizer, tiny.make_optimizer(model), recipe="fp32")
    adopt(accelerator, "fp32")
    with pytest.raises(ng.UsageError, match="nothing is prepared yet"):
        engine_of(accelerator)
    accelerator.prepare(model, optimizer)
    other = tiny.make_model()
    with pytest.raises(ng.UsageError, match="trains one model"):
        accelerator.prepare(other, tiny.make_optimizer(other))
    with pytest.raises(ng.UsageError, match="has a recipe already"):
        adopt(accelerator, "fp32")


def test_mixed_precision_with_a_recipe_is_refused():
    accelerate.state.AcceleratorState._reset_state()
    try:
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
        with pytest.raises(ng.UsageError, match="mixed_precision='bf16'"):
            adopt(accelerator, "bf16")
    finally:
        accelerate.state.AcceleratorState._reset_state()
