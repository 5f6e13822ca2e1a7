"""Describes a transformer block from one observed run: each claim is an equation between recorded tensors.

Nothing depends on names. A module is a norm because its output is the norm of its input, a projection belongs to
attention because it reads the first norm's output, an activation is GELU because the last projection's input is GELU
of an earlier one's output. What does not satisfy an order's equations is not a block, and the reason says where it
differs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from narrowgauge.nn.blocks.activations import ACTIVATIONS, GATED, compute_activation
from narrowgauge.nn.blocks.adapters import merge_adapters
from narrowgauge.nn.blocks.block_output import read_output
from narrowgauge.nn.blocks.equations import EXACT, TOLERANCE, are_close, recognize_norm
from narrowgauge.nn.blocks.example import Example, find_source
from narrowgauge.nn.blocks.observe import Call, Observation, get_rows
from narrowgauge.nn.blocks.spec import AttentionSpec, BlockSpec, BranchSpec, CrossSpec, NormSpec, NotABlock, Place
from narrowgauge.nn.products.linear import is_linear


def recognize(block: nn.Module, example: Example, seen: Observation) -> BlockSpec:
    """Describe the block that was run on the example.

    Raises:
        NotABlock: It satisfies the equations of no order.
    """
    output, in_tuple, returned = read_output(seen.output, example)
    x = get_rows(example.args[0])
    unused = list_unused(block, seen)
    seen, adapters = merge_adapters(seen)
    calls = seen.once()
    linears = [call for call in calls if call.is_projection]
    if len({call.path for call in seen.calls if call.is_projection}) != len(linears):
        raise NotABlock("a linear layer inside it runs more than once")
    if unused:
        raise NotABlock(f"{min(unused)} runs only with other arguments, or is used in another way")
    for one, two in itertools.permutations(linears, 2):
        if are_close(two.input, one.output):
            raise NotABlock(f"{two.path} reads the output of {one.path}, but they are not a low-rank adapter")
    once = set(map(id, calls))  # norms without parameters may run more than once
    may_be_norms = [call for call in seen.calls if id(call) in once or next(call.module.parameters(), None) is None]
    norms = [(call, norm) for call in may_be_norms if (norm := recognize_norm(call)) is not None]
    if len(linears) < 2 or not norms:
        raise NotABlock("it has fewer than two linear layers, or no norm")
    scales, source = _list_scales(block, x.shape[-1]), find_source(example.kwargs)
    run = _Run(x, output, norms, linears, scales, _list_factors(block), calls, seen.of_tuples, source)
    reasons = []
    for match in (_match_pre, _match_post, _match_parallel, _match_normed_branches, _match_half):
        try:
            found = match(run)
        except NotABlock as reason:
            reasons.append(str(reason))
            continue
        used = tuple(adapter for adapter in adapters if adapter.base in found.linears)  # others are attention's own
        return _complete(found, run, calls, seen, {"in_tuple": in_tuple, "returned": returned, "adapters": used})
    raise NotABlock(reasons[0])


def list_unused(block: nn.Module, seen: Observation) -> set[str]:
    """Return the linear layers that did not run, apart from adapters that are not active."""
    run = {call.path for call in seen.calls if call.is_projection}
    adapted = tuple(f"{adapter.path}." for adapter in merge_adapters(seen)[1])
    linears = {path for path, part in block.named_modules() if is_linear(part)}
    return {path for path in linears - run if not path.startswith(adapted)}


Norms = list[tuple[Call, NormSpec]]


class _Run(NamedTuple):
    """One run of a block, as rows of tokens."""

    x: Tensor
    output: Tensor
    norms: Norms
    linears: list[Call]
    scales: list[tuple[str | None, Tensor | float]]
    """Names and values of what may multiply a branch, first of all nothing."""
    factors: list[float]
    """Numbers that may multiply a branch."""
    calls: list[Call]
    """Of all modules, but for those that return tuples."""
    of_tuples: list[Call]
    source: tuple[str, Tensor] | None = None
    """The name of the argument with an encoder's output, and its value."""


class _Branch(NamedTuple):
    """A branch as it is added, without dropout."""

    value: Tensor
    spec: BranchSpec


