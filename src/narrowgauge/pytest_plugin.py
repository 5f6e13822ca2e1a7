"""The pytest plugin: a project's own tests keep its precision as good as FP32 and its recipe as fast as it was.

    def test_bf16_is_as_good(assert_equivalent):
        assert_equivalent("task.py:make", "bf16", margin=0.005)

    def test_bf16_is_as_fast(assert_not_slower):
        assert_not_slower("task.py:make", "bf16", "tests/base.json")     # pytest --narrowgauge-save makes the base

Both are fixtures and plain functions. pytest imports this in every session, so torch is imported inside them.
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
    """Fail unless a recipe trains as good a model as the reference, to within the margin of the loss.

    ``task`` is what is trained, and ``options`` go to ``narrowgauge.validate`` (steps, budget_s, device, ...). For runs
    of your own, give the final losses of the reference and of the candidate instead, pair by pair. Runs that decide
    nothing fail as well: not shown is not shown.
    """
    __tracebackhide__ = True
    from narrowgauge.task import Task

    if isinstance(task, str | Task) or callable(task):
        if not isinstance(candidate, str):
            raise UsageError(f"assert_equivalent: {candidate!r} is no recipe; a task takes one such as 'bf16'")
        from narrowgauge.validate.run import validate

        verdict = validate(task, [candidate], reference, margin=margin, seeds=seeds, **options)[candidate]
        name = f"{candidate} against {reference}"
    else:
        if isinstance(candidate, str):
            raise UsageError("assert_equivalent: losses are compared with losses; give those of the candidate too")
        from narrowgauge.validate.statistics.verdict import judge

        verdict = judge([float(loss) for loss in task], [float(loss) for loss in candidate], margin)
        name = f"{verdict.seeds} pairs of runs"
    if verdict.verdict in ("equivalent", "better"):
        return verdict
    more = ""
    if verdict.verdict == "inconclusive":
        needed = verdict.seeds_needed
        more = f"; {needed} seeds would decide it" if needed else "; more seeds than anyone would run would decide it"
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
    """Fail where a recipe is shown to be slower, or larger in memory, than it was: see docs/gate.md.

    ``against`` is a base that was saved by ``pytest --narrowgauge-save`` or ``narrowgauge bench --save``: the recipe's
    time over that of the plain-torch loop beside it is compared with what it was. With "torch" it is compared with 1:
    the recipe may not be slower than that loop. What noise hides is no failure, but is said at the end of the session.
    """
    __tracebackhide__ = True
    from narrowgauge import bench, hardware, tasks
    from narrowgauge.bench import base, gate
    from narrowgauge.recipe import parse

    path = None if against == "torch" else Path(against)
    saving = path is not None and bool(_sessions) and _sessions[-1].getoption("narrowgauge_save")
    if path is not None and not saving and not path.exists():
        raise UsageError(f"there is no base {path}: run pytest once with --narrowgauge-save, and keep what it writes")
    before = base.Base.read(path) if path is not None and not saving else None
    then = before.facts if before else {}
    where = hardware.detect(device)
    chosen = parse(recipe, where)
    settings = bench.Settings(
        steps=steps or then.get("steps", 5),
        rounds=rounds or gate.ROUNDS,
        compile=compile if compile is not None else then.get("compile", where.kind == "cuda"),
    )
    found = tasks.find(task, batch=batch, context=context) if isinstance(task, str) else task
    spec = task if isinstance(task, str) else task.name
    facts = base.describe(spec, found, where, settings, ["torch"], batch, context)
    if path is not None and saving:
        rows = bench.measure(found, [chosen], ["torch"], where, settings, print, gate.steady(tolerance, print))
        if base.twin_of(str(chosen), rows) is None:
            raise UsageError(f"{chosen} has no plain-torch twin on {where.name} to hold it against")
        base.save(path, base.joined(path, facts, rows))
        _note(f"saved {chosen} of {spec} in {path}")
        return {}
    if before:
        before.refuse_other(facts)
    judge = gate.Gate(before, [str(chosen)], tolerance, print)
    ruled = judge.rule(bench.measure(found, [chosen], ["torch"], where, settings, print, judge.enough))
    if not ruled["ok"]:
        raise AssertionError("; ".join(ruled["failures"]))
    row: dict[str, Any] = ruled["rows"][0]
    if row["verdict"] == gate.UNDECIDED:
        _note(f"{spec}: {chosen} is undecided, {row['change']:+.2%} after {row['rounds']} rounds: give more rounds")
    return row


@pytest.fixture(name="assert_equivalent", scope="session")
def _equivalent() -> Callable[..., Verdict]:
    """``narrowgauge.pytest_plugin.assert_equivalent``."""
    return assert_equivalent


@pytest.fixture(name="assert_not_slower", scope="session")
def _not_slower() -> Callable[..., dict[str, Any]]:
    """``narrowgauge.pytest_plugin.assert_not_slower``."""
    return assert_not_slower


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("narrowgauge")
    help = "assert_not_slower saves its bases instead of holding recipes against them"
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
    """Something to say at the end of the session."""
    if _sessions:
        _sessions[-1].stash[_NOTES].append(line)
