"""The search for the largest batch, for memory that grows in every way it does."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from narrowgauge import hardware
from narrowgauge.forecast.memory.estimate import get_usable_bytes
from narrowgauge.forecast.run import LARGEST_BATCH, MOST_GROWTH, find_largest_batch
from narrowgauge.recipe import parse

LIMIT = get_usable_bytes(hardware.find_gpu("h200"))
GB = 10**9
SHAPES: dict[str, Callable[[int], float]] = {
    "linear": lambda batch: 20 * GB + batch * 0.7 * GB,
    "small batches take no more than the optimizer": lambda batch: max(60 * GB + batch * 1e4, 20 * GB + batch * GB),
    "square": lambda batch: 2 * GB + batch**2 * 128e3,
    "cubic": lambda batch: 2 * GB + batch * 1e6 + batch**3 * 1e3,
    "concave": lambda batch: 2 * GB + batch**0.7 * GB,
    "in chunks": lambda batch: 10 * GB + -(-batch // 64) * 3 * GB + batch * 1e7,
    "steep": lambda batch: 10 * GB + batch * 90 * GB,
}


def search(shape: Callable[[int], float], start: int) -> tuple[int, list[int]]:
    tried: list[int] = []

    def predict(recipe: Any, batch: int) -> Any:
        tried.append(batch)
        return SimpleNamespace(batch=batch, peak=int(shape(batch)))

    scenario: Any = SimpleNamespace(gpu=hardware.find_gpu("h200"), predict_memory=predict)
    memory: Any = SimpleNamespace(batch=start, peak=int(shape(start)))
    return find_largest_batch(scenario, parse("bf16"), memory), tried


@pytest.mark.parametrize("start", [1, 2, 4, 8, 64, 4096])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_largest_batch_is_found(shape: str, start: int) -> None:
    found, tried = search(SHAPES[shape], start)
    right = 1
    while SHAPES[shape](right + 1) <= LIMIT:
        right += 1
    assert right * 0.995 - 1 <= found <= right, tried
    assert len(tried) <= 16
    assert max([start, *tried]) <= MOST_GROWTH * max(right + 1, start)


def test_no_batch_fits() -> None:
    assert search(lambda batch: 200 * GB + batch, 8)[0] == 0
    assert search(lambda batch: 200 * GB + batch, 1)[0] == 0


def test_memory_that_does_not_grow_ends_the_search() -> None:
    found, tried = search(lambda batch: 2 * GB, 4)
    assert found == LARGEST_BATCH and len(tried) < 12
