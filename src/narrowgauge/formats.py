"""Number formats: their ranges, and how each rounds any number, exact to the last bit.

A finite number of a format with m mantissa bits and exponent bias b is a whole multiple of a quantum:

    |x| = k * 2**(E - m)    with E = max(floor(log2 |x|), 1 - b),    k < 2**(m + 1)

Below 2**(1 - b), the smallest normal, E is constant: those are the subnormals, evenly spaced down to zero. So rounding
to nearest, ties to even, is one line: divide by the quantum, ``rint``, multiply. Each operation is exact in float64 (a
division by a power of two, at most 24 bits left of the point), so the result is rounded once. A cast through float32
rounds twice, and ml_dtypes 0.6 casts float64 that way: 1 + 2**-8 + 2**-45 becomes 1.0 in its bfloat16, although
1.0078125 is nearer. So the rounding is done here, and the tests compare it with ml_dtypes.

The states that ``store`` returns:

    exact       the stored number is the given one (zeros, infinities where the format has them, and NaN included)
    rounded     the nearest number of the format, at full precision
    subnormal   the nearest number is below the smallest normal, where fewer bits of precision are left
    underflow   a nonzero number became zero
    overflow    the number is too large and became inf; or NaN in E4M3, which has no inf (inf itself overflows there);
                or the largest number in FP4 E2M1, which has neither (NaN overflows there too, and becomes +6, as the
                instructions of NVIDIA's GPUs convert it)
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import ArrayLike, NDArray

from narrowgauge.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Format:
    """A binary floating-point format: sign, exponent, mantissa. See ``FORMATS`` and ``ELEMENT_FORMATS``."""

    name: str
    """Key in ``FORMATS``, such as fp8_e4m3."""
    title: str
    """Usual spelling, such as FP8 E4M3."""
    exponent_bits: int
    """Number of exponent bits."""
    mantissa_bits: int
    """Number of mantissa bits, without the implicit leading one."""
    bias: int
    """Exponent bias."""
    has_inf: bool = True
    """False for E4M3: its top exponent encodes numbers, and only the all-ones mantissa there is NaN."""
    has_nan: bool = True
    """False for FP4 E2M1: each of its codes is a number."""
    storage_bits: int
    """Bits of memory per number: 32 for TF32, of which the tensor core reads 19."""
    about: str
    """What the format is used for."""

    @property
    def bits(self) -> int:
        """Bits that carry information: sign, exponent and mantissa."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal number, and of every subnormal."""
        return 1 - self.bias

    @property
    def max_code(self) -> int:
        """The code of the largest finite number."""
        top = ((1 << self.exponent_bits) - 1) << self.mantissa_bits
        if self.has_inf:
            return top - 1
        return top + (1 << self.mantissa_bits) - (2 if self.has_nan else 1)

    @property
    def max(self) -> float:
        """The largest finite number."""
        return decode(self.max_code, self)

    @property
    def smallest_normal(self) -> float:
        """The smallest positive number with full precision."""
        return 2.0**self.min_exponent

    @property
    def smallest_subnormal(self) -> float:
        """The smallest positive number."""
        return 2.0 ** (self.min_exponent - self.mantissa_bits)

    @property
    def epsilon(self) -> float:
        """The gap between 1 and the next number."""
        return 2.0**-self.mantissa_bits

    @property
    def decimal_digits(self) -> float:
        """Precision of a normal number in decimal digits: log10 of 2**(mantissa bits + 1)."""
        return (self.mantissa_bits + 1) * math.log10(2)

    @property
    def finite_values(self) -> int:
        """Number of different finite numbers (+0 and -0 count as one)."""
        return 2 * self.max_code + 1


FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        Format(name="fp32", title="FP32", exponent_bits=8, mantissa_bits=23, bias=127, storage_bits=32,
               about="the reference: master weights, norms, softmax, loss, optimizer"),
        Format(name="tf32", title="TF32", exponent_bits=8, mantissa_bits=10, bias=127, storage_bits=32,
               about="19 of FP32's 32 bits, read by tensor cores; takes the memory of FP32"),
        Format(name="fp16", title="FP16", exponent_bits=5, mantissa_bits=10, bias=15, storage_bits=16,
               about="precise, but a small range: needs loss scaling"),
        Format(name="bf16", title="BF16", exponent_bits=8, mantissa_bits=7, bias=127, storage_bits=16,
               about="FP32's range with 8 bits of precision: needs no loss scaling"),
        Format(name="fp8_e4m3", title="FP8 E4M3", exponent_bits=4, mantissa_bits=3, bias=7, has_inf=False,
               storage_bits=8, about="OCP: no inf, one NaN; for weights and activations, with a scale"),
        Format(name="fp8_e5m2", title="FP8 E5M2", exponent_bits=5, mantissa_bits=2, bias=15, storage_bits=8,
               about="FP16's range with 3 bits of precision; for gradients, with a scale"),
    )
}  # fmt: skip
"""The formats of tensors and products."""
ELEMENT_FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        Format(name="fp4_e2m1", title="FP4 E2M1", exponent_bits=2, mantissa_bits=1, bias=1, has_inf=False,
               has_nan=False, storage_bits=4, about="OCP: 15 numbers, no inf, no NaN; in blocks that share a scale"),
    )
}  # fmt: skip
"""Formats that are only used for the elements of blocks with a common scale: see ``block_formats``."""
_ALIASES = {
    "float32": "fp32", "float": "fp32", "single": "fp32", "f32": "fp32",
    "tensorfloat32": "tf32",
    "float16": "fp16", "half": "fp16", "f16": "fp16",
    "bfloat16": "bf16", "bfloat": "bf16",
    "e4m3": "fp8_e4m3", "e4m3fn": "fp8_e4m3", "float8_e4m3fn": "fp8_e4m3", "float8_e4m3": "fp8_e4m3",
    "e5m2": "fp8_e5m2", "float8_e5m2": "fp8_e5m2",
    "e2m1": "fp4_e2m1", "float4_e2m1fn": "fp4_e2m1",
}  # fmt: skip


@dataclass(frozen=True)
class Stored:
    """A number as a format stores it, by a cast that rounds to nearest and saturates only where it must (FP4)."""

    value: float
    """The stored number."""
    bits: str
    """Its bits, sign first."""
    relative_error: float
    """abs(stored - given) / abs(given); 0 if exact, inf after an overflow."""
    state: str
    """exact, rounded, subnormal, underflow or overflow: see the module's docstring."""


def find_format(name: str | Format) -> Format:
    """Return the format of a name.

    Args:
        name: Such as fp16, FP8 E4M3, bfloat16 or torch.float8_e5m2; or a format.

    Raises:
        UsageError: There is no such format.
    """
    if isinstance(name, Format):
        return name
    key = re.sub(r"[\s\-_]+", "_", str(name).strip().lower().removeprefix("torch."))
    key = _ALIASES.get(key, key)
    known = FORMATS | ELEMENT_FORMATS
    if key not in known:
        raise UsageError(f"unknown format {name!r}: expected one of {', '.join(known)}")
    return known[key]


def parse_value(text: str) -> float:
    """Return the number of a text, as float64.

    A number beyond the range of float64 becomes its nearest finite nonzero number, never inf or 0. So 1e400 and 1e-400
    still overflow and underflow every format here.

    Args:
        text: A decimal or hexadecimal ("0x1p-24") number, inf or nan.

    Raises:
        UsageError: The text is not a number.
    """
    try:
        number = float.fromhex(text) if "0x" in text.lower() else float(text)
    except OverflowError:  # float.fromhex raises it where float() returns inf
        number = math.copysign(math.inf, -1 if text.strip().startswith("-") else 1)
    except ValueError:
        raise UsageError(f"{text!r} is not a number: expected one such as 1.2e-7, -3, 0x1p-24, inf or nan") from None
    if math.isinf(number) and "inf" not in text.lower():
        return math.copysign(float(np.finfo(np.float64).max), number)
    mantissa = re.split("p" if "0x" in text.lower() else "e", text.lower().replace("0x", ""))[0]
    if number == 0 and re.search("[1-9a-f]", mantissa):
        return math.copysign(math.ulp(0.0), number)
    return number


def round_to(values: ArrayLike, format: str | Format, saturate: bool = False) -> NDArray[np.float64]:
    """Round each value to the nearest number of a format, ties to even.

    Args:
        values: A number or any array.
        format: A format or its name.
        saturate: Values that are too large become the largest finite number, as in narrowgauge's own FP8 casts.
            Default: they become inf, or NaN in E4M3. FP4 E2M1 always saturates: it has neither.

    Returns:
        The rounded values, as a float64 array. NaN stays NaN, also in FP4 E2M1, which has no code for it.
    """
    f = find_format(format)
    x = np.asarray(values, dtype=np.float64)
    rounded = _round_unlimited(x, f)
    limit = f.max if saturate or not f.has_nan else math.inf if f.has_inf else math.nan
    return np.where(np.abs(rounded) > f.max, np.copysign(limit, x), rounded)


