"""``narrowgauge validate [TASK]``: does a recipe train as good a model as FP32? Paired runs, and a verdict."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from narrowgauge.cli import Outcome, prose
from narrowgauge.cli.terminal import say, show_table
from narrowgauge.errors import UsageError

if TYPE_CHECKING:
    from narrowgauge.validate.curves import Question, Run
    from narrowgauge.validate.verdict import Verdict

ABOUT = "prove, or fail to prove, that a recipe trains as good a model as the reference"
FIRST, MOST = 3, 12
"""With --seeds auto: pairs to estimate the noise with, and the most that are spent."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("task", nargs="?", metavar="TASK", help="a built-in task or file.py:function (default: one for this machine)")
    add("--candidates", default="bf16", help="recipes, separated by commas outside of brackets (default bf16)")
    add("--reference", default="fp32", help="what they are held against (default fp32)")
    add("--seeds", default="auto", help="pairs of runs, or auto: as many as it takes, up to 12 (default auto)")
    add("--margin", type=float, default=0.005, help="relative gap of the loss that is still as good (default 0.005)")
    add("--steps", type=int, metavar="N", help="updates of a run (default: the task's)")
    add("--batch", type=int, metavar="N")
    add("--context", type=int, metavar="N")
    add("--lr", type=float, metavar="RATE")


def run(args: argparse.Namespace) -> Outcome:
    from narrowgauge import hardware, tasks
    from narrowgauge.data import cache
    from narrowgauge.recipe import parse, refusal
    from narrowgauge.validate.curves import Question

    device = hardware.detect(args.device)
    spec = args.task or tasks.default(device.kind)
    names = [str(parse(name, device)) for name in (args.reference, *split_recipes(args.candidates))]
    for name in names:
        reason = refusal(parse(name), device)
        if reason is not None:
            raise UsageError(reason)
    if args.seeds != "auto" and not (args.seeds.isdigit() and 1 <= int(args.seeds) <= 1000):
        raise UsageError(f"--seeds {args.seeds}: expected auto, or a whole number from 1 to 1000")
    if not 0 < args.margin < 1:
        raise UsageError(f"--margin {args.margin}: expected a share between 0 and 1, such as 0.005")
    options = {name: getattr(args, name) for name in ("batch", "context") if getattr(args, name) is not None}
    settings = {"steps": args.steps, "learning_rate": args.lr, "watch_every": 0}
    if ".py:" in spec:
        spec = str(Path(spec.rpartition(":")[0]).resolve()) + ":" + spec.rpartition(":")[2]
    store = Path(args.out) if args.out else cache.folder() / "validate"
    question = Question(spec=spec, device=device, options=options, settings=settings, store=store)
    field = _Field(question, names, args, prose(args))
    verdicts = field.decide()
    return Outcome(
        field.describe(verdicts),
        exit_code=int(any(v.verdict not in ("equivalent", "better") for v in verdicts.values())),
    )


