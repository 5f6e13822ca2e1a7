"""Batches come in order, are checked, and do not change the training's random generators."""

from __future__ import annotations

import itertools
import random
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import tiny_task
import torch
from test_train import StopAt, cpu_settings

from narrowgauge import random_state
from narrowgauge.errors import UsageError
from narrowgauge.runs.batches import BatchReader, make_isolated_batch, to_device
from narrowgauge.runs.checkpoints import checkpoint
from narrowgauge.runs.finite_batches import BadData, check_finite
from narrowgauge.runs.rank_batches import RankBatches
from narrowgauge.runs.train import train
from narrowgauge.task import Task


def test_a_thread_makes_steps_and_microbatches_in_order() -> None:
    seen: list[str] = []

    def batch(step: int, split: str) -> int:
        seen.append(threading.current_thread().name)
        return step

    task = tiny_task.tiny(batch=batch, reads_ahead=True)
    with BatchReader(task, first=2, last=5, rank_batches=RankBatches(accumulate=2)) as reader:
        assert [reader.read_step() for _ in range(3)] == [[4, 5], [6, 7], [8, 9]]
    assert seen[:2] == ["MainThread"] * 2 and all(name.startswith("narrowgauge-batches") for name in seen[2:])
    assert len(seen) == 6  # no batch beyond the last step is made


def test_a_task_that_seeds_the_global_generator_does_not_disturb_dropout() -> None:
    def batch(step: int, split: str) -> torch.Tensor:
        torch.manual_seed(step)
        return torch.randn(2)

    torch.manual_seed(123)
    expected = torch.rand(3)
    torch.manual_seed(123)
    with BatchReader(tiny_task.tiny(batch=batch), first=0, last=4) as reader:
        batches = [reader.read_step()[0] for _ in range(4)]
    assert torch.equal(torch.rand(3), expected)
    for step, made in enumerate(batches):
        torch.manual_seed(step)
        assert torch.equal(made, torch.randn(2))


def by_torch() -> float:
    return float(torch.rand(()))


def by_numpy() -> float:
    return float(np.random.rand())


def by_python() -> float:
    return random.random()


DRAWS = (by_torch, by_numpy, by_python)


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("begins", [0, 1, 5])
@pytest.mark.parametrize("seeds", [False, True])
def test_random_numbers_of_a_batch_depend_only_on_its_number(draw: Any, begins: int, seeds: bool) -> None:
    def batch(step: int, split: str) -> float:
        if step < begins:
            return -1.0
        if seeds:
            random_state.seed(step // 2)
        return float(draw())

    def numbers(first: int, last: int, training: Any) -> list[float]:
        """Make the batches while the training uses the generators too."""
        random_state.seed(11)
        made = []
        with BatchReader(tiny_task.tiny(batch=batch), first, last, seed=3) as reader:
            for _ in range(first, last):
                made.append(reader.read_step()[0])
                training()
        return made

    whole = numbers(0, 10, lambda: None)
    assert numbers(0, 10, by_torch) == whole and numbers(0, 10, lambda: random_state.seed(5)) == whole
    assert numbers(6, 10, by_numpy) == whole[6:]  # as a resumed run
    drawn = whole[begins:]
    assert len(set(drawn)) == (len({step // 2 for step in range(begins, 10)}) if seeds else len(drawn))

    random_state.seed(11)
    alone = [other() for other in DRAWS for _ in range(10)]
    in_training: list[float] = []
    for other in DRAWS:
        numbers(0, 10, lambda other=other: in_training.append(other()))  # type: ignore[misc]
    assert in_training == alone


def test_another_seed_or_split_gives_other_random_numbers() -> None:
    task = tiny_task.tiny(batch=lambda step, split: by_torch() + by_numpy() + by_python())
    made = {
        make_isolated_batch(task, 4, split, "here", seed) for split in ("train", "eval") for seed in (0, 1, 2**63 - 1)
    }
    assert len(made) == 6 and make_isolated_batch(task, 4, "train", "here", 1) in made


def test_a_task_that_breaks_its_promise_is_reported_and_run_between_steps() -> None:
    lines: list[str] = []

    def batch(step: int, split: str) -> tuple[str, float]:
        return threading.current_thread().name, by_numpy()

    task = tiny_task.tiny(batch=batch, reads_ahead=True)
    with BatchReader(task, 0, 4, notify=lines.append) as reader:
        made = [reader.read_step()[0] for _ in range(4)]
    assert {name for name, _ in made} == {"MainThread"} and len({number for _, number in made}) == 4
    assert len(lines) == 1 and "global random generator" in lines[0]


def test_quitting_immediately_does_not_wait_for_a_batch() -> None:
    held, entered = threading.Event(), threading.Event()

    def batch(step: int, split: str) -> int:
        if step:
            entered.set()
            held.wait(60)
        return step

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt), BatchReader(tiny_task.tiny(batch=batch, reads_ahead=True), 0, 9) as reader:
        reader.read_step()
        entered.wait(60)
        raise KeyboardInterrupt
    assert time.monotonic() - began < 30
    held.set()


def augmented(begins: int, draw: Any) -> Any:
    """Batches of tiny_task with noise from a global generator, starting at a step."""

    def batch(step: int, split: str) -> Any:
        x, y = tiny_task.draw(step, split)
        return (x + 0.1 * draw(), y) if step >= begins else (x, y)

    return batch


def test_two_runs_with_a_shuffling_loader_are_equal(tmp_path: Path) -> None:
    """DataLoader takes the seeds of its order and its workers from torch's global generator."""
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))

    def make() -> Task:
        data = torch.utils.data.TensorDataset(x, (x[:, :4] - x[:, 4:]).argmax(1))
        loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)
        endless = (tuple(batch) for _ in itertools.count() for batch in loader)
        return tiny_task.tiny(batch=lambda step, split: next(endless), steps=12)

    runs = []
    for name in ("one", "two"):
        random_state.seed(len(name) + len(runs))
        train(make(), cpu_settings(make(), eval_every=0, watch_every=0, log="none"), tmp_path / name)
        runs.append((checkpoint.make_path(tmp_path / name, 12) / "weights.safetensors").read_bytes())
    assert runs[0] == runs[1]


