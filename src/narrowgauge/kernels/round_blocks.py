"""Rounds matrices to block formats (MXFP8, MXFP4, NVFP4) and reads them back in BF16, in one pass.

For a matrix [N, K] whose rows consist of blocks, with s the scale of a block and t that of the tensor (NVFP4 only):

    values        = s * round(x / (s t))       BF16, exact above 2**-126: an element times a scale has at most 6 bits
    tensor_scale  = t                          not applied: it multiplies a product's sum
    codes, scales                              what hardware would store, only on request

The reference is ``scaling.block_quantize``, which says why each step is exact. Results are the same bit for bit: what
is computed in FP64 there (quotients of NVFP4) is computed in FP64 here. Stochastic rounding selects between the same
two neighbours by the same rule, but has its own random numbers: Philox of a seed and the index of the value, 24 bits of
each. So the numbers depend neither on tiles nor on strides.

``x`` may have any strides: a transposed matrix is read without a copy. Bytes moved per element of a BF16 x: 4, and 2
more for NVFP4, whose largest magnitude is read first. The Hadamard transform of blocks of 16 is a kernel of its own,
because that magnitude is the one after the transform: 4 bytes. Its sums are those of ``random_hadamard``, in the same
order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from narrowgauge.kernels import HAVE_TRITON, can_bypass_op, define_op, jit
from narrowgauge.kernels.cast import max_abs
from narrowgauge.kernels.fp8_tile import tile_grid, tile_origin
from narrowgauge.kernels.launch import launch_kernel

if HAVE_TRITON or TYPE_CHECKING:
    import triton.language as tl

TILE: dict[str, int] = {"BLOCK_N": 64, "BLOCK_D": 64, "num_warps": 4}
HADAMARD_BLOCK = 16


class Element(NamedTuple):
    """The format of an element, as the kernel needs it."""

    mantissa_bits: int
    min_exponent: int
    """Exponent of the smallest normal number."""
    max_exponent: int
    """Exponent of the largest power of two."""
    largest: float
    sign: int
    """The bit of a code that is the sign."""


ELEMENTS = {
    "fp8_e4m3": Element(3, -6, 8, 448.0, 0x80),
    "fp8_e5m2": Element(2, -14, 15, 57344.0, 0x80),
    "fp4_e2m1": Element(1, 0, 2, 6.0, 0x8),
}
"""By the names of ``narrowgauge.formats``; a test compares the numbers."""


class Rounded(NamedTuple):
    """A matrix that was rounded to a block format."""

    values: Tensor
    """[N, K] in BF16: elements times the scales of their blocks."""
    tensor_scale: Tensor
    """FP32 scalar; empty if the format has none."""
    codes: Tensor
    """[N, K] in uint8; empty if not requested."""
    scales: Tensor
    """[N, ceil(K / block)] in uint8: the codes of the blocks' scales; empty if not requested."""


def round_blocks(
    x: Tensor,
    element: str,
    block: int,
    *,
    powers: bool,
    round_up: bool = False,
    seed: Tensor | None = None,
    with_codes: bool = False,
) -> Rounded:
    """Round a matrix on a GPU to blocks along its last dimension.

    Args:
        x: [N, K] in FP32, BF16 or FP16, with any strides.
        element: The format of elements: a key of ``ELEMENTS``.
        block: The number of elements that share a scale: 16, 32 or 64.
        powers: Whether scales are powers of two (E8M0); else E4M3, and the tensor has a scale.
        round_up: Whether powers are rounded up, so that nothing saturates.
        seed: A number from ``draw_seed``: round stochastically. None: to nearest.
        with_codes: Whether to return codes and scales as well.
    """
    amax = None if powers else max_abs(x.t() if x.stride(0) == 1 else x)
    return Rounded(
        *(_round if can_bypass_op(x) else _round_op)(x, element, block, powers, round_up, amax, seed, with_codes)
    )


def transform_hadamard(x: Tensor, signs: Tensor) -> Tensor:
    """Compute ``random_hadamard`` of a matrix [N, K] on a GPU, with columns of zeros up to whole blocks of 16.

    Args:
        x: FP32, BF16 or FP16, with any strides.
        signs: [16], integers: each 1 or -1.
    """
    return (_transform if can_bypass_op(x, signs) else _transform_op)(x, signs)


def draw_seed(device: torch.device) -> Tensor:
    """Return a seed from torch's generator of the device. It stays there, so that nothing waits for it."""
    return torch.randint(2**62, (1,), device=device)


@jit
def _load_bits(source, mask):  # type: ignore[no-untyped-def]
    """Load numbers as the bits of FP32, in all of which also subnormals are exact."""
    x = tl.load(source, mask=mask, other=0.0)
    if x.dtype == tl.float32:
        bits = x.to(tl.int32, bitcast=True)
    elif x.dtype == tl.bfloat16:
        bits = x.to(tl.int16, bitcast=True).to(tl.int32) << 16
    else:
        bits = x.to(tl.float32).to(tl.int32, bitcast=True)
    return bits


