"""The two halves of a block, attention and MLP, as every order computes them: from what the first projection reads to
the end of the branch, and back. The orders differ in where norms and sums stand."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from narrowgauge.nn.fused.adapters import NO_STATE, AdapterGrads, AdapterState
from narrowgauge.nn.fused.attention import Attended, attend, attend_backward, make_operand_of
from narrowgauge.nn.fused.casts import NormGrads
from narrowgauge.nn.fused.plan import BlockPlan, BlockTensors, Some
from narrowgauge.nn.fused.reports import report_mlp, report_up_gradient
from narrowgauge.nn.fused.sublayers import (
    CROSS,
    Activated,
    Branch,
    Run,
    activate,
    activate_backward,
    adapters_backward,
    branch_backward,
    finish_branch,
    get_inputs,
    get_outputs,
    input_backward,
    is_activation_remade,
    is_input_recomputed,
    project,
    project_backward,
)
from narrowgauge.nn.fused.tiles import GradientSums, get_tile_rows, split_rows
from narrowgauge.scaling.operand import WIDE, Operand


@dataclass
class AttentionHalf:
    """What attention's half saves for backward."""

    h: Operand
    attended: Attended
    o: Operand
    branch: Branch
    of_inputs: AdapterState = NO_STATE
    of_out: AdapterState = NO_STATE
    is_h_remade: bool = False
    """Whether the norm's backward computes h again."""


@dataclass
class MlpHalf:
    """What the MLP saves for backward."""

    h: Operand
    u: Tensor
    """The activation's input; empty after ``drop_unneeded`` if it is kept in 8 bits or computed again."""
    activated: Activated
    branch: Branch
    of_ups: AdapterState = NO_STATE
    of_down: AdapterState = NO_STATE
    is_h_remade: bool = False
    """Whether the norm's backward computes h again."""
    tile_rows: int = 0
    """Rows of a tile; then u and activated are empty, and backward computes them tile by tile."""
    is_u_remade: bool = False
    """Whether backward computes u and activated again from h, all rows at once."""


class EndGrads(NamedTuple):
    """Gradients at the end of a branch: of its projection's output, of its norm's weight and of its scale."""

    grad: Operand
    norm: Tensor | None = None
    scale: Tensor | None = None


class HalfGrads(NamedTuple):
    """Gradients of a half: of what its first projection reads, of that projection's output, and of parameters."""

    grad_h: Tensor
    grad_first: Operand
    """Empty for an MLP if nothing needs it any more: it is the widest tensor of a block."""
    first: Some
    first_biases: Some
    last: Some
    last_bias: Some
    adapters: AdapterGrads
    own: Some = ()
    others: tuple[Tensor | None, ...] = ()
    """Of differentiable arguments of the block's call."""


def run_attention(run: Run, h: Operand, shape: torch.Size) -> tuple[Tensor, Tensor, AttentionHalf]:
    """Return attention's branch, the output of the input projections, and what is saved."""
    plan, tensors, uses = run.plan, run.tensors, run.uses
    batch, length, _ = shape
    qkv, of_inputs = project(run, h, uses.qkv, plan.qkv, tensors.input_biases)
    attended = attend(plan, qkv.view(batch, length, -1), run.call, tensors, run.needed, run.dropout.attention)
    o = make_operand_of(plan, attended, run.caster, run.needed)
    projected, of_out = project(run, o, uses.out, plan.out, tensors.out_bias)
    out, branch = finish_branch(run, 1, projected, batch)
    return out, qkv, AttentionHalf(h, attended, o, branch, of_inputs, of_out)


def run_mlp(run: Run, h: Operand, batch: int, whole: bool = True) -> tuple[Tensor, MlpHalf]:
    """Return the MLP's branch and what is saved.

    Without ``whole``, for a recomputation, the branch has no values. What dropout drops does not depend on them.
    """
    tile_rows = get_tile_rows(run, h.rows)
    if not tile_rows:
        down, half = _run_rows(run, h, whole)
        half.is_u_remade = is_input_recomputed(run)
    else:
        wide = WIDE.get(run.plan.down.choice.output, torch.bfloat16)
        empty = run.uses.down.weights[0].new_empty(0, dtype=wide)
        down, half = _make_output(run, empty, h.rows, whole), MlpHalf(h, empty, Activated(), Branch())
        half.tile_rows = tile_rows
        for rows in split_rows(h.rows, tile_rows) if whole else ():
            down[rows] = _run_rows(run, h.slice_rows(rows), True)[0]
    y, half.branch = finish_branch(run, 2, down, batch)
    return y, half


