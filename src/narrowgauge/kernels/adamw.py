"""AdamW for many tensors at once, and the norms of their gradients: two passes over memory, no FP32 temporaries.

    norms:    sum of squares of each block, then of each tensor: finite exactly where all gradients are
    update:   reads gradient, weight, remainder and moments; unscales, clips, steps; writes all but the gradient

Bytes a parameter in the leanest form (BF16 weight and gradient, 16-bit remainder, two 8-bit moments): 2 for the norm,
14.19 for the update. ``optim.reference`` has the same in plain torch; the kernel takes roots and divides by
the hardware's approximations (1 to 2 units in the last place), as exact ones would cost more than the memory.

A BF16 weight that somebody else has written since the last update is its own master: the remainders of its group of 128
count as 0 (``optim.check_words`` has the check words and why), or the FP32 copy of the one value is dropped. Compiled
for Hopper the check adds 14 instructions a weight to 67, and a sixteenth of a byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from narrowgauge import events
from narrowgauge.kernels import HAVE_TRITON, jit, use_triton
from narrowgauge.kernels.dry_run import launch
from narrowgauge.kernels.multi_tensor import is_whole, pieces, places

if HAVE_TRITON:
    import triton.language as tl

    from narrowgauge.kernels.fp8_tile import INTERPRETED

BLOCK = 2048
GROUP = 128
WARPS = 4
NORM_BLOCK = 16384


@dataclass
class Lists:
    """The tensors of a launch, one of each for every parameter, all of a list in one format.

    ``low`` are remainders (int16) or FP32 copies beside BF16 weights, and empty where there are none; ``check`` are the
    check words beside remainders; scales are empty unless the moments are of 8 bits.
    """

    weight: list[Tensor]
    grad: list[Tensor]
    first: list[Tensor]
    second: list[Tensor]
    low: list[Tensor] = field(default_factory=list)
    check: list[Tensor] = field(default_factory=list)
    first_scale: list[Tensor] = field(default_factory=list)
    second_scale: list[Tensor] = field(default_factory=list)

    @property
    def columns(self) -> list[list[Tensor]]:
        scales = self.first_scale, self.second_scale
        every = (self.weight, self.grad, self.first, self.second, self.low, self.check, *scales)
        return [column or self.weight for column in every]

    @property
    def states(self) -> list[Tensor]:
        """What the kernel reads and writes: all but the gradients."""
        parts = (self.weight, self.first, self.second, self.low, self.check, self.first_scale, self.second_scale)
        return [tensor for part in parts for tensor in part]

    @property
    def master(self) -> str:
        if self.weight[0].dtype is torch.float32:
            return "itself"
        if not self.low:
            return "none"
        return "split" if self.low[0].dtype is torch.int16 else "copy"


@dataclass(frozen=True)
class Numbers:
    """What one update is computed with."""

    beta1: float
    beta2: float
    eps: float
    maximize: bool
    steps: Tensor
    """[n, 3], on the device: 1 - lr * weight_decay, lr / (1 - beta1^t) and 1 / sqrt(1 - beta2^t)."""
    ticks: Tensor | None = None
    """[n] in int32, for the rounding of 8-bit second moments: the step times ``optim.moments.PLASTIC[1]``."""
    seeds: Tensor | None = None
    """[n] in int32, for stochastic rounding."""
    factor: Tensor | None = None
    found: Tensor | None = None
    foreign: Tensor | None = None
    """One number in int64: is raised by the groups of weights that somebody else had written."""


def norms_of(tensors: list[Tensor]) -> Sequence[Tensor]:
    """The norm of each tensor (all of one format, on one device) in FP32: by one pass over them on a GPU, else torch's.

    Squares of FP32 numbers leave FP32 beyond 1.8e19 and below 1e-23, so they are not summed there.
    """
    narrow = tensors[0].dtype in (torch.float32, torch.bfloat16, torch.float16)
    if narrow and use_triton(tensors[0]) and all(tensor.numel() for tensor in tensors):
        return gradient_norms([flat(tensor) for tensor in tensors]).unbind()
    return [norm.float() for norm in torch._foreach_norm(tensors, 2.0, dtype=torch.float64)]


def flat(tensor: Tensor) -> Tensor:
    """A tensor's values in some order, one behind the other: in place where they lie so, whatever their strides are."""
    if tensor.is_contiguous():
        return tensor
    if torch.ops.aten.is_non_overlapping_and_dense(tensor):
        return tensor.as_strided((tensor.numel(),), (1,))
    return tensor.contiguous()


