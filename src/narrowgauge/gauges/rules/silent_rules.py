"""Rules for faults that leave the loss finite and plausible. ``lasting`` decides which are reported.

They compare parameters with each other and with their optimizer, and units with the batch. Each has a threshold far
from what healthy training shows; a healthy counterpart of each is in tests/gauges/test_silent_rules.py.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from narrowgauge.findings import SERIOUS, WARNING, Finding
from narrowgauge.gauges.rules.muon_rules import check_orthogonal, check_stale, is_stepped_by_muon
from narrowgauge.gauges.rules.tensor_rules import UpdateContext

MATRIX = 64
"""Parameters with fewer values, most of them biases, say little about the size of updates and gradients."""
_DEAD_UNITS = 0.95
_OUT_OF_PROPORTION, _LARGE = 100.0, 0.05
"""An update this many times the median of the others, relative to its weights, and at least this share of them."""
_CONVERGED = 1e-4
"""Share of the first loss below which gradients are small because there is nothing left to learn."""
_VANISHED = 1e-6
_HALVED = 2.0
_DEEP = 8
"""Matrices that a model must have for its depth to be judged."""


@dataclass(frozen=True)
class ModelHistory:
    """What earlier snapshots have shown."""

    first_weights: Mapping[str, float] = field(default_factory=dict)
    """The mean square of each parameter in the first snapshot."""
    first_loss: float | None = None
    """The median of the first losses."""
    decayed: Mapping[str, float] = field(default_factory=dict)
    """By the weight of a norm: learning rate times weight decay, summed over the updates so far."""
    first_logits: Mapping[str, float] = field(default_factory=dict)
    """By attention: its logits in the first snapshot."""


def find_silent_faults(context: UpdateContext, before: ModelHistory) -> list[Finding]:
    """Return what every rule in ``RULES`` finds in one snapshot; nothing once the loss has all but reached zero."""
    if context.loss is not None and abs(context.loss) <= _CONVERGED * abs(before.first_loss or 0.0):
        return []
    return [finding for rule in RULES for finding in rule(context, before)]


def check_missing_gradients(context: UpdateContext, _: ModelHistory) -> Iterator[Finding]:
    """Find parameters that the optimizer has and that backward never reaches."""
    names = _select_facts(context, "no_gradient")
    for owner, members in _group_by_owner(names).items():
        yield Finding(
            rule="no-gradient",
            severity=WARNING,
            where=owner,
            detail=f"backward reaches none of these parameters: {_list_names(members)}",
            why="the optimizer has them, but they never change",
            fix="look for detach(), no_grad or .data before the loss; remove parameters that are not used",
        )


def check_optimized(context: UpdateContext, _: ModelHistory) -> Iterator[Finding]:
    """Find parameters with a gradient that no optimizer has."""
    names = _select_facts(context, "no_optimizer")
    for owner, members in _group_by_owner(names).items():
        yield Finding(
            rule="not-in-optimizer",
            severity=WARNING,
            where=owner,
            detail=f"these parameters get a gradient, but are in no optimizer: {_list_names(members)}",
            why="they keep their initial values",
            fix="create the optimizer after all modules, from all parameters; freeze others with requires_grad_(False)",
        )


def check_batch_norms(context: UpdateContext, _: ModelHistory) -> Iterator[Finding]:
    """Find batch norms in training mode whose running statistics are still the initial ones."""
    for (name, path), value in context.snapshot.facts.items():
        if name == "statistics" and value == 0:
            yield Finding(
                rule="batchnorm-not-updated",
                severity=SERIOUS,
                where=path,
                detail="its running mean is still 0 and its running variance 1, although it is in training mode",
                why="evaluation normalizes with statistics that are not those of the data",
                fix="check its momentum (0 never updates; the default is 0.1)",
            )


def check_units(context: UpdateContext, _: ModelHistory) -> Iterator[Finding]:
    """Find an activation with hardly a unit that is ever active."""
    for (name, path), share in context.snapshot.facts.items():
        if name == "dead_units" and _DEAD_UNITS <= share < 1:  # all of them: a dead layer
            yield Finding(
                rule="dead-units",
                severity=WARNING,
                where=path,
                detail=f"{share:.0%} of its units are inactive for every sample of the batch",
                why="dead units get no gradient and do not recover",
                fix="lower the learning rate or the bias; use GELU, SiLU or LeakyReLU; check the scale of the inputs",
            )


def check_epsilon(context: UpdateContext, _: ModelHistory) -> Iterator[Finding]:
    """Find an Adam whose eps is larger than the root of the second moment in most parameters."""
    roots = {path: value for (name, path), value in context.snapshot.facts.items() if name == "adam_root" and value}
    below = [path for path, value in roots.items() if value < 1]
    if len(below) > 0.5 * len(roots):
        worst = min(below, key=roots.__getitem__)
        yield Finding(
            rule="adam-eps-too-large",
            severity=WARNING,
            where="optimizer",
            detail=f"eps is larger than the root of the second moment in {len(below)} of {len(roots)} parameters, "
            f"{1 / roots[worst]:.3g} times in {worst}",
            why="Adam then steps like SGD with a tiny learning rate: updates shrink with the gradients",
            fix="lower eps (the default is 1e-8), or scale the loss up",
        )


def check_proportions(context: UpdateContext, before: ModelHistory) -> Iterator[Finding]:
    """Find a parameter whose update is a hundred times as large, relative to its weights, as that of the others."""
    started = {name for name, mean_square in before.first_weights.items() if mean_square > 0}
    updates = [one for one in context.select("update") if one.count >= MATRIX and one.module in started and one.ratio]
    for one in updates if len(updates) >= 3 else ():
        others = statistics.median(other.ratio or 0.0 for other in updates if other is not one)
        ratio = one.ratio or 0.0
        if ratio > _LARGE and ratio > _OUT_OF_PROPORTION * others:
            yield Finding(
                rule="update-out-of-proportion",
                severity=WARNING,
                where=one.module,
                detail=f"an update changes it by {ratio:.2g} of its size; the median of the others is {others:.2g}",
                why="it moves too fast for the rest of the model to follow",
                fix="check the learning rate of its parameter group",
            )


def check_depth(context: UpdateContext, _: ModelHistory) -> Iterator[Finding]:
    """Find gradients that vanish from the last layers to the first; Muon's matrices learn with any size of gradient."""
    sizes = [
        (one.module, one.mean_square**0.5)
        for one in context.select("weight_gradient")
        if one.count >= MATRIX
        and one.module.endswith("weight")
        and one.mean_square > 0
        and not is_stepped_by_muon(context.snapshot, one.module)
    ]
    if len(sizes) < _DEEP:
        return
    quarter = len(sizes) // 4
    first, last = (statistics.median(size for _, size in part) for part in (sizes[:quarter], sizes[-quarter:]))
    if first < _VANISHED * last:
        yield Finding(
            rule="vanishing-gradients",
            severity=WARNING,
            where=sizes[0][0],
            detail=f"gradients of the first layers are {first / last:.1g} times those of the last layers",
            why="the first layers hardly learn",
            fix="add residual connections or norms, or use an activation that does not saturate",
        )