def _run_rows(run: Run, h: Operand, whole: bool) -> tuple[Tensor, MlpHalf]:
    """Return the output of the MLP's last projection, and what is saved but for the end of the branch."""
    plan, tensors, uses = run.plan, run.tensors, run.uses
    u, of_ups = project(run, h, uses.up, plan.up, tensors.up_biases)
    activated = activate(run, u) if whole or not is_activation_remade(run) else Activated()
    report_mlp(run, u, activated.a)
    if whole:
        if activated.codes is not None or is_input_recomputed(run):
            u = u.new_empty(0)  # the widest tensor of a block, freed before the last product
        down, of_down = project(run, activated.a, uses.down, plan.down, tensors.down_bias)
    else:
        down, of_down = _make_output(run, u, len(u), False), NO_STATE
        if run.dropout.adapters:
            read = u.new_empty(len(u), get_inputs(uses.down))
            of_down = AdapterState(masks=run.bind_adapters(plan.down).draw_masks(read))
    return down, MlpHalf(h, u, activated, Branch(), of_ups, of_down)


def _make_output(run: Run, like: Tensor, rows: int, whole: bool) -> Tensor:
    """Return room for the last projection's output; without ``whole`` only its shape, unless dropout depends on it."""
    width = get_outputs(run.uses.down, 0)
    has_memory = whole or bool(run.dropout.branch2)
    return like.new_empty(rows, width) if has_memory else like.new_empty(()).expand(rows, width)


def end_backward(run: Run, number: int, branch: Branch, grad: Tensor, written: Operand | None) -> EndGrads:
    """Return the gradients at the end of a branch; ``written`` is that of its projection, if it exists."""
    if written is not None:
        return EndGrads(written)
    plan = run.plan
    part = plan.cross[-1] if number == CROSS else plan.out if number == 1 else plan.down
    return EndGrads(*branch_backward(run, number, part, grad, branch))


def attention_backward(
    run: Run, half: AttentionHalf, grad: Operand, shape: torch.Size, needs: BlockTensors
) -> HalfGrads:
    """Return the gradients of attention's half, from that of its output projection."""
    plan, tensors, uses = run.plan, run.tensors, run.uses
    grad_o, state = input_backward(run, grad, uses.out, plan.out, half.of_out)
    adapters = adapters_backward(run, grad, half.o, plan.out, state, needs)
    of_out, of_out_bias = project_backward(grad, half.o, uses.out, plan.out, needs.out, needs.out_bias)
    if run.frees:
        half.o = Operand()
    grad_qkv, of_own, of_others = attend_backward(
        plan, half.attended, grad_o, shape, tensors, run.caster, tuple(bool(need) for need in needs.own)
    )
    if run.frees:
        half.attended = Attended(grad_o.new_empty(0))
    del grad_o
    grad_h, state = input_backward(run, grad_qkv, uses.qkv, plan.qkv, half.of_inputs)
    if half.is_h_remade:
        own, others = tuple(of_own), tuple(of_others)
        return HalfGrads(grad_h, grad_qkv, (), (), of_out, of_out_bias, adapters, own, others)
    adapters |= adapters_backward(run, grad_qkv, half.h, plan.qkv, state, needs)
    of_inputs, of_biases = project_backward(grad_qkv, half.h, uses.qkv, plan.qkv, needs.inputs, needs.input_biases)
    return HalfGrads(
        grad_h, grad_qkv, of_inputs, of_biases, of_out, of_out_bias, adapters, tuple(of_own), tuple(of_others)
    )  # fmt: skip


def mlp_backward(run: Run, half: MlpHalf, grad: Operand, needs: BlockTensors) -> HalfGrads:
    """Return the gradients of the MLP, from that of its last projection; those of its first weights may follow later
    (``finish_mlp``)."""
    if half.tile_rows:
        return _sum_over_tiles(run, half, grad, needs)
    if half.is_u_remade:
        _, again = _run_rows(_make_repetition(run), half.h, False)
        half = replace(half, u=again.u, activated=again.activated, of_ups=again.of_ups)
    return _rows_backward(run, half, grad, needs)


def _make_repetition(run: Run) -> Run:
    """Return the run of a forward that backward repeats: it records no statistics."""
    return run._replace(caster=run.plan.caster(False), again=True)


def _rows_backward(run: Run, half: MlpHalf, grad: Operand, needs: BlockTensors) -> HalfGrads:
    plan, uses = run.plan, run.uses
    dtype = torch.float32 if run.is_tile else None
    grad_a, state = input_backward(run, grad, uses.down, plan.down, half.of_down)
    grad_u, a = activate_backward(run, grad_a, half.u, half.activated)
    del grad_a
    if run.frees:
        half.u, half.activated = half.u.new_empty(0), Activated()
    report_up_gradient(run, grad_u)
    adapters = adapters_backward(run, grad, a, plan.down, state, needs)
    of_down, of_down_bias = project_backward(grad, a, uses.down, plan.down, needs.down, needs.down_bias, dtype)
    del a
    grad_h, state = input_backward(run, grad_u, uses.up, plan.up, half.of_ups)
    if half.is_h_remade:
        return HalfGrads(grad_h, grad_u, (), (), of_down, of_down_bias, adapters)
    adapters |= adapters_backward(run, grad_u, half.h, plan.up, state, needs)
    of_ups, of_up_biases = project_backward(grad_u, half.h, uses.up, plan.up, needs.ups, needs.up_biases, dtype)
    return HalfGrads(grad_h, Operand(), of_ups, of_up_biases, of_down, of_down_bias, adapters)