def gradient_norms(grads: list[Tensor]) -> Tensor:
    """The norm of each gradient (all of one format, on one device), in FP32: exact wherever FP32 holds the result."""
    events.report_launch("gradient_norms", grads, ())
    device, whole = grads[0].device, is_whole([grads])
    work = pieces(tuple(g.numel() for g in grads), NORM_BLOCK, device)
    partial = torch.empty(work.count, device=device, dtype=torch.float64)
    norms = torch.empty(len(grads), device=device)
    launch(
        _squares_kernel, (work.count,), grads[0], places([grads], whole), work.owner, work.place, work.sizes, partial,
        WHOLE=whole, UNIT=_unit(grads[0], whole), BLOCK=NORM_BLOCK, num_warps=8,
    )  # fmt: skip
    launch(_norms_kernel, (len(grads),), partial, work.first, norms, BLOCK=1024, num_warps=4)
    return norms


def adamw(lists: Lists, numbers: Numbers) -> None:
    """Step every parameter of the lists."""
    if events.is_listening():
        states = lists.states
        events.report_launch("adamw", [*states, *lists.grad], states)
    columns = lists.columns
    whole = is_whole(columns)
    work = pieces(tuple(w.numel() for w in lists.weight), BLOCK, lists.weight[0].device)
    launch(
        _adamw_kernel, (work.count,),
        *(column[0] for column in columns), places(columns, whole), work.owner, work.place, work.sizes,
        numbers.steps, numbers.ticks, numbers.seeds, numbers.factor, numbers.found, numbers.foreign,
        1.0 - numbers.beta1, numbers.beta2, 1.0 - numbers.beta2, numbers.eps,
        MAXIMIZE=numbers.maximize, MASTER=lists.master, EIGHT_BIT=bool(lists.first_scale),
        EPS_IS_0=numbers.eps == 0, WHOLE=whole, UNITS=tuple(_unit(column[0], whole) for column in columns), BLOCK=BLOCK,
        GROUP=GROUP, num_warps=WARPS,
    )  # fmt: skip


def _unit(tensor: Tensor, whole: bool) -> int:
    return 16 // tensor.element_size() if whole else 1


