"""Block formats: elements of 4 or 8 bits in blocks that share a scale, and how a tensor is converted, in fractions.

    value = element * scale of its block                          MXFP8, MXFP4
    value = element * scale of its block * scale of the tensor    NVFP4

A scale here multiplies an element and gives its value, as in the specifications. Elsewhere in narrowgauge such a
number is called ``inv_scale``.

MX formats (OCP Microscaling Formats 1.0). A scale is a power of two, stored as 8 bits of exponent (E8M0: code c is
2**(c - 127), 255 is NaN, there is no zero). Two rules select the scale of a block whose largest magnitude is ``amax``:

    floor   2**(floor(log2(amax)) - emax)   section 6.3; 2**emax is the element format's largest power of two. The
                                            largest values saturate: E4M3 ends at 1.75 * 2**8, E2M1 at 1.5 * 2**2
    up      2**ceil(log2(amax / max))       the smallest power of two with which nothing saturates: NVIDIA's recipe for
                                            training in MXFP8. max is the element format's largest number

The exponent is clamped to -127 ... 127. Elements are x / scale, rounded to nearest, ties to even, and saturated.

NVFP4 (NVIDIA: "Pretraining Large Language Models with NVFP4", and the documentation of TransformerEngine). Scales of
blocks are E4M3, which is finer than powers of two, but has a small range. So the tensor has a scale as well, which maps
its largest value to the largest element times the largest scale:

    scale of the tensor = amax of the tensor / (6 * 448)             in FP32
    scale of a block    = amax of the block / 6 / scale of tensor    rounded to E4M3, to nearest even, saturated
    element             = x / (scale of block * scale of tensor)     rounded to E2M1, to nearest even, saturated

Every line is computed exactly and rounded once. What the texts leave open is decided so:

    zeros       A block of zeros has the smallest scale: code 0, which is 2**-127 in E8M0 (as in torchao) and 0 in
                E4M3. A tensor of zeros has a tensor scale of 1 (as in TransformerEngine).
    inf, NaN    The scale of their block is NaN, so each value of the block is read back as NaN (section 5.1). The
                specification does not say it for a conversion; torchao does it for both. In NVFP4 the amax of the
                tensor is then not finite, and all its blocks are NaN, unless a finite amax was given. Codes of
                elements under a NaN scale have no meaning (section 4): here they are 0.
    underflow   If an NVFP4 block's scale rounds to 0, its elements are zeros with their signs. (torchao raises such
                scales to 2**-6.) A tensor scale that rounds to 0 becomes 2**-149, FP32's smallest number.
    subnormals  FP32 subnormals are converted like all other numbers. (The paper on MX flushes them, the specification
                does not.)
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from narrowgauge.errors import UsageError
from narrowgauge.formats import Format, decode, encode, find_format

ScaleRule = Literal["floor", "up"]
SCALE_RULES: tuple[ScaleRule, ...] = ("floor", "up")
E8M0_BIAS = 127
E8M0_NAN = 255
"""The code of NaN. The codes 0 to 254 are the powers of two 2**-127 to 2**127."""
E4M3 = find_format("fp8_e4m3")
"""The format of NVFP4's scales."""
E4M3_NAN = 0x7F
FP32 = find_format("fp32")


@dataclass(frozen=True, kw_only=True)
class BlockFormat:
    """Elements of a small format in blocks that share a scale. ``BLOCK_FORMATS`` has all of them."""

    name: str
    """Key in ``BLOCK_FORMATS``, such as mxfp8_e4m3."""
    title: str
    """Usual spelling, such as MXFP8 E4M3."""
    element: Format
    """Format of an element."""
    block: int
    """Number of consecutive elements that share a scale."""
    scale: Literal["e8m0", "e4m3"]
    """Format of a block's scale, 8 bits: powers of two (e8m0), or positive FP8 numbers (e4m3)."""
    tensor_scale: bool = False
    """Whether the whole tensor has a scale as well, in FP32."""
    decibels: Mapping[str, float]
    """Signal-to-quantization-noise ratio of normally distributed values, rounded to nearest, by the rule for scales.
    Measured on four million values; a test measures it again. Stochastic rounding has 2.6 to 3.2 dB less."""
    about: str
    """Where the format comes from, and what it is used for."""

    @property
    def range_in_block(self) -> float:
        """The largest element divided by the smallest positive one: the range of values within one block."""
        return self.element.max / self.element.smallest_subnormal

    @property
    def scale_range(self) -> tuple[float, float]:
        """The smallest positive scale of a block, and the largest."""
        if self.scale == "e4m3":
            return E4M3.smallest_subnormal, E4M3.max
        return 2.0**-E8M0_BIAS, 2.0**E8M0_BIAS

    @property
    def bits_per_element(self) -> float:
        """Bits of memory per element with its share of the block's scale. A tensor's scale is not counted."""
        return self.element.bits + 8 / self.block

    @property
    def max_exponent(self) -> int:
        """Exponent of the element format's largest power of two: emax in the specification."""
        return math.frexp(self.element.max)[1] - 1

    @property
    def nan_scale(self) -> int:
        """The code of a block's scale that is NaN."""
        return E8M0_NAN if self.scale == "e8m0" else E4M3_NAN


