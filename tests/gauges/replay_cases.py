"""Planted causes: small models, each with one op that produces inf or NaN, and the expected result of replay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 16


@dataclass(frozen=True, kw_only=True)
class Case:
    """A cause and the expected result."""

    name: str
    culprit: Callable[[], nn.Module]
    """Creates the module with the cause; it is ``blocks.1.act`` of a Net."""
    module: str = "blocks.1.act"
    op: str
    kernel: str | None = None
    phase: str = "forward"
    kind: str = "nan"
    survives: bool = False
    recipe: str = "fp32"
    microbatch: int = 1
    batches: Callable[[], list[Any]] = lambda: [draw(0)]
    prepare: Callable[[nn.Module], None] | None = None
    """Changes the model before training."""
    loss: Callable[[nn.Module, Any], Tensor] = lambda model, batch: model(batch).float().square().mean()
    exact: bool = True
    """False if only the loss is nonfinite: the update is applied, so the captured weights are from after the step."""
    engine: dict[str, Any] = field(default_factory=dict)


def draw(number: int) -> Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(number))


def act(function: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    class Act(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return function(x)

    return Act


class Block(nn.Module):
    def __init__(self, culprit: nn.Module) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)
        self.act = culprit

    def forward(self, x: Tensor) -> Tensor:
        return x + self.act(self.fc(x))


class Net(nn.Module):
    """Two healthy blocks around the faulty one. Replay must not report its mask of -inf, which softmax absorbs."""

    def __init__(self, culprit: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block(nn.Tanh()), Block(culprit), Block(nn.Tanh())])
        self.outer = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        hidden = torch.arange(WIDTH, device=x.device) > 9
        x = x + torch.softmax(x.masked_fill(hidden, -torch.inf), -1)
        for block in self.blocks:
            x = block(x)
        return self.outer(x)


class Reciprocal(torch.autograd.Function):
    """Produces inf in forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x * 0.0).reciprocal()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return -grad


class BadGradient(torch.autograd.Function):
    """Produces NaN in backward; forward has no ctx."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        zero = x - x
        return grad + zero / zero


reciprocal, bad_gradient = Reciprocal.apply, BadGradient.apply  # references that exist before any replay


def layer_norm_by_hand(x: Tensor) -> Tensor:
    x = x * 0 + 1
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-8).sqrt()  # 1e-8 is 0 in FP16


def masked_row(x: Tensor) -> Tensor:
    hidden = torch.zeros_like(x, dtype=torch.bool)
    hidden[3] = True
    return torch.softmax(x.masked_fill(hidden, -torch.inf), -1)


def in_place(x: Tensor) -> Tensor:
    y = x * 1.0
    y[2].div_(y[2] - y[2])
    return y


def where_trick(x: Tensor) -> Tensor:
    """The branch that is not taken still has a gradient: 0 * inf."""
    return torch.where(x > 0, x, (x - x).sqrt())


class Lookup(nn.Module):
    """An embedding with a row of zeros, normalized to length 1."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(5, WIDTH, padding_idx=3)

    def forward(self, x: Tensor) -> Tensor:
        found = self.rows(torch.arange(len(x), device=x.device) % 5)
        return x + found / found.norm(dim=-1, keepdim=True)


class Recomputed(nn.Module):
    """Activation checkpointing by the user around the faulty op."""

    def __init__(self, function: Callable[[Tensor], Tensor], reentrant: bool) -> None:
        super().__init__()
        self.inside = act(function)()
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.inside, x, use_reentrant=self.reentrant)
        return result


def batches_with_nan() -> list[Any]:
    good, bad = draw(0), draw(1)
    bad[2, 5] = torch.nan
    return [good, bad]


def large_second() -> list[Any]:
    return [draw(0), draw(1) * 1e3]


def overflowing_logits(model: nn.Module, batch: Tensor) -> Tensor:
    logits = model(batch).float() * 1e6
    return F.cross_entropy(logits.half(), torch.zeros(len(batch), dtype=torch.long, device=batch.device))


def set_infinite_weight(model: nn.Module) -> None:
    with torch.no_grad():
        model.get_parameter("blocks.2.fc.weight")[0, 0] = torch.inf


def set_large_weight(model: nn.Module) -> None:
    with torch.no_grad():
        model.get_parameter("blocks.1.fc.weight").fill_(3e4)


class InnerGradient(nn.Module):
    """Has a backward inside forward, like a gradient penalty."""

    def forward(self, x: Tensor) -> Tensor:
        leaf = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad((leaf * 0 + 1).acos().sum(), leaf)
        return x + gradient