@jit
def _size(sizes_ptr, tensor, WHOLE: tl.constexpr):  # type: ignore[no-untyped-def]
    """A tensor's size. WHOLE: all are multiples of 16, so that no mask cuts a 16-byte access in two."""
    size = tl.load(sizes_ptr + tensor)
    if WHOLE:
        size = (size // 16) * 16
    return size


@jit
def _squares_kernel(  # type: ignore[no-untyped-def]
    grad_ptr, places_ptr, owner_ptr, place_ptr, sizes_ptr, partial_ptr,
    WHOLE: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A block's sum of squares in FP64: of values brought near 1 by a power of two, summed in FP32.

    The block is in registers, so that its largest value costs no second pass; FP64 for every value would be bound by
    its conversions. A subnormal block is brought near 2**-23 at least, whose squares FP32 holds.
    """
    program = tl.program_id(0)
    tensor = tl.load(owner_ptr + program)
    size = _size(sizes_ptr, tensor, WHOLE)
    grad_ptr += tl.load(places_ptr + tensor) * UNIT
    offsets = tl.load(place_ptr + program).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(grad_ptr + offsets, mask=offsets < size, other=0.0).to(tl.float32)
    exponent = tl.max(tl.abs(g)).to(tl.int32, bitcast=True) >> 23
    scale = (tl.minimum(tl.maximum(254 - exponent, 1), 253) << 23).to(tl.float32, bitcast=True)
    g = g * scale
    inverse = 1.0 / scale.to(tl.float64)
    tl.store(partial_ptr + program, tl.sum(g * g).to(tl.float64) * inverse * inverse)


@jit
def _norms_kernel(partial_ptr, first_ptr, norms_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    tensor = tl.program_id(0)
    end = tl.load(first_ptr + tensor + 1)
    total = tl.zeros([BLOCK], tl.float64)
    for start in range(tl.load(first_ptr + tensor), end, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        total += tl.load(partial_ptr + offsets, mask=offsets < end, other=0.0)
    tl.store(norms_ptr + tensor, tl.sqrt(tl.sum(total)).to(tl.float32))


@jit
def _words(high, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """``optim.check_words.words_of`` the BF16 bits of groups, as int32."""
    bits = high.to(tl.uint32, bitcast=True)
    even, odd = tl.split(tl.reshape(bits, [bits.shape[0], GROUP // 2, 2]))
    state = even * 0x9E3779B1 + odd * 0xD6BEFA39 + tl.arange(0, GROUP // 2).to(tl.uint32)[None, :] * 0x85EBCA77
    return tl.sum((state * (state >> 15)).to(tl.int32, bitcast=True), 1).to(tl.int32)


@jit
def _joined(high, low):  # type: ignore[no-untyped-def]
    """``optim.split.join`` of BF16 bits: zeros stay zeros whatever the remainder says."""
    top = high << 16
    bits = top + low
    return tl.where(((bits ^ top) & -0x80000000) != 0, top, bits).to(tl.float32, bitcast=True)


@jit
def _halves(master):  # type: ignore[no-untyped-def]
    """``optim.split.split``, as BF16 bits in int32: the only NaN that hardware makes is 0x7FFFFFFF."""
    bits = tl.minimum(master.to(tl.int32, bitcast=True), 0x7FFF7FFF)
    high = (bits + 0x8000) >> 16
    return high, (bits - (high << 16)).to(tl.int16)


@jit
def _mixed(x):  # type: ignore[no-untyped-def]
    """``optim.reference.mix``."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@jit
def _root(x):  # type: ignore[no-untyped-def]
    if INTERPRETED:
        return tl.sqrt(x)
    return tl.inline_asm_elementwise("sqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@jit
def _quotient(x, y):  # type: ignore[no-untyped-def]
    if INTERPRETED:
        return x / y
    return tl.inline_asm_elementwise(
        "div.approx.ftz.f32 $0, $1, $2;", "=f,f,f", [x, y], dtype=tl.float32, is_pure=True, pack=1
    )


@jit
def _base(scale, root):  # type: ignore[no-untyped-def]
    """What a share is taken of: ``root``, or infinity where a group has next to nothing, so that its shares are 0."""
    return tl.where(scale > 1e-37, root, float("inf"))[:, None]


@jit
def _nearest(x):  # type: ignore[no-untyped-def]
    """The nearest whole number of -127 to 127, halves to even: added to 1.5 * 2**23, it is in the last bits."""
    return (x + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)


@jit
def _adamw_kernel(  # type: ignore[no-untyped-def]
    weight_ptr, grad_ptr, first_ptr, second_ptr, low_ptr, check_ptr, first_scale_ptr, second_scale_ptr,
    places_ptr, owner_ptr, place_ptr, sizes_ptr, steps_ptr, ticks_ptr, seeds_ptr, factor_ptr, found_ptr,
    foreign_ptr, rate1, beta2, rate2, eps,
    MAXIMIZE: tl.constexpr, MASTER: tl.constexpr, EIGHT_BIT: tl.constexpr, EPS_IS_0: tl.constexpr, WHOLE: tl.constexpr,
    UNITS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    go = True
    if found_ptr is not None:
        go = tl.load(found_ptr) == 0.0
    program = tl.program_id(0)
    tensor = tl.load(owner_ptr + program)
    size = _size(sizes_ptr, tensor, WHOLE)
    row = places_ptr + tensor * 8
    start = tl.load(place_ptr + program).to(tl.int64) * BLOCK
    group = tl.arange(0, BLOCK // GROUP)
    offsets = start + group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    mask = offsets < size
    there = start + group * GROUP < size
    if go:
        weight_ptr += tl.load(row) * UNITS[0]
        grad_ptr += tl.load(row + 1) * UNITS[1]
        first_ptr += tl.load(row + 2) * UNITS[2]
        second_ptr += tl.load(row + 3) * UNITS[3]
        low_ptr += tl.load(row + 4) * UNITS[4]
        # Everything is loaded before anything is computed: what waits for memory then waits once.
        g = tl.load(grad_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        high = tl.load(weight_ptr + offsets, mask=mask, other=0.0)
        m = tl.load(first_ptr + offsets, mask=mask, other=0).to(tl.float32)
        v = tl.load(second_ptr + offsets, mask=mask, other=0).to(tl.float32)
        if MASTER == "split":
            low = tl.load(low_ptr + offsets, mask=mask, other=0).to(tl.int32)
            check_ptr += tl.load(row + 5) * UNITS[5] + start // GROUP
            word = tl.load(check_ptr + group, mask=there, other=0)
        elif MASTER == "copy":
            w = tl.load(low_ptr + offsets, mask=mask, other=0.0)
        if EIGHT_BIT:
            first_scale_ptr += tl.load(row + 6) * UNITS[6] + start // GROUP
            second_scale_ptr += tl.load(row + 7) * UNITS[7] + start // GROUP
            m = _quotient(m, 254.0 - tl.abs(m)) * tl.load(first_scale_ptr + group, mask=there, other=0.0)[:, None]
            v = _quotient(v, 510.0 - v)
            v = v * v * tl.load(second_scale_ptr + group, mask=there, other=0.0)[:, None]

        if MASTER == "split":
            bits = high.to(tl.int16, bitcast=True).to(tl.int32)
            foreign = word != _words(bits, GROUP)
            w = _joined(bits, tl.where(foreign[:, None], 0, low))
        elif MASTER == "copy":
            apart = w.to(tl.int32, bitcast=True) - (high.to(tl.int16, bitcast=True).to(tl.int32) << 16)
            own = (apart >= -0x8000) & (apart <= 0x8000)
            w = tl.where(own, w, high.to(tl.float32))
            foreign = tl.min(own.to(tl.int32), 1) == 0
        else:
            w = high.to(tl.float32)
        if factor_ptr is not None:
            g = g * (1.0 / tl.load(factor_ptr))
        if MAXIMIZE:
            g = -g
        w = w * tl.load(steps_ptr + tensor * 3)
        m = m + (g - m) * rate1
        v = v * beta2 + g * g * rate2
        step_size = tl.load(steps_ptr + tensor * 3 + 1)
        root = _root(v)
        w = w - step_size * _quotient(m, root * tl.load(steps_ptr + tensor * 3 + 2) + eps)

        if EIGHT_BIT:
            scale = tl.max(tl.abs(m), 1)
            code = _nearest(_quotient(m * 254.0, _base(scale, scale) + tl.abs(m)))
            tl.store(first_ptr + offsets, code, mask=mask)
            tl.store(first_scale_ptr + group, scale, mask=there)
            scale = tl.max(v, 1)
            tick = tl.load(ticks_ptr + tensor).to(tl.uint32, bitcast=True)
            state = offsets.to(tl.uint32) * 3242174889 + tick
            threshold = (state >> 8).to(tl.float32) * 5.9604644775390625e-08
            code = (_quotient(root * 510.0, _base(scale, _root(scale)) + root) + threshold).to(tl.int32)
            code = tl.minimum(tl.maximum(code, 1), 255)
            tl.store(second_ptr + offsets, code.to(tl.uint8), mask=mask)
            tl.store(second_scale_ptr + group, scale, mask=there)
        else:
            tl.store(first_ptr + offsets, m.to(first_ptr.dtype.element_ty), mask=mask)
            tl.store(second_ptr + offsets, v.to(second_ptr.dtype.element_ty), mask=mask)

        if MASTER == "itself":
            tl.store(weight_ptr + offsets, w, mask=mask)
        elif MASTER == "none":
            seed = tl.load(seeds_ptr + tensor).to(tl.uint32, bitcast=True)
            noise = _mixed(offsets.to(tl.uint32) ^ _mixed(seed)) & 0xFFFF
            bits = w.to(tl.int32, bitcast=True)
            finite = (bits & 0x7F800000) != 0x7F800000
            bits = tl.where(finite, bits + noise.to(tl.int32, bitcast=True), bits) >> 16
            tl.store(weight_ptr + offsets, bits.to(tl.int16).to(tl.bfloat16, bitcast=True), mask=mask)
        else:
            bits, low = _halves(w)
            tl.store(weight_ptr + offsets, bits.to(tl.int16).to(tl.bfloat16, bitcast=True), mask=mask)
            if MASTER == "split":
                tl.store(low_ptr + offsets, low, mask=mask)
                if EPS_IS_0:  # beyond a tensor's end the update was 0 / 0; words are of zeros there
                    bits = tl.where(mask, bits, 0)
                tl.store(check_ptr + group, _words(bits, GROUP), mask=there)
            else:
                tl.store(low_ptr + offsets, w, mask=mask)
            one = tl.full([BLOCK // GROUP], 1, tl.int64)
            tl.atomic_add(foreign_ptr + group * 0, one, mask=there & foreign, sem="relaxed")
