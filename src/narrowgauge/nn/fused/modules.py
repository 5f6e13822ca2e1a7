"""Module changes for models built like the built-in ones: fused blocks, and a fused head with the loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.nn.fused import blocks, head
from narrowgauge.nn.fused.norm import run_norm
from narrowgauge.nn.module_changes import Change, find_change
from narrowgauge.nn.products.gemm import GemmChoice
from narrowgauge.nn.products.weight_casts import WeightCastPlan


class FusedBlock(Change):
    """A block that runs as one function."""

    differentiable_twice = False

    def __init__(self, plan: blocks.BlockPlan, compile_attention: bool) -> None:
        self.plan, self.compile_attention = plan, compile_attention
        self._attend: blocks.Attend | None = None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def run(self, module: Any, inner: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        x, *extra = args
        if kwargs or not x.numel():
            return inner(*args, **kwargs)
        return blocks.run_block(self.plan, x, blocks.get_block_weights(module), self.attend(module), tuple(extra))

    def attend(self, module: Any) -> blocks.Attend:
        """Return the module's own attention, compiled on request."""
        if not self.compile_attention:
            attend: blocks.Attend = module.attend
            return attend
        if self._attend is None:
            self._attend = torch.compile(module.attend)
        return self._attend

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_attend": None}


class FusedHead(Change):
    """Norm, head and loss as one function if there are targets; without targets the model computes as before."""

    method = "finish"
    differentiable_twice = False

    def __init__(self, weight: WeightCastPlan, choice: GemmChoice, kind: str) -> None:
        self.weight, self.choice, self.kind = weight, choice, kind

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def run(self, module: Any, inner: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        x, targets = args
        if targets is None or not x.numel():
            return inner(x, targets)
        rows = run_norm(x, module.norm.weight, module.norm.eps, self.kind)
        return head.compute_head_loss(
            rows, module.lm_head.weight, targets.flatten(), plan=self.weight, precision=self.choice
        )


class FusedTrunk(Change):
    """All blocks, last norm, head and loss as one chain, in which a block's kernels write the next block's operands."""

    method = "trunk"
    differentiable_twice = False

    def __init__(self, weight: WeightCastPlan, choice: GemmChoice) -> None:
        self.weight, self.choice = weight, choice

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def run(self, module: Any, inner: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        x, targets, *extra = args
        chain, last = list(module.blocks), module.norm
        fused = [find_change(block, FusedBlock) for block in chain]
        whole = all(fused) and x.numel() and not any(_has_hooks(part) for part in (*chain, last, module.lm_head))
        if targets is None or not whole:
            return inner(*args)
        changes = [change for change in fused if change is not None]
        plans = [change.plan for change in changes]
        attends = [change.attend(block) for change, block in zip(changes, chain, strict=True)]
        own = [blocks.get_block_weights(block) for block in chain]
        stream, branch, link = blocks.run_chain(plans, x, own, attends, tuple(extra))
        rows = blocks.run_last_norm(stream, branch, link, last.weight, last.eps, plans[-1])
        loss: Tensor = head.compute_head_loss(
            rows, module.lm_head.weight, targets.flatten(), plan=self.weight, precision=self.choice
        )
        return loss


def _has_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks, so that it must be called as a module."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, name, None) for name in hooks)