def check_norm_decay(context: UpdateContext, before: ModelHistory) -> Iterator[Finding]:
    """Find norms whose weights weight decay has halved, and still shrinks."""
    weights = {one.module: one.mean_square for one in context.select("weight")}
    for name, decayed in before.decayed.items():
        first, now = before.first_weights.get(name, 0.0), weights.get(name, 0.0)
        if now <= 0 or first <= 0 or ("norm_decay", name) not in context.snapshot.facts:
            continue
        fallen = 0.5 * math.log(first / now)
        if fallen > math.log(_HALVED) and decayed > 0.7 * fallen:
            yield Finding(
                rule="decay-on-norm",
                severity=WARNING,
                where=name,
                detail=f"it has shrunk {math.exp(fallen):.3g} times, of which weight decay explains "
                f"{math.exp(decayed):.3g} times",
                why="decay pulls the scale of a norm to 0, and the signal after it vanishes",
                fix="put norms and biases into a parameter group with weight_decay=0",
            )


RULES: tuple[Callable[[UpdateContext, ModelHistory], Iterator[Finding]], ...] = (
    check_missing_gradients,
    check_optimized,
    check_batch_norms,
    check_units,
    check_epsilon,
    check_proportions,
    check_depth,
    check_norm_decay,
    lambda context, _: check_orthogonal(context),
    lambda context, _: check_stale(context),
)


def _select_facts(context: UpdateContext, name: str) -> list[str]:
    return [path for fact, path in context.snapshot.facts if fact == name]


def _group_by_owner(names: list[str]) -> dict[str, list[str]]:
    """Group parameters by the first part of their path: a cause usually cuts off a whole part of the model."""
    owners: dict[str, list[str]] = {}
    for name in names:
        owners.setdefault(name.partition(".")[0], []).append(name)
    return owners


def _list_names(names: list[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more
