"""Public names: they exist, import nothing slow, and type checkers know their types."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import narrowgauge as ng

SOURCE = Path(ng.__file__).parent
pytestmark = pytest.mark.timeout(800)  # a type checker without a cache takes minutes on a busy machine

SCRIPT = """
import torch
from torch import nn

import narrowgauge as ng
from narrowgauge import Engine as Renamed

model = nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
engine = ng.Engine(model, optimizer, recipe="bf16[moments=8bit]", clip_norm=1.0, accumulate=4)
also = Renamed(model, [optimizer], ng.recipe("fp16"))
"""
"""The user's script before each expression below."""

REVEALED = {
    "engine": "narrowgauge.engine.engine.Engine",
    "also": "narrowgauge.engine.engine.Engine",
    "engine.model": "torch.nn.modules.module.Module",
    "engine.recipe": "narrowgauge.recipe.Recipe",
    "engine.step()": "narrowgauge.step_report.StepReport",
    "engine.step().applied": "bool",
    "engine.step().grad_norm": "float | None",
    "engine.step().loss_scale": "float",
    "engine.flush()": "narrowgauge.step_report.StepReport | None",
    "engine.skipped": "int",
    "engine.forward().__enter__()": "None",
    "engine.evaluating().__enter__()": "None",
    "engine.scaler": "narrowgauge.scaling.loss.LossScaler | None",
    "ng.recipe('fp8').replace(moments='8bit')": "narrowgauge.recipe.Recipe",
    "ng.Recipe(compute='bf16').moments": "str",
    "ng.LossScaler('cpu').get_scale()": "float",
    "ng.convert(model, 'fp8')": "narrowgauge.nn.convert.Conversion",
    "ng.watch(engine)": "narrowgauge.gauges.watch.watch.Watch",
    "ng.forecast('gpt2-124m')": "narrowgauge.forecast.run.Forecast",
    "ng.validate('gpt-tiny', ['bf16'], seeds=3)": "narrowgauge.validate.run.Validation",
    "ng.replay('run', lambda: model, lambda m, b: m(b).sum())": "narrowgauge.gauges.replay.result.Replay",
    "ng.keep_fp32(ng.hardware.find_gpu)('h200')": "narrowgauge.hardware.Gpu",
    "ng.formats.store(1.0, 'fp16')": "narrowgauge.formats.Stored",
    "ng.hardware.detect()": "narrowgauge.hardware.Device",
    "ng.optim.AdamW(model.parameters())": "narrowgauge.optim.adamw.AdamW",
    "ng.optim.full_precision(model)": "dict[str, torch._tensor.Tensor]",
    "ng.gauges.capture.Recorder": "narrowgauge.gauges.capture.Recorder",
    "ng.__version__": "str",
}
"""Expressions of a user's script, and the type (or its last part) that a type checker must infer."""

WRONG = {
    "ng.Engine(model)": "call-arg",
    "ng.Engine(model, optimizer, recipe=3)": "arg-type",
    "ng.Engine(model, optimizer, clipnorm=1.0)": "call-arg",
    "ng.Engine(optimizer, model)": "arg-type",
    "engine.backward(1.0)": "arg-type",
    "engine.steps()": "attr-defined",
    "engine.step().norm": "attr-defined",
    "ng.recipe(8)": "arg-type",
    "ng.recipe.parse('bf16')": "attr-defined",
    "ng.validate('gpt-tiny', seeds='many')": "arg-type",
    "ng.forecast('gpt2-124m', gpu=3)": "arg-type",
    "ng.optim.AdamW(model)": "arg-type",
    "ng.optim.Adam": "attr-defined",
    "ng.gauges.nothing": "attr-defined",
    "ng.nothing": "attr-defined",
}
"""Expressions that a type checker must reject, and mypy's error code."""


