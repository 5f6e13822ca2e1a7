"""Norms and rotary position embedding of queries and keys, forward and backward, on the output of their projection.

A row of the projection holds H query heads, K key heads and then the values, each of S columns. For each query and key
head x, in FP32:

    h = x / sqrt(mean(x^2) + eps) * weight            with a norm (Qwen3, Gemma 3); else h = x. If weights have H S and
                                                      K S columns, means are over all query or key heads (OLMo 2)
    y = h cos + turned(h) sin                         turned(h) = [-right, left] of the first R columns
                                                      columns from R on are not rotated
    ``pairs``                                         left and right are columns 0, 2, ... and 1, 3, ..., not halves
    grad_h = [gl cos_l + gr sin_r,  gr cos_r - gl sin_l],  and the norm's backward

Rotated queries and keys are one tensor [N, (H + K) S] in the input's dtype, of which queries and keys are views. Bytes
per element: 4 forward, 4 backward without norms, 6 with. cos and sin are [1 or B, T, R], in any dtype.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from narrowgauge import events
from narrowgauge.kernels import can_bypass_op, register, use_triton
from narrowgauge.kernels.dry_run import is_dry_run
from narrowgauge.kernels.launch import launch_kernel
from narrowgauge.kernels.rotary_kernels import backward_kernel, forward_kernel

PROGRAMS = 1024
"""Programs of a backward with norms: each adds up its rows' gradients of the norm weights before it writes them."""


class Heads(NamedTuple):
    """The layout of a row: query heads, key heads, columns of a head."""

    queries: int
    keys: int
    size: int
    pairs: bool = False
    """Whether neighbouring columns are rotated together (GPT-J, Meta's Llama), not columns of two halves (GPT-NeoX)."""


