"""AdamW for many tensors in one launch, and the norms of their gradients: two passes over memory, no FP32 temporaries.

    norms:    sum of squares of each block, then of each tensor; finite exactly if all gradients are finite
    update:   reads gradient, weight, remainder and moments; unscales, clips, steps; writes all but the gradient

Bytes per parameter in the leanest form (BF16 weight and gradient, 16-bit remainder, two 8-bit moments): 2 for the norm,
14.19 for the update. ``optim.adamw_reference`` does the same in plain torch. The kernel uses the hardware's approximate
square root and division (1 to 2 units in the last place), as exact ones would cost more than the memory traffic.

If something other than the optimizer wrote a BF16 weight since the last update, that weight is its own master. The
remainders of its group of 128 then count as 0 (``optim.weight_checksums`` explains how this is detected), or the FP32
copy of the value is dropped. On Hopper the check adds 14 instructions per weight to 67, and a sixteenth of a byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from narrowgauge import events
from narrowgauge.kernels import HAVE_TRITON, jit, use_triton
from narrowgauge.kernels.launch import launch_kernel
from narrowgauge.kernels.master_tile import (
    GROUP,
    divide_approx,
    join_master,
    load_size,
    round_to_int8,
    share_base,
    store_master,
)
from narrowgauge.kernels.multi_tensor import is_aligned, make_block_table, make_offset_table

if HAVE_TRITON:
    import triton.language as tl

    from narrowgauge.kernels.fp8_tile import INTERPRETED

BLOCK = 2048
WARPS = 4
NORM_BLOCK = 16384


@dataclass
class TensorLists:
    """The tensors of a launch: one per parameter in each list, all tensors of a list in one format.

    ``low`` has the remainders (int16) or FP32 copies of BF16 weights, and is empty without them. ``check`` has the
    checksums of weights with remainders. Scales are empty unless the moments are 8-bit.
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
class StepScalars:
    """Scalars and small tensors of one update."""

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
    """One int64 number, raised by the number of groups of weights that something else had written."""


def compute_norms(tensors: list[Tensor]) -> Sequence[Tensor]:
    """Return the norm of each tensor (all in one format, on one device) in FP32: in one pass on a GPU, else by torch.

    Squares of FP32 numbers overflow FP32 above 1.8e19 and underflow below 1e-23, so they are not summed in FP32.
    """
    narrow = tensors[0].dtype in (torch.float32, torch.bfloat16, torch.float16)
    if narrow and use_triton(tensors[0]) and all(tensor.numel() for tensor in tensors):
        return launch_grad_norms([_flatten_dense(tensor) for tensor in tensors]).unbind()
    return [norm.float() for norm in torch._foreach_norm(tensors, 2.0, dtype=torch.float64)]


def _flatten_dense(tensor: Tensor) -> Tensor:
    """Return a tensor's values as a dense vector, in any order; without a copy if the tensor is dense in memory."""
    if tensor.is_contiguous():
        return tensor
    if torch.ops.aten.is_non_overlapping_and_dense(tensor):
        return tensor.as_strided((tensor.numel(),), (1,))
    return tensor.contiguous()


def launch_grad_norms(grads: list[Tensor]) -> Tensor:
    """Return the norm of each gradient (all in one format, on one device) in FP32; exact if FP32 can hold it."""
    events.report_launch("gradient_norms", grads, ())
    device, whole = grads[0].device, is_aligned([grads])
    work = make_block_table(tuple(g.numel() for g in grads), NORM_BLOCK, device)
    partial = torch.empty(work.count, device=device, dtype=torch.float64)
    norms = torch.empty(len(grads), device=device)
    launch_kernel(
        _squares_kernel, (work.count,), grads[0], make_offset_table([grads], whole), work.tensor_index,
        work.block_index, work.sizes, partial,
        WHOLE=whole, UNIT=_unit_size(grads[0], whole), BLOCK=NORM_BLOCK, num_warps=8,
    )  # fmt: skip
    launch_kernel(_norms_kernel, (len(grads),), partial, work.first, norms, BLOCK=1024, num_warps=4)
    return norms


def launch_adamw(lists: TensorLists, numbers: StepScalars) -> None:
    """Step every parameter of the lists."""
    if events.is_listening():
        states = lists.states
        events.report_launch("adamw", [*states, *lists.grad], states)
    columns = lists.columns
    whole = is_aligned(columns)
    work = make_block_table(tuple(w.numel() for w in lists.weight), BLOCK, lists.weight[0].device)
    launch_kernel(
        _adamw_kernel, (work.count,),
        *(column[0] for column in columns), make_offset_table(columns, whole), work.tensor_index, work.block_index,
        work.sizes,
        numbers.steps, numbers.ticks, numbers.seeds, numbers.factor, numbers.found, numbers.foreign,
        1.0 - numbers.beta1, numbers.beta2, 1.0 - numbers.beta2, numbers.eps,
        MAXIMIZE=numbers.maximize, MASTER=lists.master, EIGHT_BIT=bool(lists.first_scale),
        EPS_IS_0=numbers.eps == 0, WHOLE=whole, UNITS=tuple(_unit_size(column[0], whole) for column in columns),
        BLOCK=BLOCK,
        GROUP=GROUP, num_warps=WARPS,
    )  # fmt: skip
    torch.autograd.graph.increment_version(lists.weight)  # as torch's in-place functions do


def _unit_size(tensor: Tensor, whole: bool) -> int:
    return 16 // tensor.element_size() if whole else 1