def run(code: str) -> str:
    """Return what a new interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def imported_for_type_checkers(path: Path) -> set[str]:
    """Return the names under ``if TYPE_CHECKING`` at the top of a file."""
    tests = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.If)]
    (block,) = [node for node in tests if ast.unparse(node.test) == "TYPE_CHECKING"]
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.asname or alias.name for node in imports for alias in node.names}


def test_the_lists_of_public_names_agree() -> None:
    lazy = {*ng._WHERE, *ng._MODULES}
    assert set(ng.__all__) == lazy | {"Recipe", "recipe"}
    assert len(ng.__all__) == len(set(ng.__all__))
    assert imported_for_type_checkers(SOURCE / "__init__.py") == lazy
    assert imported_for_type_checkers(SOURCE / "gauges" / "__init__.py") == set(ng.gauges.__all__)


def test_public_names_are_the_objects_of_their_modules() -> None:
    for name, where in ng._WHERE.items():
        assert getattr(ng, name) is getattr(importlib.import_module(where), name)
    for name in ng._MODULES:
        assert getattr(ng, name) is importlib.import_module(f"narrowgauge.{name}")


def test_dir_lists_the_public_names_and_imports_nothing() -> None:
    out = run("import sys, narrowgauge as ng; print(*dir(ng)); print('torch' in sys.modules or 'numpy' in sys.modules)")
    names, slow = out.splitlines()
    assert slow == "False"
    assert {name for name in names.split() if not name.startswith("__")} == set(ng.__all__)
    assert {"__doc__", "__version__", "__all__"} <= set(names.split())
    assert set(ng.gauges.__all__) <= set(dir(ng.gauges))


def test_everything_can_be_imported_at_once_and_modules_by_their_attributes() -> None:
    lines = (
        "import narrowgauge as ng",
        "assert ng.gauges.capture.Recorder.__name__ == 'Recorder'",
        "del ng",
        "from narrowgauge import *",
        "print(*[name for name in dir() if not name.startswith('__')])",
    )
    assert set(run("\n".join(lines)).split()) - {"lines"} == set(ng.__all__)


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Return the messages of mypy --strict for each expression of a user's script."""
    pytest.importorskip("mypy")
    folder = tmp_path_factory.mktemp("typed")
    public = {f"ng.{name}": "" for name in ng.__all__ if name not in ng._MODULES}
    lines = SCRIPT.splitlines()
    expressions: dict[int, str] = {}
    for expression in [*public, *REVEALED]:
        lines.append(f"reveal_type({expression})")
        expressions[len(lines)] = expression
    for expression in WRONG:
        lines.append(expression)
        expressions[len(lines)] = expression
    (folder / "user.py").write_text("\n".join(lines) + "\n")
    # With the settings of `make check`, which are strict, so that its cache serves: without one this takes a minute.
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--hide-error-context", str(folder / "user.py")],
        cwd=SOURCE.parents[1],
        env={"MYPYPATH": "src", "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    messages: dict[str, list[str]] = {expression: [] for expression in expressions.values()}
    for line in done.stdout.splitlines():
        match = re.match(r".*/user\.py:(\d+): (.*)$", line)
        if match:
            assert int(match[1]) in expressions, line  # the script around them has no mistakes
            messages[expressions[int(match[1])]].append(match[2])
    assert any(messages.values()), done.stdout + done.stderr
    return messages


def test_a_type_checker_knows_every_public_name(checked: dict[str, list[str]]) -> None:
    for name in ng.__all__:
        if name not in ng._MODULES:
            (answer,) = checked[f"ng.{name}"]
            given = "Function" if name == "keep_fp32" else r"narrowgauge\.[\w.]+"  # keep_fp32 returns its argument
            assert re.fullmatch(rf'note: Revealed type is "def .* -> {given}"', answer), answer


def test_a_type_checker_infers_the_types_of_calls(checked: dict[str, list[str]]) -> None:
    for expression, wanted in REVEALED.items():
        (answer,) = checked[expression]
        assert re.fullmatch(rf'note: Revealed type is "(.* -> )?{re.escape(wanted)}"', answer), (expression, answer)


def test_a_type_checker_rejects_wrong_calls(checked: dict[str, list[str]]) -> None:
    for expression, code in WRONG.items():
        assert any(answer.endswith(f"[{code}]") for answer in checked[expression]), (expression, checked[expression])