def _sum_over_tiles(run: Run, half: MlpHalf, grad: Operand, needs: BlockTensors) -> HalfGrads:
    """Run ``_rows_backward`` on each tile, after forward again without the last projection."""
    again, tile = _make_repetition(run), run._replace(is_tile=True)
    grad_h: Tensor | None = None
    sums = GradientSums()
    for rows in split_rows(half.h.rows, half.tile_rows):
        _, piece = _run_rows(again, half.h.slice_rows(rows), False)
        made = _rows_backward(tile, piece, grad.slice_rows(rows), needs)
        if grad_h is None:
            grad_h = made.grad_h.new_empty(half.h.rows, made.grad_h.shape[1])
        grad_h[rows] = made.grad_h
        sums.add("first", made.first)
        sums.add("first_biases", made.first_biases)
        sums.add("last", made.last)
        sums.add("last_bias", made.last_bias)
        sums.add_adapters(made.adapters)
        del piece, made  # before the next tile's are made
    assert grad_h is not None
    return HalfGrads(
        grad_h, Operand(), sums.get_weights("first", run.uses.up), sums.get_biases("first_biases"),
        sums.get_weights("last", run.uses.down), sums.get_biases("last_bias"),
        sums.get_adapters(run, run.plan.up, run.plan.down),
    )  # fmt: skip


def finish_attention(run: Run, grads: HalfGrads, h: Operand, needs: BlockTensors) -> HalfGrads:
    """Return the gradients of attention's half with those of its first weights, from what their product reads."""
    made = project_backward(grads.grad_first, h, run.uses.qkv, run.plan.qkv, needs.inputs, needs.input_biases)
    return grads._replace(first=made[0], first_biases=made[1])


def finish_mlp(run: Run, grads: HalfGrads, h: Operand, needs: BlockTensors) -> HalfGrads:
    """Return the gradients of the MLP with those of its first weights, from what their product reads."""
    made = project_backward(grads.grad_first, h, run.uses.up, run.plan.up, needs.ups, needs.up_biases)
    return grads._replace(grad_first=Operand(), first=made[0], first_biases=made[1])


def collect_grads(
    run: Run, norm1: NormGrads, attention: HalfGrads, end1: EndGrads, norm2: NormGrads, mlp: HalfGrads, end2: EndGrads
) -> BlockTensors:
    """Return the gradients of a block's parameters in their order."""
    grads = BlockTensors(
        (norm1.weight,), (norm1.bias,), attention.first, attention.first_biases, attention.last, attention.last_bias,
        (norm2.weight,), (norm2.bias,), mlp.first, mlp.first_biases, mlp.last, mlp.last_bias,
        (end1.norm,), (end2.norm,), (end1.scale,), (end2.scale,), attention.own,
    )  # fmt: skip
    return place_adapters(run, grads, attention.adapters | mlp.adapters)


def place_adapters(run: Run, grads: BlockTensors, found: AdapterGrads) -> BlockTensors:
    """Return a block's gradients with those of its adapters, besides the ones that it has."""
    numbers = range(len(run.plan.spec.adapters))
    before: Some = (None,) * len(numbers)
    pairs = list(zip(grads.adapters_a or before, grads.adapters_b or before, strict=True))
    placed = [found.get(number, pairs[number]) for number in numbers]
    return grads._replace(adapters_a=tuple(a for a, _ in placed), adapters_b=tuple(b for _, b in placed))


def drop_unneeded(plan: BlockPlan, attention: AttentionHalf, mlp: MlpHalf) -> None:
    """Drop what only forward's products read, and what is recomputed."""
    selective, made = plan.checkpoint == "selective", mlp.activated
    remade = selective or (plan.down.is_frozen and made.kept is None)
    if made.codes is not None or mlp.is_u_remade:
        mlp.u = mlp.u.new_empty(0)
    a = Operand() if remade or mlp.is_u_remade else plan.down.keep_for_backward(made.a)._replace(lp=None)
    mlp.activated = made._replace(a=a)
    attention.o = plan.out.keep_for_backward(attention.o)
    attention.h = Operand() if selective or attention.is_h_remade else plan.qkv.keep_for_backward(attention.h)
    if mlp.tile_rows or mlp.is_u_remade:
        mlp.h = mlp.h if mlp.h.lp is None else mlp.h._replace(lp_t=None)  # forward runs again, and rows are transposed
    else:
        mlp.h = Operand() if selective or mlp.is_h_remade else plan.up.keep_for_backward(mlp.h)


def release_mlp(run: Run, half: MlpHalf) -> None:
    """Free what the MLP read first, before attention's backward."""
    if run.frees:
        half.h = Operand()


def restore(
    run: Run, attention: AttentionHalf, mlp: MlpHalf, h1: Operand, h2: Operand
) -> tuple[AttentionHalf, MlpHalf]:
    """Return the halves with what selective checkpointing dropped: given, or computed again."""
    mlp = replace(mlp, h=h2)
    if not is_activation_remade(run):
        mlp.activated = activate(run, mlp.u, mlp.activated.kept)
    return replace(attention, h=h1), mlp