def _round_unlimited(x: NDArray[np.float64], f: Format) -> NDArray[np.float64]:
    """Round as if the format had no largest number."""
    _, exponent = np.frexp(x)  # |x| = [0.5, 1) * 2**exponent
    quantum = np.maximum(exponent - 1, f.min_exponent) - f.mantissa_bits
    with np.errstate(over="ignore"):  # the largest float64 numbers round up to inf: too large in any case
        rounded: NDArray[np.float64] = np.ldexp(np.rint(np.ldexp(x, -quantum)), quantum)
    return rounded


def store(value: float | str, format: str | Format) -> Stored:
    """Return how a format stores one number.

    Args:
        value: A number or its text.
        format: A format or its name.

    Example:
        >>> formats.store(1.2e-7, "fp16").state
        'subnormal'
    """
    f = find_format(format)
    given = parse_value(value) if isinstance(value, str) else float(value)
    held = float(round_to(given, f))
    if math.isnan(held) and not f.has_nan:
        held = f.max
    if held == given or (math.isnan(held) and math.isnan(given)):
        state, error = "exact", 0.0
    elif not abs(float(_round_unlimited(np.asarray(given), f))) <= f.max:
        state, error = "overflow", math.inf
    else:
        # Fractions keep the quotient exact even for float64 subnormals.
        error = float(abs(Fraction(held) - Fraction(given)) / abs(Fraction(given)))
        state = "underflow" if held == 0 else "subnormal" if abs(held) < f.smallest_normal else "rounded"
    return Stored(value=held, bits=f"{encode(held, f):0{f.bits}b}", relative_error=error, state=state)


def spacing(value: float, format: str | Format) -> float:
    """Return the distance between neighboring numbers of a format around a value (its ulp).

    Args:
        value: A number.
        format: A format or its name.

    Returns:
        The distance, or NaN if the value is outside of the format's range.
    """
    f = find_format(format)
    if not abs(value) <= f.max:
        return math.nan
    exponent = math.frexp(value)[1] - 1 if value else f.min_exponent
    return math.ldexp(1.0, max(exponent, f.min_exponent) - f.mantissa_bits)


def encode(value: float, format: str | Format) -> int:
    """Return the code (the bits as an integer) of a number. NaN becomes the quiet NaN with its sign.

    Args:
        value: A number that the format represents exactly.
        format: A format or its name.

    Raises:
        UsageError: The format does not represent the number.
    """
    f = find_format(format)
    sign = int(math.copysign(1.0, value) < 0) << (f.bits - 1)
    top = ((1 << f.exponent_bits) - 1) << f.mantissa_bits
    if math.isnan(value) and f.has_nan:
        return sign | top | (1 << (f.mantissa_bits - 1) if f.has_inf else (1 << f.mantissa_bits) - 1)
    if math.isinf(value) and f.has_inf:
        return sign | top
    if abs(value) <= f.max:
        exponent = max(math.frexp(value)[1] - 1, f.min_exponent) if value else f.min_exponent
        multiple = math.ldexp(abs(value), f.mantissa_bits - exponent)
        if multiple.is_integer():
            # A normal number's leading one adds 1 to the exponent field, so the field is written one too low.
            return sign | (((exponent - f.min_exponent) << f.mantissa_bits) + int(multiple))
    raise UsageError(f"{f.title} cannot represent {value!r}: round it first, with round_to")


def decode(code: int, format: str | Format) -> float:
    """Return the number of a code.

    Args:
        code: The bits of the number, as an integer.
        format: A format or its name.

    Raises:
        UsageError: The code is out of range.
    """
    f = find_format(format)
    if not 0 <= code < 1 << f.bits:
        raise UsageError(f"{f.title} has no code {code}: expected 0 to {(1 << f.bits) - 1}")
    sign = -1.0 if code >> (f.bits - 1) else 1.0
    magnitude = code & ((1 << (f.bits - 1)) - 1)
    field, mantissa = magnitude >> f.mantissa_bits, magnitude & ((1 << f.mantissa_bits) - 1)
    if magnitude > f.max_code:
        return math.copysign(math.inf if f.has_inf and mantissa == 0 else math.nan, sign)
    multiple = mantissa if field == 0 else mantissa | (1 << f.mantissa_bits)
    return sign * math.ldexp(multiple, max(field, 1) - f.bias - f.mantissa_bits)
