"""The head of a language model and its loss as one function, which never stores all logits at once.

    for each chunk of rows:
        logits      = x @ weight.T                              BF16, a step's largest tensor; freed after its chunk
        lse, loss   = statistics(logits)
        d           = (softmax - targets) / counted rows        BF16 in place, or FP8 in one or both layouts
        grad_input  = d @ weight
    for each group of chunks:
        grad_weight += d.T @ x                                  summed in FP32; in FP8, d.T of a group is kept for this
    loss = sum of losses / counted rows

Forward also computes the gradients, while the logits exist. Backward multiplies them by the gradient of the loss (a
loss scale, 1/accumulate), which costs a pass only if that is not 1. Without gradients only the loss is computed. Eager
PyTorch stores the logits in BF16, their FP32 copy, its log-softmax and its gradient, up to 14 bytes per logit. Here it
is at most 3 bytes per logit of one chunk, and 1 per logit of one group. A product of a weight's gradient reads and
writes all of it, so that groups are larger than chunks. Of tensors that grow with the rows, only grad_input is made
here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from narrowgauge import events
from narrowgauge.errors import UsageError
from narrowgauge.kernels import cast, compute_scale
from narrowgauge.kernels.cross_entropy import (
    IGNORE,
    PLAIN,
    UNIT_SCALE,
    LossForm,
    compute_grad_logits,
    compute_grad_logits_fp8,
    compute_loss_and_grad,
    compute_softmax_stats,
    rescale_,
)
from narrowgauge.kernels.fp8_formats import FP8_MAX
from narrowgauge.nn.fused.casts import get_wide_dtype
from narrowgauge.nn.fused.head_input import InputReader, cut, pad_rows
from narrowgauge.nn.fused.rehearse import rehearse
from narrowgauge.nn.products.gemm import (
    ALL_BF16,
    BF16,
    DOUBLE_BACKWARD,
    E4M3,
    MULTIPLE,
    GemmChoice,
    compute_grad_bias,
    compute_grad_input,
    compute_grad_weight,
    compute_output,
    is_graph_retained,
)
from narrowgauge.parameters import gradient_dtype
from narrowgauge.scaling.operand import WIDE, Operand
from narrowgauge.scaling.tensor import TensorScales
from narrowgauge.weight_copies.casts import BoundWeight, PaddedWeight, WeightCastPlan

HEAD = "lm_head"
"""Path of the module that computes the logits."""
CHUNK_BYTES = 1 << 30
"""Default limit of BF16 logits stored at once, where grad_weight's product is in FP8 and reads groups of chunks."""
SMALLEST_LIMIT = 256 << 20
"""That limit is smaller where four chunks are enough for all logits, but not smaller than this."""
WIDE_CHUNK_BYTES = 4 << 30
"""The same where it is not, so that each chunk adds to the weight's gradient."""
GROUP_BYTES = 2 << 30
"""Limit of the transposed FP8 gradients of logits stored at once. GPT-2's 65,536 x 50,304 take two groups."""
SUM_BYTES = 256 << 20
"""grad_weight is summed over groups piece by piece, so that there is no second one: limit of a piece in FP32."""
PADDED = 64
"""The columns of logits are padded to a multiple of this."""
CHUNK_MULTIPLE = 128
"""The rows of a chunk are a multiple of this, the tile of a GEMM."""


