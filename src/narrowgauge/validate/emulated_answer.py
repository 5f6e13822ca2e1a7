"""The answer to "would it train in this format?", for candidates that emulate one: a verdict in a sentence."""

from __future__ import annotations

from narrowgauge.recipe import find_emulation
from narrowgauge.validate.statistics.verdict import BETTER, EQUIVALENT, INCONCLUSIVE, WORSE, Verdict

_ANSWERS = {EQUIVALENT: "yes", BETTER: "yes", WORSE: "no", INCONCLUSIVE: "not decided"}


def make_answer(
    recipe: str, verdict: Verdict, reference: str, steps: int, format_share: float | None = None
) -> str | None:
    """Return the answer for a candidate; None if its recipe emulates nothing.

    Args:
        recipe: The text of the candidate's recipe.
        verdict: What its paired runs have shown.
        reference: The recipe that it was compared with.
        steps: The length of the runs.
        format_share: The share of multiplied parameters in the format, if it is known. Other layers ran in BF16.
    """
    title = find_emulation(recipe)
    if title is None:
        return None
    if format_share == 0:
        return (
            f"Would it train in {title}? not tested: no layer ran in it, so this compared BF16 with {reference}; print "
            "an engine's conversion to see the reason for each layer"
        )
    found = [f"{verdict.verdict} compared with {reference}" if verdict.verdict != INCONCLUSIVE else verdict.reason]
    if verdict.gap is not None and verdict.interval is not None:
        found.append(f"gap {verdict.gap:+.3%}, interval {verdict.interval[0]:+.3%} to {verdict.interval[1]:+.3%}")
    elif verdict.verdict != INCONCLUSIVE:
        found.append(verdict.reason)
    found.append(f"{verdict.seeds} pair{'s' * (verdict.seeds != 1)}, margin {verdict.margin:.2%}")
    if format_share is not None:
        found.append(f"{title} in {format_share:.0%} of the multiplied parameters")
    return (
        f"Would it train in {title}? {_ANSWERS[verdict.verdict]}, in runs of {steps:,} steps: {'; '.join(found)}. "
        f"Emulated ({recipe}): the numbers of hardware with {title}, and nothing about its speed"
    )
