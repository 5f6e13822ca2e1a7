"""The state of every random generator a training may draw from: torch on CPU and GPUs, Python's, NumPy's."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch


def capture() -> dict[str, Any]:
    """The states, as tensors and plain values."""
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
    """Put the states back. GPUs that are not here any more are passed over."""
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available():
        for index, gpu in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(gpu, index)
    random.setstate(state["python"])
    numpy = state["numpy"]
    keys = numpy["keys"].numpy().astype(np.uint32)
    np.random.set_state((numpy["name"], keys, numpy["position"], numpy["has_gauss"], numpy["gauss"]))


def seed(value: int) -> None:
    """Seed all of them."""
    torch.manual_seed(value)  # also every GPU's
    random.seed(value)
    np.random.seed(value % 2**32)


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether nothing was drawn between two captures, GPUs left aside: reading those would wait for them."""
    numpy_one, numpy_other = one["numpy"], other["numpy"]
    return (
        torch.equal(one["torch"], other["torch"])
        and one["python"] == other["python"]
        and torch.equal(numpy_one["keys"], numpy_other["keys"])
        and all(numpy_one[name] == numpy_other[name] for name in ("position", "has_gauss", "gauss"))
    )


@contextlib.contextmanager
def put_back() -> Iterator[None]:
    """Whatever is drawn in the block, the generators afterwards are as they were before it."""
    before = capture()
    try:
        yield
    finally:
        restore(before)


@contextlib.contextmanager
def apart(*names: object) -> Iterator[None]:
    """In the block the generators are seeded by ``names``, whatever was drawn before; afterwards they are as they were.

    What draws from them there draws the same numbers for the same names, and others for others.
    """
    digest = hashlib.blake2b(repr(names).encode(), digest_size=8).digest()
    with put_back():
        seed(int.from_bytes(digest, "little") >> 1)
        yield
