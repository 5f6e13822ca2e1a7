"""Numbered batches from DataLoaders depend only on their number."""

from __future__ import annotations

import multiprocessing
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

from narrowgauge import Task, UsageError
from narrowgauge.cli import main
from narrowgauge.data.loader import Batches

ITEMS = 22


class Noisy(Dataset[Tensor]):
    """Each item comes with numbers from three global generators, like augmentation."""

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index), float(torch.rand(())), random.random(), np.random.rand()])


class Stream(IterableDataset[Tensor]):
    """An unknown number of items, divided among workers."""

    def __iter__(self) -> Iterator[Tensor]:
        worker = torch.utils.data.get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for index in range(first, ITEMS, step):
            yield torch.tensor([float(index), float(torch.rand(())), random.random(), np.random.rand()])


class PlainIterable:
    """An iterable that is not a DataLoader."""

    def __iter__(self) -> Iterator[Tensor]:
        yield from (torch.rand(3) for _ in range(5))


LOADERS: dict[str, Callable[[], Any]] = {
    "in order": lambda: DataLoader(Noisy(), 4),
    "shuffled": lambda: DataLoader(Noisy(), 4, shuffle=True),
    "generator": lambda: DataLoader(Noisy(), 4, shuffle=True, generator=torch.Generator().manual_seed(9)),
    "weighted": lambda: DataLoader(Noisy(), 4, sampler=WeightedRandomSampler([1.0] * ITEMS, ITEMS)),
    "drop last": lambda: DataLoader(Noisy(), 4, shuffle=True, drop_last=True),
    "workers": lambda: DataLoader(Noisy(), 4, shuffle=True, num_workers=2),
    "persistent": lambda: DataLoader(Noisy(), 4, shuffle=True, num_workers=2, persistent_workers=True),
    "stream": lambda: DataLoader(Stream(), 4),
    "stream, workers": lambda: DataLoader(Stream(), 4, num_workers=2),
    "iterable": PlainIterable,
    "list": lambda: [torch.full((2,), float(n)) for n in range(5)],
}
CHEAP = [name for name in LOADERS if "worker" not in name and name != "persistent"]


def first(make: Callable[[], Any], count: int, seed: int = 0) -> list[Tensor]:
    batches = Batches(make(), seed)
    return [batches(number, "train") for number in range(count)]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", LOADERS)
def test_a_batch_depends_only_on_its_number(name: str) -> None:
    make = LOADERS[name]
    expected = first(make, 14)
    random.seed(5)
    np.random.seed(6)
    torch.manual_seed(7)  # other uses of the generator have no effect
    for start in (9, 5) if name not in CHEAP else range(14):
        resumed = Batches(make(), 0)
        assert equal([resumed(number, "train") for number in range(start, 14)], expected[start:]), start
    jumping = Batches(make(), 0)
    for number in (3, 3, 11, 0, 12, 6):
        assert torch.equal(jumping(number, "train"), expected[number]), number


@pytest.mark.parametrize("name", CHEAP)
def test_global_generators_are_restored(name: str) -> None:
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index, union-attr]
    first(LOADERS[name], 7)
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]  # type: ignore[index, union-attr]


def test_epochs_seeds_and_splits_differ() -> None:
    def order(found: list[Tensor]) -> list[int]:
        return [int(row[0]) for batch in found for row in batch]

    make = LOADERS["shuffled"]
    found = first(make, 12)
    one, two = order(found[:6]), order(found[6:])
    assert sorted(one) == sorted(two) == list(range(ITEMS)) and one != two != list(range(ITEMS))
    assert order(first(make, 6, seed=1)) != one
    other = DataLoader(Noisy(), 4, shuffle=True, generator=torch.Generator().manual_seed(10))
    assert order(first(lambda: other, 6)) != order(first(LOADERS["generator"], 6))
    both = Batches({"train": make(), "eval": make()}, 0)
    assert order([both(n, "eval") for n in range(6)]) != one


