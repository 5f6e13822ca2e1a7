"""Heat maps and histograms: shares equal ``Reading.shares``, columns keep the worst, and the size is bounded."""

from __future__ import annotations

import base64
import math
import random
from pathlib import Path

import example_run
import numpy as np
import pytest

from narrowgauge.formats import FORMATS
from narrowgauge.gauges.watch.readings import Reading
from narrowgauge.report.format_shares import RecordedReading, compute_shares
from narrowgauge.report.run_data import RunData
from narrowgauge.report.tensor_history import COLUMNS, LOWEST, MISSING, TensorHistory, decode, encode


def random_reading(draw: random.Random, kind: str, scale: float = 1.0) -> Reading:
    first = draw.randrange(-140, 90)
    counts = {first + i: draw.randrange(0, 1000) for i in range(draw.randrange(1, 30))}
    counts[first] += 1
    top = max(e for e, n in counts.items() if n)
    amax = math.ldexp(draw.uniform(1, 1.99), top)
    return Reading(kind=kind, module=f"m{draw.random()}", dtype="fp32", count=40_000, zeros=7, inf=2, nan=1, amax=amax,
                   exponents=counts, scale=scale)  # fmt: skip


def test_shares_equal_those_of_readings() -> None:
    draw = random.Random(1)
    readings = [random_reading(draw, "activation", 2.0 ** draw.randrange(-3, 9)) for _ in range(40)]
    readings += [random_reading(draw, "gradient", 1024.0) for _ in range(40)]
    planes = compute_shares([RecordedReading.parse(reading.as_event()) for reading in readings])
    for index, reading in enumerate(readings):
        assert planes["zeros"][index] == 7 / 40_000 and planes["not finite"][index] == 3 / 40_000
        for name, f in FORMATS.items():
            scale = 1 / reading.scale
            if f.storage_bits == 8:
                scale = reading.best_scale(name)
            elif name == "fp16" and reading.kind == "gradient":
                scale = 1.0
            wanted = reading.shares(name, scale)
            found = [planes[f"{name} {what}"][index] for what in ("flushed", "subnormal", "overflow")]
            assert found == pytest.approx([wanted.flushed, wanted.subnormal, wanted.overflow], abs=1e-9)


def test_fp16_gradients_without_loss_scale_get_a_fitting_one() -> None:
    small = Reading(kind="gradient", module="a", dtype="bf16", count=10, amax=2.0**-20, exponents={-21: 5, -45: 5})
    planes = compute_shares([RecordedReading.parse(small.as_event())])
    assert planes["fp16 flushed"][0] == 0.0 and planes["fp16 overflow"][0] == 0.0
    trained = Reading(kind="gradient", module="a", dtype="fp16", count=10, amax=2.0**-20, exponents={-21: 5, -24: 5})
    assert compute_shares([RecordedReading.parse(trained.as_event())])["fp16 subnormal"][0] == 1, (
        "FP16 trained without a loss scale"
    )
    zero = Reading(kind="gradient", module="a", dtype="bf16", count=10, zeros=10)
    planes = compute_shares([RecordedReading.parse(zero.as_event())])
    assert planes["zeros"][0] == 1 and all(planes[f"{name} flushed"][0] == 0 for name in FORMATS)


def test_shares_round_trip_through_bytes() -> None:
    shares = np.array([0.0, LOWEST / 2, LOWEST, 0.001, 0.5, 1.0])
    codes = encode(shares)
    assert codes.tolist()[:3] == [0, 0, 1] and codes[-1] == 254
    assert decode(codes)[3:] == pytest.approx(shares[3:], rel=0.03)
    assert np.isnan(decode(np.array([MISSING], dtype=np.uint8)))[0]


def make_reading(share: float, module: str = "a") -> dict[str, object]:
    """A reading of a weight of which FP16 flushes a share."""
    counts = {-60: round(1000 * share), 0: 1000 - round(1000 * share)}
    known = {e: n for e, n in counts.items() if n}
    return Reading(kind="weight", module=module, dtype="fp32", count=1000, amax=1.5, exponents=known).as_event()


