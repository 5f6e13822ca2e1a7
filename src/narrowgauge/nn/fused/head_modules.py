"""Module changes of heads: logits that are computed late, and in models built like the built-in ones head and loss as
one function, or the whole model as a chain."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from narrowgauge.kernels.cross_entropy import LossForm
from narrowgauge.nn.blocks.find import has_hooks
from narrowgauge.nn.blocks.spec import BlockSpec, BranchSpec, NormSpec
from narrowgauge.nn.fused import blocks, head
from narrowgauge.nn.fused.lazy_logits import HeadSource, make_lazy
from narrowgauge.nn.fused.modules import FusedBlock, make_call
from narrowgauge.nn.fused.norm import run_norm
from narrowgauge.nn.module_changes import Change, find_change, original_class
from narrowgauge.nn.products.bf16_for_now import get_current
from narrowgauge.nn.products.gemm import GemmChoice
from narrowgauge.weight_copies.casts import WeightCastPlan

LATE_READ = (
    "logits were read after optimizer.step(): these were computed with the new weights of the head. From now on logits "
    "are computed in every forward, which takes more time and memory; read them before the step to avoid that"
)


class LazyHead(Change):
    """A head that returns ``LazyLogits``, so that a loss computed from them needs no logits."""

    differentiable_twice = False

    def __init__(self, weight: WeightCastPlan, choice: GemmChoice) -> None:
        self.weight, self.choice = weight, choice
        self.is_read_late = False
        """Whether the loop reads logits after the optimizer's step, so that they must exist before it."""

    def _note_late_read(self) -> None:
        if not self.is_read_late:
            self.is_read_late = True
            warnings.warn(LATE_READ, stacklevel=2)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def run(self, module: Any, inner: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else next(iter(kwargs.values()))
        if self.is_read_late or not torch.is_grad_enabled() or not module.training or has_hooks(module):
            return inner(x)
        kind = x.device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        weight, bias, choice = module.weight, module.bias, get_current(self.choice, self.weight.stored_scale)

        def loss(rows: Tensor, targets: Tensor, ignore_index: int, reduction: str, form: LossForm) -> Tensor:
            made: Tensor = head.compute_head_loss(
                rows, weight, targets, plan=self.weight, precision=choice, ignore_index=ignore_index,
                reduction=reduction, bias=bias, form=form,
            )  # fmt: skip
            return made

        parameters = (weight,) if bias is None else (weight, bias)
        source = HeadSource(inner, loss, parameters, weight.shape[0], autocast, self._note_late_read)
        return make_lazy(x, source, autocast or x.dtype)


class FusedHead(Change):
    """Norm, head and loss as one function if there are targets; without targets the model computes as before."""

    method = "finish"
    differentiable_twice = False

    def __init__(self, weight: WeightCastPlan, choice: GemmChoice, norm: NormSpec) -> None:
        self.weight, self.choice, self.norm = weight, choice, norm

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def run(self, module: Any, inner: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        x, targets = args
        if targets is None or not x.numel():
            return inner(x, targets)
        rows = run_norm(x, module.norm.weight, module.norm.eps, self.norm.kind)
        return head.compute_head_loss(
            rows,
            module.lm_head.weight,
            targets.flatten(),
            plan=self.weight,
            precision=get_current(self.choice, self.weight.stored_scale),
        )


def can_chain(spec: BlockSpec) -> bool:
    """Whether the next block may add a block's last branch as its projection made it, and there is no dropout."""
    places = (spec.branch1.dropout, spec.dropout, spec.attention.dropout)
    return spec.order == "pre" and spec.branch2 == BranchSpec() and not any(places)


class FusedTrunk(Change):
    """All blocks, last norm, head and loss as one chain, in which a block's kernels write the next block's operands."""

    method = "trunk"
    differentiable_twice = False

    def __init__(self, weight: WeightCastPlan, choice: GemmChoice, norm: NormSpec) -> None:
        self.weight, self.choice, self.norm = weight, choice, norm

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def run(self, module: Any, inner: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        x, targets, *extra = args
        chain, last = list(module.blocks), module.norm
        fused = [find_change(block, FusedBlock) for block in chain]
        changes = [change for change in fused if change is not None]
        whole = len(changes) == len(chain) and x.numel() and not any(map(has_hooks, (*chain, last, module.lm_head)))
        forms = zip(changes, chain, strict=False)
        if targets is None or not whole or not all(change.has_fused_form(block) for change, block in forms):
            return inner(*args)
        if not all(can_chain(change.plan.spec) for change in changes):
            return inner(*args)
        plans = [change.get_plan(x) for change in changes]
        calls = []
        for block in chain:
            own_forward = functools.partial(original_class(block).forward, block)
            call, _ = make_call(block, own_forward, (x, *extra), {})
            assert call is not None
            calls.append(call)
        own = [change.get_parts(block).gather() for change, block in zip(changes, chain, strict=True)]
        stream, branch, link = blocks.run_chain(plans, x, own, calls, changes[0].graphs)
        norm = replace(self.norm, eps=last.eps)
        rows = blocks.run_last_norm(stream, branch, link, last.weight, norm, plans[-1])
        del stream, branch  # the norm keeps what its backward needs
        loss: Tensor = head.compute_head_loss(
            rows,
            module.lm_head.weight,
            targets.flatten(),
            plan=self.weight,
            precision=get_current(self.choice, self.weight.stored_scale),
        )
        return loss
