"""The package structure: imports go one way without cycles, files are small, ``--help`` does not import torch."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import narrowgauge

SOURCE = Path(narrowgauge.__file__).parent
LAYERS = [  # from top to bottom; a package may import itself and lower layers
    {"__main__"},
    {"cli", "pytest_plugin"},
    {"report", "validate"},
    {"runs", "integrations"},
    {"forecast"},
    {"gauges", "tasks", "bench", "lint"},
    {"pretrained"},
    {"engine", "models"},
    {"ranks"},
    {"nn"},
    {"recipe"},
    {"optim"},
    {"weight_copies"},
    {"scaling", "hardware", "peak_fractions", "op_kinds"},
    {"task", "block_formats"},
    {
        "kernels",
        "formats",
        "parameters",
        "data",
        "device_readback",
        "random_state",
        "step_report",
        "task_options",
        "own_modules",
        "serialization",
        "findings",
        "version",
        "recipe_checks",
    },
    {"files", "events", "byte_sizes"},
    {"errors"},
]
LAYER_OF = {package: index for index, layer in enumerate(LAYERS) for package in layer}
FILES = sorted(SOURCE.rglob("*.py"))
FRONT = SOURCE / "__init__.py"
"""Names every package, and imports it on first use."""


def package_of(path):
    relative = path.relative_to(SOURCE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def module_name(path):
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imported_names(path):
    """Dotted names of everything of narrowgauge that a file imports, also inside functions."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return [name for name in found if name.startswith("narrowgauge.")]


def test_imports_go_one_way():
    public = {name: where.split(".")[1] for name, where in narrowgauge._WHERE.items()} | {"Recipe": "recipe"}
    wrong = []
    for path in FILES:
        if path == FRONT:
            continue
        package = package_of(path)
        for name in imported_names(path):
            imported = public.get(name.split(".")[1], name.split(".")[1])
            assert imported in LAYER_OF, f"{path}: {imported} is in no layer"
            if imported != package and LAYER_OF[imported] <= LAYER_OF[package]:
                wrong.append(f"{path.relative_to(SOURCE)} must not import {imported}")
    assert not wrong, "\n".join(wrong)


def test_no_import_cycles():
    """Also not through imports inside functions."""
    paths = {module_name(path): path for path in FILES if path != FRONT}

    def modules(path):
        names = imported_names(path)
        return {name if name in paths else name.rpartition(".")[0] for name in names} & set(paths)

    graph = {name: modules(path) - {name} for name, path in paths.items()}
    outside = True
    while outside:  # a module that imports nothing that is left, or that nothing left imports, is in no cycle
        used = set().union(*graph.values())
        outside = {name for name, imported in graph.items() if not imported or name not in used}
        graph = {name: imported - outside for name, imported in graph.items() if name not in outside}
    assert not graph, f"these modules import each other: {sorted(graph)}"


def test_weights_are_cast_to_fp8_in_one_room():
    """Other rooms get copies from it. ``choose_formats`` times the casts of random numbers."""
    found = set()
    for path in FILES:
        named = any(name.startswith("narrowgauge.kernels.cast_weights") for name in imported_names(path))
        if named and package_of(path) not in ("weight_copies", "kernels"):
            found.add(str(path.relative_to(SOURCE)))
    assert found <= {"nn/products/choose_formats.py"}


def test_optimizers_know_nothing_of_copies_of_weights():
    """A copy that an optimizer wrote would be old after any other write, and a hook does not see all of those."""
    for path in (SOURCE / "optim").rglob("*.py"):
        assert not [name for name in imported_names(path) if name.startswith("narrowgauge.weight_copies")], path
    for path in FILES:
        assert "register_optimizer_step" not in path.read_text(), path


def test_every_package_is_in_a_layer():
    assert {package_of(path) for path in FILES} - {"__init__"} == set(LAYER_OF)


def test_files_have_one_subject_and_stay_small():
    for path in FILES:
        text = path.read_text()
        assert len(text.splitlines()) <= 400, path
        assert not text.strip() or ast.get_docstring(ast.parse(text)), f"{path} has no docstring"


def test_the_package_does_not_mock():
    assert not [path for path in FILES if "mock" in path.read_text()]


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["train", "--help"], ["formats", "1.2e-7"]])
def test_the_command_line_answers_without_torch(arguments):
    code = (
        "import sys; from narrowgauge.cli import main\n"
        f"try: code = main({arguments!r})\n"
        "except SystemExit as end: code = end.code\n"
        "assert not code, code\n"
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_public_names_exist():
    for name in narrowgauge.__all__:
        assert getattr(narrowgauge, name) is not None
    with pytest.raises(AttributeError):
        narrowgauge.nothing  # noqa: B018
    assert callable(narrowgauge.recipe)


def test_no_test_waits_for_a_child_without_a_limit():
    """``Popen.__exit__`` does; ``child_processes.start`` kills the child instead."""
    here = Path(__file__)
    files = {path.name for path in here.parent.rglob("*.py") if "subprocess.Popen(" in path.read_text()}
    assert files <= {"child_processes.py", here.name}
