"""Cross-attention inside a fused block: the half between attention and MLP that reads an encoder's output e.

    q = h Wq' + bq                 h is a norm of the stream (order "pre"), or the stream (order "post")
    kv = e Wkv' + bkv              one product for keys and values
    o = attend(q, kv)              the model's own code
    branch = drop(o Wout' + bout)

The model's own code is called as in ``attention``: by the block's forward, whose norms pass their input on. Its
self-attention is not run again: the module that contains it returns a tensor without values, which nothing reads,
because the projections of cross-attention return what exists already. The call ends at the output projection.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from narrowgauge.nn.blocks.projections import find_called, find_projection
from narrowgauge.nn.blocks.spec import CrossSpec
from narrowgauge.nn.fused import halves
from narrowgauge.nn.fused.adapters import AdapterGrads, AdapterState
from narrowgauge.nn.fused.attention import Answers, OutputReached, get_first, run_with_answers, stop
from narrowgauge.nn.fused.casts import (
    NormGrads,
    NormWeights,
    Stats,
    apply_norm,
    cast_grad_output,
    cast_input,
    norm_backward,
)
from narrowgauge.nn.fused.plan import BlockPlan, BlockTensors, Some, bind_norm
from narrowgauge.nn.fused.reports import report_cross, report_cross_gradients, report_cross_norm
from narrowgauge.nn.fused.sublayers import (
    CROSS,
    Branch,
    Run,
    adapters_backward,
    finish_branch,
    input_backward,
    project,
    project_backward,
)
from narrowgauge.nn.products.gemm import is_graph_retained
from narrowgauge.random_state import get_random_state, set_random_state
from narrowgauge.scaling.operand import Operand


@dataclass
class CrossHalf:
    """What cross-attention saves for backward."""

    h: Operand
    source: Operand
    mixed: Tensor
    """Attention's output, with its autograd graph."""
    leaves: tuple[Tensor, ...]
    """Leaves of that graph: queries, keys and values, and differentiable arguments of the block's call."""
    o: Operand
    branch: Branch
    read: Tensor | None = None
    """What the half's norm reads, as rows."""
    stats: Stats | None = None
    adapters: tuple[AdapterState, ...] = ()
    """Of the projections of the query, of key and value, and of the output."""


@dataclass
class CrossGrads:
    """Gradients of cross-attention's half: of what its query projection reads, of parameters, and of arguments."""

    grad_h: Tensor
    tensors: dict[str, Some]
    """By the fields of ``BlockTensors``, without the norm."""
    own: Some
    others: tuple[Tensor | None, ...]
    """Of differentiable arguments of the block's call, among them the encoder's output."""
    adapters: AdapterGrads
    norm: NormGrads | None = None
    """Of the half's norm, which the orders add."""


def get_cross(run: Run) -> CrossSpec:
    """Return the description of a block's cross-attention."""
    cross = run.plan.spec.cross
    assert cross is not None
    return cross


def bind_cross_norm(run: Run) -> NormWeights | None:
    """Return the half's norm with its parameters."""
    return bind_norm(get_cross(run).norm, run.tensors.cross_norm, run.tensors.cross_norm_bias)


def run_cross(run: Run, h: Operand, shape: torch.Size) -> tuple[Tensor, CrossHalf]:
    """Return the branch of cross-attention from what its query projection reads, and what is saved."""
    tensors, (query, source, out), (of_query, of_source, of_out) = run.tensors, run.plan.cross, run.uses.cross
    batch, length, _ = shape
    e = read_source(run)
    q, one = project(run, h, of_query, query, tensors.query_bias)
    kv, two = project(run, e, of_source, source, tensors.source_biases)
    mixed, leaves = _attend(run, q.view(batch, length, -1), kv.view(*get_source(run).shape[:-1], -1))
    rows = mixed.detach().reshape(-1, mixed.shape[-1])
    o = cast_input(out, rows, run.caster, run.needed)
    projected, three = project(run, o, of_out, out, tensors.cross_out_bias)
    made, branch = finish_branch(run, CROSS, projected, batch)
    report_cross(run, q, kv, made)
    return made, CrossHalf(h, e, mixed, leaves, o, branch, adapters=(one, two, three))


