"""The head of a language model and its loss as one step, which never holds all logits at once.

    for each chunk of rows:
        logits      = x @ weight.T                              BF16, the largest tensor of a step: freed with its chunk
        lse, loss   = statistics(logits)
        d           = (softmax - onehot) / counted rows         BF16 over the logits, or FP8 in one or both layouts
        grad_x      = d @ weight
        grad_weight += d.T @ x                                  summed in FP32
    loss = sum of losses / counted rows

A loss is computed to be differentiated, so forward computes the gradients too, while the logits are there; backward
multiplies them by the gradient of the loss (a loss scale, 1/accumulate), which costs a pass only where it is not 1.
Without gradients there is only the loss. Eager PyTorch holds the logits in BF16, their FP32 copy, its log-softmax and
its gradient, up to 14 bytes a logit; here it is at most 4 bytes a logit of one chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from narrowgauge import events
from narrowgauge.errors import UsageError
from narrowgauge.kernels import FP8_MAX, cast, fitting_scale
from narrowgauge.kernels.cross_entropy import (
    IGNORE,
    UNIT_SCALE,
    dlogits,
    dlogits_lp,
    loss_gradient,
    rescale_,
    softmax_statistics,
)
from narrowgauge.nn.products.gemm import (
    ALL_BF16,
    BF16,
    DOUBLE_BACKWARD,
    E4M3,
    MULTIPLE,
    GemmChoice,
    Operand,
    backward_input,
    backward_weight,
    forward_output,
    graph_is_kept,
)
from narrowgauge.nn.products.weight_casts import Weight, WeightPlan
from narrowgauge.optim.adamw import gradient_dtype

HEAD = "lm_head"
"""The module whose output the logits are."""
CHUNK_BYTES = 4 << 30
"""Most bytes of BF16 logits at once by default: GPT-2's 65,536 x 50,304 then go in two chunks, each a full GEMM."""
CHUNK_MULTIPLE = 128
"""Rows of a chunk are a multiple of this, a GEMM's tile."""


@torch.compiler.disable  # type: ignore[untyped-decorator]
def head_loss(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    plan: WeightPlan | None = None,
    precision: GemmChoice = ALL_BF16,
    operand: Operand | None = None,
    ignore_index: int = IGNORE,
    chunk_rows: int | None = None,
) -> Tensor:
    """Mean cross-entropy of ``x @ weight.T`` over the rows whose target is not ``ignore_index``, in FP32.

    ``x`` [N, D] is the normed hidden state, to which the gradient flows; ``weight`` [V, D] the parameter, cast by
    ``plan``, or by its own amax where there is none; ``targets`` [N]. ``operand`` is x in FP8 where its producer wrote
    that (x is then read by BF16 products alone, so it may be a stand-in without memory of its own); else x is cast here
    by current scaling. ``precision`` says which of the products run in FP8. torch.compile leaves this function alone.
    """
    plan = plan or WeightPlan(gradient_dtype=gradient_dtype(weight))
    task = _Task.make(x, weight, plan, targets, precision, ignore_index, chunk_rows)
    with torch.autocast(x.device.type, enabled=False):
        if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
            loss: Tensor = _HeadLoss.apply(x, weight, task, operand)  # type: ignore[no-untyped-call]
            return loss
        return events.run_in_scope(HEAD, task.run, x.detach(), weight, operand, False, False)[0]


