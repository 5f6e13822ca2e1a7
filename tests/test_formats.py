"""Formats, compared with independent references: every code and rounding boundary of the 4- to 16-bit formats."""

from __future__ import annotations

import math
from bisect import bisect_left
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowgauge.errors import UsageError
from narrowgauge.formats import (
    ELEMENT_FORMATS,
    FORMATS,
    decode,
    encode,
    find_format,
    parse_value,
    round_to,
    spacing,
    store,
)

KNOWN = FORMATS | ELEMENT_FORMATS
SMALL = [name for name, f in KNOWN.items() if f.bits <= 16]
# The published parameters: exponent bits, mantissa bits, and what is reserved for inf and NaN: the top exponent (IEEE),
# one code, or nothing (OCP).
LAYOUT = {"fp32": (8, 23, "exponent"), "tf32": (8, 10, "exponent"), "fp16": (5, 10, "exponent"),
          "bf16": (8, 7, "exponent"), "fp8_e4m3": (4, 3, "code"), "fp8_e5m2": (5, 2, "exponent"),
          "fp4_e2m1": (2, 1, "nothing")}  # fmt: skip


def exact_value(text: str, name: str) -> Fraction | str:
    """Return the value of a magnitude's bits by definition, in exact arithmetic: the reference."""
    exponent_bits, mantissa_bits, reserved = LAYOUT[name]
    exponent, mantissa = int(text[:exponent_bits], 2), int(text[exponent_bits:], 2)
    bias = 2 ** (exponent_bits - 1) - 1
    if exponent == 2**exponent_bits - 1:
        if reserved == "exponent":
            return "nan" if mantissa else "inf"
        if reserved == "code" and mantissa == 2**mantissa_bits - 1:
            return "nan"
    if exponent == 0:
        return Fraction(mantissa, 2**mantissa_bits) * Fraction(2) ** (1 - bias)
    return (1 + Fraction(mantissa, 2**mantissa_bits)) * Fraction(2) ** (exponent - bias)


def magnitudes(name: str) -> list[Fraction]:
    """Return every finite magnitude in order; the index is the code."""
    width = sum(LAYOUT[name][:2])
    values = [exact_value(f"{code:0{width}b}", name) for code in range(2**width)]
    return [value for value in values if isinstance(value, Fraction)]


def reference_round(value: Fraction, name: str) -> Fraction | None:
    """Return the nearest magnitude by search, ties to the even code; None for an overflow."""
    known = magnitudes(name)
    known.append(2 * known[-1] - known[-2])  # the number after the largest: rounding to it overflows
    if value >= known[-1]:
        return None
    above = bisect_left(known, value)
    if known[above] == value:
        chosen = above
    else:
        low, high = value - known[above - 1], known[above] - value
        chosen = above if high < low or (high == low and above % 2 == 0) else above - 1
    return None if chosen == len(known) - 1 else known[chosen]


@pytest.mark.parametrize("name", SMALL)
def test_every_code_decodes_to_its_exact_value_and_encodes_back(name: str) -> None:
    f = KNOWN[name]
    for code in range(1 << f.bits):
        value = decode(code, f)
        bits = f"{code:0{f.bits}b}"
        expected = exact_value(bits[1:], name)
        assert math.copysign(1, value) == (-1 if bits[0] == "1" else 1)
        if expected == "nan":
            assert math.isnan(value) and math.isnan(decode(encode(value, f), f))
            continue
        assert (str(abs(value)) == "inf") if expected == "inf" else Fraction(abs(value)) == expected
        assert encode(value, f) == code


@pytest.mark.parametrize("name", SMALL)
def test_rounding_is_correct_at_every_boundary(name: str) -> None:
    """Rounding is monotonic, so it is correct everywhere if it is correct at and around every midpoint."""
    f = KNOWN[name]
    values = np.array([float(m) for m in magnitudes(name)])
    lower, upper = values[:-1], values[1:]
    middle = (lower + upper) / 2  # exact: one more bit than the format has
    even = np.where(np.arange(len(lower)) % 2 == 0, lower, upper)
    for sign in (1.0, -1.0):
        np.testing.assert_array_equal(round_to(sign * values, f), sign * values)
        np.testing.assert_array_equal(round_to(sign * middle, f), sign * even)
        np.testing.assert_array_equal(round_to(sign * np.nextafter(middle, 0), f), sign * lower)
        np.testing.assert_array_equal(round_to(sign * np.nextafter(middle, np.inf), f), sign * upper)