def run_pre(run: Run, x: Tensor, branch: Tensor, shape: torch.Size) -> tuple[Tensor, Tensor, CrossHalf]:
    """Return x + branch, cross-attention's branch of its norm, and what is saved."""
    h, stats, total = apply_norm(bind_cross_norm(run), x, branch, run.plan.cross[0], run.caster)
    report_cross_norm(run, h)
    made, half = run_cross(run, h, shape)
    return total, made, replace(half, read=total, stats=stats)


def backward_pre(
    run: Run, half: CrossHalf, after: NormGrads, before: Branch, shape: torch.Size, needs: BlockTensors
) -> tuple[NormGrads, CrossGrads]:
    """Return the gradients of the half's norm, and of the half.

    Args:
        run: The forward that is differentiated.
        half: What it saved.
        after: Gradients of the next norm, which reads the stream with this half's branch.
        before: Attention's branch, which the half's norm adds.
        shape: That of the hidden state.
        needs: Which parameters need gradients: True or False in place of tensors.
    """
    end = halves.end_backward(run, CROSS, half.branch, after.stream, after.operand if half.branch.is_plain else None)
    grads = cross_backward(run, half, end.grad, shape, needs)
    reader = run.plan.out if before.is_plain else None
    assert half.read is not None
    norm = norm_backward(
        bind_cross_norm(run), grads.grad_h, half.read, half.stats, after.stream, reader, run.caster
    )  # fmt: skip
    return norm, replace(grads, norm=norm)


def cross_backward(run: Run, half: CrossHalf, grad: Operand, shape: torch.Size, needs: BlockTensors) -> CrossGrads:
    """Return the gradients of cross-attention's half, from that of its output projection."""
    (query, source, out), (of_query, of_source, of_out) = run.plan.cross, run.uses.cross
    one, two, three = half.adapters
    grad_o, three = input_backward(run, grad, of_out, out, three)
    outs = project_backward(grad, half.o, of_out, out, needs.cross_out, needs.cross_out_bias)
    own = [p for p, need in zip(run.tensors.own, needs.own, strict=True) if need and p is not None]
    found = torch.autograd.grad(
        half.mixed, [*half.leaves, *own], grad_o.view(half.mixed.shape).to(half.mixed.dtype),
        retain_graph=is_graph_retained(), allow_unused=True,
    )  # fmt: skip
    of_q, of_kv = found[:2]
    others: list[Tensor | None] = list(found[2 : len(half.leaves)])
    assert of_q is not None and of_kv is not None
    grad_q = cast_grad_output(query, of_q.reshape(-1, of_q.shape[-1]), run.caster)
    grad_kv = cast_grad_output(source, of_kv.reshape(-1, of_kv.shape[-1]), run.caster)
    queries = project_backward(grad_q, half.h, of_query, query, needs.query, needs.query_bias)
    sources = project_backward(grad_kv, half.source, of_source, source, needs.source, needs.source_biases)
    e = get_source(run)
    for number, argument in enumerate(run.call.differentiable):
        if argument is e:
            of_source_input, two = input_backward(run, grad_kv, of_source, source, two)
            others[number] = add(others[number], of_source_input.view(e.shape).to(e.dtype))
    report_cross_gradients(run, grad, grad_q, grad_kv)
    of_own = iter(found[len(half.leaves) :])
    names = ("query", "query_bias", "source", "source_biases", "cross_out", "cross_out_bias")
    grad_h, one = input_backward(run, grad_q, of_query, query, one)
    triples = ((query, grad_q, half.h, one), (source, grad_kv, half.source, two), (out, grad, half.o, three))
    adapters: AdapterGrads = {}
    for part, grad_y, x, state in triples:
        adapters |= adapters_backward(run, grad_y, x, part, state, needs)
    return CrossGrads(
        grad_h,
        dict(zip(names, (*queries, *sources, *outs), strict=True)),
        tuple(
            next(of_own) if need and p is not None else None for p, need in zip(run.tensors.own, needs.own, strict=True)
        ),
        tuple(others),
        adapters,
    )


