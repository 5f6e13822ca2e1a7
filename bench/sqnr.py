"""SQNR of a Llama feed-forward in FP8 against FP64: narrowgauge (delayed and current scaling) and torchao, same inputs.

usage: python bench/sqnr.py [WIDTH HIDDEN TOKENS]      (torchao where it is installed; CPU or GPU)
"""

import copy
import importlib.util
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from narrowgauge.nn.convert import convert

width, hidden, tokens = (int(a) for a in sys.argv[1:4]) if len(sys.argv) > 3 else (256, 688, 512)
device = "cuda" if torch.cuda.is_available() else "cpu"


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


def sqnr(value: torch.Tensor, exact: torch.Tensor) -> float:
    return float(10 * torch.log10(exact.square().sum() / (value.double() - exact).square().sum()))


def run(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    x = x.detach().requires_grad_()
    out = model(x)
    (out * target.to(out.dtype)).sum().backward()
    assert x.grad is not None
    grads = {f"{name[:-7]} grad_weight": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"output": out.detach(), "grad_input": x.grad, **grads}


torch.manual_seed(0)
plain = FeedForward().to(device)
x, target = torch.randn(tokens, width, device=device), torch.randn(tokens, width, device=device) * 1e-4
exact = run(copy.deepcopy(plain).double(), x.double(), target.double())
rows: dict[str, dict[str, float]] = {}
for recipe in (
    "fp8[products=all,scaling=current]",
    "fp8[products=all]",
    "fp8[products=all,gradients_format=e4m3]",
    "fp8[granularity=row,products=all]",
    "fp8[granularity=block,products=all]",
):
    model: Any = copy.deepcopy(plain)
    conversion = convert(model, recipe)
    for _ in range(2):
        found = run(model, x.bfloat16(), target.bfloat16())
        assert conversion.scales is not None
        conversion.scales.update()
    rows[str(recipe)] = {name: sqnr(found[name], exact[name]) for name in exact}
if importlib.util.find_spec("torchao"):
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    for name in ("tensorwise", "rowwise"):
        model = copy.deepcopy(plain).bfloat16()
        convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(name))
        found = run(model, x.bfloat16(), target.bfloat16())
        rows[f"torchao {name}"] = {key: sqnr(found[key], exact[key]) for key in exact}
print(f"{'dB, ' + device:42s}" + "".join(f"{key:>20s}" for key in exact))
for name, values in rows.items():
    print(f"{name:42s}" + "".join(f"{value:20.2f}" for value in values.values()))