def unpack_plane(described: dict, kind: str, name: str) -> np.ndarray:
    entry = described["heat"]["kinds"][kind]
    shape = (len(entry["modules"]), len(described["heat"]["steps"]))
    raw = base64.b64decode(entry["planes"][name])
    return np.frombuffer(raw, dtype=np.uint8).reshape(shape) if raw else np.zeros(shape, dtype=np.uint8)


def test_columns_keep_the_worst_of_many_samples() -> None:
    tensors = TensorHistory()
    for step in range(1300):
        assert tensors.add(step, [make_reading(0.5 if step == 1111 else 0.0)]) == 0
    described = tensors.describe(10**6, 10**4)
    steps = described["heat"]["steps"]
    assert len(steps) <= COLUMNS and steps[0][0] == 0 and steps[-1][1] == 1299
    widths = [last - first + 1 for first, last in steps]
    assert max(widths[:-1]) <= 2 * min(widths[:-1]), "columns have similar widths"
    found = decode(unpack_plane(described, "weight", "fp16 flushed"))
    hit = next(i for i, (first, last) in enumerate(steps) if first <= 1111 <= last)
    assert found[0, hit] == pytest.approx(0.5, rel=0.05) and np.delete(found, hit).max() == 0
    assert tensors.find_worst("weight", "fp16 flushed")["a"] == pytest.approx(0.5, rel=0.05)
    assert len(described["histograms"]["steps"]) <= 16 and described["histograms"]["steps"][-1] == 1299
    assert described["heat"]["kinds"]["weight"]["planes"]["fp32 flushed"] == "", "an empty plane takes no space"


def test_size_limits_are_kept() -> None:
    tensors = TensorHistory()
    for step in range(300):
        tensors.add(step, [make_reading(0.1, f"m{i}") for i in range(50)])
    described = tensors.describe(8 * 50 * 20, 50 * 3)
    assert len(described["heat"]["steps"]) == 20 and len(described["histograms"]["steps"]) == 3
    tiny = tensors.describe(0, 0)
    assert len(tiny["heat"]["steps"]) == 1 and tiny["histograms"]["steps"] == [299]


def test_modules_may_appear_later_or_be_missing() -> None:
    tensors = TensorHistory()
    tensors.add(1, [make_reading(0.2, "a")])
    tensors.add(2, [make_reading(0.2, "b")])
    described = tensors.describe(10**6, 100)
    entry = described["heat"]["kinds"]["weight"]
    assert entry["modules"] == ["a", "b"]
    assert list(base64.b64decode(entry["missing"])) == [0, 1, 1, 0]
    rows = {row["m"]: row["samples"] for row in described["histograms"]["rows"]}
    assert rows["a"][1] is None and rows["b"][0] is None and rows["a"][0][4] == 1000


@pytest.mark.parametrize(
    "change",
    [{"k": "other"}, {"e": [0]}, {"e": [-500, [1]]}, {"e": [0, [-1]]}, {"e": [0, ["a"]]}, {"amax": "nan"}, {"scale": 0},
     {"n": None}, {"e": [0, [1] * 400]}, {"scale": "inf"}],
)  # fmt: skip
def test_invalid_readings_are_counted(change: dict[str, object]) -> None:
    tensors = TensorHistory()
    assert tensors.add(1, [make_reading(0.1) | change, make_reading(0.1)]) == 1
    assert tensors.modules == {"weight": {"a": 0}}


def test_updates_and_loss_scale_of_a_run(tmp_path: Path) -> None:
    run = RunData(example_run.write_run(tmp_path / "run", 200, tensors=5, every=20))
    run.update()
    described = run.describe(500, 10**6, 10**4)
    assert described["heat"]["scaled"] and set(described["heat"]["kinds"]) == {"activation", "gradient", "update"}
    assert decode(unpack_plane(described, "update", "lost")).max() == pytest.approx(0.3, rel=0.05)
    assert set(described["heat"]["kinds"]["update"]["planes"]) == {"zeros", "not finite", "lost"}
    assert example_run.EVIL in described["heat"]["kinds"]["gradient"]["modules"]