@jit
def _squares_kernel(  # type: ignore[no-untyped-def]
    grad_ptr, offsets_ptr, tensor_index_ptr, block_index_ptr, sizes_ptr, partial_ptr,
    WHOLE: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute a block's sum of squares in FP64, from values scaled near 1 by a power of two and summed in FP32.

    The block is in registers, so finding its largest value costs no second pass. Converting every value to FP64 would
    be the bottleneck. A subnormal block is scaled to at least 2**-23, whose squares fit in FP32.
    """
    program = tl.program_id(0)
    tensor = tl.load(tensor_index_ptr + program)
    size = load_size(sizes_ptr, tensor, WHOLE)
    grad_ptr += tl.load(offsets_ptr + tensor) * UNIT
    offsets = tl.load(block_index_ptr + program).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
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
def _sqrt_approx(x):  # type: ignore[no-untyped-def]
    if INTERPRETED:
        return tl.sqrt(x)
    return tl.inline_asm_elementwise("sqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@jit
def _adamw_kernel(  # type: ignore[no-untyped-def]
    weight_ptr, grad_ptr, first_ptr, second_ptr, low_ptr, check_ptr, first_scale_ptr, second_scale_ptr,
    offsets_ptr, tensor_index_ptr, block_index_ptr, sizes_ptr, steps_ptr, ticks_ptr, seeds_ptr, factor_ptr, found_ptr,
    foreign_ptr, rate1, beta2, rate2, eps,
    MAXIMIZE: tl.constexpr, MASTER: tl.constexpr, EIGHT_BIT: tl.constexpr, EPS_IS_0: tl.constexpr, WHOLE: tl.constexpr,
    UNITS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    go = True
    if found_ptr is not None:
        go = tl.load(found_ptr) == 0.0
    program = tl.program_id(0)
    tensor = tl.load(tensor_index_ptr + program)
    size = load_size(sizes_ptr, tensor, WHOLE)
    row = offsets_ptr + tensor * 8
    start = tl.load(block_index_ptr + program).to(tl.int64) * BLOCK
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
        # All loads come before any computation, so the program waits for memory once.
        g = tl.load(grad_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        high = tl.load(weight_ptr + offsets, mask=mask, other=0.0)
        m = tl.load(first_ptr + offsets, mask=mask, other=0).to(tl.float32)
        v = tl.load(second_ptr + offsets, mask=mask, other=0).to(tl.float32)
        low = high
        word = there
        if MASTER == "split":
            low = tl.load(low_ptr + offsets, mask=mask, other=0).to(tl.int32)
            check_ptr += tl.load(row + 5) * UNITS[5] + start // GROUP
            word = tl.load(check_ptr + group, mask=there, other=0)
        elif MASTER == "copy":
            low = tl.load(low_ptr + offsets, mask=mask, other=0.0)
        if EIGHT_BIT:
            first_scale_ptr += tl.load(row + 6) * UNITS[6] + start // GROUP
            second_scale_ptr += tl.load(row + 7) * UNITS[7] + start // GROUP
            m = divide_approx(m, 254.0 - tl.abs(m)) * tl.load(first_scale_ptr + group, mask=there, other=0.0)[:, None]
            v = divide_approx(v, 510.0 - v)
            v = v * v * tl.load(second_scale_ptr + group, mask=there, other=0.0)[:, None]

        w, foreign = join_master(high, low, word, MASTER, GROUP)
        if factor_ptr is not None:
            g = g * (1.0 / tl.load(factor_ptr))
        if MAXIMIZE:
            g = -g
        w = w * tl.load(steps_ptr + tensor * 3)
        m = m + (g - m) * rate1
        v = v * beta2 + g * g * rate2
        step_size = tl.load(steps_ptr + tensor * 3 + 1)
        root = _sqrt_approx(v)
        w = w - step_size * divide_approx(m, root * tl.load(steps_ptr + tensor * 3 + 2) + eps)

        if EIGHT_BIT:
            scale = tl.max(tl.abs(m), 1)
            code = round_to_int8(divide_approx(m * 254.0, share_base(scale, scale) + tl.abs(m)))
            tl.store(first_ptr + offsets, code, mask=mask)
            tl.store(first_scale_ptr + group, scale, mask=there)
            scale = tl.max(v, 1)
            tick = tl.load(ticks_ptr + tensor).to(tl.uint32, bitcast=True)
            state = offsets.to(tl.uint32) * 3242174889 + tick
            threshold = (state >> 8).to(tl.float32) * 5.9604644775390625e-08
            code = (divide_approx(root * 510.0, share_base(scale, _sqrt_approx(scale)) + root) + threshold).to(tl.int32)
            code = tl.minimum(tl.maximum(code, 1), 255)
            tl.store(second_ptr + offsets, code.to(tl.uint8), mask=mask)
            tl.store(second_scale_ptr + group, scale, mask=there)
        else:
            tl.store(first_ptr + offsets, m.to(first_ptr.dtype.element_ty), mask=mask)
            tl.store(second_ptr + offsets, v.to(second_ptr.dtype.element_ty), mask=mask)

        seed = 0
        if MASTER == "none":
            seed = tl.load(seeds_ptr + tensor).to(tl.uint32, bitcast=True)
        # With eps = 0, updates beyond the tensor's end are 0 / 0.
        store_master(
            w, foreign, weight_ptr, low_ptr, check_ptr, foreign_ptr, seed, offsets, mask, group, there,
            MASTER, EPS_IS_0, BLOCK, GROUP,
        )  # fmt: skip
