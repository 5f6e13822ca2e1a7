"""What code of other libraries does differently while a CUDA graph is recorded, and what a graph would get wrong.

transformers  While a graph is recorded it does not read values, and builds masks that it otherwise leaves out, so that
              attention runs in another, slower kernel. Here it sees no recording. Where it does read values
              then, of an attention mask for example, recording fails, and the step runs eagerly.
random states A forward that is run again in backward restores the state of the random numbers. In a graph it would
              restore the state of the recording, not that of the step. Reading the state makes the recording fail.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from narrowgauge.hardware import is_assumed

Context = contextlib.AbstractContextManager[Any]
PLACE, QUESTION = "transformers.utils.import_utils", "is_cuda_stream_capturing"


_recording = False


def is_recording() -> bool:
    """Whether a step is being recorded."""
    return _recording


@contextlib.contextmanager
def recordable() -> Iterator[None]:
    """Context in which a step is recorded."""
    global _recording
    replaced: list[tuple[Any, str, Any]] = [(torch.cuda, "get_rng_state", _refuse)]
    library = sys.modules.get(PLACE)
    if hasattr(library, QUESTION):
        replaced.append((library, QUESTION, lambda: False))
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    for owner, name, value in replaced:
        setattr(owner, name, value)
    _recording = True
    try:
        yield
    finally:
        _recording = False
        for owner, name, value in before:
            setattr(owner, name, value)


_drawing: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
"""Whether a module that runs again in backward has ever drawn random numbers on its GPU."""


class Repeatable(NamedTuple):
    """How ``torch.utils.checkpoint`` repeats a forward."""

    options: dict[str, Any]
    contexts: tuple[Callable[[], Context], ...]
    """Make further contexts of the repetition."""


@contextlib.contextmanager
def repeatable(module: nn.Module, device: torch.device) -> Iterator[Repeatable]:
    """Context manager for a forward that backward repeats; gives how. It sees whether the module draws on the GPU.

    While a step is recorded, a module that has drawn nothing before does not restore the GPU's random numbers, whose
    state would be that of the recording. Those of the host are restored: they are not part of what is recorded.
    """
    if device.type != "cuda" or is_assumed():
        yield Repeatable({}, ())
    elif is_recording() and _drawing.get(module) is False:
        yield Repeatable({"preserve_rng_state": False}, (partial(_same_host_numbers, torch.get_rng_state()),))
    elif torch.cuda.is_current_stream_capturing():
        yield Repeatable({}, ())
    else:
        generator = torch.cuda.default_generators[device.index]
        before = generator.get_offset()
        yield Repeatable({}, ())
        _drawing[module] = _drawing.get(module, False) or generator.get_offset() != before


@contextlib.contextmanager
def _same_host_numbers(state: Tensor) -> Iterator[None]:
    """Context manager in which torch draws the host's random numbers from a state; their own state is kept."""
    before = torch.get_rng_state()
    torch.set_rng_state(state)
    try:
        yield
    finally:
        torch.set_rng_state(before)


def _refuse(*_: Any) -> Any:
    raise RuntimeError("the model reads the state of the random numbers, to repeat a forward")