def _list_scales(block: nn.Module, width: int) -> list[tuple[str | None, Tensor | float]]:
    found = [(name, p.detach()) for name, p in block.named_parameters() if p.shape == (width,) and "bias" not in name]
    return [(None, 1.0), *found]


def _list_factors(block: nn.Module) -> list[float]:
    return [value for value in vars(block).values() if type(value) is float and value not in (0.0, 1.0)]


def _match_pre(run: _Run) -> BlockSpec:
    first, norm1 = _find_norm(run.norms, run.x, "no norm reads the block's input")
    inputs = [call for call in run.linears if are_close(call.input, first.output)]
    rest = [call for call in run.linears if call not in inputs]
    if not inputs or len(rest) < 3:
        raise NotABlock("no projection reads the first norm's output, or too few follow")
    out, one = _find_attention_end(run, rest, [call for call, _ in run.norms], "norm")
    x1, end = run.x + one.value, out
    second, norm2 = _find_norm(run.norms, x1, "no norm reads the sum")
    crossed = _find_cross(run, second.output, x1, rest)
    cross = None
    if crossed is not None:
        end, x1 = crossed.out, crossed.total
        cross, (second, norm2) = crossed.describe(norm2), crossed.reader
    ups, down = _split_mlp(second.output, rest, end)
    activation, ordered, last = _match_activation(ups, down)
    two = _find_branch(run, down, run.output - x1)
    return BlockSpec(
        "pre", norm1, _paths(inputs), AttentionSpec(), out.path, norm2, ordered, activation, down.path, one.spec, two,
        gate_last=last, cross=cross,
    )  # fmt: skip


def _match_normed_branches(run: _Run) -> BlockSpec:
    """The order "pre" without norms of the stream: only its branches are normed (OLMo 2)."""
    inputs = [call for call in run.linears if are_close(call.input, run.x)]
    rest = [call for call in run.linears if call not in inputs]
    if not inputs or len(rest) < 3:
        raise NotABlock("no projection reads the block's input")
    out, one = _find_attention_end(run, rest, rest, "projection")
    x1 = run.x + one.value
    ups, down = _split_mlp(x1, rest, out)
    activation, ordered, last = _match_activation(ups, down)
    two = _find_branch(run, down, run.output - x1)
    return BlockSpec(
        "pre", None, _paths(inputs), AttentionSpec(), out.path, None, ordered, activation, down.path, one.spec, two,
        gate_last=last,
    )  # fmt: skip


def _match_post(run: _Run) -> BlockSpec:
    inputs = [call for call in run.linears if are_close(call.input, run.x)]
    rest = [call for call in run.linears if call not in inputs]
    if not inputs or len(rest) < 3:
        raise NotABlock("no projection reads the block's input")
    out, one = _find_attention_end(run, rest, [call for call, _ in run.norms], "norm")
    first, norm1 = _find_norm(run.norms, run.x + one.value, "no norm reads the sum")
    crossed = _find_cross(run, first.output, first.output, rest)
    cross, x1, end = None, first.output, out
    if crossed is not None:
        cross, x1, end = crossed.describe(crossed.reader[1]), crossed.reader[0].output, crossed.out
    ups, down = _split_mlp(x1, rest, end)
    activation, ordered, last = _match_activation(ups, down)
    for two in _list_branches(run, down):
        for second, norm2 in run.norms:
            if are_close(second.input, x1 + two.value) and are_close(second.output, run.output):
                return BlockSpec(
                    "post", norm1, _paths(inputs), AttentionSpec(), out.path, norm2, ordered, activation, down.path,
                    one.spec, two.spec, gate_last=last, cross=cross,
                )  # fmt: skip
    raise NotABlock("its output is not the norm of the sum with the MLP's branch")


def _match_parallel(run: _Run) -> BlockSpec:
    reading = [(call, norm) for call, norm in run.norms if are_close(call.input, run.x)]
    for first, norm1 in reading:
        for second, norm2 in reading:
            readers = [call for call in run.linears if are_close(call.input, first.output)]
            mlp = [call for call in run.linears if are_close(call.input, second.output)]
            rest = [call for call in run.linears if call not in readers and call not in mlp]
            if len(rest) != 2 or not readers or not mlp or any(call.output.shape != run.x.shape for call in rest):
                continue
            for out, down in (rest, rest[::-1]):
                if not are_close(run.x + out.output + down.output, run.output):
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


