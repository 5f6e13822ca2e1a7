"""The task digits: an exact split, batches by number, and 97% accuracy in FP32 in seconds."""

import sys

import pytest
import torch

from narrowgauge import tasks
from narrowgauge.errors import UsageError
from narrowgauge.tasks import digits

pytest.importorskip("sklearn")


def test_the_splits_are_disjoint_and_complete():
    (train, _), (held, _) = digits.load("train"), digits.load("eval")
    assert (len(train), len(held)) == (1437, 360)
    assert train.shape[1:] == (1, 8, 8)
    assert float(train.min()) == -1
    assert float(train.max()) == 1
    # The data set has a few images twice; more in common would be a leak.
    seen = {image.numpy().tobytes() for image in train}
    assert sum(image.numpy().tobytes() in seen for image in held) <= 2


def test_an_epoch_has_every_image_at_most_once():
    task = tasks.find("digits")
    per_epoch = 1437 // 64
    epoch = torch.cat([task.batch(step, "train")[0] for step in range(per_epoch)])
    assert len({image.numpy().tobytes() for image in epoch}) >= 64 * per_epoch - 2
    assert not torch.equal(task.batch(0, "train")[0], task.batch(per_epoch, "train")[0])


def test_a_batch_is_a_function_of_step_and_seed():
    task, other = tasks.find("digits"), tasks.find("digits", seed=1)
    assert torch.equal(task.batch(7, "train")[0], tasks.find("digits").batch(7, "train")[0])
    assert not torch.equal(task.batch(7, "train")[0], other.batch(7, "train")[0])
    assert torch.equal(task.batch(0, "eval")[0], other.batch(3, "eval")[0])


def test_it_learns_in_fp32():
    task = tasks.find("digits")
    torch.manual_seed(0)
    model = task.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.learning_rate, weight_decay=task.weight_decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, task.steps)
    for step in range(task.steps):
        optimizer.zero_grad()
        task.loss(model, task.batch(step, "train")).backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        assert task.metrics(model, task.batch(0, "eval"))["accuracy"].item() >= 0.97


def test_synthetic_batches_have_the_shape_of_real_ones():
    task = tasks.find("digits", batch=5)
    for fake, real in zip(task.synthetic(0), task.batch(0, "train"), strict=True):
        assert (fake.shape, fake.dtype) == (real.shape, real.dtype)


def test_bad_input_is_refused(monkeypatch):
    with pytest.raises(UsageError, match="smaller --batch"):
        tasks.find("digits", batch=5000).batch(0, "train")
    with pytest.raises(UsageError, match="train and eval"):
        tasks.find("digits").batch(0, "test")
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    digits.load.cache_clear()
    with pytest.raises(UsageError, match="scikit-learn"):
        tasks.find("digits").batch(0, "train")