class Attention(nn.Module):
    """Attention in which all keys of the second sequence are padding."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(2, 4, WIDTH)
        padding = torch.tensor([False, True], device=x.device)[:, None].expand(2, 4)
        mixed: Tensor = self.inner(x, x, x, key_padding_mask=padding)[0]
        return mixed.reshape(8, WIDTH)


def hooked(x: Tensor) -> Tensor:
    y = x * 1
    y.register_hook(lambda grad: grad / (grad - grad))
    return y


CASES = [
    Case(name="log of zero", culprit=act(lambda x: (x - x).log()), op="aten.log", kind="inf"),
    Case(name="zero over zero", culprit=act(lambda x: (x - x) / (x - x)), op="aten.div"),
    Case(name="sqrt backward at zero", culprit=act(lambda x: (x - x).sqrt()), op="SqrtBackward0", kernel="aten.div",
         phase="backward", kind="inf"),
    Case(name="exp overflows fp16", culprit=act(lambda x: torch.exp_((x * 0 + 12).half())), op="aten.exp_", kind="inf",
         survives=True, recipe="fp16"),
    Case(name="matmul overflows fp16", culprit=act(lambda x: x / 1e5), module="blocks.1.fc", op="aten.addmm",
         kind="inf", survives=True, recipe="fp16", prepare=set_large_weight),
    Case(name="layer norm by hand in fp16", culprit=act(layer_norm_by_hand), op="aten.div", survives=True,
         recipe="fp16"),
    Case(name="softmax of a masked row", culprit=act(masked_row), op="aten._softmax"),
    Case(name="custom function, forward", culprit=act(lambda x: reciprocal(x)), op="Reciprocal",
         kernel="aten.reciprocal", kind="inf"),
    Case(name="custom function, backward", culprit=act(lambda x: bad_gradient(x)), op="BadGradient", kernel="aten.div",
         phase="backward"),
    Case(name="norm backward at zero", culprit=act(lambda x: x * (x * 0).square().sum(-1, keepdim=True).sqrt()),
         op="SqrtBackward0", kernel="aten.div", phase="backward", kind="inf"),
    Case(name="fractional power", culprit=act(lambda x: (-x.abs() - 1).pow(0.5)), op="aten.pow"),
    Case(name="negative power of zero, backward", culprit=act(lambda x: (x - x).pow(0.5)), op="PowBackward0",
         kernel="aten.pow", phase="backward", kind="inf"),
    Case(name="cross entropy of huge logits in fp16", culprit=nn.Tanh, loss=overflowing_logits, module="(loss)",
         op="aten._to_copy", kind="inf", survives=True, recipe="fp16"),
    Case(name="compiled", culprit=act(lambda x: (x - x).log()), op="aten.log", kind="inf", engine={"compile": True}),
    Case(name="recipe recomputes, forward", culprit=act(lambda x: (x - x).log()), op="aten.log", kind="inf",
         recipe="fp32[checkpoint=full]"),
    Case(name="recipe recomputes, backward", culprit=act(where_trick), op="SqrtBackward0", phase="backward",
         recipe="fp32[checkpoint=full]", kernel="aten.div"),
    Case(name="user recomputes, backward", culprit=lambda: Recomputed(where_trick, False), op="SqrtBackward0",
         module="blocks.1.act.inside", phase="backward", kernel="aten.div"),
    Case(name="user recomputes reentrantly, backward", culprit=lambda: Recomputed(where_trick, True),
         op="SqrtBackward0", module="blocks.1.act.inside", phase="backward", kernel="aten.div"),
    Case(name="second microbatch", culprit=act(lambda x: x / (x.amax() < 50)), batches=large_second, microbatch=2,
         op="aten.div", kind="inf", engine={"accumulate": 2}),
    Case(name="NaN in the batch", culprit=nn.Tanh, batches=batches_with_nan, microbatch=2, module="(batch)", op="input",
         engine={"accumulate": 2}),
    Case(name="infinite weight", culprit=nn.Tanh, prepare=set_infinite_weight, module="blocks.2.fc", op="parameter",
         kind="inf"),
    Case(name="loss scale overflows a gradient", culprit=act(lambda x: x * 1e4 - x.detach() * 1e4), op="MulBackward0",
         kernel="aten.mul", phase="backward", kind="inf", survives=True, recipe="fp16[loss_scale=16384.0]",
         loss=lambda model, batch: (model(batch) * 1e-2).sum()),
    Case(name="variance of one value", culprit=act(lambda x: x - x[:, :1].var(-1, keepdim=True)), op="aten.var"),
    Case(name="acos backward at the edge", culprit=act(lambda x: (x * 0 + 1).acos()), op="AcosBackward0",
         phase="backward", kind="inf"),
    Case(name="embedding", culprit=Lookup, op="aten.div"),
    Case(name="in place", culprit=act(in_place), op="aten.div_", kind="inf"),
    Case(name="fp8 linear", culprit=act(lambda x: (x.float() - x.float()).log()), op="aten.log", kind="inf",
         recipe="fp8[products=all]"),
    Case(name="number times infinity", culprit=act(lambda x: x.abs() * float("inf")), op="aten.mul", kind="inf"),
    Case(name="where takes the other branch", culprit=act(where_trick), op="SqrtBackward0", phase="backward"),
    Case(name="a gradient in forward", culprit=InnerGradient, op="AcosBackward0", phase="backward", kind="inf"),
    Case(name="attention to padding alone", culprit=Attention, module="blocks.1.act.inner", op="aten._softmax"),
    Case(name="targets all ignored", culprit=nn.Tanh, module="(loss)", op="aten.nll_loss_forward",
         loss=lambda model, batch: F.cross_entropy(model(batch), torch.full((8,), -100).to(batch.device)), exact=False),
    Case(name="mean of nothing", culprit=act(lambda x: x - x[x > 1e9].mean()), op="aten.mean"),
    Case(name="zero times a mask", culprit=act(lambda x: x * 0 * torch.where(x > 0, 0.0, -torch.inf)), op="aten.mul"),
    Case(name="gradient hook", culprit=act(hooked), module="(hook)", op="gradient hook", kernel="aten.div",
         phase="backward", kind="inf"),
    Case(name="bf16, lean", culprit=act(lambda x: (x - x).log()), op="aten.log", kind="inf", recipe="bf16-lean"),
]  # fmt: skip