@pytest.mark.parametrize("name", SMALL)
def test_overflow_threshold(name: str) -> None:
    f = KNOWN[name]
    edge = f.max + spacing(f.max, f) / 2
    lost = {"exponent": math.inf, "code": math.nan, "nothing": f.max}[LAYOUT[name][2]]
    assert float(round_to(np.nextafter(edge, 0), f)) == f.max
    np.testing.assert_array_equal(round_to(np.nextafter(edge, np.inf), f), lost)
    # On the edge itself the even code wins: E4M3's largest is even and stays, the others' are odd.
    np.testing.assert_array_equal(round_to(edge, f), f.max if name == "fp8_e4m3" else lost)
    extremes = np.array([edge * 2, -1e300, np.inf, -np.inf, np.nan, 1.0])
    saturated = [f.max, -f.max, f.max, -f.max, np.nan, 1.0]
    np.testing.assert_array_equal(round_to(extremes, f, saturate=True), saturated)


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2", "fp4_e2m1"])
@settings(deadline=None)  # the machine may be busy
@given(value=st.floats(allow_nan=False, allow_infinity=False))
def test_any_float64_is_rounded_once(name: str, value: float) -> None:
    expected = reference_round(abs(Fraction(value)), name)
    rounded = float(round_to(value, name))
    if expected is None:
        assert abs(rounded) == 6 if name == "fp4_e2m1" else not math.isfinite(rounded)
        assert store(value, name).state == "overflow"
    else:
        assert Fraction(abs(rounded)) == expected and math.copysign(1, rounded) == math.copysign(1, value)


@settings(deadline=None)  # the machine may be busy
@given(value=st.floats(allow_nan=False))
def test_fp32_and_fp16_agree_with_numpy(value: float) -> None:
    with np.errstate(over="ignore", under="ignore"):
        assert float(round_to(value, "fp32")) == float(np.float64(value).astype(np.float32))
        assert float(round_to(value, "fp16")) == float(np.float64(value).astype(np.float16))


