"""Norms, activations and their backward with output in the format of the next product: written directly, or cast.

If a projection reads an operand in one format only, the norm, activation or backward kernel writes that format. If its
products have mixed formats, the operand is computed in BF16 and cast, so that both exist.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from narrowgauge.kernels import activation, cast, norm
from narrowgauge.nn.blocks.activations import compute_activation
from narrowgauge.nn.blocks.spec import BlockSpec, NormSpec
from narrowgauge.nn.products.gemm import BF16, Fp8Caster, GemmChoice
from narrowgauge.scaling.operand import WIDE, Operand
from narrowgauge.scaling.tensor import Site
from narrowgauge.weight_copies.casts import WeightCastPlan

Stats = tuple[Tensor | None, Tensor]
"""Mean (None for RMSNorm) and 1 / standard deviation of each row."""


class AdapterPlan(NamedTuple):
    """A low-rank adapter of one of the weights that a projection stacks."""

    number: int
    """Its place among the block's adapters."""
    columns: tuple[int, int]
    """Where it adds to the projection's output: the first column, and the one after the last."""
    scale: float
    gradient_dtypes: tuple[torch.dtype | None, torch.dtype | None]
    """Those of its two weights; None for the dtypes of the weights, as gathered by FSDP."""


@dataclass(frozen=True)
class Projection:
    """A linear layer of a block: the casts of its weights, the formats of its products, the sites of their inputs."""

    weight: WeightCastPlan
    choice: GemmChoice
    input: Site | None = None
    grad: Site | None = None
    adapters: tuple[AdapterPlan, ...] = ()
    is_frozen: bool = False
    """Whether its weights need no gradient, so that no product grad_weight runs."""

    @functools.cached_property
    def frozen(self) -> Projection:
        """The same projection without gradient of its weights."""
        return replace(self, is_frozen=True)

    @property
    def wide(self) -> str:
        """The format of the adapters' products."""
        return "fp32" if "fp32" in self.choice else "bf16"

    @property
    def input_formats(self) -> set[str]:
        return {self.choice.output} | self._other_formats

    @property
    def grad_formats(self) -> set[str]:
        return {self.choice.grad_input} | self._other_formats

    @property
    def _other_formats(self) -> set[str]:
        """The formats in which both the input and the gradient are read."""
        of_weight = set() if self.is_frozen else {self.choice.grad_weight}
        return of_weight | ({self.wide} if self.adapters else set())

    @property
    def reads_transposed(self) -> bool:
        """Whether grad_weight reads transposed FP8 copies."""
        return self.choice.grad_weight == "fp8" and not self.is_frozen

    def keep_for_backward(self, x: Operand) -> Operand:
        """Return what backward reads of the projection's input, without what only forward's product reads."""
        if self.is_frozen:
            return Operand(x.hp if self.adapters else None)
        if x.lp is not None and self._other_formats == {"fp8"}:
            x = x._replace(hp=None)
        return x._replace(lp=None) if x.lp_t is not None else x


def _can_write_fp8(formats: set[str], site: Site | None, caster: Fp8Caster | None) -> bool:
    """Whether a kernel can write FP8 only, because the scale is known in advance."""
    return formats == {"fp8"} and site is not None and caster is not None and caster.delayed


def _fp8_options(site: Site, caster: Fp8Caster) -> dict[str, Any]:
    return {"scale": site.scale, "dtype": site.dtype, "amax": caster.amax(site), "counts": caster.counts(site)}


def make_operand(
    hp: Tensor, formats: set[str], site: Site | None, caster: Fp8Caster | None, transposed: bool
) -> Operand:
    """Make an operand from a high-precision tensor [N, D], cast to FP8 if a product reads that."""
    operand = Operand()
    if "fp8" in formats:
        assert caster is not None and site is not None
        operand = caster.cast(hp, site, transposed)
    wide = get_wide_dtype(formats)
    return operand if wide is None else operand._replace(hp=hp.to(wide))


def get_wide_dtype(formats: set[str]) -> torch.dtype | None:
    """Return the dtype of an operand that some product reads without a scale; None if all read FP8."""
    return next((WIDE[name] for name in ("fp32", "bf16") if name in formats), None)


def cast_grad_output(writer: Projection, rows: Tensor, caster: Fp8Caster | None) -> Operand:
    """Cast the gradient of a projection's output to the formats that its products read."""
    return make_operand(rows, writer.grad_formats, writer.grad, caster, writer.reads_transposed)


