"""Energy: read from NVML's counter, which may be missing in several ways, over enough steps to be exact."""

import ctypes
import io
from types import SimpleNamespace

import pytest
import torch

from narrowgauge.bench import energy
from narrowgauge.bench.compare import Row
from narrowgauge.bench.energy import EnergyCounter, measure_joules_per_step, open_counter
from narrowgauge.cli.bench_tables import show_rows


class Library:
    """Stands for libnvidia-ml: functions return 0, or the code in ``fails``, and write through pointers."""

    def __init__(self, millijoules=123_456, **fails):
        self.millijoules, self.fails, self.uuid = millijoules, fails, None

    def nvmlInit_v2(self):
        return self.fails.get("init", 0)

    def nvmlDeviceGetHandleByUUID(self, uuid, handle):
        self.uuid = uuid
        return self.fails.get("handle", 0)

    def nvmlDeviceGetTotalEnergyConsumption(self, handle, target):
        ctypes.cast(target, ctypes.POINTER(ctypes.c_ulonglong))[0] = self.millijoules
        return self.fails.get("energy", 0)


def test_millijoules_of_the_gpu_with_this_uuid_become_joules():
    library = Library(2**40 + 1)
    counter = EnergyCounter.open("GPU-1", lambda name: library)
    assert counter is not None
    assert library.uuid == b"GPU-1"
    assert counter.read_joules() == (2**40 + 1) / 1e3  # more than 32 bits


@pytest.mark.parametrize("fails", ["init", "handle", "energy"])
def test_a_gpu_without_the_counter_has_none(fails):
    assert EnergyCounter.open("GPU-1", lambda name: Library(**{fails: 3})) is None


def test_a_system_without_the_library_or_its_functions_has_no_counter():
    def load(name):
        raise OSError(name)

    assert EnergyCounter.open("GPU-1", load) is None
    assert EnergyCounter.open("GPU-1", lambda name: SimpleNamespace()) is None
    without_energy = SimpleNamespace(nvmlInit_v2=lambda: 0, nvmlDeviceGetHandleByUUID=lambda uuid, handle: 0)
    assert EnergyCounter.open("GPU-1", lambda name: without_energy) is None
    assert open_counter("cpu") is None


def test_steps_run_for_two_seconds_between_two_readings(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    library, ran = Library(0), []
    counter = EnergyCounter(library, None)

    def run_step(number):
        ran.append(number)
        library.millijoules += 500

    assert measure_joules_per_step(counter, run_step, step_ms=300.0) == pytest.approx(0.5)
    assert len(ran) == energy.WARMUP_STEPS + 7
    assert measure_joules_per_step(counter, lambda number: None, step_ms=1000.0) is None  # it did not advance
    library.fails["energy"] = 1
    assert measure_joules_per_step(counter, run_step, step_ms=1000.0) is None


def test_the_table_has_a_column_for_energy_only_if_it_was_measured():
    fields = {"recipe": "fp8", "tokens_per_s": 1e5, "step_ms": 1.0, "step_ms_low": 1.0, "step_ms_high": 1.0}
    fields |= {"peak_bytes": None, "mfu": None, "loss": 1.0, "times_ms": (1.0,), "cpu_ms": (), "ratio": 1.0}
    task = SimpleNamespace(unit="token")
    texts = []
    for joules in (None, 0.00471):
        out = io.StringIO()
        show_rows("title", task, [Row(name="fp8", joules_per_token=joules, **fields)], out)
        texts.append(out.getvalue())
    assert "mJ/token" not in texts[0]
    assert "mJ/token" in texts[1] and "4.71" in texts[1]