@settings(deadline=None)  # the machine may be busy
@given(value=st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_tf32_is_fp32_rounded_to_19_bits(value: float) -> None:
    """The same result by integer arithmetic on FP32's bits."""
    code = int(np.float32(value).view(np.uint32))
    kept = (code + 0xFFF + ((code >> 13) & 1)) & 0xFFFFE000
    assert float(round_to(value, "tf32")) == float(np.uint32(kept).view(np.float32))
    stored = store(value, "tf32")
    assert f"{kept >> 13:019b}" == stored.bits


def test_ml_dtypes_agrees_on_every_code_and_on_float32_inputs() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    kinds = {"bf16": ml_dtypes.bfloat16, "fp8_e4m3": ml_dtypes.float8_e4m3fn, "fp8_e5m2": ml_dtypes.float8_e5m2,
             "fp4_e2m1": ml_dtypes.float4_e2m1fn}  # fmt: skip
    inputs = np.ldexp(np.random.default_rng(0).standard_normal(20_000), np.arange(20_000) % 60 - 40).astype(np.float32)
    for name, kind in kinds.items():
        f, info = KNOWN[name], ml_dtypes.finfo(kind)
        assert (f.max, f.smallest_normal, f.smallest_subnormal, f.epsilon) == (
            float(info.max), float(info.smallest_normal), float(info.smallest_subnormal), float(info.eps))  # fmt: skip
        codes = np.arange(1 << f.bits, dtype=np.uint16 if f.bits == 16 else np.uint8)
        with np.errstate(invalid="ignore"):  # NaN codes
            theirs = codes.view(kind).astype(np.float64)
        np.testing.assert_array_equal([decode(int(code), f) for code in codes], theirs)
        with np.errstate(over="ignore", invalid="ignore"):
            np.testing.assert_array_equal(round_to(inputs, f), inputs.astype(kind).astype(np.float64))


def test_a_cast_through_float32_would_round_twice() -> None:
    assert float(round_to(1 + 2**-8 + 2**-45, "bf16")) == 1 + 2**-7
    assert float(round_to(1 + 2**-4 + 2**-45, "fp8_e4m3")) == 1 + 2**-3


@pytest.mark.parametrize(("name", "finite", "largest"), [
    ("fp32", 4_278_190_079, 3.4028234663852886e38), ("tf32", 522_239, 3.4011621342146535e38), ("fp16", 63_487, 65504.0),
    ("bf16", 65_279, 3.3895313892515355e38), ("fp8_e4m3", 253, 448.0), ("fp8_e5m2", 247, 57344.0),
    ("fp4_e2m1", 15, 6.0),
])  # fmt: skip
def test_range_and_number_of_values(name: str, finite: int, largest: float) -> None:
    f = KNOWN[name]
    assert (f.max, f.finite_values) == (largest, finite)
    if f.bits <= 16:
        assert finite == 2 * len(magnitudes(name)) - 1
    assert decode(1, f) == f.smallest_subnormal
    assert decode(1 << f.mantissa_bits, f) == f.smallest_normal


@pytest.mark.parametrize(("value", "name", "held", "state"), [
    ("1.2e-7", "fp16", 2 * 2.0**-24, "subnormal"),  # not 0, as is often said
    ("0x1p-24", "fp16", 2.0**-24, "exact"),
    ("0x1p-25", "fp16", 0.0, "underflow"),  # a tie between 0 and 2^-24: 0 is even
    ("0x1.0001p-25", "fp16", 2.0**-24, "subnormal"),
    ("6e-5", "fp16", 1007 * 2.0**-24, "subnormal"),
    ("65519", "fp16", 65504.0, "rounded"),
    ("65520", "fp16", math.inf, "overflow"),
    ("-1e400", "bf16", -math.inf, "overflow"),
    ("1e-400", "fp32", 0.0, "underflow"),
    ("0x1p-2000", "fp32", 0.0, "underflow"),
    ("-0x1p2000", "tf32", -math.inf, "overflow"),
    ("1e-50", "fp32", 0.0, "underflow"),
    ("464", "fp8_e4m3", 448.0, "rounded"),
    ("465", "fp8_e4m3", math.nan, "overflow"),
    ("inf", "fp8_e4m3", math.nan, "overflow"),
    ("inf", "fp8_e5m2", math.inf, "exact"),
    ("nan", "fp8_e4m3", math.nan, "exact"),
    ("6.99", "fp4_e2m1", 6.0, "rounded"),
    ("-7", "fp4_e2m1", -6.0, "overflow"),  # a tie between 6 and 8, and 8 is even
    ("-inf", "fp4_e2m1", -6.0, "overflow"),
    ("nan", "fp4_e2m1", 6.0, "overflow"),
    ("0.25", "fp4_e2m1", 0.0, "underflow"),
    ("-0.3", "fp4_e2m1", -0.5, "subnormal"),
    ("2.5", "fp4_e2m1", 2.0, "rounded"),
    ("0.1", "fp32", 0.10000000149011612, "rounded"),
    ("-1.5", "fp8_e5m2", -1.5, "exact"),
    ("0e7", "fp16", 0.0, "exact"),
])  # fmt: skip
def test_store_returns_value_and_state(value: str, name: str, held: float, state: str) -> None:
    stored = store(value, name)
    np.testing.assert_array_equal(stored.value, held)
    assert stored.state == state
    assert (stored.relative_error == 0) == (state == "exact")
    assert (stored.relative_error == math.inf) == (state == "overflow")
    assert len(stored.bits) == KNOWN[name].bits


def test_store_keeps_the_sign_of_zero_and_the_error_of_tiny_numbers() -> None:
    assert store("-0", "fp16").bits == "1000000000000000"
    assert store(-1e-30, "fp16").bits == "1000000000000000"
    assert store(5e-324, "fp32").relative_error == 1
    assert store("1.2e-7", "fp16").relative_error == pytest.approx(1 - 2**-23 / 1.2e-7)


def test_spacing_is_the_distance_to_the_next_number() -> None:
    for name in SMALL:
        f = KNOWN[name]
        for code in range(0, f.max_code, max(1, f.max_code // 500)):
            assert spacing(decode(code, f), f) == decode(code + 1, f) - decode(code, f)
        assert (
            math.isnan(spacing(math.inf, f)) and math.isnan(spacing(f.max * 2, f)) and math.isnan(spacing(math.nan, f))
        )


@pytest.mark.parametrize(("alias", "name"), [
    ("float16", "fp16"), ("torch.bfloat16", "bf16"), ("E4M3", "fp8_e4m3"), ("FP8 E5M2", "fp8_e5m2"),
    ("float8_e4m3fn", "fp8_e4m3"), ("TF32", "tf32"), ("half", "fp16"), ("fp8-e4m3", "fp8_e4m3"), ("E2M1", "fp4_e2m1"),
    ("float4_e2m1fn", "fp4_e2m1"), ("FP4 E2M1", "fp4_e2m1"),
])  # fmt: skip
def test_formats_have_aliases(alias: str, name: str) -> None:
    assert find_format(alias) is KNOWN[name]


def test_invalid_input_is_refused() -> None:
    for text in ("abc", "", "1.2.3", "0xzz", "1e", "--1"):
        with pytest.raises(UsageError, match="is not a number"):
            parse_value(text)
    for name in ("fp8", "int8", "fp4"):
        with pytest.raises(UsageError, match="expected one of fp32"):
            find_format(name)
    with pytest.raises(UsageError, match="cannot represent"):
        encode(0.1, "fp16")
    with pytest.raises(UsageError, match="cannot represent inf"):
        encode(math.inf, "fp8_e4m3")
    for value in (math.nan, math.inf, 8.0):
        with pytest.raises(UsageError, match="FP4 E2M1 cannot represent"):
            encode(value, "fp4_e2m1")
    with pytest.raises(UsageError, match="has no code 16"):
        decode(16, "fp4_e2m1")
    with pytest.raises(UsageError, match="has no code 256"):
        decode(256, "fp8_e4m3")
