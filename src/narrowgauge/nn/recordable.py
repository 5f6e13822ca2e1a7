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
from collections.abc import Iterator
from typing import Any

import torch

PLACE, QUESTION = "transformers.utils.import_utils", "is_cuda_stream_capturing"


@contextlib.contextmanager
def recordable() -> Iterator[None]:
    """Context in which a step is recorded."""
    replaced: list[tuple[Any, str, Any]] = [(torch.cuda, "get_rng_state", _refuse)]
    library = sys.modules.get(PLACE)
    if hasattr(library, QUESTION):
        replaced.append((library, QUESTION, lambda: False))
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    for owner, name, value in replaced:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def _refuse(*_: Any) -> Any:
    raise RuntimeError("the model reads the state of the random numbers, to repeat a forward")
