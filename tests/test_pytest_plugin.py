"""The pytest plugin: its assertions pass and fail as documented, and loading it does not import torch."""

import importlib
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from narrowgauge import pytest_plugin

pytestmark = pytest.mark.usefixtures("modules_are_not_collected")

pytest_plugins = ["pytester"]

TASK = """
import torch, torch.nn.functional as F
import narrowgauge as ng

def tiny():
    def make_batch(step, split):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        return x, (x.sum(1) > 0).long()
    loss = lambda model, b: F.cross_entropy(model(b[0]), b[1])
    return ng.Task(name="tiny", model=lambda: torch.nn.Linear(4, 2), batch=make_batch, loss=loss, items_per_batch=8,
                   steps=12)
"""


@pytest.fixture(scope="module")
def imported():
    """Import everything that a session needs: pytester drops new modules, and torch cannot be imported twice."""
    names = {}
    exec(TASK, names)
    pytest_plugin.assert_not_slower(names["tiny"](), "fp32", tolerance=0.9, steps=1, rounds=1, device="cpu")
    for recipe in ("fp32[attention=math]", "fp8"):
        pytest_plugin.assert_equivalent(names["tiny"](), recipe, seeds=2, steps=4, margin=0.9, device="cpu")


@pytest.fixture
def session(imported, pytester, monkeypatch):
    """Run pytest with the plugin on a test file."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # an installed plugin would be loaded twice
    monkeypatch.syspath_prepend(pytester.path)
    monkeypatch.setenv("NARROWGAUGE_CACHE", str(pytester.path / "cache"))
    pytester.makepyfile(mine=TASK)

    def run(text, *options):
        pytester.makepyfile(test_it=text)
        return pytester.runpytest_inprocess("-p", "narrowgauge.pytest_plugin", "-p", "no:cacheprovider", *options)

    return run


def test_given_losses_are_compared(session):
    result = session("""
        from narrowgauge.pytest_plugin import assert_equivalent as plain

        REFERENCE = [2.0, 2.1, 1.9, 2.05, 1.95]

        def test_as_good(assert_equivalent):
            verdict = assert_equivalent(REFERENCE, [loss * 1.0001 for loss in REFERENCE])
            assert verdict.verdict == "equivalent"

        def test_better(assert_equivalent):
            assert assert_equivalent(REFERENCE, [loss * 0.9 for loss in REFERENCE]).verdict == "better"

        def test_worse(assert_equivalent):
            assert_equivalent(REFERENCE, [loss * 1.1 for loss in REFERENCE])

        def test_not_shown():
            plain(REFERENCE, [2.1, 2.0, 1.95, 2.0, 1.96])

        def test_diverged(assert_equivalent):
            assert_equivalent(REFERENCE, [float("nan")] * 5)

        def test_misused(assert_equivalent):
            assert_equivalent(REFERENCE, "bf16")
    """)
    result.assert_outcomes(passed=2, failed=4)
    text = result.stdout.str()
    assert "AssertionError: 5 pairs of runs: worse: the gap is at least" in text
    assert "AssertionError: 5 pairs of runs: inconclusive:" in text and "seeds would decide" in text
    assert "5 of 5 runs diverged" in text
    assert "losses are compared with losses" in text


def test_task_is_validated(session):
    result = session("""
        from mine import tiny

        def test_fp32_again(assert_equivalent):
            assert_equivalent(tiny(), "fp32[attention=math]", seeds=2, steps=8, margin=0.5, device="cpu")

        def test_too_strict(assert_equivalent):
            assert_equivalent(tiny(), "fp8", seeds=2, steps=8, margin=1e-7, device="cpu")

        def test_no_recipe(assert_equivalent):
            assert_equivalent(tiny(), [1.0, 2.0])
    """)
    result.assert_outcomes(passed=1, failed=2)
    text = result.stdout.str()
    assert "AssertionError: fp8 compared with fp32: " in text
    assert "is not a recipe" in text


SLOW = """
    import pytest
    from mine import tiny
    from narrowgauge.bench import compare

    @pytest.fixture
    def slow(monkeypatch):
        plain = compare.make_engine_step

        def many(task, engine):
            step = plain(task, engine)
            return lambda batch: [step(batch) for _ in range(4)][-1]

        monkeypatch.setattr(compare, "make_engine_step", many)

    def test_same(assert_not_slower):
        assert_not_slower(tiny(), "fp32", BASE, tolerance=0.5, device="cpu")

    def test_slow(assert_not_slower, slow):
        assert_not_slower(tiny(), "fp32", BASE, tolerance=0.5, device="cpu")
"""


def test_slower_than_a_saved_benchmark_fails(session, pytester):
    text = SLOW.replace("BASE", "'base.json'")
    missing = session(text)
    missing.assert_outcomes(failed=2)
    assert "running pytest once with --narrowgauge-save" in missing.stdout.str()
    saved = session(text, "--narrowgauge-save", "-k", "same")
    saved.assert_outcomes(passed=1)
    saved.stdout.fnmatch_lines(["*narrowgauge*", "saved fp32 of tiny in base.json"])
    rows = json.loads((pytester.path / "base.json").read_text())["rows"]
    assert [row["name"] for row in rows] == ["fp32", "torch-fp32"]
    again = session(text)
    again.assert_outcomes(passed=1, failed=1)
    assert "AssertionError: fp32 is slower: +" in again.stdout.str()


def test_slower_than_plain_torch_fails(session):
    result = session(SLOW.replace("BASE, tolerance=0.5", "tolerance=0.9"))
    result.assert_outcomes(passed=1, failed=1)
    assert "AssertionError: fp32 is slower: +" in result.stdout.str()


def test_recipes_share_a_file_and_undecided_results_are_reported(session, pytester):
    text = """
        import random, types
        import pytest
        from mine import tiny
        from narrowgauge.bench import compare

        @pytest.fixture(autouse=True)
        def noise(monkeypatch):
            drawn = random.Random(0)
            monkeypatch.setattr(compare, "time_round", lambda *_: drawn.lognormvariate(0, 0.5))
            monkeypatch.setattr(compare, "time", types.SimpleNamespace(process_time=float, perf_counter=float))

        @pytest.mark.parametrize("recipe", ["fp32", "fp32[attention=math]"])
        def test_it(assert_not_slower, recipe):
            assert_not_slower(tiny(), recipe, "base.json", device="cpu", rounds=2)
    """
    session(text, "--narrowgauge-save").assert_outcomes(passed=2)
    rows = json.loads((pytester.path / "base.json").read_text())["rows"]
    assert [row["name"] for row in rows] == ["fp32", "torch-fp32", "fp32[attention=math]", "torch-fp32"]
    result = session(text)
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["tiny: fp32 is undecided, * after 16 rounds: use more rounds"])


def test_entry_point_is_the_plugin_and_does_not_import_torch():
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())
    name = project["project"]["entry-points"]["pytest11"]["narrowgauge"]
    assert importlib.import_module(name) is pytest_plugin
    code = f"import {name}, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