def cast_input(reader: Projection, rows: Tensor, caster: Fp8Caster | None, needed: bool) -> Operand:
    """Cast the input of a projection to the formats that its products read; ``needed``: backward will follow."""
    return make_operand(rows, reader.input_formats, reader.input, caster, needed and reader.reads_transposed)


class NormWeights(NamedTuple):
    """A norm with its parameters, as the kernels take them."""

    spec: NormSpec
    weight: Tensor
    """With the norm's offset added."""
    bias: Tensor | None

    @staticmethod
    def of(spec: NormSpec, weight: Tensor, bias: Tensor | None) -> NormWeights:
        weight = weight.detach()
        return NormWeights(spec, weight + spec.offset if spec.offset else weight, bias)


def apply_norm(
    norms: NormWeights | None, rows: Tensor, branch: Tensor | None, reader: Projection, caster: Fp8Caster | None
) -> tuple[Operand, Stats | None, Tensor]:
    """Return norm(rows + branch) in the reader's formats, its statistics, and the sum; without a norm only the sum."""
    if norms is None:
        total = rows if branch is None else rows + branch
        return make_operand(total, reader.input_formats, reader.input, caster, False), None, total
    options: dict[str, Any] = {"eps": norms.spec.eps, "kind": norms.spec.kind, "branch": branch}
    site = reader.input
    if _can_write_fp8(reader.input_formats, site, caster):
        assert site is not None and caster is not None
        made = norm.norm(rows, norms.weight, norms.bias, **options, **_fp8_options(site, caster))
        operand = Operand(None, made.out, None, site.inv_scale)
    else:
        dtype = get_wide_dtype(reader.input_formats) or BF16
        made = norm.norm(rows, norms.weight, norms.bias, dtype=dtype, **options)
        operand = make_operand(made.out, reader.input_formats, site, caster, False)
    return operand, (made.mean, made.rstd), rows if made.residual is None else made.residual


def can_keep_normalized(norms: NormWeights | None, reader: Projection, caster: Fp8Caster | None) -> bool:
    """Whether ``apply_norm_and_keep`` can run: backward reads FP8 only, which it can write again."""
    in_backward = reader._other_formats or reader.input_formats
    return norms is not None and _can_write_fp8(in_backward, reader.input, caster)


def apply_norm_and_keep(
    norms: NormWeights, rows: Tensor, branch: Tensor | None, reader: Projection, caster: Fp8Caster
) -> tuple[Operand, Normalized, Tensor]:
    """Return what ``apply_norm`` does, with the normalized rows in place of statistics: all that backward needs."""
    site, wide = reader.input, get_wide_dtype(reader.input_formats)
    assert site is not None
    options = _fp8_options(site, caster)
    if wide is not None:  # forward's product reads it; backward casts it with the site's scale
        options |= {"dtype": wide, "later": site.dtype}
    made = norm.norm(
        rows, norms.weight, norms.bias, eps=norms.spec.eps, kind=norms.spec.kind, branch=branch, keep=True, **options
    )
    assert made.normalized is not None
    operand = Operand(None, made.out, None, site.inv_scale) if wide is None else Operand(made.out)
    kept = Normalized(made.normalized, made.rstd, rows.dtype)
    return operand, kept, rows if made.residual is None else made.residual


class Normalized(NamedTuple):
    """The rows of a norm before weight and bias, in BF16, and 1 / standard deviation of each."""

    rows: Tensor
    rstd: Tensor
    stream_dtype: torch.dtype


class NormGrads(NamedTuple):
    """Gradients of a norm and its residual stream."""

    stream: Tensor
    operand: Operand
    """The stream's gradient as the projection of the branch reads it."""
    weight: Tensor | None
    bias: Tensor | None
    output: Operand = Operand()
    """The norm's output, if it was computed again."""


class WantedGradient(NamedTuple):
    """How the backward of the block before wants the gradient of a block's input."""

    reader: Projection | None = None
    """Its last projection, which reads the gradient as an operand."""
    dtype: torch.dtype | None = None
    """The dtype of the gradient itself; None for that of the stream."""


def get_inner_dtype(caster: Fp8Caster | None) -> torch.dtype | None:
    """Return the dtype of the stream's gradient where only fused code sees it; None for that of the stream.

    Beside FP8 products it is BF16, half the bytes: that rounds normal numbers at -55 dB, and E5M2 at -25 dB.
    """
    return None if caster is None else BF16


