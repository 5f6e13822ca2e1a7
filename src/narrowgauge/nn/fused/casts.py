"""How the parts of a block write what the next product reads: in FP8 by the kernel that makes it, or cast after it.

Where a projection wants an operand in one format only, the norm, the activation or their backward writes that format
itself. Where its products are mixed, the operand is made in BF16 and cast, so that both are there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from narrowgauge.kernels import activation, cast, norm
from narrowgauge.nn.products.gemm import BF16, Caster, GemmChoice, Operand
from narrowgauge.nn.products.weight_casts import WeightPlan
from narrowgauge.scaling.tensor import Site

Stats = tuple[Tensor | None, Tensor]
"""Mean (None for RMSNorm) and 1 / standard deviation of each row."""


@dataclass(frozen=True)
class Projection:
    """A linear layer of a block: how its weights are read, the formats of its products, the sites of what they read."""

    weight: WeightPlan
    choice: GemmChoice
    input: Site | None
    grad: Site | None

    @property
    def input_formats(self) -> set[str]:
        return {self.choice.output, self.choice.grad_weight}

    @property
    def grad_formats(self) -> set[str]:
        return {self.choice.grad_input, self.choice.grad_weight}


def _direct(formats: set[str], site: Site | None, caster: Caster | None) -> bool:
    """Whether a producer can write FP8 and nothing else: the scale is known beforehand."""
    return formats == {"fp8"} and site is not None and caster is not None and caster.delayed


def _recorded(site: Site, caster: Caster) -> dict[str, Any]:
    return {"scale": site.scale, "dtype": site.dtype, "amax": caster.amax(site), "counts": caster.counts(site)}


def as_operand(hp: Tensor, formats: set[str], site: Site | None, caster: Caster | None, transposed: bool) -> Operand:
    """A high-precision tensor [N, D] as an operand, cast where FP8 is wanted."""
    operand = Operand()
    if "fp8" in formats:
        assert caster is not None and site is not None
        operand = caster.cast(hp, site, transposed)
    return operand._replace(hp=hp.to(BF16)) if "bf16" in formats else operand


def gradient(writer: Projection, rows: Tensor, caster: Caster | None) -> Operand:
    """The gradient of a projection's output as its products read it."""
    return as_operand(rows, writer.grad_formats, writer.grad, caster, True)


def normed(
    kind: str,
    eps: float,
    rows: Tensor,
    branch: Tensor | None,
    weight: Tensor,
    reader: Projection,
    caster: Caster | None,
) -> tuple[Operand, Stats, Tensor]:
    """norm(rows + branch) as the reader wants it, its statistics, and the sum."""
    options: dict[str, Any] = {"eps": eps, "kind": kind, "branch": branch}
    site = reader.input
    if _direct(reader.input_formats, site, caster):
        assert site is not None and caster is not None
        made = norm.norm(rows, weight, **options, **_recorded(site, caster))
        operand = Operand(None, made.out, None, site.inv_scale)
    else:
        made = norm.norm(rows, weight, **options)
        operand = as_operand(made.out, reader.input_formats, site, caster, False)
    return operand, (made.mean, made.rstd), rows if made.residual is None else made.residual


def norm_backward(
    kind: str,
    dout: Tensor,
    residual: Tensor,
    weight: Tensor,
    stats: Stats,
    dresidual: Tensor | None,
    branch: Projection | None,
    caster: Caster | None,
) -> tuple[Tensor, Operand, Tensor]:
    """The gradient of the residual stream, the same as the projection that was added there reads it, the weight's."""
    options: dict[str, Any] = {"kind": kind, "dresidual": dresidual}
    site, operand = None, Operand()
    if branch is not None and _direct(branch.grad_formats, branch.grad, caster):
        site = branch.grad
        assert site is not None and caster is not None
        options |= _recorded(site, caster)
    elif branch is not None and branch.grad_formats == {"bf16"}:
        options["dtype"] = BF16
    dx, copy, dweight, _ = norm.norm_backward(dout, residual, weight, *stats, **options)
    if site is not None:
        operand = Operand(None, copy, None, site.inv_scale)
    elif branch is not None:
        operand = Operand(copy) if copy is not None else gradient(branch, dx, caster)
    return dx, operand, dweight