def merge(
    run: Run, grads: BlockTensors, others: list[Tensor | None], cross: CrossGrads | None
) -> tuple[BlockTensors, list[Tensor | None]]:
    """Add the gradients of cross-attention to those of a block's other parameters and of its arguments."""
    if cross is None:
        return grads, others
    assert cross.norm is not None
    own = grads.own or (None,) * len(cross.own)
    whole: Any = {**cross.tensors, "cross_norm": (cross.norm.weight,), "cross_norm_bias": (cross.norm.bias,)}
    others = others or [None] * len(cross.others)
    grads = halves.place_adapters(run, grads, cross.adapters)
    return (
        grads._replace(own=tuple(map(add, own, cross.own)), **whole),
        [add(one, other) for one, other in zip(others, cross.others, strict=True)],
    )


def add(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Return the sum of two gradients of which each may be missing."""
    return other if one is None else one if other is None else one + other


def drop_unneeded(plan: BlockPlan, half: CrossHalf | None) -> CrossHalf | None:
    """Drop what only forward's products read, and with selective checkpointing what ``restore`` makes again."""
    if half is None:
        return None
    query, source, out = plan.cross
    again = plan.checkpoint == "selective"
    return replace(
        half,
        h=Operand() if again else query.keep_for_backward(half.h),
        source=Operand() if again else source.keep_for_backward(half.source),
        o=out.keep_for_backward(half.o),
    )


def restore(run: Run, half: CrossHalf, h: Operand | None = None) -> CrossHalf:
    """Return the half with what selective checkpointing dropped; ``h`` is what the query projection reads, if known."""
    if h is None:
        assert half.read is not None
        h, _, _ = apply_norm(bind_cross_norm(run), half.read, None, run.plan.cross[0], run.caster)
    return replace(half, h=h, source=read_source(run))


def get_source(run: Run) -> Tensor:
    """Return the encoder's output."""
    source: Tensor = run.call.kwargs[get_cross(run).source]
    return source


def read_source(run: Run) -> Operand:
    """Return the encoder's output in the formats of the projections of keys and values."""
    e = get_source(run).detach()
    return cast_input(run.plan.cross[1], e.reshape(-1, e.shape[-1]), run.caster, run.needed)


def _attend(run: Run, q: Tensor, kv: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Run the model's own attention; return its output, and the leaves of its autograd graph."""
    call, needed = run.call, run.needed
    leaves = tuple(part.detach().requires_grad_(needed) for part in (q, kv))
    others = [argument.detach().requires_grad_(needed) for argument in call.differentiable]
    x = q.new_empty(()).expand(*q.shape[:-1], find_projection(call.module, get_cross(run).output).shape[0])
    with torch.set_grad_enabled(needed):
        try:
            run_with_answers(call, x, _make_answers(run, x, *leaves), others)
        except OutputReached as reached:
            return reached.value, (*leaves, *others)
    raise RuntimeError("the block's forward no longer reaches the output projection of its cross-attention")


def _answer(value: Tensor) -> Callable[[tuple[Any, ...], dict[str, Any]], Tensor]:
    """Return an answer with a tensor, in the leading shape of a module's first argument."""
    return lambda args, kwargs: value.view(*get_first(args, kwargs).shape[:-1], -1)


def _make_answers(run: Run, x: Tensor, q: Tensor, kv: Tensor) -> Answers:
    """Return what the block's modules answer until the output projection of cross-attention stops."""
    spec, cross, module = run.plan.spec, get_cross(run), run.call.module
    answers: Answers = {id(module.get_submodule(norm.path)): get_first for norm in spec.norms}
    before: Any = (x, *[None] * (cross.before_entries - 1)) if cross.before_entries else x
    answers[id(module.get_submodule(cross.before))] = lambda args, kwargs: before
    state = get_random_state(x.device) if module.training else None

    def answer_query(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        if state is not None:  # attention's branch has had its dropout already
            set_random_state(state, x.device)
        return _answer(q)(args, kwargs)

    answers[id(find_called(module, spec, cross.query))] = answer_query
    sizes = [find_projection(module, path).shape[0] for path in cross.inputs]
    for path, part in zip(cross.inputs, kv.split(sizes, -1), strict=True):
        answers[id(find_called(module, spec, path))] = _answer(part)
    answers[id(find_called(module, spec, cross.output))] = stop
    return answers
