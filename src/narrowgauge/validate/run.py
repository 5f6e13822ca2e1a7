"""Runs a validation: paired runs of a reference and its candidates, as many as the verdicts need.

    validation = ng.validate("gpt-tiny", ["bf16", "fp8"])
    validation["bf16"].verdict            # equivalent, better, worse or inconclusive

A candidate is the text of a recipe, or RECIPE@TASK to train another task with it, for example the same model with a
change in its code.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from narrowgauge import hardware
from narrowgauge.data import cache
from narrowgauge.engine.choose_recipe import choose_for_task
from narrowgauge.errors import UsageError
from narrowgauge.recipe import find_emulation, is_auto, parse, refusal
from narrowgauge.runs.json_lines import replace_nonfinite
from narrowgauge.runs.optimizers import with_optimizer
from narrowgauge.runs.settings import OPTIMIZERS, check_learning_rate
from narrowgauge.task import Task
from narrowgauge.validate.curves import paired_runs
from narrowgauge.validate.curves.paired_runs import Experiment, Run, make_task
from narrowgauge.validate.curves.progress_lines import ProgressLines
from narrowgauge.validate.curves.run_length import choose_learning_rate, choose_steps
from narrowgauge.validate.emulated_answer import make_answer
from narrowgauge.validate.layers.compare import LayerComparison, compare_step
from narrowgauge.validate.statistics.equal_loss import SHARE, EqualLoss, compare_at_equal_loss
from narrowgauge.validate.statistics.sequential_test import FIRST, SequentialTest
from narrowgauge.validate.statistics.verdict import Verdict
from narrowgauge.validate.step_times import PLAIN, measure_step_times

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
    optimizer: str = OPTIMIZERS[0],
    accumulate: int | None = None,
    options: Mapping[str, Any] | None = None,
    budget_s: float = BUDGET_S,
    device: str | None = None,
    out: str | Path | None = None,
    layers: bool = False,
    time_steps: bool = False,
    tell: Tell | None = None,
) -> Validation:
    """Tests whether candidate recipes train as good a model as the reference.

    Args:
        task: A task name or ``file.py:function``, whose runs are cached and reused; or a ``Task``, or a function that
            creates one from a seed, whose runs cannot be identified and are not cached.
        candidates: Recipes to test, as text. ``RECIPE@TASK`` trains another task.
        reference: The recipe to compare with.
        seeds: The number of pairs of runs; "auto" runs as many as the verdicts need, within ``budget_s``.
        margin: The largest relative gap of the final loss that counts as equivalent.
        steps: Updates per run. By default the task's own number, or fewer to fit the budget, with a learning rate to
            match.
        learning_rate: Peak learning rate. By default the task's own.
        optimizer: The optimizer of all runs, "adamw" or "muon", for tasks that do not make their own.
        accumulate: Batches per update. By default 1.
        options: Options of the task.
        budget_s: Seconds that "auto" may spend.
        device: The device to train on, such as "cpu" or "cuda". By default a GPU if there is one.
        out: The folder for the runs. By default the cache folder.
        layers: Also compare one step module by module.
        time_steps: Also measure step times, and how much faster each candidate reaches the reference's final loss. This
            trains a shorter run of the reference for each seed.
        tell: Called with each line of progress.

    Returns:
        A mapping from each candidate to its ``Verdict``.

    Raises:
        UsageError: If an argument is invalid, or the device does not support a recipe.
    """
    say, start = tell or (lambda line: None), time.monotonic()
    check_arguments(seeds, margin, budget_s, steps)
    if learning_rate is not None:
        check_learning_rate(learning_rate)  # before modules are compared, which takes seconds
    found = hardware.detect(device)
    recipes = {name: _check_recipe(name, found) for name in (reference, *candidates)}
    if len(recipes) < len(candidates) + 1:
        raise UsageError(f"validate: {', '.join((reference, *candidates))}: each recipe may be given only once")
    with tempfile.TemporaryDirectory() as temporary:
        store = Path(out) if out else Path(temporary) if not isinstance(task, str) else cache.get_folder() / "validate"
        source = {"spec": _resolve_spec(task)} if isinstance(task, str) else {"spec": "", "make": _make_factory(task)}
        experiment = Experiment(device=found, options=dict(options or {}), store=store, **source)
        _check_optimizer(optimizer, experiment, recipes)
        recipes |= _choose_recipes(experiment, recipes, say)
        compared = compare_layers(experiment, reference, candidates, recipes, say) if layers else {}
        given = {"learning_rate": learning_rate, "optimizer": optimizer, "watch_every": 0}
        given |= {} if accumulate is None else {"accumulate": accumulate}
        if steps is None:
            left = budget_s - (time.monotonic() - start)
            runs = [(name, recipes[name], _with_task_of(name, experiment)) for name in (reference, *candidates)]
            pairs = seeds if isinstance(seeds, int) else FIRST
            steps = choose_steps(runs, given, pairs, left, budget_s, say)
            given["learning_rate"] = learning_rate or choose_learning_rate(make_task(experiment, 0), steps, say)
        experiment = dataclasses.replace(experiment, settings={"steps": steps, **given})
        validation = Validation(experiment, reference, list(candidates), recipes, margin, seeds, budget_s, say, start)
        validation.layers = compared
        validation.run()
        if time_steps:
            validation.measure_speed()
    return validation


def check_arguments(seeds: int | str, margin: float, budget_s: float, steps: int | None = None) -> None:
    """Raises UsageError for arguments out of range."""
    number = isinstance(seeds, int) and not isinstance(seeds, bool) and 1 <= seeds <= 1000
    if seeds != "auto" and not number:
        raise UsageError(f"--seeds {seeds}: expected auto, or a whole number from 1 to 1000")
    if not 0 < margin < 1:
        raise UsageError(f"--margin {margin}: expected a fraction between 0 and 1, such as 0.005")
    if not budget_s > 0:
        raise UsageError(f"--budget {budget_s / 60:g}: expected a positive number of minutes")
    if steps is not None and steps < 1:
        raise UsageError(f"--steps {steps}: expected a whole number of at least 1")


def _check_recipe(name: str, device: hardware.Device) -> str:
    text, at, other = name.partition("@")
    if at and not other.strip():
        raise UsageError(f"--candidates {name}: expected RECIPE@TASK, such as {text or 'bf16'}@my_task.py:make")
    recipe = parse(text, device)
    reason = refusal(recipe, device)
    if reason is not None:
        raise UsageError(reason)
    return str(recipe)


def _check_optimizer(optimizer: str, experiment: Experiment, names: Iterable[str]) -> None:
    """Raises UsageError if a task cannot be trained with the optimizer."""
    for name in names if optimizer != OPTIMIZERS[0] else ():
        with_optimizer(make_task(_with_task_of(name, experiment), 0), optimizer)


def _choose_recipes(experiment: Experiment, names: Iterable[str], tell: Tell) -> dict[str, str]:
    """What ``auto`` trains with for the task, by the name of the candidate that says auto."""
    chosen = {}
    for name in names:
        text = name.partition("@")[0]
        if is_auto(text):
            task = make_task(_with_task_of(name, experiment), 0)
            compile = experiment.device.kind == "cuda"  # as runs do
            recipe, reason = choose_for_task(text, task, experiment.device, compile=compile)
            tell(f"  {name} is {recipe}: {reason}")
            chosen[name] = str(recipe)
    return chosen


def _with_task_of(name: str, experiment: Experiment) -> Experiment:
    """The experiment of a candidate: another task for ``RECIPE@TASK``."""
    other = name.partition("@")[2]
    return dataclasses.replace(experiment, spec=_resolve_spec(other), make=None) if other else experiment


def _resolve_spec(spec: str) -> str:
    """A task file by its absolute path, so that cached runs match from every working directory."""
    file, _, function = spec.rpartition(":")
    return f"{Path(file).resolve()}:{function}" if file.endswith(".py") else spec


def _make_factory(task: Task | Callable[[int], Task]) -> Callable[[int], Task]:
    return (lambda seed: task) if isinstance(task, Task) else task


def compare_layers(
    experiment: Experiment, reference: str, candidates: Sequence[str], recipes: Mapping[str, str], tell: Tell
) -> dict[str, LayerComparison]:
    """Compares one step of each candidate module by module. Skips candidates with another task: its modules differ."""
    found = {}
    for name in candidates:
        if "@" not in name:
            tell(f"  {name}: comparing one step module by module")
            pair = parse(recipes[name]), parse(recipes[reference])
            found[name] = compare_step(make_task(experiment, 0), *pair, device=experiment.device.torch_device)
    return found


class Validation(Mapping[str, Verdict]):
    """The result of ``ng.validate``: a mapping from each candidate to its ``Verdict``.

    Attributes:
        reference: The reference recipe.
        candidates: The candidates, as given.
        margin: The largest relative gap of the final loss that counts as equivalent.
        recipes: The full text of each recipe, by name.
        experiment: The task, its options and the settings of the runs.
        tests: The sequential test of each candidate, with the number of pairs it still needs.
        runs: The finished runs by (recipe, seed).
        layers: The comparison of one step by candidate, if it was requested.
        speeds: The speed at equal loss by candidate, if it was requested.
    """

    def __init__(
        self,
        experiment: Experiment,
        reference: str,
        candidates: list[str],
        recipes: dict[str, str],
        margin: float,
        seeds: int | str,
        budget_s: float,
        tell: Tell,
        start: float,
    ) -> None:
        self.experiment, self.reference, self.candidates, self.margin = experiment, reference, candidates, margin
        self.recipes, self.budget_s = recipes, budget_s
        self._fixed = seeds if isinstance(seeds, int) else None
        self.tests = {name: SequentialTest(margin, self._fixed) for name in candidates}
        self.runs: dict[tuple[str, int], Run] = {}
        self.layers: dict[str, LayerComparison] = {}
        self.speeds: dict[str, EqualLoss] = {}
        self._tell, self._start = tell, start

    def __getitem__(self, name: str) -> Verdict:
        verdict = self.tests[name].verdict
        assert verdict is not None
        return verdict

    def __iter__(self) -> Iterator[str]:
        return iter(self.candidates)

    def __len__(self) -> int:
        return len(self.candidates)

    @property
    def good(self) -> bool:
        """Whether every candidate is equivalent to the reference, or better, and emulates what it is to emulate."""
        return all(verdict.is_good and not self._is_untested(name) for name, verdict in self.items())

    def _is_untested(self, name: str) -> bool:
        """Whether a candidate emulates a format in which none of its layers ran."""
        return find_emulation(self.recipes[name]) is not None and self.runs[name, 0].format_share == 0

    def run(self) -> None:
        """Trains the pairs that the tests need, starting with the candidate that needs the fewest.

        A pair that would exceed the budget is not started, except for the first one: without it there is no result.
        The number of pairs then depends on the time they take, not on their losses, so the test remains valid.
        """
        while undecided := [(one.pairs_wanted, name) for name, one in self.tests.items() if one.pairs_wanted]:
            count = min(wanted for wanted, _ in undecided)
            names = [name for wanted, name in undecided if wanted == count]
            count = self._train([self.reference, *names], count)
            for name in names:
                test = self.tests[name]
                test.update(
                    self._losses(self.reference, count), self._losses(name, count), self._affordable_pairs(name, count)
                )
                if test.pairs_wanted is not None and test.pairs_wanted <= count:
                    test.pairs_wanted = None
                if test.pairs_wanted:
                    self._tell(f"{name} is undecided after {count} pairs; continuing to {test.pairs_wanted}")

    def measure_speed(self) -> None:
        """Measures step times side by side, and trains the shorter runs of the reference (``equal_loss``)."""
        names = (self.reference, *self.candidates)
        optimizer = self.experiment.settings["optimizer"]
        made = {name: with_optimizer(make_task(self._experiment_of(name), 0), optimizer) for name in names}
        times = measure_step_times(
            made, {name: self.recipes[name] for name in names}, self.experiment.device, self._tell
        )
        steps = max(1, round(SHARE * self.experiment.settings["steps"]))
        share = steps / self.experiment.settings["steps"]
        settings = {**self.experiment.settings, "steps": steps}
        shorter = dataclasses.replace(self._experiment_of(self.reference), settings=settings)
        losses: list[float] = []
        for seed in range(max(verdict.seeds for verdict in self.values())):
            what = f"  {self.reference} seed {seed}, {steps} steps"
            run = paired_runs.get_run(shorter, self.recipes[self.reference], seed, ProgressLines(what, self._tell))
            losses.append(run.loss)
            self._tell(f"{what}: loss {run.loss:.5g} ({f'{run.seconds:.0f} s' if run.fresh else 'cached'})")
        for name, verdict in self.items():
            count = verdict.seeds
            pair = self._losses(self.reference, count), self._losses(name, count)
            speed = compare_at_equal_loss(
                *pair, losses[:count], times[self.reference], times[name], share, verdict.alpha
            )
            self.speeds[name] = speed.beside_plain(times[self.reference], times[PLAIN])

    def _losses(self, name: str, count: int) -> list[float]:
        return [self.runs[name, seed].loss for seed in range(count)]

    def _train(self, names: list[str], count: int) -> int:
        """Trains the missing runs of so many pairs; returns the number of pairs that the budget allowed."""
        wanted = [(name, seed) for seed in range(count) for name in names if (name, seed) not in self.runs]
        for index, (name, seed) in enumerate(wanted):
            if name == next(one for one, its_seed in wanted if its_seed == seed) and self._is_spent(wanted, seed):
                spent = (time.monotonic() - self._start) / 60
                self._tell(f"  the next pair would exceed the budget ({spent:.2g} minutes spent): stopping at {seed}")
                return seed
            observer = ProgressLines(f"  {name} seed {seed}", self._tell)
            experiment = self._experiment_of(name)
            self.runs[name, seed] = one = paired_runs.get_run(experiment, self.recipes[name], seed, observer)
            left = sum(self._mean_seconds(other) for other, _ in wanted[index + 1 :])
            how = f"{one.seconds:.0f} s, about {left:.0f} s left" if one.fresh else "cached"
            result = f"loss {one.loss:.5g}" if math.isfinite(one.loss) else "diverged"
            self._tell(f"  {index + 1} of {len(wanted)}: {name} seed {seed}: {result} ({how})")
        return count

    def _is_spent(self, wanted: Sequence[tuple[str, int]], seed: int) -> bool:
        """Whether the runs of one more seed would exceed the budget. Cached runs take no time, so they never do."""
        if self._fixed or not seed or not any(run.fresh for run in self.runs.values()):
            return False
        cost = sum(self._mean_seconds(name) for name, its_seed in wanted if its_seed == seed)
        return time.monotonic() - self._start + cost > self.budget_s

    def _experiment_of(self, name: str) -> Experiment:
        return _with_task_of(name, self.experiment)

    def _mean_seconds(self, name: str) -> float:
        own = [run.seconds for (one, _), run in self.runs.items() if one == name]
        return statistics.fmean(own or [run.seconds for run in self.runs.values()] or [0.0])

    def _affordable_pairs(self, name: str, count: int) -> int:
        """The number of pairs within the budget, including ``count``. Finished reference runs cost nothing."""
        left = self.budget_s - (time.monotonic() - self._start)
        while (cost := self._estimate_cost(name, count)) <= left and count < 1000:
            left, count = left - cost, count + 1
        return count

    def _estimate_cost(self, name: str, seed: int) -> float:
        has_reference = (self.reference, seed) in self.runs
        return self._mean_seconds(name) + (0.0 if has_reference else self._mean_seconds(self.reference))

    def minutes_needed(self, name: str) -> float | None:
        """The time for the additional pairs that would decide a candidate; None if it is decided or cannot be."""
        needed = self.tests[name].pairs_needed
        if needed is None:
            return None
        return sum(self._estimate_cost(name, seed) for seed in range(self[name].seeds, needed)) / 60

    def describe(self) -> dict[str, Any]:
        """The validation as JSON data, as ``validate --json`` prints it."""
        most = max(verdict.seeds for verdict in self.values())
        references = [self.runs[self.reference, seed] for seed in range(most)]
        losses, steps = self._losses(self.reference, most), self.experiment.settings["steps"]
        described: dict[str, Any] = {}
        for name, verdict in self.items():
            count = verdict.seeds
            own = [self.runs[name, seed] for seed in range(count)]
            described[name] = {
                **dataclasses.asdict(verdict),
                "recipe": self.recipes[name],
                "emulated": find_emulation(self.recipes[name]),
                "answer": make_answer(self.recipes[name], verdict, self.reference, steps, own[0].format_share),
                "conversion": own[0].conversion,
                "format_share": own[0].format_share,
                "detectable": verdict.detectable,
                "diverged": verdict.diverged[1],
                "diverged_reference": verdict.diverged[0],
                "seeds_needed": self.tests[name].pairs_needed,
                "minutes_needed": self.minutes_needed(name),
                **paired_runs.compare_runs(references[:count], own),
                "losses": self._losses(name, count),
                "layers": self.layers[name].describe() if name in self.layers else None,
                "speed": dataclasses.asdict(self.speeds[name]) if name in self.speeds else None,
            }
        data = {
            "task": self.experiment.spec,
            "device": self.experiment.device.name,
            "reference": self.reference,
            "margin": self.margin,
            "steps": steps,
            "optimizer": self.experiment.settings["optimizer"],
            "losses": losses,
            "noise_band": paired_runs.measure_noise_band(losses),
            "seconds": time.monotonic() - self._start,
            "candidates": described,
        }
        result: dict[str, Any] = replace_nonfinite(data)
        return result