def made_in_backward(reader: Projection, caster: Caster | None) -> bool:
    """Whether ``activation_backward`` makes what the weight's gradient reads, so that forward need not keep it."""
    return _direct(reader.input_formats, reader.input, caster)


def activated(kind: str, u: Tensor, reader: Projection, caster: Caster | None, needed: bool) -> Operand:
    """act(u) as the reader's first product wants it; ``kind`` is gelu, gelu-tanh or swiglu.

    What the weight's gradient reads is left to ``activation_backward`` where that can make it.
    """
    site = reader.input
    if _direct(reader.input_formats, site, caster):
        assert site is not None and caster is not None
        lp, _ = _activate(kind, u, transposed=False, **_recorded(site, caster))
        return Operand(None, lp, None, site.inv_scale)
    hp, _ = _activate(kind, u)
    return as_operand(hp, reader.input_formats, site, caster, needed)


def activation_backward(
    kind: str, da: Tensor, u: Tensor, a: Operand, reader: Projection, writer: Projection, caster: Caster | None
) -> tuple[Operand, Operand]:
    """The gradient of u as the products of the projection that wrote u read it; and act(u) as grad_weight reads it.

    ``a`` is what forward has kept of act(u), nothing where it is to be made again. No scale has moved since then.
    """
    site, source = writer.grad, reader.input
    options: dict[str, Any] = {}
    missing = a.hp is None and a.lp_t is None
    if missing:
        assert source is not None
        options["forward_scale"] = source.scale
    direct = _direct(writer.grad_formats, site, caster)
    if direct:
        assert site is not None and caster is not None
        options |= _recorded(site, caster)
    out, out_t, again = _activate_backward(kind, da, u, **options)
    if missing:
        assert source is not None
        a = Operand(None, None, again, source.inv_scale)
    if direct:
        assert site is not None
        return Operand(None, out, out_t, site.inv_scale), a
    return gradient(writer, out, caster), a


def _activate(kind: str, u: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
    if kind == "swiglu":
        return activation.swiglu(u, **options)
    return activation.gelu(u, approximate=_approximation(kind), **options)


def _activate_backward(kind: str, da: Tensor, u: Tensor, **options: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
    if kind == "swiglu":
        return activation.swiglu_backward(da, u, **options)
    return activation.gelu_backward(da, u, approximate=_approximation(kind), **options)


def _approximation(kind: str) -> str:
    return "tanh" if kind == "gelu-tanh" else "none"


def heads_as_input(mixed: Tensor, reader: Projection, caster: Caster | None, needed: bool) -> Operand:
    """Attention's output [B, H, T, S] as the output projection reads it, rows of tokens."""
    if reader.input_formats == {"fp8"}:
        assert caster is not None and reader.input is not None
        scale, inv_scale, amax = caster.scale_of(mixed, reader.input)
        lp, lp_t = cast.cast_transpose_packed((mixed,), scale, reader.input.dtype, amax, caster.counts(reader.input))
        return Operand(None, lp, lp_t, inv_scale)
    rows = mixed.transpose(1, 2).reshape(-1, mixed.shape[1] * mixed.shape[3])
    return as_operand(rows, reader.input_formats, reader.input, caster, needed)


def heads_as_gradient(parts: tuple[Tensor, ...], writer: Projection, caster: Caster | None) -> Operand:
    """The gradients of q, k and v [B, H, T, S] as those of a packed projection's output."""
    site = writer.grad
    if writer.grad_formats == {"fp8"}:
        assert caster is not None and site is not None
        if caster.delayed:
            scale, inv_scale, amax = site.scale, site.inv_scale, caster.amax(site)
        else:
            scale, inv_scale, amax = caster.scale_of(torch.stack([cast.max_abs(part) for part in parts]), site)
        lp, lp_t = cast.cast_transpose_packed(parts, scale, site.dtype, amax, caster.counts(site))
        return Operand(None, lp, lp_t, inv_scale)
    return gradient(writer, cast.pack(parts), caster)
