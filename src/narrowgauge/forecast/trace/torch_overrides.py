"""Replaces attributes of torch, and one of transformers, while a GPU is simulated, and restores them.

torch has no setting that makes ``torch.cuda`` describe a GPU that is not installed, and some of its functions are
called from inside of torch's own Python, where no function mode sees them. So these attributes of torch are set, and
set back on the way out. narrowgauge's own code is never replaced: it has proper switches (``hardware.assume``,
``kernels.dry_run``).

transformers looks for packed documents in the positions that it makes itself, and builds a mask of all pairs of tokens
if it finds any. Read as zeros, the positions of an ordinary batch would look like documents.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint

from narrowgauge.forecast.trace import cuda_rules
from narrowgauge.forecast.trace.meter import MemoryMeter
from narrowgauge.hardware import Device, Gpu


@contextlib.contextmanager
def override_torch(
    gpu: Gpu,
    device: Device,
    rules: cuda_rules.Rules,
    compile_function: Callable[[Any], Any],
    has_documents: bool = False,
    meter: MemoryMeter | None = None,
) -> Iterator[None]:
    """Let torch describe ``gpu`` as its only CUDA device.

    ``compile_function`` replaces torch.compile. ``has_documents``: batches give the positions of their tokens.
    ``meter`` answers how much memory is allocated.
    """
    # Recomputation compares devices as well, and hooks see them with and without the simulation.
    checks: Any = torch.utils.checkpoint._allowed_determinism_checks_to_fns
    compare = checks["default"]
    with contextlib.ExitStack() as stack:
        stack.callback(checks.__setitem__, "default", compare)
        checks["default"] = lambda tensor: (tensor.shape, tensor.dtype)
        overrides = list(_overrides(gpu, device, rules, compile_function, meter or MemoryMeter()))
        masks = sys.modules.get("transformers.masking_utils")
        if hasattr(masks, "find_packed_sequence_indices") and not has_documents:
            overrides.append((masks, "find_packed_sequence_indices", functools.partial(_answer, None)))
        for owner, name, value in overrides:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield


def _overrides(
    gpu: Gpu, device: Device, rules: cuda_rules.Rules, compile_function: Callable[[Any], Any], meter: MemoryMeter
) -> Iterator[tuple[Any, str, Any]]:
    """Owner, attribute and replacement."""

    def compile(function: Any = None, **options: Any) -> Any:
        return compile_function if function is None else compile_function(function)

    yield torch, "compile", compile
    yield torch, "clear_autocast_cache", rules.forget
    yield F, "scaled_dot_product_attention", rules.attention  # both are called from torch's own Python functions,
    yield F, "dropout", rules.dropout  # where no function mode sees them
    properties = SimpleNamespace(
        name=device.name, major=gpu.capability[0], minor=gpu.capability[1], total_memory=gpu.memory_bytes,
        multi_processor_count=gpu.sms, L2_cache_size=gpu.l2_bytes,
    )  # fmt: skip
    answers: dict[str, Any] = {
        "is_available": True,
        "is_initialized": False,  # so that seeds are stored for later instead of sent to the device
        "device_count": 1,
        "current_device": 0,
        "get_device_name": device.name,
        "get_device_capability": gpu.capability,
        "get_device_properties": properties,
        "is_bf16_supported": "bf16" in device.native,
        "is_current_stream_capturing": False,
        "current_stream": _FinishedWork(),
        "get_rng_state": torch.get_rng_state(),
        "device": contextlib.nullcontext(),
        **dict.fromkeys(("synchronize", "empty_cache", "set_device", "set_rng_state")),
    }
    for name, answer in answers.items():
        yield torch.cuda, name, functools.partial(_answer, answer)
    yield torch.cuda, "memory_allocated", lambda device=None: meter.allocated
    yield torch.cuda, "max_memory_allocated", lambda device=None: meter.peak
    yield torch.cuda, "reset_peak_memory_stats", lambda device=None: meter.reset_peak()
    yield torch.cuda, "_initialized", False  # otherwise recomputation would fetch random states from the device
    yield torch.cuda, "Event", _FinishedWork
    yield torch.cuda, "Stream", _FinishedWork


def _answer(value: Any, *args: Any, **kwargs: Any) -> Any:
    return value


class _FinishedWork:
    """A CUDA event or stream whose work has always finished."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.cuda_stream = 0

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 1.0

    def _do_nothing(self, *args: Any, **kwargs: Any) -> None:
        return None

    record = synchronize = wait = wait_stream = wait_event = record_event = __enter__ = __exit__ = _do_nothing
