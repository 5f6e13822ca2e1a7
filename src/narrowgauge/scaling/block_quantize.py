"""Quantization to block formats (MXFP8, MXFP4, NVFP4) in plain torch, bit for bit as ``block_formats`` defines it.

Few machines multiply these formats. Here a tensor is converted, and read back to be multiplied in BF16 or FP32, so that
training in them can be studied on any machine.

Why the results are exact. An element is x / s, rounded once, with s the scale of its block:

    MX      s is a power of two, and x / s stays in FP32's range: the quotient is exact in FP32. (Quotients that FP32
            would round are below 2**-126 and become 0.) The scale itself comes from the bits of amax: floor(log2) is
            its exponent field, and the rule ``up`` adds 1 if its mantissa is above that of the largest element.
    NVFP4   s = scale of block * scale of tensor has at most 4 + 24 bits: exact in FP64. Rounding x / s can only go
            wrong if the FP64 quotient is moved onto a midpoint c between two elements, or off it. If x = c s, the
            quotient is c exactly. If not, both are integers times a common power of two, x has 24 bits and c s at
            most 31, so they differ by more than 2**-32 of x: FP64, with 53 bits, separates them. FP32 would not. The
            same holds for the scales of blocks, amax / (6 * scale of tensor), and the midpoints of E4M3.

A magnitude y is then rounded as in ``formats``: with E = max(floor(log2 y), smallest exponent) and m mantissa bits,

    k = y / 2**(E - m)        rounded to an integer        code = (E - smallest exponent) 2**m + k

If k rounds up to 2**(m + 1), the code is that of the next power of two, as it should be. All this needs FP32's
subnormals: ``torch.set_flush_denormal(True)`` on a CPU would flush them.

Stochastic rounding takes floor(k) + 1 with a probability of k - floor(k), and floor(k) otherwise. So its mean is y, up
to 2**-24 of a step because random numbers have 24 bits, and numbers of the format do not change. Beyond the largest
element there is nothing to round up to: values saturate, as they do in hardware. The rule ``up`` avoids it; ``floor``
and the rounded scales of NVFP4 do not, so the largest values of a block have a bias there.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from narrowgauge.block_formats import (
    E4M3,
    FP32,
    BlockFormat,
    ScaleRule,
    check_scale_options,
    find_block_format,
)
from narrowgauge.errors import UsageError
from narrowgauge.formats import Format

Rounding = Literal["nearest", "stochastic"]
ROUNDINGS: tuple[Rounding, ...] = ("nearest", "stochastic")
INPUTS = (torch.float32, torch.bfloat16, torch.float16)
FP8_DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
SCALE_DTYPES = {"e8m0": torch.float8_e8m0fnu, "e4m3": torch.float8_e4m3fn}
_MAGNITUDE = 0x7FFFFFFF
"""The bits of an FP32 number without its sign."""
_INF = 0x7F800000
"""The bits of inf in FP32. NaN is above, all finite magnitudes are below, in their order."""


class QuantizedBlocks(NamedTuple):
    """A tensor [..., K] in a block format."""

    codes: Tensor
    """[..., K], uint8: the code of each element, in the lowest bits."""
    scales: Tensor
    """[..., ceil(K / block)]: the scale of each block, float8_e8m0fnu or float8_e4m3fn. It multiplies the elements."""
    tensor_scale: Tensor | None
    """FP32 scalar that multiplies all elements; None if the format has none. [..., 1, 1] for several tensors."""
    format: BlockFormat
    """The block format."""

    @property
    def shape(self) -> torch.Size:
        """The shape of the tensor."""
        return self.codes.shape

    def dequantize(self, dtype: torch.dtype = torch.float32, *, apply_tensor_scale: bool = True) -> Tensor:
        """Return the values: elements times scales.

        In FP32 and without tensor scale, the products are exact, also FP32's subnormals; they have at most 6 bits, so
        BF16 represents them too, except below 2**-126. With tensor scale they are rounded once, to FP32.

        Args:
            dtype: The dtype of the result.
            apply_tensor_scale: If False, the tensor's scale is left out. A product of two NVFP4 tensors in BF16 is then
                exact before its sum, and is multiplied by both tensor scales afterwards, as hardware does it.
        """
        values = _decode_elements(_split(self.codes, self.format.block), self.format.element)
        values.mul_(self.scales.float().unsqueeze(-1))
        if apply_tensor_scale and self.tensor_scale is not None:
            values.mul_(self.tensor_scale)
        return _join(values, self.codes.shape[-1]).to(dtype)


@torch.no_grad()
def quantize_blocks(
    x: Tensor,
    format: str | BlockFormat,
    *,
    rounding: Rounding = "nearest",
    generator: torch.Generator | None = None,
    scale_rule: ScaleRule = "floor",
    amax: Tensor | float | None = None,
) -> QuantizedBlocks:
    """Convert a tensor to a block format. Blocks are along the last dimension; a shorter last block counts as padded.

    Args:
        x: [..., K] in FP32, BF16 or FP16. It is not changed, and gets no gradient.
        format: A block format or its name, such as ``"nvfp4"``.
        rounding: Of the elements: ``nearest`` (ties to even) or ``stochastic``. Scales are always rounded to nearest.
        generator: For stochastic rounding. Default: torch's generator of the device.
        scale_rule: How powers of two are selected: ``floor`` as in OCP's specification, or ``up``, so that nothing
            saturates. For MX formats.
        amax: Largest magnitude of the tensor, if it is known or shared with other ranks, for the tensor's scale. Larger
            values saturate. Default: that of ``x``. For NVFP4. If ``x`` has samples of several tensors: [..., 1], one
            for the values of each, in a shape that broadcasts to that of ``x``.

    Raises:
        UsageError: The dtype, the format or an option is unknown, or an option does not apply to the format.
    """
    f = find_block_format(format)
    check_scale_options(f, scale_rule, amax is not None)
    if rounding not in ROUNDINGS:
        raise UsageError(f"unknown rounding {rounding!r}: expected one of {', '.join(ROUNDINGS)}")
    if x.dtype not in INPUTS or not x.ndim:
        given = f"{x.dtype} with {x.ndim} dimensions"
        raise UsageError(f"cannot quantize {given}: expected FP32, BF16 or FP16 with at least one dimension")
    bits = _split(x.float(), f.block).view(torch.int32)
    sizes = bits & _MAGNITUDE
    amax_bits = sizes.amax(-1, keepdim=True)  # integers are in the order of the magnitudes that they encode
    finite, sizes, tensor_scale = amax_bits < _INF, sizes.view(torch.float32), None
    if f.scale == "e8m0":
        scale_codes, inverse = _select_powers(amax_bits, f, scale_rule)
        scaled = sizes * inverse
    else:
        tensor_scale = _select_tensor_scale(amax_bits, amax)
        finite &= tensor_scale.isfinite()
        scale_codes, divisor = _select_fp8_scales(amax_bits.view(torch.float32), tensor_scale)
        scaled = sizes / divisor
    codes = _encode_magnitudes(scaled, f.element, rounding, generator)
    codes |= (bits >> 31).to(torch.uint8) & (1 << (f.element.bits - 1))
    codes *= finite
    scales = torch.where(finite, scale_codes, f.nan_scale).squeeze(-1).view(SCALE_DTYPES[f.scale])
    return QuantizedBlocks(_join(codes, x.shape[-1]), scales, tensor_scale, f)


def random_hadamard(x: Tensor, *, block: int = 16, signs: Tensor) -> Tensor:
    """Multiply each block of the last dimension by a Hadamard matrix with random signs, divided by sqrt(block).

    With D = diag(signs) and H the Hadamard matrix of Sylvester (H_1 = 1, H_2n = [[H_n, H_n], [H_n, -H_n]]), the result
    is x D H / sqrt(block). D D = I and H H = block I, so the matrix is orthogonal: applied to both operands of a
    product along the dimension that is summed, it cancels, and lengths do not change. An outlier is spread over its
    block, which makes the block's scale smaller. NVIDIA's recipe for NVFP4 applies it to both operands of the weight
    gradient, with the same signs in all layers and steps.

    The sums are computed as log2(block) sums and differences of halves, in FP32 for 16-bit inputs, and rounded to the
    input's dtype at the end. A matrix product could round its inputs to TF32.

    Args:
        x: [..., K], with K a multiple of ``block``.
        block: A power of two.
        signs: [block], each 1 or -1.

    Raises:
        UsageError: The sizes do not fit.
    """
    if block < 1 or block & (block - 1) or x.shape[-1] % block or tuple(signs.shape) != (block,):
        given = f"block={block}, a last dimension of {x.shape[-1]} and signs of shape {tuple(signs.shape)}"
        raise UsageError(f"cannot transform with {given}: expected a power of two, a multiple of it, and one sign each")
    wide = torch.promote_types(x.dtype, torch.float32)
    y = x.to(wide).reshape(*x.shape[:-1], x.shape[-1] // block, block) * signs.to(x.device, wide)
    half = 1
    while half < block:
        left, right = y.reshape(*y.shape[:-1], block // (2 * half), 2, half).unbind(-2)
        y = torch.stack((left + right, left - right), -2).flatten(-3)
        half *= 2
    return (y / math.sqrt(block)).reshape(x.shape).to(x.dtype)


def _split(x: Tensor, block: int) -> Tensor:
    """Return [..., K] as contiguous [..., blocks, block], padded with zeros."""
    missing = -x.shape[-1] % block
    padded = (F.pad(x, (0, missing)) if missing else x).contiguous()
    return padded.view(*x.shape[:-1], padded.shape[-1] // block, block)


def _join(blocks: Tensor, length: int) -> Tensor:
    """Return [..., blocks, block] as contiguous [..., length]: the inverse of ``_split``."""
    return blocks.flatten(-2)[..., :length].contiguous()


def _select_powers(amax_bits: Tensor, f: BlockFormat, rule: str) -> tuple[Tensor, Tensor]:
    """Return the E8M0 codes of blocks from the bits of their amax, and 1 / scale in FP32."""
    exponent = amax_bits
    if rule == "up":
        # A mantissa above that of the largest element carries into the exponent.
        mantissa = int((math.frexp(f.element.max)[0] * 2 - 1) * 2**23)
        exponent = amax_bits + (2**23 - 1 - mantissa)
    # FP32 and E8M0 have the same bias. Zeros and subnormals have a field of 0, and become the smallest scale.
    codes = ((exponent >> 23) - f.max_exponent).clamp_(min=0)
    # The largest code is 253, for E2M1 and ``up``: its inverse is 2**-126, still a normal number.
    return codes.to(torch.uint8), ((254 - codes) << 23).view(torch.float32)


def _select_tensor_scale(amax_bits: Tensor, amax: Tensor | float | None) -> Tensor:
    """Return NVFP4's tensor scale, an FP32 scalar; or one for each amax, in a shape for ``_split`` blocks."""
    if amax is not None:
        largest = torch.as_tensor(amax, dtype=torch.float32, device=amax_bits.device).detach()
        largest = largest.reshape(()) if largest.numel() == 1 else largest.unsqueeze(-1)
    elif amax_bits.numel():
        largest = amax_bits.amax().view(torch.float32)
    else:
        largest = amax_bits.new_zeros((), dtype=torch.float32)
    # Not ``/ 2688``: on a GPU, torch multiplies by the reciprocal of a number, which rounds twice.
    scale = (largest / torch.full_like(largest, 6 * E4M3.max)).clamp_(min=FP32.smallest_subnormal)
    return torch.where(largest.isfinite(), torch.where(largest == 0, 1.0, scale), math.nan)


