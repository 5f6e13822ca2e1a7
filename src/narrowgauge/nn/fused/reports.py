"""Reports the activations and gradients inside a fused block to listeners, by the paths of the block's own modules."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from narrowgauge import events
from narrowgauge.nn.fused.attention import Attended
from narrowgauge.nn.fused.sublayers import Run, get_outputs
from narrowgauge.scaling.operand import Operand

Value = Tensor | Operand


def report_activations(
    run: Run, norms: tuple[Value, Value], qkv: Tensor, attended: Attended, out: Tensor, y: Tensor
) -> None:
    """Report what a forward computed; nothing without a listener, in evaluation, or when a forward is repeated.

    ``report_mlp`` reports what the MLP computes inside.

    Args:
        run: The forward.
        norms: The outputs of both norms.
        qkv: The output of the input projections.
        attended: Attention's result.
        out: Attention's branch.
        y: The MLP's branch.
    """
    if not events.wants_tensors() or not run.needed or run.again:
        return
    _report(run, "activation", {**_list_attention(run, norms, qkv, attended, out), run.plan.spec.down: y})


def _list_attention(
    run: Run, norms: tuple[Value, Value], qkv: Tensor, attended: Attended, out: Tensor
) -> dict[str, Value]:
    spec = run.plan.spec
    inputs = qkv.split([get_outputs(run.uses.qkv, n) for n in range(len(spec.inputs))], -1)
    shown: dict[str, Value] = {
        norm.path: value for norm, value in zip((spec.norm1, spec.norm2), norms, strict=True) if norm is not None
    }
    return {
        **shown,
        **dict(zip(spec.inputs, inputs, strict=True)),
        "attention": attended.mixed.detach(),
        spec.output: out,
    }


def report_half(run: Run, norms: tuple[Value, Value], qkv: Tensor, attended: Attended, out: Tensor) -> None:
    """Report the same of a block whose MLP is a module, which is called and observed as such."""
    if not events.wants_tensors() or not run.needed or run.again:
        return
    _report(run, "activation", _list_attention(run, norms, qkv, attended, out))


def report_mlp(run: Run, u: Tensor, a: Operand) -> None:
    """Report the output of the MLP's first projections and that of the activation, of all rows or of a tile."""
    if not events.wants_tensors() or not run.needed or run.again:
        return
    spec = run.plan.spec
    ups = u.split([get_outputs(run.uses.up, n) for n in range(len(spec.ups))], -1)
    _report(run, "activation", {**dict(zip(spec.ups, ups, strict=True)), "act": a})


def report_cross(run: Run, q: Tensor, kv: Tensor, out: Tensor) -> None:
    """Report what cross-attention computed: queries, keys and values, and its branch."""
    cross = run.plan.spec.cross
    if not events.wants_tensors() or not run.needed or run.again or cross is None:
        return
    parts = kv.split([get_outputs(run.uses.cross[1], n) for n in range(len(cross.inputs))], -1)
    _report(run, "activation", {cross.query: q, **dict(zip(cross.inputs, parts, strict=True)), cross.output: out})


def report_cross_norm(run: Run, value: Value) -> None:
    """Report the output of cross-attention's norm."""
    cross = run.plan.spec.cross
    if events.wants_tensors() and run.needed and not run.again and cross is not None:
        _report(run, "activation", {cross.norm.path: value})


def report_cross_gradients(run: Run, of_output: Operand, of_query: Operand, of_inputs: Operand) -> None:
    """Report the gradients of the outputs of cross-attention's projections."""
    cross = run.plan.spec.cross
    if events.wants_tensors() and cross is not None:
        _report(run, "gradient", {cross.output: of_output, cross.query: of_query, cross.inputs[0]: of_inputs})


def report_gradients(run: Run, of_down: Operand, of_output: Operand, of_inputs: Operand) -> None:
    """Report the gradients of the projections' outputs; of projections that read one input, one gradient."""
    if events.wants_tensors():
        spec = run.plan.spec
        _report(run, "gradient", {spec.down: of_down, spec.output: of_output, spec.inputs[0]: of_inputs})


def report_up_gradient(run: Run, of_ups: Operand) -> None:
    """Report the gradient of the output of the MLP's first projections, of all rows or of a tile."""
    if events.wants_tensors():
        _report(run, "gradient", {run.plan.spec.ups[-1]: of_ups})


def _report(run: Run, kind: str, shown: Mapping[str, Value]) -> None:
    for name, value in shown.items():
        operand = value if isinstance(value, Operand) else Operand(value)
        operand.report(kind, f"{run.plan.path}.{name}")
