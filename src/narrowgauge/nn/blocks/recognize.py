"""Describes a transformer block from one observed run: each claim is an equation between recorded tensors.

Nothing depends on names. A module is a norm because its output is the norm of its input, a projection belongs to
attention because it reads the first norm's output, an activation is GELU because the last projection's input is GELU
of an earlier one's output. What does not satisfy an order's equations is not a block, and the reason says where it
differs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.nn.blocks.activations import ACTIVATIONS, GATED
from narrowgauge.nn.blocks.observe import Call, Observation, get_rows
from narrowgauge.nn.blocks.spec import AttentionSpec, BlockSpec, NormSpec
from narrowgauge.nn.products.linear import is_linear

TOLERANCE = 2e-4
"""Of sums, relative to the largest value: FP32 in another order differs by less, another formula by more."""
EXACT = 1e-5
"""Of functions of single values: GELU and its tanh form differ by 1e-4."""


class NotABlock(Exception):
    """Why a module is not a block that can be fused."""


def recognize(x: Tensor, seen: Observation) -> BlockSpec:
    """Describe the block that was run on x.

    Raises:
        NotABlock: It satisfies the equations of no order.
    """
    output, in_tuple = _get_hidden_state(seen.output, x)
    x = get_rows(x)
    calls = seen.once()
    norms = [(call, norm) for call in calls if (norm := recognize_norm(call)) is not None]
    linears = [call for call in calls if is_linear(call.module)]
    if len({call.path for call in seen.calls if is_linear(call.module)}) != len(linears):
        raise NotABlock("a linear layer inside it runs more than once")
    if len(linears) < 3 or not norms:
        raise NotABlock("it has fewer than three linear layers, or no norm")
    reasons = []
    for match in (_match_pre, _match_post, _match_parallel):
        try:
            found = match(x, output, norms, linears)
        except NotABlock as reason:
            reasons.append(str(reason))
            continue
        dropouts = [call for call in calls if isinstance(call.module, nn.Dropout)]
        return _complete(found, calls, dropouts, in_tuple)
    raise NotABlock(reasons[0])


def are_close(one: Tensor, other: Tensor, tolerance: float = TOLERANCE) -> bool:
    """Whether two tensors are the same up to the rounding of FP32."""
    if one.shape != other.shape:
        return False
    return bool((one - other).abs().max() <= tolerance * max(float(other.abs().max()), 1e-6))


def recognize_norm(call: Call) -> NormSpec | None:
    """Return the description of a module whose output is a norm of its input."""
    own = dict(call.module.named_parameters(recurse=False))
    weight, bias = own.pop("weight", None), own.pop("bias", None)
    if weight is None or own or weight.dim() != 1 or call.input.shape != call.output.shape:
        return None
    if call.input.shape[-1] != len(weight):
        return None
    for kind in ("layer", "rms"):
        for eps in _list_eps(call.module):
            for offset in (0.0, 1.0):
                if are_close(compute_norm(call.input, weight, bias, kind, eps, offset), call.output):
                    return NormSpec(call.path, kind, eps, offset)
    return None


def compute_norm(x: Tensor, weight: Tensor, bias: Tensor | None, kind: str, eps: float, offset: float) -> Tensor:
    """Return the norm in plain torch."""
    centred = x - x.mean(-1, keepdim=True) if kind == "layer" else x
    y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps) * (offset + weight)
    return y if bias is None else y + bias


def _list_eps(module: nn.Module) -> list[float]:
    stated = (getattr(module, name, None) for name in ("eps", "variance_epsilon", "epsilon"))
    return [float(eps) for eps in stated if isinstance(eps, float | int)] or [1e-5, 1e-6, 1e-12]


def _get_hidden_state(output: Any, x: Tensor) -> tuple[Tensor, bool]:
    if isinstance(output, Tensor) and output.shape == x.shape:
        return get_rows(output), False
    if isinstance(output, tuple) and output and isinstance(output[0], Tensor) and output[0].shape == x.shape:
        if any(value is not None for value in output[1:]):
            raise NotABlock("it returns more than the hidden state")
        return get_rows(output[0]), True
    raise NotABlock("it does not return a tensor of its input's shape")


Norms = list[tuple[Call, NormSpec]]


def _match_pre(x: Tensor, output: Tensor, norms: Norms, linears: list[Call]) -> BlockSpec:
    first, norm1 = _find_norm(norms, x, "no norm reads the block's input")
    inputs = [call for call in linears if are_close(call.input, first.output)]
    rest = [call for call in linears if call not in inputs]
    if not inputs or len(rest) < 3:
        raise NotABlock("no projection reads the first norm's output, or too few follow")
    out = rest[0]
    post1 = _find_post_norm(norms, out)
    x1 = x + (post1[0].output if post1 else out.output)
    second, norm2 = _find_norm(norms, x1, "no norm reads the sum of the input and attention's branch")
    ups = [call for call in rest if are_close(call.input, second.output)]
    ends = [call for call in rest[1:] if call not in ups]
    if not ups or len(ends) != 1:
        raise NotABlock("its MLP is not one or two projections, an activation and one more projection")
    activation, ordered, last = _match_activation(ups, ends[0])
    post2 = _find_post_norm(norms, ends[0])
    if not are_close(x1 + (post2[0].output if post2 else ends[0].output), output):
        raise NotABlock("its output is not the sum of the residual stream and the MLP's branch")
    return BlockSpec(
        "pre", norm1, _paths(inputs), AttentionSpec(), out.path, norm2, ordered, activation, ends[0].path,
        post1 and post1[1], post2 and post2[1], gate_last=last,
    )  # fmt: skip


def _match_post(x: Tensor, output: Tensor, norms: Norms, linears: list[Call]) -> BlockSpec:
    inputs = [call for call in linears if are_close(call.input, x)]
    rest = [call for call in linears if call not in inputs]
    if not inputs or len(rest) < 3:
        raise NotABlock("no projection reads the block's input")
    out = rest[0]
    first, norm1 = _find_norm(norms, x + out.output, "no norm reads the sum of the input and attention's branch")
    ups = [call for call in rest if are_close(call.input, first.output)]
    ends = [call for call in rest[1:] if call not in ups]
    if not ups or len(ends) != 1:
        raise NotABlock("its MLP is not one or two projections, an activation and one more projection")
    activation, ordered, last = _match_activation(ups, ends[0])
    second, norm2 = _find_norm(norms, first.output + ends[0].output, "no norm reads the sum with the MLP's branch")
    if not are_close(second.output, output):
        raise NotABlock("its output is not its last norm")
    return BlockSpec(
        "post", norm1, _paths(inputs), AttentionSpec(), out.path, norm2, ordered, activation, ends[0].path,
        gate_last=last,
    )  # fmt: skip


def _match_parallel(x: Tensor, output: Tensor, norms: Norms, linears: list[Call]) -> BlockSpec:
    reading = [(call, norm) for call, norm in norms if are_close(call.input, x)]
    for first, norm1 in reading:
        for second, norm2 in reading:
            readers = [call for call in linears if are_close(call.input, first.output)]
            mlp = [call for call in linears if are_close(call.input, second.output)]
            rest = [call for call in linears if call not in readers and call not in mlp]
            if len(rest) != 2 or not readers or not mlp:
                continue
            for out, down in (rest, rest[::-1]):
                if not are_close(x + out.output + down.output, output):
                    continue
                for count in range(1, 3):
                    ups = [call for call in mlp if norm1 is not norm2 or call in mlp[-count:]]
                    inputs = [call for call in readers if call not in ups]
                    try:
                        activation, ordered, last = _match_activation(ups, down)
                    except NotABlock:
                        continue
                    if inputs:
                        return BlockSpec(
                            "parallel", norm1, _paths(inputs), AttentionSpec(), out.path, norm2, ordered, activation,
                            down.path, gate_last=last,
                        )  # fmt: skip
    raise NotABlock("attention and MLP do not both read norms of the block's input")


def _find_norm(norms: Norms, value: Tensor, otherwise: str) -> tuple[Call, NormSpec]:
    for call, norm in norms:
        if are_close(call.input, value):
            return call, norm
    raise NotABlock(otherwise)


def _find_post_norm(norms: Norms, branch: Call) -> tuple[Call, NormSpec] | None:
    return next(((call, norm) for call, norm in norms if are_close(call.input, branch.output)), None)


def _match_activation(ups: list[Call], down: Call) -> tuple[str, tuple[str, ...], bool]:
    """Return the activation, the projections with the gate first, and whether the gate is the last half of one."""
    if len(ups) == 1:
        for name, function in ACTIVATIONS.items():
            if are_close(function(ups[0].output), down.input, EXACT):
                return name, _paths(ups), False
        if ups[0].output.shape[-1] == 2 * down.input.shape[-1]:
            halves = ups[0].output.chunk(2, -1)
            for last, (gate, up) in ((False, halves), (True, halves[::-1])):
                for name, of_gate in GATED.items():
                    if are_close(ACTIVATIONS[of_gate](gate) * up, down.input, EXACT):
                        return name, _paths(ups), last
    if len(ups) == 2:
        for first, second in (ups, ups[::-1]):
            for name, of_gate in GATED.items():
                if are_close(ACTIVATIONS[of_gate](first.output) * second.output, down.input, EXACT):
                    return name, _paths([first, second]), False
    raise NotABlock("its MLP's activation is none of " + ", ".join((*ACTIVATIONS, *GATED)))


def _complete(found: BlockSpec, calls: list[Call], dropouts: list[Call], in_tuple: bool) -> BlockSpec:
    """Add the places of dropout, which is the identity in this run."""
    outputs = {call.path: call.output for call in calls}
    places: dict[str, str | None] = {"dropout1": None, "dropout2": None}
    ends = (("dropout1", found.post1, found.output), ("dropout2", found.post2, found.down))
    for name, post, linear in ends:
        branch = outputs[post.path if post is not None else linear]
        places[name] = next((call.path for call in dropouts if are_close(call.input, branch)), None)
    fields: dict[str, Any] = {**found.__dict__, **places, "in_tuple": in_tuple}
    return BlockSpec(**fields)


def _paths(calls: list[Call]) -> tuple[str, ...]:
    return tuple(call.path for call in calls)