def _select_fp8_scales(amax: Tensor, tensor_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return the E4M3 codes of blocks, and scale of block * scale of tensor in FP64."""
    wide = tensor_scale.double()  # a scalar: it does not make products with FP32 tensors FP64
    codes = _encode_magnitudes(amax.double() / (wide * 6), E4M3, "nearest", None)
    divisor = codes.view(torch.float8_e4m3fn).double() * wide
    return codes, divisor.masked_fill_(divisor == 0, math.inf)  # all elements of a block without a scale become zeros


def _encode_magnitudes(y: Tensor, f: Format, rounding: str, generator: torch.Generator | None) -> Tensor:
    """Return the codes of magnitudes (FP32 or FP64) in a format, saturated. Overwrites them.

    Magnitudes that are NaN get any code.
    """
    y.clamp_(max=f.max)
    if rounding == "nearest" and y.dtype == torch.float32 and f.name in FP8_DTYPES:
        return y.to(FP8_DTYPES[f.name]).view(torch.uint8)  # torch's cast also rounds to nearest even
    integers, mantissa_bits, bias = (torch.int64, 52, 1023) if y.dtype == torch.float64 else (torch.int32, 23, 127)
    exponent = (y.view(integers) >> mantissa_bits).sub_(bias + f.min_exponent).clamp_(min=0)
    inv_step = (bias - f.min_exponent + f.mantissa_bits - exponent).bitwise_left_shift_(mantissa_bits)
    multiple = y.mul_(inv_step.view(y.dtype))
    if rounding == "nearest":
        multiple.round_()  # halves to even
    else:
        lower = multiple.floor()
        random = torch.rand(y.shape, dtype=torch.float32, device=y.device, generator=generator)
        multiple = lower.add_(random < multiple.sub_(lower))
    return multiple.add_(exponent.bitwise_left_shift_(f.mantissa_bits)).to(torch.uint8)


def _decode_elements(codes: Tensor, f: Format) -> Tensor:
    """Return the numbers of codes in FP32."""
    if f.name in FP8_DTYPES:
        return codes.view(FP8_DTYPES[f.name]).float()
    # s ee m of E2M1, written as s 000ee m0, is an E5M2 number that is 2**14 times smaller: their biases are 1 and 15.
    return (codes * 2 + (codes & 8) * 14).view(torch.float8_e5m2).float().mul_(2.0**14)
