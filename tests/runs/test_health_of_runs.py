"""A run is never called healthy, and never exits with 0, beside a capture, a skipped update or a nonfinite loss."""

import io
import json
import math

import pytest
import torch
from torch import nn

from narrowgauge.cli.train_output import describe, summarise
from narrowgauge.findings import SERIOUS
from narrowgauge.runs.settings import make_settings
from narrowgauge.runs.train import train
from narrowgauge.task import Task


class Distance(nn.Module):
    """The distance of two embeddings; its slope at 0 is inf times 0, which is NaN."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(6, 5, bias=False)

    def forward(self, pair):
        left, right = self.embed(pair[:, 0]), self.embed(pair[:, 1])
        return (left - right).square().sum(-1).sqrt()


def make_task(equal_at=(), infinite_at=()):
    def batch(number, split):
        pair = torch.randn(12, 2, 6, generator=torch.Generator().manual_seed(number))
        if split == "train" and number in equal_at:
            pair[0, 1] = pair[0, 0]
        return pair, split == "train" and number in infinite_at

    def loss(model, batch):
        pair, infinite = batch
        value = (model(pair).float() - 3.0).square().mean()
        return value + math.inf if infinite else value

    return Task(name="distances", model=Distance, batch=batch, loss=loss, items_per_batch=12, learning_rate=1e-2)


def run(tmp_path, recipe="fp32", steps=10, watch=1, **bad):
    task = make_task(**bad)
    settings = make_settings(task, recipe=recipe, device="cpu", steps=steps, checkpoint_every=0, watch_every=watch)
    result = train(task, settings, tmp_path / "run")
    out = io.StringIO()
    summarise(result, {}, tmp_path / "run", out, False)
    return result, out.getvalue()


def serious(result):
    return {finding.rule: finding for finding in result.findings if finding.severity == SERIOUS}


@pytest.mark.parametrize("recipe", ["fp32", "bf16"])
@pytest.mark.parametrize("watch", [0, 2])
def test_a_nan_gradient_that_was_skipped_is_serious(recipe, watch, tmp_path):
    result, text = run(tmp_path, recipe, watch=watch, equal_at=(4,))
    found = serious(result)["gradient-not-finite"]
    assert result.skipped == 1 and len(result.captures) == 1 and result.serious
    assert found.step == 5 and "healthy" not in text and "use bf16" not in found.fix
    assert json.loads(json.dumps(describe(result, {})))["findings"][0]["step"] == 5


def test_the_same_run_without_the_bad_pair_is_healthy(tmp_path):
    result, text = run(tmp_path)
    assert result.findings == [] and "healthy: nothing to report" in text


def test_all_updates_skipped_is_serious_and_advice_fits_the_recipe(tmp_path):
    result, text = run(tmp_path, equal_at=range(10))
    (found,) = result.findings
    assert (found.rule, found.severity, found.step) == ("gradient-not-finite", SERIOUS, 1)
    assert result.skipped == 10 and "10 of 10 updates were skipped" in text and "bf16" not in found.fix
    assert {one.rule for one in found.consequences} == {"skips-in-a-row", "many-skipped-updates"}


@pytest.mark.parametrize("bad", [(3,), (9,), (2, 3, 4, 5)])
def test_a_nonfinite_loss_is_found_without_watching(bad, tmp_path):
    result, text = run(tmp_path, watch=0, infinite_at=bad)
    assert result.serious and result.captures and "not watched" in text and "healthy" not in text


def test_an_unwatched_run_does_not_claim_to_be_healthy(tmp_path):
    result, text = run(tmp_path, watch=0)
    assert result.findings == [] and not result.watched and "healthy" not in text and "not watched" in text


def test_a_requested_capture_is_no_fault(tmp_path):
    task = make_task()
    settings = make_settings(task, recipe="fp32", device="cpu", steps=4, checkpoint_every=0)
    result = train(task, settings, tmp_path / "run", capture=2)
    assert len(result.captures) == 1 and not result.serious
