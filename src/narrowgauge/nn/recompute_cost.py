"""Estimates what recomputing a block's activations costs, from shapes and the table of GPUs.

The same function serves an engine and a forecast, so that both choose the same plan. Products cost their FLOPs, and
what memory bounds costs its bytes, each at the rate that training reaches (``peak_fractions``). Per token, with D the
width of the stream, U the outputs of the MLP's first projections and A the inputs of its last:

    full         the projections into attention, attention, its output projection, the MLP's first projections, both
                 norms and the activation. Attention and the projections around it are left out if their results are
                 kept in the room of future gradients (``passes``). FP8 copies of BF16 weights are written again
    selective    both norms, 6D bytes each, and the activation, 2U + 2A, if backward does not compute it anyway
    offload      as full; what the copy to the host takes longer than a block's forward, and the copy back than three
                 forwards: recomputation and backward
    recompute    the MLP's first projections, and the activation if backward does not compute it anyway
    normalized   8D bytes for normalized rows and what norms write again
    8bit         also 3U bytes to encode the activation's input

If the MLP is a module, ``full`` runs that again, and ``selective`` the first norm only (``estimate_module``).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from torch import Tensor, nn

from narrowgauge.hardware import Gpu, find_gpu, interconnect
from narrowgauge.nn.experts.modules import FusedExperts, WideExperts
from narrowgauge.nn.fused.casts import is_remade_in_backward
from narrowgauge.nn.fused.passes import SHARE_OF_GRADIENTS
from narrowgauge.nn.fused.plan import BlockParts, BlockPlan, BlockTensors
from narrowgauge.nn.module_changes import find_change
from narrowgauge.peak_fractions import get_fraction

REFERENCE = "H200"
"""The GPU whose rates decide on one that is not in the table; only the ratios of costs matter for a choice."""
CHOICES = 2
"""Experts of a token where that is not known: their module computes as its own code."""
_WIDER = {"fp8": "bf16", "bf16": "fp32", "fp16": "fp32", "tf32": "fp32"}


class Rates:
    """Times of work on a GPU, in milliseconds."""

    def __init__(self, gpu: Gpu | None) -> None:
        self.gpu = gpu or find_gpu(REFERENCE)

    def multiply(self, flops: float, format: str) -> float:
        """Milliseconds of a product."""
        return flops / (self._peak(format) * get_fraction(f"product.{format}")) * 1e3

    def attend(self, flops: float) -> float:
        """Milliseconds of attention."""
        return flops / (self._peak("bf16") * get_fraction("attention.cudnn")) * 1e3

    def move(self, count: float) -> float:
        """Milliseconds to read or write bytes."""
        return count / (self.gpu.bandwidth * get_fraction("memory.other")) * 1e3

    def send(self, count: float) -> float:
        """Milliseconds to copy bytes to host memory, or from there."""
        return count / (self.gpu.node.pcie * interconnect().pcie_share) * 1e3

    def _peak(self, format: str) -> float:
        while format not in self.gpu.peaks:
            format = _WIDER[format]
        return self.gpu.peaks[format]


def estimate_fused(
    plan: BlockPlan,
    module: nn.Module,
    shape: tuple[int, ...],
    gpu: Gpu | None,
    microbatches: int = 1,
    itemsize: int = 4,
) -> Mapping[str, float]:
    """Return the milliseconds that each option costs one update, for a fused block and input [B, T, D].

    Args:
        plan: The block's plan.
        module: The block.
        shape: The shape of its input.
        gpu: The GPU; None if it is not in the table.
        microbatches: How many forwards an update has.
        itemsize: Bytes of a value of its input.
    """
    rates, tensors = Rates(gpu), BlockParts(module, plan).gather()
    batch, length, width = shape
    rows = batch * length
    qkv, out, up, down = (_count(group) for group in (tensors.inputs, tensors.out, tensors.ups, tensors.down))
    spec, columns = plan.spec, up // width
    mixed = out // width
    pairs = (0.5 if spec.attention.causal else 1.0) * batch * length**2 * mixed
    activation = rates.move(rows * (2 * columns + 2 * down // width))
    remade = is_remade_in_backward(spec, plan.down, plan.caster(False))
    norms = rates.move(rows * 12 * width)
    product = rates.multiply(2.0 * rows * up, plan.up.choice.output)
    last = product + norms + activation
    casts = 0.0
    if plan.scales is not None and not plan.qkv.weight.keep_for_backward:
        casts = rates.move(qkv + out + up)  # backward casts them again anyway, and writes a second layout
    first = rates.multiply(2.0 * rows * qkv, plan.qkv.choice.output) + rates.attend(4 * pairs)
    first += rates.multiply(2.0 * rows * out, plan.out.choice.output)
    first += sum(rates.multiply(2.0 * rows * _count(group), "bf16") for group in _list_cross(tensors))
    size = rows * width * itemsize
    forward = first + last + rates.multiply(2.0 * rows * down, plan.down.choice.output)
    if spec.mlp:
        norms /= 2  # the second one's output is what the module keeps
        module_ms = estimate_module(module.get_submodule(spec.mlp), rows, rates)
        last, forward = last + module_ms, forward + module_ms
    copied = sum(max(0.0, rates.send(size) - times * forward) for times in (1, 3)) + rates.move(2 * size)
    kept = 1 if _keeps_attention(plan, tensors, rows, qkv // width, mixed) else 0
    full = microbatches * (last + casts) + (microbatches - kept) * first
    return {
        "none": 0.0,
        "normalized": microbatches * rates.move(rows * 8 * width),
        "selective": microbatches * (norms + (0.0 if remade or spec.mlp else activation)),
        "recompute": microbatches * (product + (0.0 if remade else activation)),
        "8bit": microbatches * rates.move(rows * (3 * columns + 8 * width)),
        "full": full,
        "offload": full + microbatches * copied,
    }


def estimate_module(module: nn.Module, rows: int, rates: Rates) -> float:
    """Return the milliseconds of the forward of a mixture of experts, or of another module with matrices.

    Every token is multiplied by each matrix, and by those of its experts. For each pair of a token and an expert, D
    wide and F inside, 4D bytes gather the token and add the output, and 10F are both sides of the activation. Stacks
    are cast.
    """
    total = 0.0
    for part in module.modules():
        change = find_change(part, FusedExperts) or find_change(part, WideExperts)
        choices = change.choices if change is not None and change.choices else CHOICES
        format = "fp8" if isinstance(change, FusedExperts) else "bf16"
        for weight in part.parameters(recurse=False):
            if weight.dim() == 3:
                count, outputs, inputs = weight.shape
                slots = rows * min(choices, count)
                passes = slots * (5 if outputs > inputs else 4) * outputs
                copied = weight.numel() * (weight.itemsize + (1 if format == "fp8" else 2))
                total += rates.multiply(2.0 * slots * outputs * inputs, format) + rates.move(passes + copied)
            elif weight.dim() == 2:
                total += rates.multiply(2.0 * rows * weight.numel(), "bf16")
    return total


def _keeps_attention(plan: BlockPlan, tensors: BlockTensors, rows: int, outputs: int, mixed: int) -> bool:
    """Whether a recomputed block keeps attention in the room of its gradients, as ``passes.run_forward`` decides."""
    dtype = plan.qkv.weight.gradient_dtype
    spec = plan.spec
    if dtype is None or not plan.holds_gradients or spec.order != "pre" or spec.cross is not None:
        return False
    trained = sum(p.numel() for p in tensors.flatten() if p is not None and p.requires_grad)
    width = _count(tensors.out) // max(1, mixed)
    return rows * (2 * outputs + 2 * mixed + 4 * width) <= SHARE_OF_GRADIENTS * dtype.itemsize * trained


def _count(group: tuple[Tensor | None, ...]) -> int:
    return sum(weight.numel() for weight in group if weight is not None)


def _list_cross(tensors: BlockTensors) -> tuple[tuple[Any, ...], ...]:
    return tensors.query, tensors.source, tensors.cross_out


def estimate_unfused(
    module: nn.Module, shape: tuple[int, ...], compute: str, gpu: Gpu | None, microbatches: int = 1
) -> Mapping[str, float]:
    """Return the same for a block that runs layer by layer: as if each matrix was multiplied once per token."""
    rates = Rates(gpu)
    width = shape[-1] if shape else 1
    rows = prod(shape[:-1]) if len(shape) > 1 else 1
    matrices = sum(p.numel() for p in module.parameters() if p.dim() > 1)
    others = rates.move(rows * (12 * width + 4 * matrices // max(1, width)))
    full = rates.multiply(2.0 * rows * matrices, compute) + others
    return {"none": 0.0, "selective": microbatches * others, "full": microbatches * full}
