"""The exact conversion to block formats: every code and rounding boundary, both rules for scales, special values."""

from __future__ import annotations

import math
from bisect import bisect_left
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowgauge.block_formats import (
    BLOCK_FORMATS,
    decode_scale,
    find_block_format,
    quantize_exactly,
    round_exactly,
)
from narrowgauge.errors import UsageError
from narrowgauge.formats import decode, find_format, round_to

MX = [name for name, f in BLOCK_FORMATS.items() if f.scale == "e8m0"]
ELEMENTS = ["fp4_e2m1", "fp8_e4m3", "fp8_e5m2"]
FP32_MAX = float(np.finfo(np.float32).max)


def list_magnitudes(name: str) -> list[Fraction]:
    """Return the finite magnitudes of a format in order; the index is the code."""
    return [Fraction(decode(code, name)) for code in range(find_format(name).max_code + 1)]


def search_nearest(value: Fraction, name: str) -> Fraction:
    """Return the nearest magnitude by search, ties to the even code, saturated: independent of ``round_exactly``."""
    known = list_magnitudes(name)
    above = bisect_left(known, value)
    if above == len(known):
        return known[-1]
    if above == 0:
        return known[0]
    low, high = value - known[above - 1], known[above] - value
    return known[above] if high < low or (high == low and above % 2 == 0) else known[above - 1]


@pytest.mark.parametrize(("name", "element", "block", "scale", "bits"), [
    ("mxfp8_e4m3", "fp8_e4m3", 32, "e8m0", 8.25), ("mxfp8_e5m2", "fp8_e5m2", 32, "e8m0", 8.25),
    ("mxfp4", "fp4_e2m1", 32, "e8m0", 4.25), ("nvfp4", "fp4_e2m1", 16, "e4m3", 4.5),
])  # fmt: skip
def test_parameters(name: str, element: str, block: int, scale: str, bits: float) -> None:
    f = BLOCK_FORMATS[name]
    assert (f.element.name, f.block, f.scale, f.bits_per_element) == (element, block, scale, bits)
    assert f.tensor_scale == (name == "nvfp4")
    assert f.max_exponent == {"fp8_e4m3": 8, "fp8_e5m2": 15, "fp4_e2m1": 2}[element]


def test_names_and_wrong_options() -> None:
    assert find_block_format("MXFP8").name == "mxfp8_e4m3" and find_block_format("MXFP8 E5M2").name == "mxfp8_e5m2"
    assert find_block_format(BLOCK_FORMATS["nvfp4"]) is find_block_format("NVFP4")
    with pytest.raises(UsageError, match="unknown block format 'mxfp6': expected one of mxfp8_e4m3"):
        find_block_format("mxfp6")
    with pytest.raises(UsageError, match="unknown scale rule 'ceil': expected one of floor, up"):
        quantize_exactly([1.0], "mxfp4", scale_rule="ceil")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="leave it out for NVFP4"):
        quantize_exactly([1.0], "nvfp4", scale_rule="up")
    with pytest.raises(UsageError, match="amax is for formats with a scale of the tensor"):
        quantize_exactly([1.0], "mxfp4", amax=1.0)


def test_scales_agree_with_ml_dtypes() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    codes = np.arange(256, dtype=np.uint8)
    with np.errstate(invalid="ignore"):
        e8m0 = codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
        e4m3 = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    np.testing.assert_array_equal([decode_scale(int(code), "mxfp4") for code in codes], e8m0)
    np.testing.assert_array_equal([decode_scale(int(code), "nvfp4") for code in codes], e4m3)
    assert (e8m0[0], e8m0[127], e8m0[254]) == (2.0**-127, 1.0, 2.0**127) and math.isnan(e8m0[255])


@pytest.mark.parametrize("name", ELEMENTS)
def test_fractions_are_rounded_correctly_at_every_boundary(name: str) -> None:
    known = list_magnitudes(name)
    tiny = Fraction(1, 2**80)
    for code, (low, high) in enumerate(pairwise(known)):
        middle = (low + high) / 2
        for sign in (1, -1):
            assert round_exactly(sign * low, name) == sign * low
            assert round_exactly(sign * middle, name) == sign * (low if code % 2 == 0 else high)
            assert round_exactly(sign * (middle - tiny), name) == sign * low
            assert round_exactly(sign * (middle + tiny), name) == sign * high
    assert round_exactly(known[-1] + 10**9, name) == known[-1]


@pytest.mark.parametrize("name", ELEMENTS)
@settings(deadline=None)  # the machine may be busy
@given(value=st.fractions(min_value=0, max_value=70_000))
def test_fractions_are_rounded_to_the_nearest(name: str, value: Fraction) -> None:
    assert round_exactly(value, name) == search_nearest(value, name)
    number = float(value)
    assert float(round_exactly(Fraction(number), name)) == float(round_to(number, name, saturate=True))


