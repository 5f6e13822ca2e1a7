"""The Hugging Face Trainer under a recipe: losses match the engine's; checkpoints, findings and captures."""

import json

import pytest
import torch
from hosting import RECIPES, Labelled, batches, engine_run, same, tiny, weights

import narrowgauge as ng

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from narrowgauge.integrations.transformers import adapt, gauges_of, replay_loss  # noqa: E402

STEPS = 6


class Rows(torch.utils.data.IterableDataset):
    """The rows of all batches in order. A map-style dataset would be shuffled."""

    def __init__(self, data):
        self.data = data

    def __iter__(self):
        for points, labels in self.data:
            for row, label in zip(points, labels, strict=True):
                yield {"points": row, "labels": label}


class LossRecordingTrainer(transformers.Trainer):
    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        self.losses = [*getattr(self, "losses", []), loss.item()]
        return loss


def make(folder, data, recipe, accumulate=1, clip=0.0, bad_arguments=None, **options):
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=STEPS // accumulate, per_device_train_batch_size=tiny.BATCH,
        learning_rate=tiny.LEARNING_RATE, weight_decay=0.01, lr_scheduler_type="constant", max_grad_norm=clip,
        gradient_accumulation_steps=accumulate, save_steps=STEPS // 2, logging_steps=1, report_to="none",
        disable_tqdm=True, use_cpu=True, optim="adamw_torch", dataloader_pin_memory=False, logging_nan_inf_filter=False,
        remove_unused_columns=False, **(bad_arguments or {}),
    )  # fmt: skip
    model = Labelled()
    trainer = LossRecordingTrainer(
        model, arguments, train_dataset=Rows(data), optimizers=(tiny.make_optimizer(model), None), callbacks=[]
    )
    trainer.remove_callback(transformers.trainer_callback.PrinterCallback)
    return adapt(trainer, recipe, **options)


@pytest.mark.parametrize("recipe", [*RECIPES, "bf16-lean"])
def test_losses_match_the_engine(recipe, tmp_path):
    trainer = make(tmp_path, batches(STEPS), recipe, watch=2)
    trainer.train()
    assert same(trainer.losses, engine_run(recipe, batches(STEPS))[0])


def test_accumulation_matches_the_engine(tmp_path):
    trainer = make(tmp_path, batches(STEPS), "fp16", accumulate=2)
    trainer.train()
    expected, _ = engine_run("fp16", batches(STEPS), accumulate=2)
    assert same([2 * loss for loss in trainer.losses], expected)  # the Trainer reports loss / accumulate


def test_clipping_sees_unscaled_gradients(tmp_path):
    trainer = make(tmp_path, batches(STEPS), "fp16", clip=0.1)
    trainer.train()
    _, engine = engine_run("fp16", batches(STEPS), clip_norm=0.1)
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    assert max(norms) < 100  # scaled norms would be 65536 times larger
    torch.testing.assert_close(weights(trainer.model), weights(engine.model), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("recipe", ["bf16", "fp16", "fp8", "fp8-lean"])
def test_resume_continues_bit_exactly(recipe, tmp_path):
    data = batches(STEPS, bad=[1])
    expected, _ = engine_run(recipe, data)
    first = make(tmp_path, data, recipe)
    first.train()
    assert same(first.losses, expected)
    second = make(tmp_path, data, recipe)
    second.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{STEPS // 2}"))
    assert same(second.losses, expected[STEPS // 2 :])
    assert gauges_of(second).engine.skipped == 1
    assert torch.equal(weights(first.model), weights(second.model))


def test_an_overflow_is_skipped_logged_and_captured(tmp_path):
    trainer = make(tmp_path / "run", batches(STEPS, bad=[2]), "fp16", watch=1, captures=tmp_path / "captures")
    trainer.train()
    callback = gauges_of(trainer)
    assert callback.engine.skipped == 1
    assert bool(weights(trainer.model).isfinite().all())
    last = [entry for entry in trainer.state.log_history if "loss_scale" in entry][-1]
    assert (last["skipped_updates"], last["loss_scale"]) == (1, 32768.0)
    assert "bad-batch" in {finding.rule for finding in callback.findings}
    (capture,) = (tmp_path / "captures").iterdir()
    assert json.loads((capture / "capture.json").read_text())["step"] == 3
    found = ng.replay(capture, Labelled(), replay_loss)
    assert "batch" in found.message


def test_watching_changes_no_bit(tmp_path):
    losses = []
    for watch in (0, 1):
        trainer = make(tmp_path, batches(STEPS), "fp8", watch=watch)
        trainer.train()
        losses.append(trainer.losses)
    assert same(*losses)


def test_evaluation_after_training_runs_under_the_recipe(tmp_path):
    data = batches(STEPS)
    trainer = make(tmp_path, data, "bf16")
    trainer.train()
    logits = torch.from_numpy(trainer.predict(Rows(data[:1])).predictions)
    engine = gauges_of(trainer).engine
    with engine.evaluating():
        expected = trainer.model.network(data[0][0][: tiny.BATCH]).float()
    torch.testing.assert_close(logits[: tiny.BATCH], expected, rtol=0.02, atol=0.02)


def test_mistakes_give_one_line_errors(tmp_path):
    with pytest.raises(ng.UsageError, match=r"expected a transformers\.Trainer, got Labelled"):
        adapt(Labelled())
    with pytest.raises(ng.UsageError, match="mixed_precision='bf16'"):
        make(tmp_path, batches(1), "bf16", bad_arguments={"bf16": True})
    with pytest.raises(ng.UsageError, match="captures need watch"):
        make(tmp_path, batches(1), "bf16", watch=0, captures=tmp_path)
    with pytest.raises(ng.UsageError, match="unknown option 'clip'"):
        adapt(make_plain(tmp_path), "bf16", clip=1)
    with pytest.raises(ng.UsageError, match="has no recipe"):
        gauges_of(make_plain(tmp_path))


def make_plain(folder):
    arguments = transformers.TrainingArguments(output_dir=str(folder), use_cpu=True, max_steps=1, report_to="none")
    return transformers.Trainer(Labelled(), arguments, train_dataset=Rows(batches(1)))
