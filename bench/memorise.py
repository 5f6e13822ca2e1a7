"""How fast FP8 learns: losses of a transformers Llama that learns two batches by heart, step by step (needs a GPU).

usage: python bench/memorise.py [LAYERS] [NAME ...]       (default: 6 layers and everything; JSON to $OUT/memorise.json)

NAME: a recipe with or without fields (fp8, fp8[gradients_format=e4m3], fp8-lean), plain (BF16 autocast without
narrowgauge), or an emulation: operands of all linear layers but the head are rounded, products run in BF16:

    ROLES[:FORMAT[:GRANULARITY]]

    ROLES         x, w, gi, gw, or several with +: inputs, weights, gradients that grad_input and grad_weight read;
                  g is gi+gw; a trailing > rounds inputs or weights in forward only (x>, w>)
    FORMAT        e4m3 (default), e5m2; with sr, as in e5m2sr: stochastic rounding; with p, as in e4m3p: scales that
                  are powers of two
    GRANULARITY   tensor (default), row, or the number of columns that share a scale: 128

Emulations are joined with a slash: x+w/g:e5m2 is what fp8 does. ``first=ROLES`` leaves these roles of the first block
as they are, ``first.attention=ROLES``, ``first.mlp=ROLES`` and ``first.mlp.down_proj=ROLES`` those of its parts:
x+w/g:e5m2/first=x>+w>. Learning is measured by the loss of the ninth step: lower is faster. Recipes reduce it more
slowly than BF16; the emulations show why.
"""

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn

from narrowgauge import Engine

STEPS, ROWS, LENGTH, WORDS = 10, 4, 2048, 4096
BF16 = torch.bfloat16
DTYPES = {"e4m3": (torch.float8_e4m3fn, 448.0, 3, -6), "e5m2": (torch.float8_e5m2, 57344.0, 2, -14)}
NAMES = (
    "plain", "fp8", "fp8[gradients_format=e4m3]", "fp8[first_forward=bf16]",
    "fp8[gradients_format=e4m3,first_forward=bf16]", "x+w/g:e5m2", "g:e5m2", "g", "x", "x>", "w", "w>", "x+w+g",
    "x+w+g:e4m3:row", "x+w+g:e4m3:128", "x+w:e4m3p/g:e5m2p", "x+w/g:e5m2sr", "x+w/g:e5m2/first=x>+w>",
    "x+w+g/first=x>+w>", "x+w+g/first.attention=x>+w>", "x+w+g/first.mlp=x>+w>",
)  # fmt: skip


class Rounding(NamedTuple):
    """How one operand of a product is rounded."""

    format: str = "e4m3"
    granularity: str = "tensor"

    def apply(self, x: Tensor) -> Tensor:
        """Round a matrix whose last dimension is summed; return values that BF16 holds up to its own rounding."""
        dtype, largest, mantissa, lowest = DTYPES[self.format[:4]]
        values, shape = x.float(), x.shape
        if self.granularity == "tensor":
            top = values.abs().amax()
        else:
            if self.granularity != "row":
                values = values.view(*shape[:-1], -1, int(self.granularity))
            top = values.abs().amax(-1, keepdim=True)
        scale = largest / top.clamp(min=1e-30)
        if "p" in self.format[4:]:
            scale = torch.exp2(torch.floor(torch.log2(scale)))
        scaled = values * scale
        if "sr" in self.format[4:]:
            exponent = torch.floor(torch.log2(scaled.abs().clamp(min=1e-30))).clamp(min=lowest)
            step = torch.exp2(exponent - mantissa)
            scaled = (torch.floor(scaled / step + torch.rand_like(scaled)) * step).clamp(-largest, largest)
        return (scaled.to(dtype).float() / scale).view(shape).to(BF16)


Roundings = dict[str, Rounding]
"""By role: x, w (in forward), xb, wb (the same in backward), gi, gw."""


def list_roles(text: str) -> list[str]:
    """Return the roles of a text such as x+w>."""
    found = []
    for one in text.split("+"):
        if one == "g":
            found += ["gi", "gw"]
        elif one.endswith(">"):
            found.append(one[:-1])
        else:
            found += [one, f"{one}b"] if one in ("x", "w") else [one]
    return found