BLOCK_FORMATS: dict[str, BlockFormat] = {
    f.name: f
    for f in (
        BlockFormat(name="mxfp8_e4m3", title="MXFP8 E4M3", element=E4M3, block=32, scale="e8m0",
                    decibels={"floor": 30.7, "up": 31.5},
                    about="OCP MX 1.0: a power of two for 32 elements; for all three products"),
        BlockFormat(name="mxfp8_e5m2", title="MXFP8 E5M2", element=find_format("fp8_e5m2"), block=32, scale="e8m0",
                    decibels={"floor": 25.4, "up": 25.5},
                    about="OCP MX 1.0: more range within a block, less precision"),
        BlockFormat(name="mxfp4", title="MXFP4", element=find_format("fp4_e2m1"), block=32, scale="e8m0",
                    decibels={"floor": 18.8, "up": 18.7},
                    about="OCP MX 1.0: 4 bits, a power of two for 32 elements"),
        BlockFormat(name="nvfp4", title="NVFP4", element=find_format("fp4_e2m1"), block=16, scale="e4m3",
                    tensor_scale=True, decibels={"floor": 20.4},
                    about="NVIDIA: 4 bits, finer scales for 16 elements, one more for the tensor"),
    )
}  # fmt: skip
_ALIASES = {"mxfp8": "mxfp8_e4m3", "mxfp4_e2m1": "mxfp4", "nvfp4_e2m1": "nvfp4"}


class ExactBlocks(NamedTuple):
    """The result of ``quantize_exactly``.

    Args:
        codes: Code of each element, in the shape of the values.
        scales: Code of each block's scale: E8M0 or E4M3.
        tensor_scale: The tensor's scale, an FP32 number; None if the format has none.
        values: What is read back: element times scales. float64 represents it exactly.
    """

    codes: NDArray[np.uint8]
    scales: NDArray[np.uint8]
    tensor_scale: float | None
    values: NDArray[np.float64]


def find_block_format(name: str | BlockFormat) -> BlockFormat:
    """Return the block format of a name.

    Args:
        name: Such as mxfp4, NVFP4, MXFP8 E5M2 or mxfp8 (which is mxfp8_e4m3); or a block format.

    Raises:
        UsageError: There is no such format.
    """
    if isinstance(name, BlockFormat):
        return name
    key = re.sub(r"[\s\-_]+", "_", str(name).strip().lower())
    key = _ALIASES.get(key, key)
    if key not in BLOCK_FORMATS:
        raise UsageError(f"unknown block format {name!r}: expected one of {', '.join(BLOCK_FORMATS)}")
    return BLOCK_FORMATS[key]


def check_scale_options(f: BlockFormat, scale_rule: str, has_amax: bool) -> None:
    """Refuse options that do not apply to a block format.

    Args:
        f: The block format.
        scale_rule: The name of the rule.
        has_amax: Whether the amax of the tensor was given.

    Raises:
        UsageError: The rule is unknown or for E8M0 scales alone, or the format has no tensor scale that needs an amax.
    """
    if scale_rule not in SCALE_RULES:
        raise UsageError(f"unknown scale rule {scale_rule!r}: expected one of {', '.join(SCALE_RULES)}")
    if f.scale != "e8m0" and scale_rule != "floor":
        raise UsageError(f"scale_rule={scale_rule!r} is for scales that are powers of two: leave it out for {f.title}")
    if has_amax and not f.tensor_scale:
        raise UsageError(f"amax is for formats with a scale of the tensor (nvfp4): leave it out for {f.title}")


def decode_scale(code: int, format: str | BlockFormat) -> float:
    """Return the scale of a code.

    Args:
        code: The 8 bits of a block's scale, as an integer.
        format: A block format or its name.
    """
    number = int(code)
    if find_block_format(format).scale == "e4m3":
        return decode(number, E4M3)
    return math.nan if number == E8M0_NAN else math.ldexp(1.0, number - E8M0_BIAS)


