"""The house: imports run one way, files stay small, and asking for help never waits for torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import narrowgauge

SOURCE = Path(narrowgauge.__file__).parent
FLOORS = [  # from the top to the ground; a room may import from its own folder and from lower floors
    {"__main__"},
    {"cli", "pytest_plugin"},
    {"report", "validate"},
    {"runs", "integrations"},
    {"forecast"},
    {"gauges", "tasks", "bench", "lint"},
    {"engine", "models"},
    {"ranks"},
    {"nn"},
    {"recipe"},
    {"optim"},
    {"scaling", "hardware", "peak_fractions", "op_kinds"},
    {"task"},
    {
        "kernels",
        "formats",
        "data",
        "device_readback",
        "random_state",
        "step_report",
        "task_options",
        "serialization",
        "findings",
        "version",
    },
    {"files", "events"},
    {"errors"},
]
FLOOR_OF = {room: index for index, floor in enumerate(FLOORS) for room in floor}
FILES = sorted(SOURCE.rglob("*.py"))


def room_of(path):
    relative = path.relative_to(SOURCE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def imported_rooms(path):
    """The rooms a file imports, wherever in the file; ``from narrowgauge import x`` counts as x."""
    public = {name: where.split(".")[1] for name, where in narrowgauge._WHERE.items()} | {"Recipe": "recipe"}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "narrowgauge":
            names = [f"narrowgauge.{public.get(alias.name, alias.name)}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        else:
            continue
        for name in names:
            if name.startswith("narrowgauge.") and name != "narrowgauge.__version__":
                yield name.split(".")[1]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_run_one_way(path):
    room = room_of(path)
    if path == SOURCE / "__init__.py":
        return  # the front door names every room
    for imported in imported_rooms(path):
        if imported == room:
            continue
        assert imported in FLOOR_OF, f"{imported} has no place in the house"
        assert FLOOR_OF[imported] > FLOOR_OF[room], f"{room} must not import {imported}"


def module_name(path):
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(path, known):
    """The modules of ours that a file imports, wherever in the file it does."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module in known:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in known else node.module


@pytest.mark.xfail(strict=True, reason="circles in forecast, lint, trackers and checkpoints are being removed")
def test_no_import_circles():
    """Also not by imports inside functions; the package itself, whose names are lazy, is left out."""
    paths = {module_name(path): path for path in FILES if path != SOURCE / "__init__.py"}
    graph = {name: set(imported_modules(path, paths)) - {name} for name, path in paths.items()}
    outside = True
    while outside:  # what imports nothing that is left, or is imported by nothing that is left, is in no circle
        used = set().union(*graph.values())
        outside = {name for name, imported in graph.items() if not imported or name not in used}
        graph = {name: imported - outside for name, imported in graph.items() if name not in outside}
    assert not graph, f"these modules import each other: {sorted(graph)}"


def test_every_room_has_its_place():
    assert {room_of(path) for path in FILES} - {"__init__"} <= set(FLOOR_OF)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_files_have_one_subject_and_stay_small(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 400
    if text.strip():
        docstring = ast.get_docstring(ast.parse(text))
        assert docstring, f"{path.name} does not say what it is about"


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
