"""Batches come in order, checked, and without disturbing the random generators of the training they feed."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import pytest
import tiny_task
import torch

from narrowgauge.errors import UsageError
from narrowgauge.runs.feed import BadData, Feed, check_finite, to_device
from narrowgauge.runs.share import Share


def test_steps_and_microbatches_in_order_from_a_thread() -> None:
    seen: list[str] = []

    def batch(step: int, split: str) -> int:
        seen.append(threading.current_thread().name)
        return step

    with Feed(tiny_task.tiny(batch=batch), first=2, last=5, share=Share(accumulate=2)) as feed:
        assert [feed.take() for _ in range(3)] == [[4, 5], [6, 7], [8, 9]]
    assert seen[:2] == ["MainThread"] * 2 and all(name.startswith("narrowgauge-feed") for name in seen[2:])
    assert len(seen) == 6  # nothing beyond the last step is asked for


def test_a_task_that_seeds_the_global_generator_does_not_disturb_dropout() -> None:
    def batch(step: int, split: str) -> torch.Tensor:
        torch.manual_seed(step)
        return torch.randn(2)

    torch.manual_seed(123)
    expected = torch.rand(3)
    torch.manual_seed(123)
    with Feed(tiny_task.tiny(batch=batch), first=0, last=4) as feed:
        batches = [feed.take()[0] for _ in range(4)]
    assert torch.equal(torch.rand(3), expected)
    for step, made in enumerate(batches):
        torch.manual_seed(step)
        assert torch.equal(made, torch.randn(2))


class Pair(NamedTuple):
    x: Any
    y: Any


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    ("wrap", "name"),
    [
        (lambda t: t, "train batch 3"),
        (lambda t: {"image": [torch.zeros(2), t]}, r"train batch 3\['image'\]\[1\]"),
        (lambda t: Pair(1, t.half()), r"train batch 3\[1\]"),
    ],
)
def test_bad_data_names_step_and_tensor(value: float, wrap: Any, name: str) -> None:
    bad = torch.tensor([[1.0, value]])
    task = tiny_task.tiny(batch=lambda step, split: wrap(bad if step == 3 else torch.ones(1, 2)))
    with Feed(task, first=0, last=9) as feed:
        for _ in range(3):
            feed.take()
        with pytest.raises(BadData, match=rf"step 4 is not finite: {name} \(shape \(1, 2\)\) holds 1 NaN"):
            feed.take()


def test_a_refusal_by_the_task_says_where() -> None:
    def batch(step: int, split: str) -> torch.Tensor:
        raise UsageError("token 99 is out of range")

    with Feed(tiny_task.tiny(batch=batch), 0, 1) as feed, pytest.raises(BadData, match="step 1: token 99 is out"):
        feed.take()


def test_nests_keep_their_types() -> None:
    batch = {"pair": Pair(torch.ones(1), [torch.zeros(1)]), "name": "x"}
    moved = to_device(batch, torch.device("meta"))
    assert isinstance(moved["pair"], Pair) and moved["pair"].x.is_meta and moved["pair"].y[0].is_meta
    assert moved["name"] == "x"
    check_finite(batch, "here", "batch")