def _match_half(run: _Run) -> BlockSpec:
    """The order "pre" with an MLP that is not described, but a module."""
    first, norm1 = _find_norm(run.norms, run.x, "no norm reads the block's input")
    inputs = [call for call in run.linears if are_close(call.input, first.output)]
    rest = [call for call in run.linears if call not in inputs]
    if not inputs or not rest:
        raise NotABlock("no projection reads the first norm's output")
    out, one = _find_attention_end(run, rest, [call for call, _ in run.norms], "norm")
    x1 = run.x + one.value
    second, norm2 = _find_norm(run.norms, x1, "no norm reads the sum")
    largest, others = float(run.output.abs().max()), _paths([*inputs, out, first, second])
    found = [
        (call.path, factor) for call in (*run.calls, *run.of_tuples) for factor in (1.0, *run.factors)
        if call.is_alone and call.output.shape == call.input.shape == x1.shape and are_close(call.input, second.output)
        and bool((call.output * factor - (run.output - x1)).abs().max() <= TOLERANCE * largest)
        and not any(path.startswith(f"{call.path}.") for path in others)
    ]  # fmt: skip
    if not found:
        raise NotABlock("no module computes its MLP's branch from the norm of the sum")
    mlp, factor = min(found, key=lambda one: len(one[0]))  # the outermost module: experts read the same, and more
    return BlockSpec(
        "half", norm1, _paths(inputs), AttentionSpec(), out.path, norm2, (), "", "", one.spec,
        BranchSpec(factor=factor), mlp=mlp,
    )  # fmt: skip


class _Crossed(NamedTuple):
    """The projections of cross-attention, and what follows it."""

    source: str
    query: Call
    inputs: list[Call]
    out: Call
    total: Tensor
    """The stream with the branch."""
    reader: tuple[Call, NormSpec]
    """The norm that reads this sum."""

    def describe(self, norm: NormSpec) -> CrossSpec:
        return CrossSpec(self.source, norm, self.query.path, _paths(self.inputs), self.out.path, "", 0)


def _find_cross(run: _Run, read: Tensor, stream: Tensor, rest: list[Call]) -> _Crossed | None:
    """Return cross-attention whose query projection reads ``read``; None if nothing reads an encoder's output."""
    name, value = run.source or ("", None)
    inputs = [call for call in run.linears if value is not None and are_close(call.input, get_rows(value))]
    if not inputs:
        return None
    queries = [call for call in rest if are_close(call.input, read)]
    if len(queries) != 1 or len(inputs) > 2:
        raise NotABlock("its cross-attention does not have one projection for queries, and one or two for the encoder")
    for out in (call for call in rest if call not in (*queries, *inputs) and call.output.shape == stream.shape):
        for reader in run.norms:
            if are_close(reader[0].input, stream + out.output):
                return _Crossed(name, queries[0], inputs, out, stream + out.output, reader)
    raise NotABlock("no norm reads the sum with the branch of cross-attention")


def _complete_cross(found: BlockSpec, cross: CrossSpec, calls: list[Call], seen: Observation) -> CrossSpec:
    """Add the place of dropout, and the module that contains self-attention and nothing else."""
    branch = next(call.output for call in calls if call.path == cross.output)
    names = [path.split(".") for path in (*found.inputs, found.output)]
    shared = itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*names, strict=False))
    before = ".".join(parts[0] for parts in shared)
    others = (cross.query, *cross.inputs, cross.output, *found.ups, found.down)
    if before not in seen.entries or any(path.startswith(f"{before}.") for path in others):
        raise NotABlock("its self-attention is not a module of its own that returns a tensor, or a tuple with one")
    dropout = _find_dropout(seen, [branch])
    return replace(cross, before=before, before_entries=seen.entries[before], dropout=dropout)


def _find_norm(norms: Norms, value: Tensor, otherwise: str) -> tuple[Call, NormSpec]:
    for call, norm in norms:
        if are_close(call.input, value):
            return call, norm
    raise NotABlock(otherwise)


