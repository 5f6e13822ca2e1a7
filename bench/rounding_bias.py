"""Which roundings of FP8 leave errors of gradients that all batches share, emulated in plain torch.

usage: python bench/rounding_bias.py [--task gpt2-124m] [--data FOLDER] [--steps 700] [--batches 64] [--reference bf16]
                                     [--vocab N] [--batch N] [--context N] [--device cpu]
(JSON to $OUT/rounding-bias.json where OUT is set)

Trains the reference as bench/gradient_bias.py does; its columns are those of that script. The operands of linear layers
are then rounded with the scale of the tensor, and multiplied as FP32 numbers (TF32 on a GPU). Two comparisons:

    forward     inputs and weights rounded, gradients not: another model, and the exact gradient of it. Beside the model
                without rounding
    backward    the same forward with rounded gradients. Beside the exact gradients of the same forward, so that only
                errors of backward are left. "unbiased" is the rounding of gradients of logits in narrowgauge's kernels
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
from gradient_bias import Comparison, Sums, check, compare, make_parser, named_gradients, print_errors

from narrowgauge import UsageError
from narrowgauge.kernels import cross_entropy as ce

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


class Rounding(NamedTuple):
    """The formats of the operands of a layer; None: not rounded."""

    x: torch.dtype | None = None
    weight: torch.dtype | None = None
    grad: torch.dtype | None = None
    unbiased: bool = False
    """Whether gradients are rounded up or down, so that they are right on average, instead of to the nearest."""


FP8 = Rounding(E4M3, E4M3)
NONE = Rounding()
FORWARD = {
    "forward: all": (FP8, FP8),
    "forward: the head's weight": (NONE, Rounding(weight=E4M3)),
    "forward: the head's input": (NONE, Rounding(x=E4M3)),
    "forward: weights of other layers": (Rounding(weight=E4M3), NONE),
    "forward: inputs of other layers": (Rounding(x=E4M3), NONE),
}
"""The rounding of other layers and of the head."""
BACKWARD = {
    "backward: layers in E5M2": (FP8._replace(grad=E5M2), FP8),
    "backward: layers in E5M2, unbiased": (FP8._replace(grad=E5M2, unbiased=True), FP8),
    "backward: layers in E4M3": (FP8._replace(grad=E4M3), FP8),
    "backward: head in E4M3": (FP8, FP8._replace(grad=E4M3)),
    "backward: head in E4M3, unbiased": (FP8, FP8._replace(grad=E4M3, unbiased=True)),
    "backward: as fp8": (FP8._replace(grad=E5M2), FP8._replace(grad=E4M3, unbiased=True)),
}


def round_to(tensor: Tensor, dtype: torch.dtype | None, unbiased: bool = False) -> Tensor:
    if dtype is None:
        return tensor
    scale = torch.finfo(dtype).max / tensor.abs().amax().float().clamp(min=1e-30)
    rows = tensor.float().reshape(-1, tensor.shape[-1]) * scale
    largest = torch.finfo(dtype).max
    rows = (ce.dither(rows, dtype) if unbiased else rows).clamp(-largest, largest)
    return (rows.to(dtype).float() / scale).view(tensor.shape).to(tensor.dtype)


class RoundedProduct(torch.autograd.Function):
    """A product of rounded operands, whose backward reads the same ones."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, rounding: Rounding) -> Tensor:
        x, weight = round_to(x, rounding.x), round_to(weight, rounding.weight)
        ctx.save_for_backward(x, weight)
        ctx.rounding = rounding
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        grad = round_to(grad, ctx.rounding.grad, ctx.rounding.unbiased)
        rows = grad.reshape(-1, grad.shape[-1])
        return grad @ weight, rows.t() @ x.reshape(-1, x.shape[-1]), None


def install(model: nn.Module, others: Rounding, head: Rounding) -> None:
    """Round the operands of all linear layers."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):

            def forward(
                x: Tensor, layer: nn.Linear = module, own: Rounding = head if "head" in name else others
            ) -> Tensor:
                product: Tensor = RoundedProduct.apply(x, layer.weight, own)
                return product if layer.bias is None else product + layer.bias

            module.forward = forward  # type: ignore[method-assign]


class Emulation(Comparison):
    """Gradients with emulated roundings at one place of a training."""

    def emulate(self, name: str, others: Rounding, head: Rounding) -> tuple[Sums, dict[str, Tensor]]:
        """Return sums of gradients over both halves of the batches, and the gradients of the first one."""
        with torch.device(self.device):
            model = self.task.model()
        model.load_state_dict(self.weights)
        install(model, others, head)
        sums: Sums = {}
        first: dict[str, Tensor] = {}
        losses = []
        for index, batch in enumerate(self.read_batches(self.args.steps, self.args.batches)):
            loss = self.task.loss(model, batch)
            loss.backward()
            losses.append(loss.item())
            for path, grad in named_gradients(model):
                if index == 0:
                    first[path] = grad.clone()
                    sums[path] = [torch.zeros_like(grad) for _ in range(2)]
                sums[path][index % 2] += grad
            model.zero_grad()
        print(f"{name}: loss {sum(losses) / len(losses):.5f}", flush=True)
        return sums, first


def main() -> int:
    args = make_parser(__doc__).parse_args()
    torch.set_float32_matmul_precision("high")
    results: dict[str, Any] = {"task": args.task, "steps": args.steps, "batches": args.batches, "errors": {}}
    try:
        check(args)
        emulation = Emulation(args)
        emulation.train()
        wanted = emulation.emulate("no rounding", NONE, NONE)
        for roundings in (FORWARD, BACKWARD):
            if roundings is BACKWARD:
                wanted = emulation.emulate("exact gradients of the rounded forward", FP8, FP8)
            for name, (others, head) in roundings.items():
                errors = compare(emulation.emulate(name, others, head), wanted, args.batches // 2)
                results["errors"][name] = errors
                print_errors(name, errors)
                if os.environ.get("OUT"):
                    Path(os.environ["OUT"], "rounding-bias.json").write_text(json.dumps(results, indent=1))
    except (UsageError, OSError, ValueError) as error:
        print(f"rounding_bias: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