@pytest.mark.parametrize("rule", ["floor", "up"])
@pytest.mark.parametrize("name", MX)
def test_every_element_code_at_several_scales(name: str, rule: str) -> None:
    """Blocks hold 31 numbers of the element format and its largest, so that both rules select the same scale."""
    f = BLOCK_FORMATS[name]
    finite = [code for code in range(1 << f.element.bits) if math.isfinite(decode(code, f.element))]
    wanted = [[*finite[i : i + 31], f.element.max_code] for i in range(0, len(finite), 31)]
    for exponent in (-127, -60, 0, 7, 127 - f.max_exponent):
        for codes in wanted:
            values = [decode(code, f.element) * 2.0**exponent for code in codes]
            found = quantize_exactly(values, name, scale_rule=rule)  # type: ignore[arg-type]
            assert (found.codes.tolist(), found.scales.tolist()) == (codes, [exponent + 127])
            np.testing.assert_array_equal(found.values, values)
            assert np.array_equal(np.signbit(found.values), np.signbit(values))


@pytest.mark.parametrize("amax", [1.0, 1408.0, 3.0 * 2.0**-100])
def test_every_nvfp4_element_code_at_every_scale(amax: float) -> None:
    tensor_scale = float(np.float32(amax) / np.float32(2688))
    for scale in range(1, 0x7F):
        values = [decode(code, "fp4_e2m1") * decode(scale, "fp8_e4m3") * tensor_scale for code in range(16)]
        found = quantize_exactly(values, "nvfp4", amax=amax)  # the numbers need more bits than FP32 has
        assert (found.codes.tolist(), found.scales.tolist()) == (list(range(16)), [scale])
        assert found.tensor_scale == tensor_scale
        np.testing.assert_array_equal(found.values, values)


@pytest.mark.parametrize(("name", "amax", "floor", "up"), [
    # The largest E4M3 number is 1.75 * 2**8, of E5M2 1.75 * 2**15, of E2M1 1.5 * 2**2.
    ("mxfp8_e4m3", 448.0, 0, 0), ("mxfp8_e4m3", 448.00003, 0, 1), ("mxfp8_e4m3", 511.99997, 0, 1),
    ("mxfp8_e4m3", 512.0, 1, 1), ("mxfp8_e4m3", 256.0, 0, 0), ("mxfp8_e4m3", 255.99998, -1, 0),
    ("mxfp8_e4m3", 224.0, -1, -1), ("mxfp8_e5m2", 57344.0, 0, 0), ("mxfp8_e5m2", 57344.004, 0, 1),
    ("mxfp4", 6.0, 0, 0), ("mxfp4", 6.0000005, 0, 1), ("mxfp4", 4.0, 0, 0), ("mxfp4", 3.9999998, -1, 0),
    ("mxfp4", 3.0, -1, -1), ("mxfp4", FP32_MAX, 125, 126), ("mxfp8_e4m3", FP32_MAX, 119, 120),
    ("mxfp4", 2.0**-149, -127, -127), ("mxfp4", 0.0, -127, -127), ("mxfp4", 1.9 * 2.0**-126, -127, -127),
    ("mxfp4", 2.0**-124, -126, -126), ("mxfp8_e4m3", 2.0**-119, -127, -127), ("mxfp8_e4m3", 2.0**-118, -126, -126),
])  # fmt: skip
def test_scale_rules(name: str, amax: float, floor: int, up: int) -> None:
    amax = float(np.float32(amax))
    for sign in (1, -1):
        values = [0.0, sign * amax]
        assert quantize_exactly(values, name).scales.tolist() == [floor + 127]
        assert quantize_exactly(values, name, scale_rule="up").scales.tolist() == [up + 127]
    largest = BLOCK_FORMATS[name].element.max
    assert amax <= math.ldexp(largest, up), "nothing saturates"


def test_an_example_of_the_specification_saturates() -> None:
    """From torchao's issue 436: 127.99999 with 1 to 31. Its exponent is 6, so the scale is 2**(6 - 15)."""
    found = quantize_exactly([*range(1, 32), float(np.float32(127.99999))], "mxfp8_e5m2")
    assert found.scales.tolist() == [118]
    assert found.values[:8].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert found.values[8] == 8 and found.values[10] == 12, "9 and 11 are ties between 8, 10 and 12"
    assert found.values[31] == 57344 * 2.0**-9 == 112, "saturated: 128 would be nearer"
    up = quantize_exactly([*range(1, 32), float(np.float32(127.99999))], "mxfp8_e5m2", scale_rule="up")
    assert (up.scales.tolist(), up.values[31]) == ([119], 128)