def rotate(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: Heads,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 0.0,
    in_place: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return rotated queries and keys [B, T, (H + K) S] and, with norms, 1 / rms of each head [B T, H + K].

    ``in_place`` writes them over ``qkv``, and returns it.

    Args:
        qkv: Output of the projections [B, T, at least (H + K) S].
        cos: Cosines [1 or B, T, R].
        sin: Sines of the same shape.
        heads: The layout of a row.
        q_weight: Weight [S] or [H S] of the queries' norm; None without norms.
        k_weight: Weight [S] or [K S] of the keys' norm.
        eps: Epsilon of the norms.
    """
    if in_place and is_dry_run():  # an op may not return its argument, so that a forecast would count a copy
        front = qkv[..., : (heads.queries + heads.keys) * heads.size]
        events.report_launch("rotate", [front], [front])
        return _forward_fake(qkv, cos, sin, *heads, q_weight, k_weight, eps, in_place)
    if not can_bypass_op(qkv, cos, sin):
        return _forward_op(qkv, cos, sin, *heads, q_weight, k_weight, eps)
    return _forward(qkv, cos, sin, *heads, q_weight, k_weight, eps, in_place)


def rotate_backward(
    grad_q: Tensor,
    grad_k: Tensor,
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: Heads,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    rstd: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradient of queries and keys [B, T, (H + K) S], and of the norm weights in FP32.

    ``grad_q`` [B, H, T, S] and ``grad_k`` [B, K, T, S] may have any strides with contiguous columns.
    """
    call = _backward if can_bypass_op(grad_q, grad_k, qkv) else _backward_op
    grad, of_q, of_k = call(grad_q, grad_k, qkv, cos, sin, *heads, q_weight, k_weight, rstd)
    return (grad, None, None) if q_weight is None else (grad, of_q, of_k)


def rotate_reference(
    qkv: Tensor, cos: Tensor, sin: Tensor, queries: int, keys: int, size: int, pairs: bool,
    q_weight: Tensor | None, k_weight: Tensor | None, eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute ``rotate`` in plain torch."""
    batch, length, _ = qkv.shape
    wide = torch.promote_types(qkv.dtype, torch.float32)
    x = qkv[..., : (queries + keys) * size].view(batch, length, queries + keys, size).to(wide)
    rstd = x.new_empty(0)
    if q_weight is not None and k_weight is not None:
        rstd = torch.rsqrt(_average(x.square(), queries, len(q_weight) > size) + eps)
        x = x * rstd[..., None] * _stack_weights(q_weight, k_weight, queries, keys, size).to(wide)
    turned = cos.shape[-1]
    c, s = cos[:, :, None].to(wide), sin[:, :, None].to(wide)
    part = x[..., :turned]
    left, right = _part(part, pairs)
    y = torch.cat([part * c + _join(-right, left, pairs) * s, x[..., turned:]], -1)
    return y.flatten(2).to(qkv.dtype), rstd.reshape(-1, queries + keys) if rstd.numel() else rstd


def rotate_backward_reference(
    grad_q: Tensor, grad_k: Tensor, qkv: Tensor, cos: Tensor, sin: Tensor, queries: int, keys: int, size: int,
    pairs: bool, q_weight: Tensor | None, k_weight: Tensor | None, rstd: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute ``rotate_backward`` in plain torch; a missing gradient is empty."""
    batch, length, _ = qkv.shape
    wide = torch.promote_types(qkv.dtype, torch.float32)
    g = torch.cat([grad_q, grad_k], 1).transpose(1, 2).to(wide)
    turned = cos.shape[-1]
    c, s = cos[:, :, None].to(wide), sin[:, :, None].to(wide)
    part = g[..., :turned]
    left, right = _part(part * s, pairs)
    d = torch.cat([part * c + _join(right, -left, pairs), g[..., turned:]], -1)
    if q_weight is None or k_weight is None or rstd is None:
        return d.flatten(2).to(qkv.dtype), d.new_empty(0), d.new_empty(0)
    x = qkv[..., : (queries + keys) * size].view(batch, length, queries + keys, size).to(wide)
    r = rstd.view(batch, length, queries + keys, 1).to(wide)
    h, whole = x * r, len(q_weight) > size
    of_q, of_k = ((d * h)[:, :, some].sum((0, 1)) for some in (slice(queries), slice(queries, None)))
    of_q, of_k = (of.flatten() if whole else of.sum(0) for of in (of_q, of_k))
    g = d * _stack_weights(q_weight, k_weight, queries, keys, size).to(wide)
    mean = _average(g * h, queries, whole)[..., None]
    return ((g - h * mean) * r).flatten(2).to(qkv.dtype), of_q, of_k


def _part(x: Tensor, pairs: bool) -> tuple[Tensor, Tensor]:
    """Return the columns that are rotated together."""
    return (x[..., ::2], x[..., 1::2]) if pairs else x.chunk(2, -1)  # type: ignore[return-value]


def _join(left: Tensor, right: Tensor, pairs: bool) -> Tensor:
    return torch.stack([left, right], -1).flatten(-2) if pairs else torch.cat([left, right], -1)


def _average(x: Tensor, queries: int, whole: bool) -> Tensor:
    """Return the mean of each head's columns [B, T, heads]; with ``whole`` that of all query or key heads."""
    mean = x.mean(-1)
    if not whole:
        return mean
    parts = mean[..., :queries], mean[..., queries:]
    return torch.cat([part.mean(-1, keepdim=True).expand_as(part) for part in parts], -1)


def _stack_weights(q_weight: Tensor, k_weight: Tensor, queries: int, keys: int, size: int) -> Tensor:
    """Return the weights of each head, [heads, S]."""
    return torch.cat([
        (weight.view(count, size) if len(weight) > size else weight.expand(count, -1))
        for weight, count in ((q_weight, queries), (k_weight, keys))
    ])  # fmt: skip


def _constants(heads: Heads, turned: int, q_weight: Tensor | None) -> dict[str, Any]:
    whole = q_weight is not None and len(q_weight) > heads.size
    sizes = {"H": heads.queries, "K": heads.keys, "S": heads.size, "R": turned, "PAIRS": heads.pairs, "ALL": whole}
    blocks = {"HALF": turned // 2, "REST": max(heads.size - turned, 1), "HEADS": heads.queries + heads.keys}
    powers = {name: max(1 << (value - 1).bit_length(), 1) for name, value in blocks.items()}
    return {**sizes, **powers, "num_warps": 8 if powers["HEADS"] * powers["HALF"] > 2048 else 4}


def _forward(
    qkv: Tensor, cos: Tensor, sin: Tensor, queries: int, keys: int, size: int, pairs: bool,
    q_weight: Tensor | None, k_weight: Tensor | None, eps: float, in_place: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if not use_triton(qkv):
        out, rstd = rotate_reference(qkv, cos, sin, queries, keys, size, pairs, q_weight, k_weight, eps)
        if in_place:
            qkv[..., : out.shape[-1]] = out
        return qkv if in_place else out, rstd
    out, rstd = _forward_fake(qkv, cos, sin, queries, keys, size, pairs, q_weight, k_weight, eps, in_place)
    batch, length, _ = qkv.shape
    cos, sin = cos.contiguous(), sin.contiguous()
    if qkv.numel():
        launch_kernel(
            forward_kernel, (batch * length,),
            qkv, cos, sin, q_weight, k_weight, out, rstd if rstd.numel() else None, length, qkv.stride(1),
            out.stride(1), cos.stride(0) if len(cos) > 1 else 0, eps,
            **_constants(Heads(queries, keys, size, pairs), cos.shape[-1], q_weight), IN_PLACE=in_place,
        )  # fmt: skip
    return out, rstd


def _rotate(
    qkv: Tensor, cos: Tensor, sin: Tensor, queries: int, keys: int, size: int, pairs: bool,
    q_weight: Tensor | None, k_weight: Tensor | None, eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The op of ``rotate``, which may not return its argument."""
    return _forward(qkv, cos, sin, queries, keys, size, pairs, q_weight, k_weight, eps)


def _forward_fake(
    qkv: Tensor, cos: Tensor, sin: Tensor, queries: int, keys: int, size: int, pairs: bool,
    q_weight: Tensor | None, k_weight: Tensor | None, eps: float, in_place: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    batch, length, _ = qkv.shape
    count = batch * length if q_weight is not None else 0
    rstd = qkv.new_empty(count, queries + keys if count else 0, dtype=torch.float32)
    out = qkv if in_place else qkv.new_empty(batch, length, (queries + keys) * size)
    return out, rstd if count else rstd.view(0)


def _backward(
    grad_q: Tensor, grad_k: Tensor, qkv: Tensor, cos: Tensor, sin: Tensor, queries: int, keys: int, size: int,
    pairs: bool, q_weight: Tensor | None, k_weight: Tensor | None, rstd: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    arguments = grad_q, grad_k, qkv, cos, sin, queries, keys, size, pairs, q_weight, k_weight, rstd
    if not use_triton(qkv) or not qkv.numel():
        return rotate_backward_reference(*arguments)
    grad, of_q, of_k = _backward_fake(*arguments)
    batch, length, _ = qkv.shape
    rows = batch * length
    cos, sin = cos.contiguous(), sin.contiguous()
    grad_q, grad_k = (g if g.stride(3) == 1 else g.contiguous() for g in (grad_q, grad_k))
    programs = rows if q_weight is None else min(rows, PROGRAMS)
    partial = None
    if q_weight is not None:
        columns = 2 * size if len(q_weight) == size else (queries + keys) * size
        partial = qkv.new_empty(programs, columns, dtype=torch.float32)
    launch_kernel(
        backward_kernel, (programs,),
        grad_q, grad_k, qkv, cos, sin, q_weight, k_weight, rstd if q_weight is not None else None, grad, partial, rows,
        length, *grad_q.stride()[:3], *grad_k.stride()[:3], qkv.stride(1), cos.stride(0) if len(cos) > 1 else 0,
        **_constants(Heads(queries, keys, size, pairs), cos.shape[-1], q_weight),
    )  # fmt: skip
    if partial is not None:
        of_q, of_k = (part.sum(0) for part in partial.split([len(of_q), len(of_k)], 1))  # an op's results share nothing
    return grad, of_q, of_k


def _backward_fake(
    grad_q: Tensor, grad_k: Tensor, qkv: Tensor, cos: Tensor, sin: Tensor, queries: int, keys: int, size: int,
    pairs: bool, q_weight: Tensor | None, k_weight: Tensor | None, rstd: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    batch, length, _ = qkv.shape
    sizes = (0 if weight is None else len(weight) for weight in (q_weight, k_weight))
    of_q, of_k = (qkv.new_empty(columns, dtype=torch.float32) for columns in sizes)
    return qkv.new_empty(batch, length, (queries + keys) * size), of_q, of_k


_forward_op = register("rotate", _rotate, _forward_fake)
_backward_op = register("rotate_backward", _backward, _backward_fake)
