"""The answer to "would it train in this format?", for candidates that emulate one: a verdict in a sentence."""

from __future__ import annotations

from narrowgauge.recipe import find_emulation
from narrowgauge.validate.statistics.verdict import BETTER, EQUIVALENT, INCONCLUSIVE, WORSE, Verdict

_ANSWERS = {EQUIVALENT: "yes", BETTER: "yes", WORSE: "no", INCONCLUSIVE: "not decided"}


def make_answer(recipe: str, verdict: Verdict, reference: str, steps: int) -> str | None:
    """Return the answer for a candidate; None if its recipe emulates nothing.

    Args:
        recipe: The text of the candidate's recipe.
        verdict: What its paired runs have shown.
        reference: The recipe that it was compared with.
        steps: The length of the runs.
    """
    title = find_emulation(recipe)
    if title is None:
        return None
    found = [f"{verdict.verdict} compared with {reference}" if verdict.verdict != INCONCLUSIVE else verdict.reason]
    if verdict.gap is not None and verdict.interval is not None:
        found.append(f"gap {verdict.gap:+.3%}, interval {verdict.interval[0]:+.3%} to {verdict.interval[1]:+.3%}")
    elif verdict.verdict != INCONCLUSIVE:
        found.append(verdict.reason)
    found.append(f"{verdict.seeds} pair{'s' * (verdict.seeds != 1)}, margin {verdict.margin:.2%}")
    return (
        f"Would it train in {title}? {_ANSWERS[verdict.verdict]}, in runs of {steps:,} steps: {'; '.join(found)}. "
        f"Emulated ({recipe}): the numbers of hardware with {title}, and nothing about its speed"
    )