@jit
def _round_magnitudes(y, random, MANTISSA: tl.constexpr, LOWEST: tl.constexpr, LARGEST: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the codes of magnitudes (FP32 or FP64) in a format, saturated, and their numbers in FP32.

    LOWEST is the exponent of the smallest normal number. A magnitude is a multiple of a power of two, ``step``.
    """
    y = tl.minimum(y, LARGEST)
    if y.dtype == tl.float64:
        exponent = tl.maximum((y.to(tl.int64, bitcast=True) >> 52).to(tl.int32) - (1023 + LOWEST), 0)
        inv_step = ((1023 - LOWEST + MANTISSA - exponent).to(tl.int64) << 52).to(tl.float64, bitcast=True)
    else:
        exponent = tl.maximum((y.to(tl.int32, bitcast=True) >> 23) - (127 + LOWEST), 0)
        inv_step = ((127 - LOWEST + MANTISSA - exponent) << 23).to(tl.float32, bitcast=True)
    multiple = y * inv_step
    lower = multiple.to(tl.int32)
    rest = multiple - lower.to(y.dtype)
    if random is None:
        is_up = (rest > 0.5) | ((rest == 0.5) & ((lower & 1) == 1))
    else:
        is_up = random < rest
    rounded = lower + is_up.to(tl.int32)
    step = ((127 + LOWEST - MANTISSA + exponent) << 23).to(tl.float32, bitcast=True)
    return (exponent << MANTISSA) + rounded, rounded.to(tl.float32) * step


@jit
def _select_tensor_scale(amax):  # type: ignore[no-untyped-def]
    """Return NVFP4's scale of a tensor, and whether it is finite; then it is above 0."""
    bits = amax.to(tl.int32, bitcast=True)
    finite = (bits & 0x7FFFFFFF) < 0x7F800000
    scale = tl.div_rn(amax, 2688.0)  # the largest element times the largest scale: 6 * 448
    scale = tl.maximum(scale.to(tl.int32, bitcast=True), 1).to(tl.float32, bitcast=True)  # at least 2**-149
    return tl.where(bits == 0, 1.0, scale), finite


@jit
def _draw(seed_ptr, index):  # type: ignore[no-untyped-def]
    """Return random numbers in [0, 1) of 24 bits, as torch.rand has them: Philox4x32-10 of the seed and an index."""
    low, high = index.to(tl.uint32), (index >> 32).to(tl.uint32)
    word, _, _, _ = tl.philox(tl.load(seed_ptr), low, high, low * 0, low * 0)
    return (word >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08


@jit
def _round_blocks_kernel(  # type: ignore[no-untyped-def]
    x_ptr, out_ptr, codes_ptr, scales_ptr, amax_ptr, tensor_scale_ptr, seed_ptr, height, width, row_stride,
    column_stride, MANTISSA: tl.constexpr, LOWEST: tl.constexpr, HIGHEST: tl.constexpr, LARGEST: tl.constexpr,
    SIGN: tl.constexpr, CARRY: tl.constexpr, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Round one tile [rows, blocks, elements of a block]. Without ``amax_ptr``, scales are powers of two.

    LOWEST and HIGHEST are the exponents of the smallest normal number and of the largest power of two. CARRY is added
    to the bits of a block's amax before its exponent is read.
    """
    n0, d0 = tile_origin(BLOCK_N, BLOCK_D)
    rows = n0 + tl.arange(0, BLOCK_N)[:, None, None]
    blocks = d0 // BLOCK + tl.arange(0, BLOCK_D // BLOCK)[None, :, None]
    columns = blocks * BLOCK + tl.arange(0, BLOCK)[None, None, :]
    mask = (rows < height) & (columns < width)
    rows = rows.to(tl.int64)
    bits = _load_bits(x_ptr + rows * row_stride + columns.to(tl.int64) * column_stride, mask)
    size = bits & 0x7FFFFFFF
    amax = tl.max(size, axis=2, keep_dims=True)  # bits order like the magnitudes that they encode
    finite = amax < 0x7F800000
    amax = tl.where(finite, amax, 0)
    size = tl.where(finite, size, 0).to(tl.float32, bitcast=True)
    offsets = rows * width + columns
    random = None
    if seed_ptr is not None:
        random = _draw(seed_ptr, offsets)
    if amax_ptr is None:
        scale_code = tl.maximum(((amax + CARRY) >> 23) - HIGHEST, 0)  # FP32 and E8M0 have the same bias
        scale = tl.where(scale_code == 0, 0x400000, scale_code << 23).to(tl.float32, bitcast=True)
        scaled = size * ((254 - scale_code) << 23).to(tl.float32, bitcast=True)
    else:
        tensor_scale, is_tensor_finite = _select_tensor_scale(tl.load(amax_ptr))
        if (n0 == 0) & (d0 == 0):
            tl.store(tensor_scale_ptr, tl.where(is_tensor_finite, tensor_scale, float("nan")))
        finite = finite & is_tensor_finite
        wide = tl.where(is_tensor_finite, tensor_scale, 1.0).to(tl.float64)
        ratio = amax.to(tl.float32, bitcast=True).to(tl.float64) / (wide * 6.0)
        scale_code, scale = _round_magnitudes(ratio, None, 3, -6, 448.0)
        divisor = scale.to(tl.float64) * wide
        # All elements of a block without a scale become zeros.
        scaled = size.to(tl.float64) / tl.where(divisor == 0.0, float("inf"), divisor)
    code, value = _round_magnitudes(scaled, random, MANTISSA, LOWEST, LARGEST)
    signed = (value * scale).to(tl.int32, bitcast=True) | (bits & -0x80000000)
    signed = tl.where(finite, signed, 0x7FC00000).to(tl.float32, bitcast=True)
    tl.store(out_ptr + offsets, signed.to(tl.bfloat16), mask=mask)
    if codes_ptr is not None:
        code = tl.where(finite, tl.where(bits < 0, code | SIGN, code), 0)
        tl.store(codes_ptr + offsets, code.to(tl.uint8), mask=mask)
        count = (width + BLOCK - 1) // BLOCK
        scale_code = tl.where(finite, scale_code, 0xFF if amax_ptr is None else 0x7F).to(tl.uint8)
        tl.store(scales_ptr + rows * count + blocks, scale_code, mask=(rows < height) & (blocks < count))


@jit
def _spread_blocks_kernel(  # type: ignore[no-untyped-def]
    x_ptr, signs_ptr, out_ptr, height, width, out_width, row_stride, column_stride,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Transform one tile: four sums and differences of halves, then a division by sqrt(16)."""
    n0, d0 = tile_origin(BLOCK_N, BLOCK_D)
    rows = n0 + tl.arange(0, BLOCK_N)[:, None]
    columns = d0 + tl.arange(0, BLOCK_D)[None, :]
    source = x_ptr + rows.to(tl.int64) * row_stride + columns.to(tl.int64) * column_stride
    y = _load_bits(source, (rows < height) & (columns < width)).to(tl.float32, bitcast=True)
    y = y * tl.load(signs_ptr + columns % 16).to(tl.float32)
    for stage in tl.static_range(4):
        pairs = tl.reshape(y, [BLOCK_N * BLOCK_D // (2 << stage), 2, 1 << stage])
        left, right = tl.split(tl.permute(pairs, (0, 2, 1)))
        y = tl.reshape(tl.permute(tl.join(left + right, left - right), (0, 2, 1)), [BLOCK_N, BLOCK_D])
    target = out_ptr + rows.to(tl.int64) * out_width + columns
    tl.store(target, (y * 0.25).to(out_ptr.dtype.element_ty), mask=(rows < height) & (columns < out_width))


def _allocate(x: Tensor, block: int, powers: bool, with_codes: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    height, width = x.shape
    return (
        x.new_empty((height, width), dtype=torch.bfloat16),
        x.new_empty((0,) if powers else (), dtype=torch.float32),
        x.new_empty((height, width) if with_codes else 0, dtype=torch.uint8),
        x.new_empty((height, -(-width // block)) if with_codes else 0, dtype=torch.uint8),
    )


def _round(
    x: Tensor,
    element: str,
    block: int,
    powers: bool,
    round_up: bool,
    amax: Tensor | None,
    seed: Tensor | None,
    with_codes: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    made = values, tensor_scale, codes, scales = _allocate(x, block, powers, with_codes)
    if not x.numel():
        tensor_scale.fill_(1.0)
        return made
    form, (height, width) = ELEMENTS[element], x.shape
    # To round up, a mantissa above that of the largest element carries into the exponent.
    carry = 2**24 - 1 - int(form.largest * 2 ** (23 - form.max_exponent)) if round_up else 0
    launch_kernel(
        _round_blocks_kernel, tile_grid(height, width, TILE),
        x, values, codes if with_codes else None, scales if with_codes else None, amax,
        None if powers else tensor_scale, seed, height, width, x.stride(0), x.stride(1),
        MANTISSA=form.mantissa_bits, LOWEST=form.min_exponent, HIGHEST=form.max_exponent, LARGEST=form.largest,
        SIGN=form.sign, CARRY=carry, BLOCK=block, **TILE,
    )  # fmt: skip
    return made


def _fake_round(
    x: Tensor,
    element: str,
    block: int,
    powers: bool,
    round_up: bool,
    amax: Tensor | None,
    seed: Tensor | None,
    with_codes: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _allocate(x, block, powers, with_codes)


def _transform(x: Tensor, signs: Tensor) -> Tensor:
    height, width = x.shape
    out = _fake_transform(x, signs)
    if out.numel():
        launch_kernel(
            _spread_blocks_kernel, tile_grid(height, out.shape[1], TILE),
            x, signs, out, height, width, out.shape[1], x.stride(0), x.stride(1), **TILE,
        )  # fmt: skip
    return out


def _fake_transform(x: Tensor, signs: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], -(-x.shape[1] // HADAMARD_BLOCK) * HADAMARD_BLOCK))


_round_op = define_op("round_blocks", _round, _fake_round)
_transform_op = define_op("spread_blocks", _transform, _fake_transform)