def split_recipes(text: str) -> list[str]:
    """Recipes between commas, but for commas within brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += {"[": 1, "]": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    found = [part.strip() for part in parts if part.strip()]
    if not found:
        raise UsageError("--candidates: give at least one recipe, such as bf16,fp8")
    return found


class _Field:
    """Reference and candidates, run seed by seed; the reference's runs serve all."""

    def __init__(self, question: Question, names: list[str], args: argparse.Namespace, out: TextIO) -> None:
        self.question, self.out, self.margin = question, out, args.margin
        self.reference, *self.candidates = names
        self.auto = args.seeds == "auto"
        self.seeds = FIRST if self.auto else int(args.seeds)
        self.runs: dict[tuple[str, int], Run] = {}

    def decide(self) -> dict[str, Verdict]:
        say(
            f"{self.question.spec}: {', '.join(self.candidates)} against {self.reference}, margin {self.margin:.2%}",
            self.out,
        )
        open_ones, seeds = list(self.candidates), self.seeds
        verdicts: dict[str, Verdict] = {}
        while open_ones:
            self._run([self.reference, *open_ones], seeds)
            verdicts |= {name: self._judge(name, seeds) for name in open_ones}
            needed = {
                name: verdicts[name].seeds_needed for name in open_ones if verdicts[name].verdict == "inconclusive"
            }
            open_ones = (
                [name for name, count in needed.items() if count is not None and seeds < MOST] if self.auto else []
            )
            if open_ones:
                seeds = min(MOST, max(seeds + 1, min(needed[name] or MOST for name in open_ones)))
                say(f"not decided yet: {', '.join(open_ones)}; going on to {seeds} seeds", self.out)
        self._show(verdicts)
        return verdicts

    def _run(self, names: list[str], seeds: int) -> None:
        from narrowgauge.validate.curves import run

        wanted = [(name, seed) for seed in range(seeds) for name in names if (name, seed) not in self.runs]
        spent: list[float] = []
        for index, (name, seed) in enumerate(wanted):
            start = time.perf_counter()
            self.runs[name, seed] = one = run(self.question, name, seed)
            if one.fresh:
                spent.append(time.perf_counter() - start)
            left = sum(spent) / len(spent) * (len(wanted) - index - 1) if spent else 0.0
            how = f"{spent[-1]:.0f} s, about {left:.0f} s left" if one.fresh else "known"
            say(f"  {index + 1} of {len(wanted)}: {name} seed {seed}: loss {one.loss:.5f} ({how})", self.out)

    def _judge(self, name: str, seeds: int) -> Verdict:
        from narrowgauge.validate.verdict import judge

        pairs = [(self.runs[self.reference, seed].loss, self.runs[name, seed].loss) for seed in range(seeds)]
        return judge([r for r, _ in pairs], [c for _, c in pairs], self.margin)

    def _show(self, verdicts: dict[str, Verdict]) -> None:
        rows = []
        for name, verdict in verdicts.items():
            interval = "" if verdict.interval is None else f"{verdict.interval[0]:+.3%} to {verdict.interval[1]:+.3%}"
            gap = "" if verdict.gap is None else f"{verdict.gap:+.3%}"
            rows.append([name, verdict.verdict, gap, interval, str(verdict.seeds), f"{verdict.diverged[1]}"])
        show_table("verdicts", ["candidate", "verdict", "gap", "interval", "seeds", "diverged"], rows, self.out)
        for name, verdict in verdicts.items():
            say(f"{name}: {verdict.reason}", self.out)
            if verdict.verdict == "inconclusive" and verdict.seeds_needed is not None:
                say(f"  {verdict.seeds_needed} seeds would decide it, if the noise stays as it is", self.out)
            elif verdict.detectable is not None:
                say(f"  a gap of {verdict.detectable:.3%} would have been called worse four times of five", self.out)
        say("a run of this length says nothing of what comes after it: later divergence is not excluded", self.out)

    def describe(self, verdicts: dict[str, Verdict]) -> dict[str, Any]:
        from narrowgauge.runs.record import plain
        from narrowgauge.validate.curves import largest_gap

        described = {}
        for name, verdict in verdicts.items():
            seeds = range(verdict.seeds)
            runs = [[self.runs[one, seed] for seed in seeds] for one in (self.reference, name)]
            area, largest = largest_gap(*runs)
            described[name] = {
                "verdict": verdict.verdict,
                "gap": verdict.gap,
                "interval": verdict.interval,
                "margin": verdict.margin,
                "detectable": verdict.detectable,
                "diverged": verdict.diverged[1],
                "diverged_reference": verdict.diverged[0],
                "deviation": verdict.deviation,
                "seeds": verdict.seeds,
                "seeds_needed": verdict.seeds_needed,
                "reason": verdict.reason,
                "curve_gap_mean": area,
                "curve_gap_largest": largest,
                "losses": [run.loss for run in runs[1]],
            }
        reference = [self.runs[self.reference, seed].loss for seed in range(max(v.seeds for v in verdicts.values()))]
        data = {"task": self.question.spec, "reference": self.reference, "losses": reference, "candidates": described}
        result: dict[str, Any] = plain(data)
        return result