def test_nvfp4_by_hand() -> None:
    """Two blocks: amax 2688 gives a tensor scale of 1, and scales of 448 and 3.25 (from 20 / 6 = 3.33)."""
    found = quantize_exactly([2688.0, *[100.0] * 15, 20.0, -1.0, 0.8, *[0.0] * 13], "nvfp4")
    assert (found.tensor_scale, [decode_scale(code, "nvfp4") for code in found.scales]) == (1.0, [448.0, 3.25])
    assert found.codes.tolist() == [7, *[0] * 15, 7, 9, 0, *[0] * 13]
    assert found.values[:2].tolist() == [2688, 0] and found.values[16:19].tolist() == [19.5, -1.625, 0]


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_zeros_keep_their_signs(name: str) -> None:
    f = BLOCK_FORMATS[name]
    found = quantize_exactly([[0.0, -0.0] * 20] * 2, name)
    assert not found.scales.any()
    assert found.codes.tolist() == [[0, 1 << (f.element.bits - 1)] * 20] * 2
    assert found.tensor_scale == (1.0 if f.tensor_scale else None)
    assert not found.values.any()


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_inf_and_nan_make_their_block_nan(name: str, bad: float) -> None:
    f = BLOCK_FORMATS[name]
    values = np.ones(3 * f.block)
    values[f.block + 2] = bad
    found = quantize_exactly(values, name)
    if f.tensor_scale:
        assert math.isnan(found.tensor_scale or 0) and np.isnan(found.values).all() and set(found.scales) == {0x7F}
        found = quantize_exactly(values, name, amax=1.0)
    assert [int(code) == f.nan_scale for code in found.scales] == [False, True, False]
    assert np.isnan(found.values.reshape(3, -1)).all(1).tolist() == [False, True, False]
    assert not found.codes[f.block : 2 * f.block].any() and not np.isnan(found.values[: f.block]).any()


def test_nvfp4_underflow_and_saturation() -> None:
    quiet = quantize_exactly([2688.0, *[0.0] * 15, 6 * 2.0**-10, *[-(2.0**-10)] * 15], "nvfp4")
    assert quiet.scales[1] == 0, "a tie between 0 and the smallest scale"
    assert quiet.codes[16:].tolist() == [0, *[8] * 15] and not quiet.values[16:].any()
    loud = quantize_exactly([2688.0, *[0.0] * 15, 6 * 1.0001 * 2.0**-10, *[2.0**-10] * 15], "nvfp4")
    assert decode_scale(int(loud.scales[1]), "nvfp4") == 2.0**-9 and loud.values[16] == 3 * 2.0**-9
    beyond = quantize_exactly([1e6, -500.0], "nvfp4", amax=2688.0)
    assert beyond.values.tolist() == [2688.0, -448.0], "500 / 448 rounds to 1"
    tiny = quantize_exactly([2.0**-149, 0.0], "nvfp4")
    assert tiny.tensor_scale == 2.0**-149 and tiny.codes.tolist() == [7, 0]
    assert tiny.values[0] == 6 * 0.171875 * 2.0**-149


@pytest.mark.parametrize("name", MX)
def test_elements_agree_with_ml_dtypes(name: str) -> None:
    """x / scale is exact in float32, so ml_dtypes rounds it once. It does not saturate E4M3 and E5M2, so we do it."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    kinds = {"fp4_e2m1": "float4_e2m1fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
    f = BLOCK_FORMATS[name]
    kind = getattr(ml_dtypes, kinds[f.element.name])
    draw = np.random.default_rng(0)
    x = np.ldexp(draw.standard_normal((20, 64)), draw.integers(-20, 20, (20, 64))).astype(np.float32)
    found = quantize_exactly(x, name)
    scales = found.scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float32).repeat(32, 1)
    elements = np.clip(x / scales, -f.element.max, f.element.max).astype(kind)
    np.testing.assert_array_equal(found.codes, elements.view(np.uint8))
    np.testing.assert_array_equal(found.values, elements.astype(np.float64) * scales)


def test_shapes() -> None:
    x = np.arange(2 * 3 * 50, dtype=np.float64).reshape(2, 3, 50)
    found = quantize_exactly(x, "mxfp8_e4m3")
    assert (found.codes.shape, found.scales.shape, found.values.shape) == ((2, 3, 50), (2, 3, 2), (2, 3, 50))
    np.testing.assert_array_equal(quantize_exactly(x[1, 2], "mxfp8_e4m3").codes, found.codes[1, 2])
    assert quantize_exactly(np.zeros((3, 0)), "nvfp4").scales.shape == (3, 0)
