"""Saves and restores the random states of torch (CPU and GPUs), Python and NumPy."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch


def capture() -> dict[str, Any]:
    """Return the states of all generators as tensors and plain values."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "python": random.getstate(),
        "numpy": {
            "name": str(name),
            "keys": torch.from_numpy(np.asarray(keys, dtype=np.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "gauss": float(gauss),
        },
    }


def restore(state: dict[str, Any]) -> None:
    """Restore the states from ``capture``. States of GPUs that no longer exist are ignored."""
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available():
        for index, gpu in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(gpu, index)
    random.setstate(state["python"])
    numpy = state["numpy"]
    keys = numpy["keys"].numpy().astype(np.uint32)
    np.random.set_state((numpy["name"], keys, numpy["position"], numpy["has_gauss"], numpy["gauss"]))


def get_random_state(device: torch.device) -> torch.Tensor:
    """Return the state of one device's generator."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def set_random_state(state: torch.Tensor, device: torch.device) -> None:
    """Restore a state of ``get_random_state``."""
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


def seed(value: int) -> None:
    """Seed all generators."""
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_available():  # without a GPU, torch.manual_seed stores one more call and its stack at each step
        torch.cuda.manual_seed_all(value)
    random.seed(value)
    np.random.seed(value % 2**32)


def are_equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two captures are equal, without the GPU states: comparing them would block."""
    numpy_one, numpy_other = one["numpy"], other["numpy"]
    return (
        torch.equal(one["torch"], other["torch"])
        and one["python"] == other["python"]
        and torch.equal(numpy_one["keys"], numpy_other["keys"])
        and all(numpy_one[name] == numpy_other[name] for name in ("position", "has_gauss", "gauss"))
    )


@contextlib.contextmanager
def preserve() -> Iterator[None]:
    """Restore all generators at the end of the block."""
    before = capture()
    try:
        yield
    finally:
        restore(before)


@contextlib.contextmanager
def seed_temporarily(*names: object) -> Iterator[None]:
    """Seed all generators from ``names`` in the block, and restore them at its end.

    The same names give the same random numbers, and different names different ones.
    """
    digest = hashlib.blake2b(repr(names).encode(), digest_size=8).digest()
    with preserve():
        seed(int.from_bytes(digest, "little") >> 1)
        yield