@torch.compiler.disable  # type: ignore[untyped-decorator]
def compute_head_loss(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    plan: WeightCastPlan | None = None,
    precision: GemmChoice = ALL_BF16,
    operand: Operand | None = None,
    ignore_index: int = IGNORE,
    chunk_rows: int | None = None,
    reduction: str = "mean",
    bias: Tensor | None = None,
    form: LossForm = PLAIN,
) -> Tensor:
    """Return the cross-entropy of ``x @ weight.T + bias``, in FP32, of the rows whose target is not ``ignore_index``.

    torch.compile does not trace this function.

    Args:
        x: Normalized hidden state [N, D].
        weight: The parameter [V, D].
        targets: Token ids [N].
        plan: How to cast the weight; None uses its current amax.
        precision: The format of each of the three products.
        operand: x in FP8, if its producer wrote that; only BF16 products then read x. None: x is cast here.
        ignore_index: Rows with this target do not count.
        chunk_rows: Rows per chunk; None chooses by memory.
        reduction: "mean" over the counted rows, or "sum".
        bias: The head's bias [V], or None.
        form: A factor and a soft cap of the logits, and label smoothing.
    """
    plan = plan or WeightCastPlan(gradient_dtype=gradient_dtype(weight))
    task = _HeadCall.make(x, weight, plan, targets, precision, ignore_index, chunk_rows, reduction == "sum", form)
    with torch.autocast(x.device.type, enabled=False):
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias)):
            loss: Tensor = _HeadLoss.apply(x, weight, bias, task, operand)  # type: ignore[no-untyped-call]
            return loss
        needs = (False, False, False)
        return events.run_in_scope(task.path, task.run, x.detach(), weight, bias, operand, needs)[0]