def _list_branches(run: _Run, linear: Call) -> Iterator[_Branch]:
    """Yield what a projection's output may become before it is added: it may be normed and scaled."""
    ends: list[tuple[Tensor, NormSpec | None]] = [(linear.output, None)]
    ends += [(call.output, norm) for call, norm in run.norms if norm.weight and are_close(call.input, linear.output)]
    for value, norm in ends:
        for name, scale in run.scales:
            yield _Branch(value * scale, BranchSpec(norm, scale=name))
        for factor in run.factors:
            yield _Branch(value * factor, BranchSpec(norm, factor=factor))


def _find_attention_end(run: _Run, rest: list[Call], readers: list[Call], kind: str) -> tuple[Call, _Branch]:
    """Return the linear layer that ends attention's branch, so that a reader reads the sum of x and the branch.

    Linear layers that run before it belong to attention's own code, as in multi-head latent attention.
    """
    for out in (call for call in rest if call.output.shape == run.x.shape):
        for branch in _list_branches(run, out):
            if any(are_close(call.input, run.x + branch.value) for call in readers):
                return out, branch
    raise NotABlock(f"no {kind} reads the sum of the input and attention's branch")


def _find_branch(run: _Run, linear: Call, added: Tensor) -> BranchSpec:
    largest = float(run.output.abs().max())
    for branch in _list_branches(run, linear):
        if bool((branch.value - added).abs().max() <= TOLERANCE * largest):
            return branch.spec
    raise NotABlock("its output is not the sum of the residual stream and the MLP's branch")


def _split_mlp(source: Tensor, rest: list[Call], out: Call) -> tuple[list[Call], Call]:
    """Return the projections that read the MLP's input, and the last one, of those that run after ``out``."""
    after = rest[rest.index(out) + 1 :]
    ups = [call for call in after if are_close(call.input, source)]
    ends = [call for call in after if call not in ups]
    if not ups or len(ends) != 1:
        raise NotABlock("its MLP is not one or two projections, an activation and one more projection")
    return ups, ends[0]


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


def has_activation(seen: Observation, spec: BlockSpec) -> bool:
    """Whether the last projection's input is the described activation of the MLP's first projections."""
    calls = {call.path: call for call in merge_adapters(seen)[0].calls}
    u = torch.cat([calls[path].output for path in spec.ups], -1)
    return are_close(compute_activation(spec.activation, u, spec.gate_last), calls[spec.down].input)


def _complete(found: BlockSpec, run: _Run, calls: list[Call], seen: Observation, output: dict[str, Any]) -> BlockSpec:
    """Add the places of dropout and stochastic depth, which are identities in this run."""
    outputs = {call.path: call.output for call in (*calls, *seen.of_tuples)}
    branches = []
    for spec, linear in ((found.branch1, found.output), (found.branch2, found.mlp or found.down)):
        value = outputs[linear if spec.norm is None else spec.norm.path]
        scale = spec.factor if spec.scale is None else dict(run.scales)[spec.scale]
        values = [value, value * scale]
        place = _find_dropout(seen, values)
        depth = _find_depth([call for call in seen.calls if place is None or call.path != place[0]], values)
        branches.append(replace(spec, dropout=place, depth=depth))
    hidden = [call.input for call in calls if call.path == found.down]
    dropout = _find_dropout(seen, hidden)
    cross = None if found.cross is None else _complete_cross(found, found.cross, calls, seen)
    return replace(found, branch1=branches[0], branch2=branches[1], dropout=dropout, cross=cross, **output)


def _find_dropout(seen: Observation, values: list[Tensor]) -> Place | None:
    for call in seen.dropouts:
        if any(are_close(call.input, value) for value in values):
            if call.place is None:
                raise NotABlock("the probability of a dropout is not an attribute of its modules")
            return call.place
    return None


def _find_depth(calls: list[Call], values: list[Tensor]) -> str | None:
    """Return the module that passes a branch on as it is, and is neither nn.Identity nor dropout."""
    for call in calls:
        plain = isinstance(call.module, nn.Identity | nn.Dropout) or any(call.module.children())
        if plain or any(True for _ in call.module.parameters()) or call.is_projection:
            continue
        if torch.equal(call.input, call.output) and any(are_close(call.input, value) for value in values):
            return call.path
    return None


def _paths(calls: list[Call]) -> tuple[str, ...]:
    return tuple(call.path for call in calls)