def read_emulation(text: str) -> tuple[Roundings, dict[str, list[str]]]:
    """Return the roundings, and by part of the first block the roles that it does without."""
    roundings: Roundings = {}
    without: dict[str, list[str]] = {}
    for part in text.split("/"):
        if part.startswith("first"):
            place, _, roles = part.partition("=")
            name = place.partition(".")[2]
            without[{"attention": "self_attn.", "mlp": "mlp."}.get(name, name)] = list_roles(roles)
        else:
            roles, *how = part.split(":")
            roundings |= {role: Rounding(*how) for role in list_roles(roles)}
    return roundings, without


class _Emulated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, roundings: Roundings) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).to(BF16)
        ctx.save_for_backward(rows, weight)
        ctx.roundings, ctx.shape = roundings, x.shape
        return (_round(rows, roundings, "x") @ _round(weight, roundings, "w").t()).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        rows, weight = ctx.saved_tensors
        grad = grad.reshape(-1, grad.shape[-1]).to(BF16)
        of_input = _round(grad, ctx.roundings, "gi") @ _round(weight.t(), ctx.roundings, "wb").t()
        turned, across = grad.t().contiguous(), rows.t().contiguous()
        of_weight = _round(turned, ctx.roundings, "gw") @ _round(across, ctx.roundings, "xb").t()
        return of_input.view(ctx.shape), of_weight.float(), None


def _round(x: Tensor, roundings: Roundings, role: str) -> Tensor:
    return roundings[role].apply(x) if role in roundings else x.to(BF16)


def emulate(model: nn.Module, text: str) -> None:
    """Make a model's linear layers, but for its head, round their operands."""
    roundings, without = read_emulation(text)
    for path, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and "lm_head" not in path:
            left = [role for part, roles in without.items() if f"layers.0.{part}" in path for role in roles]
            own = {role: how for role, how in roundings.items() if role not in left}
            layer.forward = _make_forward(layer, own)  # type: ignore[method-assign]


def _make_forward(layer: nn.Linear, roundings: Roundings) -> Callable[[Tensor], Tensor]:
    return lambda x: _Emulated.apply(x, layer.weight, roundings)  # type: ignore[no-untyped-call]


def make_model(layers: int) -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=128256, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda"):
        return transformers.LlamaForCausalLM(config)


def learn(name: str, layers: int, batches: list[Tensor]) -> list[float]:
    """Return the losses of ten steps, on both batches in turn."""
    model = make_model(layers)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-5, fused=True)
    is_recipe = name.startswith(("fp8", "bf16", "fp16"))
    engine = Engine(model, optimizer, name, clip_norm=1.0) if is_recipe else None
    if engine is None and name != "plain":
        emulate(model, name)
    losses = []
    for step in range(STEPS):
        batch = batches[step % 2]
        if engine is not None:
            with engine.forward():
                loss = engine.model(input_ids=batch, labels=batch, use_cache=False).loss
            engine.backward(loss)
            engine.step()
        else:
            with torch.autocast("cuda", BF16):
                loss = model(input_ids=batch, labels=batch, use_cache=False).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    layers = next((int(word) for word in sys.argv[1:] if word.isdigit()), 6)
    names = [word for word in sys.argv[1:] if not word.isdigit()] or NAMES
    torch.manual_seed(1)
    batches = [torch.randint(0, WORDS, (ROWS, LENGTH), device="cuda") for _ in range(2)]
    found: dict[str, list[float]] = {}
    for name in names:
        gc.collect()
        torch.cuda.empty_cache()
        begin = time.perf_counter()
        found[name] = learn(name, layers, batches)
        behind = f"  behind {found[name][8] - found['plain'][8]:+.4f}" if "plain" in found else ""
        lasted = time.perf_counter() - begin
        print(f"{name:46s} {found[name][8]:.4f} {found[name][9]:.4f}{behind}  ({lasted:.0f} s)", flush=True)
        if "OUT" in os.environ:
            (Path(os.environ["OUT"]) / "memorise.json").write_text(json.dumps({"layers": layers, "losses": found}))


if __name__ == "__main__":
    main()