def default_chunk_rows(rows: int, vocab: int) -> int:
    """Rows of a chunk: as many as CHUNK_BYTES allow, spread evenly over the chunks."""
    most = max(CHUNK_MULTIPLE, CHUNK_BYTES // (2 * vocab) // CHUNK_MULTIPLE * CHUNK_MULTIPLE)
    chunks = max(1, -(-rows // most))
    return max(1, -(-rows // (chunks * CHUNK_MULTIPLE))) * CHUNK_MULTIPLE


@dataclass(frozen=True)
class _Task:
    """One call of the head: everything but the tensors that gradients flow to."""

    weight: WeightPlan
    targets: Tensor
    precision: GemmChoice
    ignore_index: int
    chunk_rows: int

    @staticmethod
    def make(
        x: Tensor,
        weight: Tensor,
        plan: WeightPlan,
        targets: Tensor,
        precision: GemmChoice,
        ignore_index: int,
        chunk_rows: int | None,
    ) -> _Task:
        shape = weight.shape
        if x.dim() != 2 or len(shape) != 2 or x.shape[1] != shape[1] or targets.shape != x.shape[:1]:
            raise UsageError(
                "head_loss: expected x [N, D], weight [V, D] and targets [N], got "
                f"{list(x.shape)}, {list(shape)} and {list(targets.shape)}"
            )
        lp = "fp8" in tuple(precision)
        if lp and (shape[0] % MULTIPLE or shape[1] % MULTIPLE):
            raise UsageError(
                f"head_loss: FP8 products need multiples of {MULTIPLE}, but the weight is {list(shape)}; pad the "
                "vocabulary, or take bf16 for the head"
            )
        if chunk_rows is not None and (chunk_rows < 1 or (lp and chunk_rows % MULTIPLE)):
            raise UsageError(f"head_loss: chunk_rows={chunk_rows} must be a positive multiple of {MULTIPLE}")
        rows = chunk_rows or default_chunk_rows(len(x), shape[0])
        return _Task(plan, targets.contiguous(), precision, ignore_index, rows)

    @torch.no_grad()
    def run(
        self, x: Tensor, weight: Tensor, operand: Operand | None, need_x: bool, need_weight: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The loss and, where needed, the gradients of x (BF16) and of the weight (FP32)."""
        rows, targets = len(x), self.targets
        source = self._source(x, operand or Operand(), need_x or need_weight, need_weight)
        if self.precision.grad_weight == "fp8" and need_weight and rows % MULTIPLE:
            # That product sums over rows. The rows added are ignored, so they count nowhere.
            source, targets = _padded(source, targets, -rows % MULTIPLE, self.ignore_index)
        counted = (targets != self.ignore_index).sum()
        factor = counted.clamp(min=1).float().reciprocal()

        total = torch.zeros((), device=x.device)
        grad_x = torch.empty(rows, x.shape[1], dtype=BF16, device=x.device) if need_x else None
        grad_weight: Tensor | None = None
        use = self.weight.use(weight, record=need_x or need_weight, backward=need_x)
        for start in range(0, len(targets), self.chunk_rows):
            part = slice(start, start + self.chunk_rows)
            piece = _rows(source, part)
            loss, d = self._chunk(piece, use, start, targets[part], factor, need_x, need_weight)
            total += loss.sum()
            if grad_x is not None:
                into = grad_x[part]
                into.copy_(backward_input(d, use, self.precision)[: len(into)])
            if need_weight:
                share = backward_weight(d, piece, self.precision, weight=use)
                grad_weight = share if grad_weight is None else grad_weight.add_(share)
            del d  # before the next chunk's logits are made
        return total / counted, grad_x, grad_weight

    def _chunk(
        self,
        x: Operand,
        use: Weight,
        start: int,
        targets: Tensor,
        factor: Tensor,
        need_x: bool,
        need_weight: bool,
    ) -> tuple[Tensor, Operand]:
        """Losses of a chunk's rows, and the gradient of its logits as the products want it; the logits end here."""
        logits = forward_output(x, use, self.precision)
        events.report_tensor("activation", HEAD, logits)
        formats = {self.precision.grad_input} if need_x else set()
        formats |= {self.precision.grad_weight} if need_weight else set()
        d = Operand()
        if formats == {"bf16"}:
            loss, hp = loss_gradient(logits, targets, factor, self.ignore_index, out=logits)
            events.report_tensor("gradient", HEAD, hp)
            return loss, Operand(hp)
        lse, loss = softmax_statistics(logits, targets, self.ignore_index)
        if "fp8" in formats:
            transposed = need_weight and self.precision.grad_weight == "fp8"
            lp, lp_t = dlogits_lp(logits, targets, lse, E4M3, self.ignore_index, None, transposed, start)
            d = Operand(None, lp, lp_t, factor / UNIT_SCALE[E4M3])
        if "bf16" in formats:
            d = d._replace(hp=dlogits(logits, targets, lse, factor, self.ignore_index, out=logits))
        d.report("gradient", HEAD)
        return loss, d

    def _source(self, x: Tensor, given: Operand, training: bool, need_weight: bool) -> Operand:
        """x in the formats that its two products read: what was given, and what is missing made from x."""
        formats = {self.precision.output} | ({self.precision.grad_weight} if need_weight else set())
        transposed = need_weight and self.precision.grad_weight == "fp8"
        if "fp8" in formats and given.lp is None:
            amax = cast.max_abs(x)
            if self.weight.scales is not None and training:
                self.weight.scales.notice(amax)
            scale = fitting_scale(amax, FP8_MAX[E4M3])
            lp, lp_t = cast.cast_transpose(x, scale, E4M3) if transposed else (cast.cast(x, scale, E4M3), None)
            given = Operand(given.hp, lp, lp_t, scale.reciprocal())
        if transposed:
            given = given.transposed()
        return given._replace(hp=x.to(BF16)) if "bf16" in formats and given.hp is None else given


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, task: _Task, operand: Operand | None) -> Tensor:
        need_x, need_weight, *_ = ctx.needs_input_grad
        loss, *ctx.grads = events.run_in_scope(HEAD, task.run, x, weight, operand, need_x, need_weight)
        ctx.dtypes = x.dtype, gradient_dtype(weight)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise UsageError(DOUBLE_BACKWARD)
        if ctx.grads is None:  # they were scaled in place, and belong to others now
            raise UsageError(
                "head_loss: backward ran twice through one loss; its gradients were made in forward, and were let go: "
                "give the first one retain_graph=True"
            )
        made = ctx.grads
        if graph_is_kept():
            made = [None if gradient is None else gradient.clone() for gradient in made]
        else:
            ctx.grads = None
        grad_x, grad_weight = (
            None if gradient is None else events.run_in_scope(HEAD, rescale_, gradient, grad).to(dtype)
            for gradient, dtype in zip(made, ctx.dtypes, strict=True)
        )
        return grad_x, grad_weight, None, None


def _rows(x: Operand, part: slice) -> Operand:
    """Some rows of an operand, without a copy."""
    return Operand(
        x.hp[part] if x.hp is not None else None,
        x.lp[part] if x.lp is not None else None,
        x.lp_t[:, part] if x.lp_t is not None else None,
        x.inv_scale,
    )


def _padded(x: Operand, targets: Tensor, more: int, ignore_index: int) -> tuple[Operand, Tensor]:
    """The operand with rows of zeros added, and ignored targets for them."""

    def below(t: Tensor | None, sides: tuple[int, ...]) -> Tensor | None:
        if t is None:
            return None
        wide = t if t.dtype is BF16 else t.view(torch.uint8)  # a zero in FP8 is a zero byte
        return F.pad(wide, sides).view(t.dtype)

    padded = Operand(below(x.hp, (0, 0, 0, more)), below(x.lp, (0, 0, 0, more)), below(x.lp_t, (0, more)), x.inv_scale)
    return padded, F.pad(targets, (0, more), value=ignore_index)