def quantize_exactly(
    values: ArrayLike, format: str | BlockFormat, *, scale_rule: ScaleRule = "floor", amax: float | None = None
) -> ExactBlocks:
    """Convert values to a block format in exact fractions: slow, the reference for ``scaling.block_quantize``.

    Args:
        values: Numbers [..., K] that FP32 represents. Blocks are along the last dimension; the last one may be shorter.
        format: A block format or its name.
        scale_rule: How a power of two is selected for a block: ``floor`` or ``up``, see the module's docstring.
        amax: Largest magnitude of the tensor, an FP32 number, for the tensor's scale. Default: that of the values.

    Raises:
        UsageError: The format is unknown, or an option does not apply to it.
    """
    f = find_block_format(format)
    check_scale_options(f, scale_rule, amax is not None)
    x = np.asarray(values, dtype=np.float64)
    tensor_scale = _select_tensor_scale(x, amax) if f.tensor_scale else None
    count = -(-x.shape[-1] // f.block)
    codes, decoded = np.zeros(x.shape, np.uint8), np.zeros(x.shape)
    scales = np.zeros((*x.shape[:-1], count), np.uint8)
    for place in np.ndindex(scales.shape):
        *row, index = place
        inside = (*row, slice(index * f.block, (index + 1) * f.block))
        block = x[inside]
        scales[place] = code = _select_scale(block, f, scale_rule, tensor_scale)
        if code == f.nan_scale:
            decoded[inside] = math.nan
            continue
        scale = Fraction(decode_scale(code, f)) * (1 if tensor_scale is None else Fraction(tensor_scale))
        codes[inside] = elements = [_encode_element(float(value), scale, f.element) for value in block]
        decoded[inside] = [decode(e, f.element) * float(scale) for e in elements]  # at most 30 bits: exact
    return ExactBlocks(codes, scales, tensor_scale, decoded)


def round_exactly(value: Fraction, format: str | Format) -> Fraction:
    """Round a fraction to the nearest number of a format, ties to even, saturated at its largest number.

    Args:
        value: Any fraction.
        format: A format or its name.
    """
    f = find_format(format)
    size = abs(value)
    if not size:
        return size
    exponent = _floor_log2(size)
    quantum = Fraction(2) ** (max(exponent, f.min_exponent) - f.mantissa_bits)
    rounded = min(round(size / quantum) * quantum, Fraction(f.max))  # Python rounds halves of fractions to even
    return rounded if value > 0 else -rounded


def _floor_log2(value: Fraction) -> int:
    """Return the exponent of the largest power of two that is not above a positive fraction."""
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    return exponent if Fraction(2) ** exponent <= value else exponent - 1


def _select_tensor_scale(x: NDArray[np.float64], amax: float | None) -> float:
    largest = float(np.abs(x).max(initial=0.0)) if amax is None else float(amax)
    if not math.isfinite(largest):
        return math.nan
    if largest == 0:
        return 1.0
    scale = round_exactly(Fraction(largest) / (6 * 448), FP32)
    return float(scale) or FP32.smallest_subnormal


def _select_scale(block: NDArray[np.float64], f: BlockFormat, rule: str, tensor_scale: float | None) -> int:
    """Return the code of a block's scale."""
    amax = float(np.abs(block).max())
    if not math.isfinite(amax) or (tensor_scale is not None and math.isnan(tensor_scale)):
        return f.nan_scale
    if amax == 0:
        return 0
    largest = Fraction(amax)
    if f.scale == "e4m3":
        assert tensor_scale is not None
        return encode(float(round_exactly(largest / 6 / Fraction(tensor_scale), E4M3)), E4M3)
    if rule == "floor":
        exponent = _floor_log2(largest) - f.max_exponent
    else:
        ratio = largest / Fraction(f.element.max)
        exponent = _floor_log2(ratio)
        exponent += ratio > Fraction(2) ** exponent
    return min(max(exponent, -E8M0_BIAS), E8M0_BIAS) + E8M0_BIAS


def _encode_element(value: float, scale: Fraction, f: Format) -> int:
    """Return the code of value / scale, saturated. A scale of zero gives zeros with the sign of the value."""
    quotient = round_exactly(Fraction(value) / scale, f) if scale else Fraction(0)
    return encode(math.copysign(float(abs(quotient)), value), f)