def choose_chunk_rows(rows: int, vocab: int, limit: int = WIDE_CHUNK_BYTES) -> int:
    """Return the rows per chunk: as many as the limit of bytes allows, divided evenly among the chunks.

    If up to twice as many chunks divide the rows without a rest, there are so many: products of one shape only.
    """
    most = max(CHUNK_MULTIPLE, limit // (2 * vocab) // CHUNK_MULTIPLE * CHUNK_MULTIPLE)
    chunks = max(1, -(-rows // most))
    chunks = next((n for n in range(chunks, 2 * chunks) if rows % (n * CHUNK_MULTIPLE) == 0), chunks)
    return max(1, -(-rows // (chunks * CHUNK_MULTIPLE))) * CHUNK_MULTIPLE


def choose_group_rows(rows: int, vocab: int, chunk_rows: int) -> int:
    """Return the rows per group: whole chunks, as many as GROUP_BYTES allows, divided evenly among the groups."""
    chunks = -(-rows // chunk_rows)
    most = max(1, GROUP_BYTES // (vocab * chunk_rows))
    return -(-chunks // max(1, -(-chunks // most))) * chunk_rows


@dataclass(frozen=True)
class _HeadCall:
    """One call of the head: everything but the tensors that need gradients."""

    weight: WeightCastPlan
    targets: Tensor
    precision: GemmChoice
    ignore_index: int
    chunk_rows: int
    summed: bool = False
    """Whether the losses of rows are added and not averaged."""
    form: LossForm = PLAIN

    @property
    def path(self) -> str:
        return self.weight.path or HEAD

    @staticmethod
    def make(
        x: Tensor,
        weight: Tensor,
        plan: WeightCastPlan,
        targets: Tensor,
        precision: GemmChoice,
        ignore_index: int,
        chunk_rows: int | None,
        summed: bool = False,
        form: LossForm = PLAIN,
    ) -> _HeadCall:
        shape = weight.shape
        if x.dim() != 2 or len(shape) != 2 or x.shape[1] != shape[1] or targets.shape != x.shape[:1]:
            raise UsageError(
                "head_loss: expected x [N, D], weight [V, D] and targets [N], got "
                f"{list(x.shape)}, {list(shape)} and {list(targets.shape)}"
            )
        lp = "fp8" in tuple(precision)
        if lp and (shape[0] % MULTIPLE or shape[1] % MULTIPLE):
            raise UsageError(
                f"head_loss: FP8 products need dimensions that are multiples of {MULTIPLE}, but the weight is "
                f"{list(shape)}; pad the vocabulary, or use bf16 for the head"
            )
        if chunk_rows is not None and (chunk_rows < 1 or (lp and chunk_rows % MULTIPLE)):
            raise UsageError(f"head_loss: chunk_rows={chunk_rows} must be a positive multiple of {MULTIPLE}")
        limit = WIDE_CHUNK_BYTES
        if precision.grad_weight == "fp8":
            limit = min(CHUNK_BYTES, max(SMALLEST_LIMIT, len(x) * shape[0] * 2 // 4))
        rows = chunk_rows or choose_chunk_rows(len(x), shape[0], limit)
        return _HeadCall(plan, targets.contiguous(), precision, ignore_index, rows, summed, form)

    @torch.no_grad()
    def run(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, operand: Operand | None, needs: tuple[bool, bool, bool]
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Return the loss and, if needed, the gradients of x (as grad_input writes it), weight and bias (FP32)."""
        need_input, need_weight, need_bias = needs
        rows, targets = len(x), self.targets
        source = self._make_reader(x, operand or Operand(), any(needs), need_weight)
        counted = (targets != self.ignore_index).sum()
        factor = torch.ones((), device=x.device) if self.summed else counted.clamp(min=1).float().reciprocal()
        if self.form.multiplier is not None:
            factor = factor * self.form.multiplier
        added = None if bias is None else bias.detach().to(WIDE.get(self.precision.output, BF16))

        total = torch.zeros((), device=x.device)
        made = WIDE.get(self.precision.grad_input, BF16)
        grad_input = torch.empty(rows, x.shape[1], dtype=made, device=x.device) if need_input else None
        grad_weight: Tensor | None = None
        grad_bias: Tensor | None = None
        bound = self.weight.use(weight, record=any(needs), backward=need_input)
        missing = 0 if "fp8" in self.precision else -len(weight) % PADDED
        use = PaddedWeight(bound, missing) if missing else bound
        if added is not None and missing:
            added = F.pad(added, (0, missing))
        group_rows = self.chunk_rows
        if need_weight and self.precision.grad_weight == "fp8":
            group_rows = choose_group_rows(rows, len(weight), self.chunk_rows)
        for group in cut(slice(0, rows), group_rows):
            d_t = self._allocate_transposed(len(weight), group, x.device, need_weight)
            for part in cut(group, self.chunk_rows):
                piece, chosen, into_t = source.read(part), targets[part], None
                if d_t is not None:  # grad_weight sums over rows; rows with ignored targets add nothing
                    piece, chosen = pad_rows(piece, chosen, MULTIPLE, self.ignore_index)
                    into_t = d_t.narrow(1, part.start - group.start, len(chosen))
                loss, d = self._run_chunk(piece, use, added, part.start, chosen, factor, needs, into_t)
                total += loss.sum()
                if grad_input is not None:
                    into = grad_input[part]
                    if len(chosen) == len(into):
                        compute_grad_input(d, use, self.precision, into)
                    else:  # with rows of padding
                        into.copy_(compute_grad_input(d, use, self.precision)[: len(into)])
                if part.stop == rows:
                    use.release()  # grad_weight, where most memory is taken, does not read it
                if need_bias:
                    share = compute_grad_bias(d)
                    grad_bias = share if grad_bias is None else grad_bias.add_(share)
                if need_weight and d_t is None:
                    grad_weight = self._add_grad_weight(grad_weight, d, piece, use)
                del d  # before the next chunk's logits are made
            if d_t is not None:
                d = Operand(None, None, d_t, factor / UNIT_SCALE[E4M3])
                grad_weight = self._add_grad_weight(grad_weight, d, source.read_transposed(group), use)
                del d
            del d_t
        if missing:
            grad_weight, grad_bias = (None if g is None else g[: len(weight)] for g in (grad_weight, grad_bias))
        return total if self.summed else total / counted, grad_input, grad_weight, grad_bias

    def _run_chunk(
        self,
        x: Operand,
        use: BoundWeight | PaddedWeight,
        bias: Tensor | None,
        start: int,
        targets: Tensor,
        factor: Tensor,
        needs: tuple[bool, bool, bool],
        into_t: Tensor | None,
    ) -> tuple[Tensor, Operand]:
        """Return the losses of a chunk's rows, and the gradient of its logits as an operand; frees the logits.

        ``into_t`` takes that gradient transposed, in FP8.
        """
        need_input, need_weight, need_bias = needs
        whole = compute_output(x, use, self.precision, bias)
        logits = whole[:, : whole.shape[1] - use.missing] if isinstance(use, PaddedWeight) else whole
        events.report_tensor("activation", self.path, logits)
        formats = {self.precision.grad_input} if need_input else set()
        formats |= {self.precision.grad_weight} if need_weight or need_bias else set()
        d = Operand()
        if formats and "fp8" not in formats:
            loss, hp = compute_loss_and_grad(logits, targets, factor, self.ignore_index, logits, self.form)
            events.report_tensor("gradient", self.path, hp)
            return loss, Operand(whole)  # columns of padding are zero, as the weight's rows are
        lse, loss = compute_softmax_stats(logits, targets, self.ignore_index, self.form)
        if "fp8" in formats:
            lp, lp_t = compute_grad_logits_fp8(
                logits, targets, lse, E4M3, self.ignore_index, None, False, start, self.form, into_t
            )
            d = Operand(None, lp, lp_t, factor / UNIT_SCALE[E4M3])
        if "bf16" in formats:
            hp = compute_grad_logits(logits, targets, lse, factor, self.ignore_index, logits, self.form)
            d = d._replace(hp=hp)
        d.report("gradient", self.path)
        return loss, d

    def _allocate_transposed(self, vocab: int, group: slice, device: torch.device, need_weight: bool) -> Tensor | None:
        """Allocate the transposed gradient of a group's logits, if grad_weight reads it."""
        if not need_weight or self.precision.grad_weight != "fp8":
            return None
        return torch.empty(vocab, -(-(group.stop - group.start) // MULTIPLE) * MULTIPLE, dtype=E4M3, device=device)

    def _add_grad_weight(self, total: Tensor | None, d: Operand, x: Operand, use: BoundWeight | PaddedWeight) -> Tensor:
        """Add a share to the gradient of the weight, some of its rows at a time; without a sum, return it."""
        if total is None:
            return compute_grad_weight(d, x, self.precision, weight=use)
        step = max(CHUNK_MULTIPLE, SUM_BYTES // (4 * total.shape[1]) // CHUNK_MULTIPLE * CHUNK_MULTIPLE)
        for part in cut(slice(0, len(total)), step):
            hp, d_t = None if d.hp is None else d.hp[:, part], None if d.lp_t is None else d.lp_t[part]
            total[part] += compute_grad_weight(Operand(hp, None, d_t, d.inv_scale), x, self.precision, weight=use)
        return total

    def _make_reader(self, x: Tensor, given: Operand, training: bool, need_weight: bool) -> InputReader:
        """Return what reads rows of x; formats missing in ``given`` are made from x."""
        formats = {self.precision.output} | ({self.precision.grad_weight} if need_weight else set())
        scale: Tensor | None = None
        if "fp8" in formats and given.lp is None:
            amax = cast.max_abs(x)
            if isinstance(self.weight.scales, TensorScales) and training:
                self.weight.scales.note_amax(amax)
            scale = compute_scale(amax, FP8_MAX[E4M3])
        return InputReader(x, given, scale, None if scale is None else scale.reciprocal(), get_wide_dtype(formats))


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, task: _HeadCall, operand: Operand | None
    ) -> Tensor:
        needs = tuple(ctx.needs_input_grad[:3])
        how = needs, task.precision, task.summed, task.form, bias is None, operand is None
        run = partial(task.run, x, weight, bias, operand, needs)
        rehearse(task.weight.scales, x, ("head", weight.shape, weight.dtype, how), run)
        loss, *ctx.grads = events.run_in_scope(task.path, task.run, x, weight, bias, operand, needs)
        ctx.dtypes = x.dtype, gradient_dtype(weight), None if bias is None else bias.dtype
        ctx.path = task.path
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise UsageError(DOUBLE_BACKWARD)
        if ctx.grads is None:  # they were scaled in place and handed to autograd
            raise UsageError(
                "head_loss: backward ran twice through one loss, but the gradients computed in forward are freed after "
                "the first; pass retain_graph=True to the first backward"
            )
        made = ctx.grads
        if is_graph_retained():
            made = [None if gradient is None else gradient.clone() for gradient in made]
        else:
            ctx.grads = None
        grads = [
            None if gradient is None else events.run_in_scope(ctx.path, rescale_, gradient, grad).to(dtype)
            for gradient, dtype in zip(made, ctx.dtypes, strict=True)
        ]
        return *grads, None, None
