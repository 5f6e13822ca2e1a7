"""Parts of kernels that step weights: FP32 masters of BF16 weights, checksums, and 8-bit moments.

MASTER says what the FP32 value of a weight is: "itself" (the weight is FP32), "split" (BF16 and 16 more bits, with a
checksum for each group), "copy" (an FP32 copy) or "none" (BF16 only, rounded stochastically). ``optim.master_access``
does the same in plain torch. A program has a tile of groups [BLOCK / GROUP, GROUP].
"""

from __future__ import annotations

from narrowgauge.kernels import HAVE_TRITON, jit

if HAVE_TRITON:
    import triton.language as tl

    from narrowgauge.kernels.fp8_tile import INTERPRETED

GROUP = 128


@jit
def load_size(sizes_ptr, tensor, WHOLE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load a tensor's size. WHOLE: all are multiples of 16, so no mask splits a 16-byte access."""
    size = tl.load(sizes_ptr + tensor)
    if WHOLE:
        size = (size // 16) * 16
    return size


@jit
def compute_checksums(high, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Compute ``optim.weight_checksums.compute_checksums`` of the BF16 bits of groups, as int32."""
    bits = high.to(tl.uint32, bitcast=True)
    even, odd = tl.split(tl.reshape(bits, [bits.shape[0], GROUP // 2, 2]))
    state = even * 0x9E3779B1 + odd * 0xD6BEFA39 + tl.arange(0, GROUP // 2).to(tl.uint32)[None, :] * 0x85EBCA77
    return tl.sum((state * (state >> 15)).to(tl.int32, bitcast=True), 1).to(tl.int32)


@jit
def join_halves(high, low):  # type: ignore[no-untyped-def]
    """Compute ``optim.split_fp32.join`` from BF16 bits. Zeros stay zeros for any remainder."""
    top = high << 16
    bits = top + low
    return tl.where(((bits ^ top) & -0x80000000) != 0, top, bits).to(tl.float32, bitcast=True)


@jit
def split_halves(master):  # type: ignore[no-untyped-def]
    """Compute ``optim.split_fp32.split``, as BF16 bits in int32. The hardware makes no NaN other than 0x7FFFFFFF."""
    bits = tl.minimum(master.to(tl.int32, bitcast=True), 0x7FFF7FFF)
    high = (bits + 0x8000) >> 16
    return high, (bits - (high << 16)).to(tl.int16)


@jit
def mix(x):  # type: ignore[no-untyped-def]
    """Compute ``optim.master_access.mix``."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@jit
def divide_approx(x, y):  # type: ignore[no-untyped-def]
    if INTERPRETED:
        return x / y
    return tl.inline_asm_elementwise(
        "div.approx.ftz.f32 $0, $1, $2;", "=f,f,f", [x, y], dtype=tl.float32, is_pure=True, pack=1
    )


@jit
def share_base(scale, root):  # type: ignore[no-untyped-def]
    """Return the divisor of a share: ``root``, or infinity if the group is almost 0, so that its shares are 0."""
    return tl.where(scale > 1e-37, root, float("inf"))[:, None]


@jit
def round_to_int8(x):  # type: ignore[no-untyped-def]
    """Round to the nearest integer in -127..127, ties to even: adding 1.5 * 2**23 puts it in the last bits."""
    return (x + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)


@jit
def join_master(high, low, word, MASTER: tl.constexpr, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the FP32 values of weights, and for each group whether something else wrote it since the last step.

    ``high`` has the weights, ``low`` the remainders as int32 or the FP32 copies, ``word`` the checksums.
    """
    if MASTER == "split":
        bits = high.to(tl.int16, bitcast=True).to(tl.int32)
        foreign = word != compute_checksums(bits, GROUP)
        w = join_halves(bits, tl.where(foreign[:, None], 0, low))
    elif MASTER == "copy":
        apart = low.to(tl.int32, bitcast=True) - (high.to(tl.int16, bitcast=True).to(tl.int32) << 16)
        own = (apart >= -0x8000) & (apart <= 0x8000)
        w = tl.where(own, low, high.to(tl.float32))
        foreign = tl.min(own.to(tl.int32), 1) == 0
    else:
        w = high.to(tl.float32)
        foreign = tl.zeros([high.shape[0]], tl.int1)
    return w, foreign


@jit
def store_master(  # type: ignore[no-untyped-def]
    w, foreign, weight_ptr, low_ptr, check_ptr, foreign_ptr, seed, offsets, mask, group, there,
    MASTER: tl.constexpr, MAY_BE_NAN: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Store FP32 values as weights and their masters. MAY_BE_NAN: beyond the tensor's end, where checksums need 0."""
    if MASTER == "itself":
        tl.store(weight_ptr + offsets, w, mask=mask)
    elif MASTER == "none":
        noise = mix(offsets.to(tl.uint32) ^ mix(seed)) & 0xFFFF
        bits = w.to(tl.int32, bitcast=True)
        finite = (bits & 0x7F800000) != 0x7F800000
        bits = tl.where(finite, bits + noise.to(tl.int32, bitcast=True), bits) >> 16
        tl.store(weight_ptr + offsets, bits.to(tl.int16).to(tl.bfloat16, bitcast=True), mask=mask)
    else:
        bits, low = split_halves(w)
        tl.store(weight_ptr + offsets, bits.to(tl.int16).to(tl.bfloat16, bitcast=True), mask=mask)
        if MASTER == "split":
            tl.store(low_ptr + offsets, low, mask=mask)
            if MAY_BE_NAN:
                bits = tl.where(mask, bits, 0)
            tl.store(check_ptr + group, compute_checksums(bits, GROUP), mask=there)
        else:
            tl.store(low_ptr + offsets, w, mask=mask)
        one = tl.full([BLOCK // GROUP], 1, tl.int64)
        tl.atomic_add(foreign_ptr + group * 0, one, mask=there & foreign, sem="relaxed")
