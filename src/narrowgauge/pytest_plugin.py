"""The pytest plugin: assertions that a recipe trains as good a model as FP32, and that it did not become slower.

    def test_bf16_is_equivalent(assert_equivalent):
        assert_equivalent("task.py:make", "bf16", margin=0.005)

    def test_bf16_is_not_slower(assert_not_slower):
        assert_not_slower("task.py:make", "bf16", "tests/bench.json")     # created by pytest --narrowgauge-save

Both are fixtures and plain functions. pytest imports this module in every session, so torch is imported inside them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from narrowgauge.errors import UsageError

if TYPE_CHECKING:
    from narrowgauge.task import Task
    from narrowgauge.validate.statistics.verdict import Verdict

_NOTES = pytest.StashKey[list[str]]()
_sessions: list[pytest.Config] = []


def assert_equivalent(
    task: str | Task | Callable[[int], Task] | Sequence[float],
    candidate: str | Sequence[float],
    reference: str = "fp32",
    *,
    margin: float = 0.005,
    seeds: Any = "auto",
    **options: Any,
) -> Verdict:
    """Fails unless a recipe trains as good a model as the reference.

    For your own runs, pass the final losses of the reference and of the candidate instead of a task and a recipe. An
    inconclusive result fails too.

    Args:
        task: The task to train, as for ``ng.validate``; or the final losses of the reference.
        candidate: The recipe to test; or the final losses of the candidate, in the same order.
        reference: The recipe to compare with.
        margin: The largest relative gap of the final loss that counts as equivalent.
        seeds: The number of pairs of runs, or "auto".
        **options: Further arguments of ``ng.validate``: steps, budget_s, device, ...

    Returns:
        The verdict, which is "equivalent" or "better".

    Raises:
        AssertionError: If the verdict is "worse" or "inconclusive".
        UsageError: If an argument is invalid.
    """
    __tracebackhide__ = True
    from narrowgauge.task import Task

    if isinstance(task, str | Task) or callable(task):
        if not isinstance(candidate, str):
            raise UsageError(f"assert_equivalent: {candidate!r} is not a recipe; use one such as 'bf16'")
        from narrowgauge.validate.run import validate

        verdict = validate(task, [candidate], reference, margin=margin, seeds=seeds, **options)[candidate]
        name = f"{candidate} compared with {reference}"
    else:
        if isinstance(candidate, str):
            raise UsageError("assert_equivalent: losses are compared with losses; pass the losses of the candidate")
        from narrowgauge.validate.statistics.verdict import judge

        verdict = judge([float(loss) for loss in task], [float(loss) for loss in candidate], margin)
        name = f"{verdict.seeds} pairs of runs"
    if verdict.verdict in ("equivalent", "better"):
        return verdict
    more = ""
    if verdict.verdict == "inconclusive" and verdict.decidable:
        needed = verdict.seeds_needed
        more = f"; {needed} seeds would decide" if needed else "; 1,000 seeds would not decide"
    raise AssertionError(f"{name}: {verdict.verdict}: {verdict.reason}{more}")


def assert_not_slower(
    task: str | Task,
    recipe: str,
    against: str | Path = "torch",
    *,
    tolerance: float = 0.03,
    steps: int | None = None,
    rounds: int | None = None,
    compile: bool | None = None,
    device: str | None = None,
    batch: int | None = None,
    context: int | None = None,
) -> dict[str, Any]:
    """Fails if a recipe became slower or needs more memory than in a saved benchmark.

    The recipe's time relative to a plain-torch loop is compared with the saved ratio. An undecided result passes and is
    reported at the end of the session. ``pytest --narrowgauge-save`` writes the benchmark instead of comparing with it.

    Args:
        task: The task to measure.
        recipe: The recipe to measure.
        against: The file of a benchmark, saved by ``pytest --narrowgauge-save`` or ``narrowgauge bench --save``; or
            "torch", to require that the recipe is not slower than the plain-torch loop.
        tolerance: The relative slowdown or memory growth that is accepted.
        steps: Steps per round.
        rounds: Rounds before the first analysis.
        compile: Use torch.compile. By default as in the saved benchmark, or on a GPU.
        device: The device to measure on.
        batch: Items per batch.
        context: Tokens per sequence, for language tasks.

    Returns:
        The row of the recipe in the gate's result; empty when saving.

    Raises:
        AssertionError: If the recipe is slower or needs more memory.
        UsageError: If the file is missing or does not match, or the recipe has no plain-torch baseline.
    """
    __tracebackhide__ = True
    from narrowgauge import bench, hardware, tasks
    from narrowgauge.bench import gate, saved_benchmark
    from narrowgauge.engine.choose_recipe import choose_for_task

    path = None if against == "torch" else Path(against)
    saving = path is not None and bool(_sessions) and _sessions[-1].getoption("narrowgauge_save")
    if path is not None and not saving and not path.exists():
        raise UsageError(f"{path} does not exist: create it by running pytest once with --narrowgauge-save")
    saved = saved_benchmark.SavedBenchmark.read(path) if path is not None and not saving else None
    then = saved.facts if saved else {}
    where = hardware.detect(device)
    settings = bench.Settings(
        steps=steps or then.get("steps", 5),
        rounds=rounds or gate.ROUNDS,
        compile=compile if compile is not None else then.get("compile", where.kind == "cuda"),
    )
    found = tasks.find(task, batch=batch, context=context) if isinstance(task, str) else task
    chosen, _ = choose_for_task(recipe, found, where, compile=settings.compile)
    spec = task if isinstance(task, str) else task.name
    facts = saved_benchmark.describe_setup(spec, found, where, settings, ["torch"], batch, context)
    if path is not None and saving:
        rows = bench.measure(found, [chosen], ["torch"], where, settings, print, gate.make_save_rule(tolerance, print))
        if saved_benchmark.find_baseline(str(chosen), rows) is None:
            raise UsageError(f"{chosen} has no plain-torch baseline on {where.name}")
        saved_benchmark.save(path, saved_benchmark.merge_rows(path, facts, rows))
        _note(f"saved {chosen} of {spec} in {path}")
        return {}
    if saved:
        saved.check_same_setup(facts)
    judge = gate.Gate(saved, [str(chosen)], tolerance, print)
    ruled = judge.judge_rows(bench.measure(found, [chosen], ["torch"], where, settings, print, judge.enough))
    if not ruled["ok"]:
        raise AssertionError("; ".join(ruled["failures"]))
    row: dict[str, Any] = ruled["rows"][0]
    if row["verdict"] == gate.UNDECIDED:
        _note(f"{spec}: {chosen} is undecided, {row['change']:+.2%} after {row['rounds']} rounds: use more rounds")
    return row


@pytest.fixture(name="assert_equivalent", scope="session")
def _equivalent() -> Callable[..., Verdict]:
    """Fails unless a recipe trains as good a model as the reference: ``pytest_plugin.assert_equivalent``."""
    return assert_equivalent


@pytest.fixture(name="assert_not_slower", scope="session")
def _not_slower() -> Callable[..., dict[str, Any]]:
    """Fails if a recipe became slower or needs more memory: ``pytest_plugin.assert_not_slower``."""
    return assert_not_slower


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("narrowgauge")
    help = "assert_not_slower saves its benchmarks instead of comparing with them"
    group.addoption("--narrowgauge-save", action="store_true", dest="narrowgauge_save", help=help)


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_NOTES] = []
    _sessions.append(config)


def pytest_unconfigure(config: pytest.Config) -> None:
    if config in _sessions:
        _sessions.remove(config)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    notes = config.stash.get(_NOTES, [])
    if notes:
        terminalreporter.section("narrowgauge")
        for line in notes:
            terminalreporter.line(line)


def _note(line: str) -> None:
    """Adds a line to the summary at the end of the session."""
    if _sessions:
        _sessions[-1].stash[_NOTES].append(line)
