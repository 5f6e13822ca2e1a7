"""Groups the findings of a run by cause: one finding per cause, with what follows from it listed under it.

    cause of a finding   the first finding, not later, with a rule that CAUSES names for its rule;
                         otherwise the first finding of the same rule in the same step, if the rule spreads
    root                 follow causes until a finding has none
    group                the root with the severity of its worst member; the others are its consequences

``training-stalled`` says why a run ended, and stays on its own. CAUSES only leads from effects to rules earlier in the
chain of computation, so there are no cycles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from narrowgauge.findings import ORDER, Consequence, Finding

_FORWARD = ("overflow", "activation-not-finite")
_WEIGHTS = ("updates-too-large", "update-out-of-proportion")
_BAD_NUMBERS = (*_FORWARD, *_WEIGHTS, "loss-not-finite", "bad-batch", "gradient-not-finite")
_SCALE = ("scale-collapsing", "scale-at-floor", "scale-oscillating")
CAUSES: dict[str, tuple[str, ...]] = {
    "no-gradient": ("dead-layer",),
    "underflow": ("dead-layer",),
    "loss-not-finite": (*_FORWARD, *_WEIGHTS),
    "bad-batch": _FORWARD,
    "gradient-not-finite": (*_FORWARD, *_WEIGHTS),
    "gradient-spike": _WEIGHTS,
    "loss-spike": _WEIGHTS,
    "loss-diverging": _WEIGHTS,
    "exploding-logits": _WEIGHTS,
    **dict.fromkeys(_SCALE, _BAD_NUMBERS),
    "skips-in-a-row": (*_BAD_NUMBERS, *_SCALE),
    "skipping-too-often": (*_BAD_NUMBERS, *_SCALE, "skips-in-a-row"),
    "many-skipped-updates": (*_BAD_NUMBERS, *_SCALE, "skips-in-a-row"),
    "loss-did-not-fall": (*_BAD_NUMBERS, *_SCALE, "dead-layer", "underflow", "no-gradient", "stagnating-updates"),
}
"""For the rule of a finding: the rules that can be its cause."""
SPREADING = ("dead-layer", "no-gradient", "underflow", "updates-too-large", "stagnating-updates", "fp8-underflow")
"""Rules that report many places of one cause in the same step."""
_SAME_STEP = ("bad-batch",)


def group_by_cause(findings: Sequence[Finding]) -> list[Finding]:
    """Return one finding per cause, in the order of the given ones.

    Args:
        findings: The findings of a run, in the order in which they were found.
    """
    causes = [_find_cause(index, findings) for index in range(len(findings))]
    members: dict[int, list[Finding]] = {}
    for index, finding in enumerate(findings):
        root = index
        while (cause := causes[root]) is not None:
            root = cause
        members.setdefault(root, [])
        if root != index:
            members[root].append(finding)
    return [_join(findings[root], members[root]) for root in sorted(members)]


def _find_cause(index: int, findings: Sequence[Finding]) -> int | None:
    effect = findings[index]
    step = effect.step or 0
    for number, one in enumerate(findings):
        first = one.step or 0
        in_time = first == step if effect.rule in _SAME_STEP else first <= step
        if one.rule in CAUSES.get(effect.rule, ()) and in_time:
            return number
    for number, one in enumerate(findings[:index]):
        if effect.rule in SPREADING and one.rule == effect.rule and one.step == effect.step:
            return number
    return None


def _join(root: Finding, others: list[Finding]) -> Finding:
    if not others:
        return root
    worst = min((root, *others), key=lambda one: ORDER[one.severity]).severity
    listed = [Consequence(one.rule, one.where, one.detail, one.step) for one in others]
    return replace(root, severity=worst, consequences=(*root.consequences, *listed))