def test_set_epoch_is_called() -> None:
    class Counting(torch.utils.data.Sampler[int]):
        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[int]:
            yield from [self.epoch] * 4

        def __len__(self) -> int:
            return 4

    found = first(lambda: DataLoader(Noisy(), 2, sampler=Counting()), 6)
    assert [int(batch[0, 0]) for batch in found] == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (Noisy(), "is a Noisy; give a DataLoader over it"),
        (iter([1]), "can be read only once"),
        (3, "is a int"),
        ({"eval": [1]}, "has no train"),
        ([], "has no batches"),
        (DataLoader(Noisy(), 64, drop_last=True), "has no batches"),
        (DataLoader(Noisy(), sampler=DistributedSampler(Noisy(), 2, 0)), "leave it out"),
        (lambda split: None, "has no train"),
    ],
)
def test_invalid_data_is_refused(data: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        task(data).batch(0, "train")


def task(data: Any, **more: Any) -> Task:
    return Task(model=lambda: nn.Linear(4, 1), loss=lambda m, b: m(b).square().mean(), data=data, **more)


def test_a_task_takes_sizes_from_its_loaders() -> None:
    found = task({"train": LOADERS["in order"](), "eval": LOADERS["in order"]()})
    assert found.items_per_batch == 4 and found.eval_batches == 6
    assert torch.equal(found.batch(0, "train")[:, 0], torch.arange(4.0))
    made: list[str] = []

    def make(split: str) -> Any:
        made.append(split)
        return LOADERS["in order"]()

    lazy = task(make, items_per_batch=4)
    assert not made and lazy.eval_batches == 8, "data is opened when it is needed"
    lazy.batch(0, "train")
    lazy.batch(1, "eval")
    assert made == ["train", "eval"]
    with pytest.raises(UsageError, match="both batch and data"):
        task(make, batch=lambda step, split: None)
    with pytest.raises(UsageError, match="neither batch nor data"):
        Task(model=lambda: nn.Linear(4, 1), loss=lambda m, b: m(b).mean())


FILE = """
import random
import torch
from torch import nn
from torch.utils.data import DataLoader
from narrowgauge import Task

class Noisy(torch.utils.data.Dataset):
    def __len__(self): return 22
    def __getitem__(self, index): return torch.full((4,), float(index)) / 22 + random.random()

def make(workers: int = 0, seed: int = 0):
    loader = lambda split: DataLoader(Noisy(), 4, shuffle=split == "train", drop_last=True, num_workers=workers)
    return Task(model=lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)), data=loader, data_seed=seed,
                loss=lambda m, b: (m(b) - b[:, :1]).square().mean(), items_per_batch=4, eval_batches=2, steps=13)
"""


@pytest.mark.parametrize("workers", ["0", "2"])
def test_resume_continues_bit_exactly(workers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from narrowgauge.runs import record

    monkeypatch.chdir(tmp_path)
    others = multiprocessing.active_children()
    Path("mine.py").write_text(FILE)
    options = ["--device", "cpu", "--recipe", "fp32", "--log", "none", "--watch", "0", "--keep", "9"]
    assert main(
        ["train", "mine.py:make", "--workers", workers, *options, "--checkpoint-every", "4", "--out", "whole"]
    ) in (0, 1)
    shutil.copytree("whole", "cut")
    for step in (8, 12, 13):  # as if it had been killed at step 7, in the middle of the second epoch
        shutil.rmtree(f"cut/checkpoints/step-{step:08d}", ignore_errors=True)
    record.truncate_after(Path("cut"), 7)
    assert [path.name for path in Path("cut/checkpoints").iterdir()] == ["step-00000004"]
    assert main(["train", "--resume", "cut"]) in (0, 1)
    last = "checkpoints/step-00000013/weights.safetensors"
    assert Path("cut", last).read_bytes() == Path("whole", last).read_bytes()
    assert {*multiprocessing.active_children()} <= {*others}, "workers of loaders end with their run"