@pytest.mark.parametrize("draw", DRAWS)
def test_runs_with_random_noise_are_equal_even_if_resumed(tmp_path: Path, draw: Any) -> None:
    """The model has dropout, so a batch that advanced its generator would change the weights."""
    weights = []
    for name in ("one", "two", "resumed"):
        task = tiny_task.tiny(batch=augmented(7, draw), steps=30, sample=None)
        settings = cpu_settings(task, eval_every=10, watch_every=0, log="none")
        train(task, settings, tmp_path / name, observer=StopAt(17) if name == "resumed" else None)
        if name == "resumed":
            random_state.seed(99)
            train(task, settings, tmp_path / name, resume=True)
        weights.append((checkpoint.make_path(tmp_path / name, 30) / "weights.safetensors").read_bytes())
    assert weights[0] == weights[1] == weights[2]


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
def test_bad_data_error_names_step_and_tensor(value: float, wrap: Any, name: str) -> None:
    bad = torch.tensor([[1.0, value]])
    task = tiny_task.tiny(batch=lambda step, split: wrap(bad if step == 3 else torch.ones(1, 2)))
    with BatchReader(task, first=0, last=9) as reader:
        for _ in range(3):
            reader.read_step()
        with pytest.raises(BadData, match=rf"step 4 is not finite: {name} \(shape \(1, 2\)\) holds 1 NaN"):
            reader.read_step()


def test_an_error_in_the_task_names_the_step() -> None:
    def batch(step: int, split: str) -> torch.Tensor:
        raise UsageError("token 99 is out of range")

    task = tiny_task.tiny(batch=batch)
    with BatchReader(task, 0, 1) as reader, pytest.raises(BadData, match="step 1: token 99 is out"):
        reader.read_step()


def test_nested_batches_keep_their_types() -> None:
    batch = {"pair": Pair(torch.ones(1), [torch.zeros(1)]), "name": "x"}
    moved = to_device(batch, torch.device("meta"))
    assert isinstance(moved["pair"], Pair) and moved["pair"].x.is_meta and moved["pair"].y[0].is_meta
    assert moved["name"] == "x"
    check_finite(batch, "here", "batch")