def norm_backward(
    norms: NormWeights | None,
    grad_output: Tensor,
    residual: Tensor,
    stats: Stats | None,
    grad_residual: Tensor | None,
    branch: Projection | None,
    caster: Fp8Caster | None,
    stream_dtype: torch.dtype | None = None,
) -> NormGrads:
    """Return the gradient of the residual stream, the same as ``branch`` reads it, and those of the parameters.

    Without a norm, gradients are only added. ``stream_dtype`` is that of the stream's gradient, if not the stream's.
    """
    if norms is None or stats is None:
        total = grad_output.to(residual.dtype)
        total = total if grad_residual is None else grad_residual + total
        copied = Operand() if branch is None else cast_grad_output(branch, total, caster)
        return NormGrads(total, copied, None, None)
    options = _copy_options(branch, caster)
    grad_input, copy, grad_weight, grad_bias = norm.norm_backward(
        grad_output, residual, norms.weight, *stats, has_bias=norms.bias is not None, kind=norms.spec.kind,
        grad_residual=grad_residual, stream_dtype=stream_dtype, **options,
    )  # fmt: skip
    return NormGrads(grad_input, _get_copy(branch, grad_input, copy, caster), grad_weight, grad_bias)


def norm_backward_kept(
    norms: NormWeights,
    grad_output: Tensor,
    kept: Normalized,
    grad_residual: Tensor | None,
    branch: Projection | None,
    reader: Projection | None,
    caster: Fp8Caster | None,
    stream_dtype: torch.dtype | None = None,
) -> NormGrads:
    """Return the same from normalized rows, and the norm's output for the reader's grad_weight, if it has one."""
    site = None if reader is None or reader.is_frozen else reader.input
    grad_input, copy, grad_weight, grad_bias, again = norm.norm_backward_normalized(
        grad_output, kept.rows, norms.weight, norms.bias, kept.rstd, stream_dtype or kept.stream_dtype,
        kind=norms.spec.kind,
        grad_residual=grad_residual, forward_scale=None if site is None else site.scale,
        **_copy_options(branch, caster),
    )  # fmt: skip
    output = Operand() if site is None else Operand(None, again, None, site.inv_scale)
    return NormGrads(grad_input, _get_copy(branch, grad_input, copy, caster), grad_weight, grad_bias, output)


def _copy_options(branch: Projection | None, caster: Fp8Caster | None) -> dict[str, Any]:
    """Return the options with which a norm's backward writes the stream's gradient as ``branch`` reads it."""
    if branch is not None and _can_write_fp8(branch.grad_formats, branch.grad, caster):
        assert branch.grad is not None and caster is not None
        return _fp8_options(branch.grad, caster)
    return {"dtype": BF16} if branch is not None and branch.grad_formats == {"bf16"} else {}


def _get_copy(branch: Projection | None, grad: Tensor, copy: Tensor | None, caster: Fp8Caster | None) -> Operand:
    """Return the stream's gradient as ``branch`` reads it, from the copy that a norm's backward wrote, if it did."""
    if branch is None:
        return Operand()
    if copy is None:
        return cast_grad_output(branch, grad, caster)
    if copy.dtype is BF16:
        return Operand(copy)
    assert branch.grad is not None
    return Operand(None, copy, None, branch.grad.inv_scale)


def is_remade_in_backward(spec: BlockSpec, reader: Projection, caster: Fp8Caster | None) -> bool:
    """Whether ``apply_activation_backward`` recomputes the input of grad_weight, so forward does not save it."""
    return _has_kernel(spec) and _can_write_fp8(reader.input_formats, reader.input, caster)


def apply_activation(spec: BlockSpec, u: Tensor, reader: Projection, caster: Fp8Caster | None, needed: bool) -> Operand:
    """Return act(u) in the format of the reader's first product.

    The input of grad_weight is left to ``apply_activation_backward`` if that can recompute it.
    """
    site = reader.input
    if _has_kernel(spec) and _can_write_fp8(reader.input_formats, site, caster):
        assert site is not None and caster is not None
        lp, _ = activation.activate(
            spec.activation, u, transposed=False, gate_last=spec.gate_last, **_fp8_options(site, caster)
        )
        return Operand(None, lp, None, site.inv_scale)
    return cast_input(reader, compute_wide_activation(spec, u, reader), caster, needed)


