"""A validation from end to end: paired runs of a reference and its candidates, as many as the verdicts take.

    validation = ng.validate("gpt-tiny", ["bf16", "fp8"])
    validation["bf16"].verdict            # equivalent, better, worse or inconclusive

A candidate is the text of a recipe, or RECIPE@TASK to train another task with it: the same model with something changed
in its code, say.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from narrowgauge import hardware
from narrowgauge.data import cache
from narrowgauge.errors import UsageError
from narrowgauge.recipe import parse, refusal
from narrowgauge.runs.json_lines import replace_nonfinite
from narrowgauge.runs.trainer import Observer
from narrowgauge.task import Task
from narrowgauge.validate.curves import paired_runs
from narrowgauge.validate.curves.paired_runs import Question, Run, make_task
from narrowgauge.validate.curves.run_length import choose_steps, rate_for
from narrowgauge.validate.layers.compare import Layers, compare
from narrowgauge.validate.statistics.sample_size import Inquiry
from narrowgauge.validate.statistics.verdict import Verdict

BUDGET_S = 600.0
Tell = Callable[[str], None]


def validate(
    task: str | Task | Callable[[int], Task],
    candidates: Sequence[str] = ("bf16",),
    reference: str = "fp32",
    *,
    seeds: int | Literal["auto"] = "auto",
    margin: float = 0.005,
    steps: int | None = None,
    learning_rate: float | None = None,
    options: Mapping[str, Any] | None = None,
    budget_s: float = BUDGET_S,
    device: str | None = None,
    out: str | Path | None = None,
    layers: bool = False,
    tell: Tell | None = None,
) -> Validation:
    """Whether the candidates train as good a model as the reference, on this task.

    ``task``: a name or file.py:function, whose runs are kept and used again; or a Task, or a function that makes one
    from a seed, whose runs cannot be recognised and are not kept. ``seeds``: pairs of runs, or auto: what the verdicts
    take, as far as ``budget_s`` seconds reach. ``steps``: updates of a run; by default the task's own number, or as
    many as the budget has room for, with a learning rate to suit. ``layers``: compare the modules of one step first.
    """
    say, start = tell or (lambda line: None), time.monotonic()
    check(seeds, margin, budget_s)
    found = hardware.detect(device)
    recipes = {name: _recipe(name, found) for name in (reference, *candidates)}
    if len(recipes) < len(candidates) + 1:
        raise UsageError(f"validate: {', '.join((reference, *candidates))}: each may be named once")
    with tempfile.TemporaryDirectory() as passing:
        store = Path(out) if out else Path(passing) if not isinstance(task, str) else cache.get_folder() / "validate"
        made = {"spec": _absolute(task)} if isinstance(task, str) else {"spec": "", "make": _maker(task)}
        question = Question(device=found, options=dict(options or {}), store=store, **made)
        compared = compare_layers(question, reference, candidates, recipes, say) if layers else {}
        given = {"learning_rate": learning_rate, "watch_every": 0}
        if steps is None:
            left = budget_s - (time.monotonic() - start)
            steps, update_s = choose_steps(
                question, recipes[reference], given, 1 + len(candidates), left, budget_s, say
            )
            given["learning_rate"] = learning_rate or rate_for(make_task(question, 0), steps, say)
            question = dataclasses.replace(question, update_s=update_s)
        question = dataclasses.replace(question, settings={"steps": steps, **given})
        validation = Validation(question, reference, list(candidates), recipes, margin, seeds, budget_s, say, start)
        validation.layers = compared
        validation.decide()
    return validation


def check(seeds: int | str, margin: float, budget_s: float) -> None:
    number = isinstance(seeds, int) and not isinstance(seeds, bool) and 1 <= seeds <= 1000
    if seeds != "auto" and not number:
        raise UsageError(f"--seeds {seeds}: expected auto, or a whole number from 1 to 1000")
    if not 0 < margin < 1:
        raise UsageError(f"--margin {margin}: expected a share between 0 and 1, such as 0.005")
    if not budget_s > 0:
        raise UsageError(f"--budget {budget_s / 60:g}: expected a positive number of minutes")


def _recipe(name: str, device: hardware.Device) -> str:
    recipe = parse(name.partition("@")[0], device)
    reason = refusal(recipe, device)
    if reason is not None:
        raise UsageError(reason)
    return str(recipe)


def _absolute(spec: str) -> str:
    """A task of a file by its whole path, so that it is the same from wherever it is asked for."""
    file, _, function = spec.rpartition(":")
    return f"{Path(file).resolve()}:{function}" if file.endswith(".py") else spec


def _maker(task: Task | Callable[[int], Task]) -> Callable[[int], Task]:
    return (lambda seed: task) if isinstance(task, Task) else task


def compare_layers(
    question: Question, reference: str, candidates: Sequence[str], recipes: Mapping[str, str], tell: Tell
) -> dict[str, Layers]:
    """One step of each candidate, module by module; not of one that is another task, whose modules may differ."""
    found = {}
    for name in candidates:
        if "@" not in name:
            tell(f"  {name}: one step, module by module")
            pair = parse(recipes[name]), parse(recipes[reference])
            found[name] = compare(make_task(question, 0), *pair, device=question.device.torch_device)
    return found


class Validation(Mapping[str, Verdict]):
    """The verdicts by candidate, and the runs they stand on."""

    def __init__(
        self,
        question: Question,
        reference: str,
        candidates: list[str],
        recipes: dict[str, str],
        margin: float,
        seeds: int | str,
        budget_s: float,
        tell: Tell,
        start: float,
    ) -> None:
        self.question, self.reference, self.candidates, self.margin = question, reference, candidates, margin
        self.recipes, self.budget_s = recipes, budget_s
        fixed = seeds if isinstance(seeds, int) else None
        self.inquiries = {name: Inquiry(margin, fixed) for name in candidates}
        self.runs: dict[tuple[str, int], Run] = {}
        self.layers: dict[str, Layers] = {}
        self._tell, self._start = tell, start

    def __getitem__(self, name: str) -> Verdict:
        verdict = self.inquiries[name].verdict
        assert verdict is not None
        return verdict

    def __iter__(self) -> Iterator[str]:
        return iter(self.candidates)

    def __len__(self) -> int:
        return len(self.candidates)

    @property
    def good(self) -> bool:
        """Whether every candidate is shown to be as good as the reference, or better."""
        return all(verdict.is_good for verdict in self.values())

    def decide(self) -> None:
        """Train what is wanted, the candidate that wants least first."""
        while waiting := [(one.wanted, name) for name, one in self.inquiries.items() if one.wanted]:
            count = min(wanted for wanted, _ in waiting)
            names = [name for wanted, name in waiting if wanted == count]
            self._train([self.reference, *names], count)
            for name in names:
                inquiry = self.inquiries[name]
                inquiry.see(
                    self._losses(self.reference, count), self._losses(name, count), self._affordable(name, count)
                )
                if inquiry.wanted:
                    self._tell(f"{name} is not decided by {count} pairs; going on to {inquiry.wanted}")

    def _losses(self, name: str, count: int) -> list[float]:
        return [self.runs[name, seed].loss for seed in range(count)]

    def _train(self, names: list[str], count: int) -> None:
        wanted = [(name, seed) for seed in range(count) for name in names if (name, seed) not in self.runs]
        for index, (name, seed) in enumerate(wanted):
            observer = _Lines(f"  {name} seed {seed}", self._tell)
            self.runs[name, seed] = one = paired_runs.run(self._asked(name), self.recipes[name], seed, observer)
            left = sum(self._seconds(other) for other, _ in wanted[index + 1 :])
            how = f"{one.seconds:.0f} s, about {left:.0f} s left" if one.fresh else "known"
            result = f"loss {one.loss:.5g}" if math.isfinite(one.loss) else "diverged"
            self._tell(f"  {index + 1} of {len(wanted)}: {name} seed {seed}: {result} ({how})")

    def _asked(self, name: str) -> Question:
        other = name.partition("@")[2]
        return dataclasses.replace(self.question, spec=_absolute(other), make=None) if other else self.question

    def _seconds(self, name: str) -> float:
        own = [run.seconds for (one, _), run in self.runs.items() if one == name]
        return statistics.fmean(own or [run.seconds for run in self.runs.values()] or [0.0])

    def _affordable(self, name: str, count: int) -> int:
        """Pairs there is time for, these included; where the reference has run already, only the candidate counts."""
        left = self.budget_s - (time.monotonic() - self._start)
        while (cost := self._cost(name, count)) <= left and count < 1000:
            left, count = left - cost, count + 1
        return count

    def _cost(self, name: str, seed: int) -> float:
        known = (self.reference, seed) in self.runs
        return self._seconds(name) + (0.0 if known else self._seconds(self.reference))

    def minutes_needed(self, name: str) -> float | None:
        """How long the pairs would take that an undecided candidate needs."""
        needed = self.inquiries[name].needed
        if needed is None:
            return None
        return sum(self._cost(name, seed) for seed in range(self[name].seeds, needed)) / 60

    def describe(self) -> dict[str, Any]:
        """As JSON has it."""
        most = max(verdict.seeds for verdict in self.values())
        references = [self.runs[self.reference, seed] for seed in range(most)]
        losses = self._losses(self.reference, most)
        described: dict[str, Any] = {}
        for name, verdict in self.items():
            count = verdict.seeds
            own = [self.runs[name, seed] for seed in range(count)]
            described[name] = {
                **dataclasses.asdict(verdict),
                "recipe": self.recipes[name],
                "detectable": verdict.detectable,
                "diverged": verdict.diverged[1],
                "diverged_reference": verdict.diverged[0],
                "seeds_needed": self.inquiries[name].needed,
                "minutes_needed": self.minutes_needed(name),
                **paired_runs.compare(references[:count], own),
                "losses": self._losses(name, count),
                "layers": self.layers[name].describe() if name in self.layers else None,
            }
        data = {
            "task": self.question.spec,
            "device": self.question.device.name,
            "reference": self.reference,
            "margin": self.margin,
            "steps": self.question.settings["steps"],
            "losses": losses,
            "noise_band": paired_runs.band(losses),
            "seconds": time.monotonic() - self._start,
            "candidates": described,
        }
        result: dict[str, Any] = replace_nonfinite(data)
        return result


class _Lines(Observer):
    """A line every so often in runs that take long."""

    EVERY_S = 20.0

    def __init__(self, name: str, tell: Tell) -> None:
        self._name, self._tell = name, tell
        self._next, self._steps = time.monotonic() + self.EVERY_S, 0

    def on_start(self, step: int, steps: int) -> None:
        self._steps = steps

    def on_metrics(self, event: Mapping[str, Any], skipped: int) -> None:
        if event["kind"] == "step" and time.monotonic() >= self._next:
            self._next = time.monotonic() + self.EVERY_S
            self._tell(f"{self._name}: step {event['step']} of {self._steps}, loss {event['loss']:.4f}")
