"""Muon's passes over memory for many matrices, each in one launch: the momentum, and the step of weights and masters.

    momentum    m <- m + (g - m)(1 - momentum);  direction = g + (m - g) momentum in BF16, or m without nesterov
    apply       w <- w keep - rate direction, with the FP32 masters of BF16 weights

Between the two, ``optim.newton_schulz`` orthogonalizes the directions. Both leave everything as it is if ``found`` is
not 0. ``optim.muon`` does the same in plain torch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgauge import events
from narrowgauge.kernels import HAVE_TRITON, jit
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
from narrowgauge.kernels.multi_tensor import BlockTable, is_aligned, make_block_table, make_offset_table

if HAVE_TRITON:
    import triton.language as tl

BLOCK = 2048
WARPS = 4


def launch_momentum(
    grads: list[Tensor],
    momenta: list[Tensor],
    scales: list[Tensor],
    directions: list[Tensor],
    momentum: float,
    nesterov: bool,
    maximize: bool,
    factor: Tensor | None,
    found: Tensor | None,
) -> None:
    """Update momenta and write directions in BF16; ``scales`` is empty unless the momenta are 8-bit codes."""
    if events.is_listening():
        written = [*momenta, *scales, *directions]
        events.report_launch("muon_momentum", [*grads, *momenta, *scales], written)
    columns = [grads, momenta, scales or momenta, directions]
    whole, work = _lay_out(columns)
    launch_kernel(
        _momentum_kernel, (work.count,), *(column[0] for column in columns), make_offset_table(columns, whole),
        work.tensor_index, work.block_index, work.sizes, factor, found, 1.0 - momentum, momentum,
        NESTEROV=nesterov, MAXIMIZE=maximize, EIGHT_BIT=bool(scales), WHOLE=whole,
        UNITS=tuple(_unit_size(column[0], whole) for column in columns), BLOCK=BLOCK, GROUP=GROUP, num_warps=WARPS,
    )  # fmt: skip


def launch_apply(
    weights: list[Tensor],
    low: list[Tensor],
    check: list[Tensor],
    directions: list[Tensor],
    rates: Tensor,
    seeds: Tensor | None,
    found: Tensor | None,
    foreign: Tensor,
) -> None:
    """Step weights along directions.

    ``low`` has remainders or FP32 copies, ``check`` the checksums of the former; both may be empty. ``rates`` is [n, 2]
    on the device: what a weight is multiplied by, and the size of its step. ``seeds`` is for stochastic rounding.
    """
    if events.is_listening():
        written = [*weights, *low, *check]
        events.report_launch("muon_apply", [*written, *directions], written)
    master = "itself" if weights[0].dtype is torch.float32 else "none"
    if low:
        master = "split" if low[0].dtype is torch.int16 else "copy"
    columns = [weights, low or weights, check or weights, directions]
    whole, work = _lay_out(columns)
    launch_kernel(
        _apply_kernel, (work.count,), *(column[0] for column in columns), make_offset_table(columns, whole),
        work.tensor_index, work.block_index, work.sizes, rates, seeds, found, foreign, MASTER=master, WHOLE=whole,
        UNITS=tuple(_unit_size(column[0], whole) for column in columns), BLOCK=BLOCK, GROUP=GROUP, num_warps=WARPS,
    )  # fmt: skip
    torch.autograd.graph.increment_version(weights)  # as torch's in-place functions do


def _lay_out(columns: list[list[Tensor]]) -> tuple[bool, BlockTable]:
    """Return whether 16-byte accesses are possible, and which program handles which block."""
    sizes = tuple(tensor.numel() for tensor in columns[0])
    return is_aligned(columns), make_block_table(sizes, BLOCK, columns[0][0].device)


def _unit_size(tensor: Tensor, whole: bool) -> int:
    return 16 // tensor.element_size() if whole else 1


@jit
def _momentum_kernel(  # type: ignore[no-untyped-def]
    grad_ptr, momentum_ptr, scale_ptr, direction_ptr, offsets_ptr, tensor_index_ptr, block_index_ptr, sizes_ptr,
    factor_ptr, found_ptr, rate, momentum,
    NESTEROV: tl.constexpr, MAXIMIZE: tl.constexpr, EIGHT_BIT: tl.constexpr, WHOLE: tl.constexpr, UNITS: tl.constexpr,
    BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    go = True
    if found_ptr is not None:
        go = tl.load(found_ptr) == 0.0
    program = tl.program_id(0)
    tensor = tl.load(tensor_index_ptr + program)
    size = load_size(sizes_ptr, tensor, WHOLE)
    row = offsets_ptr + tensor * 4
    start = tl.load(block_index_ptr + program).to(tl.int64) * BLOCK
    group = tl.arange(0, BLOCK // GROUP)
    offsets = start + group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    mask = offsets < size
    there = start + group * GROUP < size
    if go:
        grad_ptr += tl.load(row) * UNITS[0]
        momentum_ptr += tl.load(row + 1) * UNITS[1]
        direction_ptr += tl.load(row + 3) * UNITS[3]
        g = tl.load(grad_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        m = tl.load(momentum_ptr + offsets, mask=mask, other=0).to(tl.float32)
        if EIGHT_BIT:
            scale_ptr += tl.load(row + 2) * UNITS[2] + start // GROUP
            m = divide_approx(m, 254.0 - tl.abs(m)) * tl.load(scale_ptr + group, mask=there, other=0.0)[:, None]
        if factor_ptr is not None:
            g = g * (1.0 / tl.load(factor_ptr))
        if MAXIMIZE:
            g = -g
        m = m + (g - m) * rate
        if EIGHT_BIT:
            scale = tl.max(tl.abs(m), 1)
            code = round_to_int8(divide_approx(m * 254.0, share_base(scale, scale) + tl.abs(m)))
            tl.store(momentum_ptr + offsets, code, mask=mask)
            tl.store(scale_ptr + group, scale, mask=there)
        else:
            tl.store(momentum_ptr + offsets, m.to(momentum_ptr.dtype.element_ty), mask=mask)
        if NESTEROV:
            m = g + (m - g) * momentum
        tl.store(direction_ptr + offsets, m.to(tl.bfloat16), mask=mask)


@jit
def _apply_kernel(  # type: ignore[no-untyped-def]
    weight_ptr, low_ptr, check_ptr, direction_ptr, offsets_ptr, tensor_index_ptr, block_index_ptr, sizes_ptr,
    rates_ptr, seeds_ptr, found_ptr, foreign_ptr,
    MASTER: tl.constexpr, WHOLE: tl.constexpr, UNITS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    go = True
    if found_ptr is not None:
        go = tl.load(found_ptr) == 0.0
    program = tl.program_id(0)
    tensor = tl.load(tensor_index_ptr + program)
    size = load_size(sizes_ptr, tensor, WHOLE)
    row = offsets_ptr + tensor * 4
    start = tl.load(block_index_ptr + program).to(tl.int64) * BLOCK
    group = tl.arange(0, BLOCK // GROUP)
    offsets = start + group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    mask = offsets < size
    there = start + group * GROUP < size
    if go:
        weight_ptr += tl.load(row) * UNITS[0]
        low_ptr += tl.load(row + 1) * UNITS[1]
        direction_ptr += tl.load(row + 3) * UNITS[3]
        high = tl.load(weight_ptr + offsets, mask=mask, other=0.0)
        direction = tl.load(direction_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        low = high
        word = there
        if MASTER == "split":
            low = tl.load(low_ptr + offsets, mask=mask, other=0).to(tl.int32)
            check_ptr += tl.load(row + 2) * UNITS[2] + start // GROUP
            word = tl.load(check_ptr + group, mask=there, other=0)
        elif MASTER == "copy":
            low = tl.load(low_ptr + offsets, mask=mask, other=0.0)
        w, foreign = join_master(high, low, word, MASTER, GROUP)
        w = w * tl.load(rates_ptr + tensor * 2) - direction * tl.load(rates_ptr + tensor * 2 + 1)
        seed = 0
        if MASTER == "none":
            seed = tl.load(seeds_ptr + tensor).to(tl.uint32, bitcast=True)
        store_master(
            w, foreign, weight_ptr, low_ptr, check_ptr, foreign_ptr, seed, offsets, mask, group, there,
            MASTER, False, BLOCK, GROUP,
        )  # fmt: skip