def apply_activation_and_keep(
    spec: BlockSpec, u: Tensor, reader: Projection, caster: Fp8Caster | None
) -> tuple[Operand, activation.Kept]:
    """Return act(u) where ``is_remade_in_backward`` holds, and u in 8 bits for that."""
    site = reader.input
    assert site is not None and caster is not None
    options = _fp8_options(site, caster)
    lp, kept = activation.activate_and_keep(spec.activation, u, gate_last=spec.gate_last, **options)
    return Operand(None, lp, None, site.inv_scale), kept


def compute_wide_activation(spec: BlockSpec, u: Tensor, reader: Projection) -> Tensor:
    """Return act(u) in the widest format that the reader's products read, at least BF16."""
    dtype = get_wide_dtype(reader.input_formats) or BF16
    if _has_kernel(spec):
        return activation.activate(spec.activation, u, dtype=dtype, gate_last=spec.gate_last)[0]
    return compute_activation(spec.activation, u.float(), spec.gate_last).to(dtype)


def apply_activation_backward(
    spec: BlockSpec,
    grad_output: Tensor,
    u: Tensor | activation.Kept,
    a: Operand,
    reader: Projection,
    writer: Projection,
    caster: Fp8Caster | None,
) -> tuple[Operand, Operand]:
    """Return the gradient of u in the formats of ``writer``, the projection that wrote u; and act(u) for grad_weight.

    ``a`` is what forward saved of act(u); it is recomputed if empty and a product reads it. No scale has changed since
    forward.
    """
    if not _has_kernel(spec):
        assert isinstance(u, Tensor)
        with torch.enable_grad():
            leaf = u.detach().float().requires_grad_()
            value = compute_activation(spec.activation, leaf, spec.gate_last)
        (grad,) = torch.autograd.grad(value, leaf, grad_output.float())
        return cast_grad_output(writer, grad.to(get_wide_dtype(writer.grad_formats) or BF16), caster), a
    site, source = writer.grad, reader.input
    options: dict[str, Any] = {"gate_last": spec.gate_last}
    missing = not reader.is_frozen and a.hp is None and a.lp_t is None
    if missing:
        assert source is not None
        options["forward_scale"] = source.scale
    direct = _can_write_fp8(writer.grad_formats, site, caster)
    if direct:
        assert site is not None and caster is not None
        options |= {**_fp8_options(site, caster), "transposed": writer.reads_transposed}
    else:
        options["dtype"] = get_wide_dtype(writer.grad_formats) or BF16
    out, out_t, again = activation.activate_backward(spec.activation, grad_output, u, **options)
    if missing:
        assert source is not None
        a = Operand(None, None, again, source.inv_scale)
    if direct:
        assert site is not None
        return Operand(None, out, out_t, site.inv_scale), a
    return cast_grad_output(writer, out, caster), a


def _has_kernel(spec: BlockSpec) -> bool:
    """Whether an activation has a kernel; the others run in torch, followed by a cast."""
    return spec.activation in activation.KINDS


def cast_heads_input(mixed: Tensor, reader: Projection, caster: Fp8Caster | None, needed: bool) -> Operand:
    """Cast attention's output [B, H, T, S] to the output projection's formats, one row per token."""
    if reader.input_formats == {"fp8"}:
        assert caster is not None and reader.input is not None
        scale, inv_scale, amax = caster.scale_of(mixed, reader.input)
        lp, lp_t = cast.cast_transpose_packed((mixed,), scale, reader.input.dtype, amax, caster.counts(reader.input))
        return Operand(None, lp, lp_t if reader.reads_transposed else None, inv_scale)
    rows = mixed.transpose(1, 2).reshape(-1, mixed.shape[1] * mixed.shape[3])
    return cast_input(reader, rows, caster, needed)


def cast_heads_grad(parts: tuple[Tensor, ...], writer: Projection, caster: Fp8Caster | None) -> Operand:
    """Cast the gradients of q, k and v [B, H, T, S] to the gradient of a packed projection's output."""
    site = writer.grad
    if writer.grad_formats == {"fp8"}:
        assert caster is not None and site is not None
        if caster.delayed:
            scale, inv_scale, amax = site.scale, site.inv_scale, caster.amax(site)
        else:
            scale, inv_scale, amax = caster.scale_of(torch.stack([cast.max_abs(part) for part in parts]), site)
        lp, lp_t = cast.cast_transpose_packed(parts, scale, site.dtype, amax, caster.counts(site))
        return Operand(None, lp, lp_t if writer.reads_transposed else None, inv_scale)
    packed = cast.pack(parts) if parts[0].dtype is BF16 else cast.pack_reference(list(parts))
    return cast_grad_output(writer, packed, caster)
