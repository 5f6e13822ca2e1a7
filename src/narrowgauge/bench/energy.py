"""Energy of training steps: reads the energy counter of an NVIDIA GPU through NVML, which comes with the driver.

The counter is the energy of the whole board since the driver was loaded, in millijoules. The driver updates it every
20 to 100 ms, so steps are run for two seconds between two readings: the error is a few percent. NVML is called through
ctypes, because the counter is all that is needed here, and its Python package may not be installed.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from typing import Any

import torch

SECONDS = 2.0
"""Duration of a measurement."""
WARMUP_STEPS = 2
"""Steps before it, so that the GPU's clocks and power have settled."""


class EnergyCounter:
    """The energy counter of one GPU."""

    def __init__(self, library: Any, handle: Any) -> None:
        self._library, self._handle = library, handle

    @classmethod
    def open(cls, uuid: str, load: Callable[[str], Any] = ctypes.CDLL) -> EnergyCounter | None:
        """Return the counter of a GPU, or None if the system has none: no driver, a virtual GPU, a part of a GPU.

        Args:
            uuid: The GPU's UUID, as in ``GPU-5a7b...``.
            load: Loads a shared library.
        """
        try:
            library = load("libnvidia-ml.so.1")
            handle = ctypes.c_void_p()
            if library.nvmlInit_v2() or library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)):
                return None
        except (OSError, AttributeError):  # no such library, or one without these functions
            return None
        counter = cls(library, handle)
        return None if counter.read_joules() is None else counter

    def read_joules(self) -> float | None:
        """Return the joules since the driver was loaded, or None if the GPU does not count them."""
        millijoules = ctypes.c_ulonglong()
        try:
            failed = self._library.nvmlDeviceGetTotalEnergyConsumption(self._handle, ctypes.byref(millijoules))
        except AttributeError:
            return None
        return None if failed else millijoules.value / 1e3


def open_counter(device: str) -> EnergyCounter | None:
    """Return the energy counter of a torch device, or None if it has none."""
    if torch.device(device).type != "cuda" or torch.version.cuda is None:
        return None
    return EnergyCounter.open(f"GPU-{torch.cuda.get_device_properties(device).uuid}")


def measure_joules_per_step(counter: EnergyCounter, run_step: Callable[[int], object], step_ms: float) -> float | None:
    """Run steps for about two seconds.

    Args:
        counter: The counter of the GPU that runs them.
        run_step: Runs the step with this number.
        step_ms: Expected time of a step.

    Returns:
        The joules of one step, or None if the counter could not be read or did not advance.
    """
    steps = max(1, math.ceil(SECONDS * 1e3 / step_ms))
    for number in range(WARMUP_STEPS):
        run_step(number)
    torch.cuda.synchronize()
    before = counter.read_joules()
    for number in range(steps):
        run_step(number)
    torch.cuda.synchronize()
    after = counter.read_joules()
    return (after - before) / steps if before is not None and after is not None and after > before else None
