"""Error rates and power of a validation with up to four analyses, in simulations with known noise and gap.

usage: python bench/sequential.py [TRIALS]     (2000 by default; JSON to $OUT/sequential.json)
"""

import json
import os
import random
import sys
from pathlib import Path

from narrowgauge.validate.statistics.sequential_test import SequentialTest

MARGIN, MOST = 0.005, 200
CASES = [(gap, noise) for gap in (0.0, MARGIN, 3 * MARGIN) for noise in (0.001, 0.003, 0.01)]


def trial(rng: random.Random, gap: float, noise: float, most: int = MOST) -> tuple[str, int]:
    """The verdict of one validation with at most ``most`` pairs, and the number of pairs it used."""
    test, losses = SequentialTest(MARGIN), []
    while test.pairs_wanted:
        losses += [1 + rng.gauss(gap, noise) for _ in range(test.pairs_wanted - len(losses))]
        test.update([1.0] * len(losses), losses, most)
    assert test.verdict is not None
    return test.verdict.verdict, len(losses)


def main() -> None:
    trials = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    record = []
    for gap, noise in CASES:
        rng = random.Random(f"{gap} {noise}")
        found = [trial(rng, gap, noise) for _ in range(trials)]
        names = ("equivalent", "worse", "better", "inconclusive")
        shares = {name: sum(verdict == name for verdict, _ in found) / trials for name in names}
        pairs = sum(count for _, count in found) / trials
        record.append({"gap": gap, "noise": noise, "pairs": pairs, **shares})
        said = ", ".join(f"{name} {share:.1%}" for name, share in shares.items())
        print(f"gap {gap:.2%}, noise {noise:.2%}: {said}; {pairs:.1f} pairs", flush=True)
    if "OUT" in os.environ:
        data = {"trials": trials, "margin": MARGIN, "most": MOST, "cases": record}
        (Path(os.environ["OUT"]) / "sequential.json").write_text(json.dumps(data, indent=1))


if __name__ == "__main__":
    main()
