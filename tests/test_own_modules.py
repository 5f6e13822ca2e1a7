"""A user's file and its neighbors: imports are found, also later and in two folders; cached runs know them."""

import sys

import pytest

import narrowgauge as ng
from narrowgauge import own_modules, tasks
from narrowgauge.validate.curves.paired_runs import list_input_files

TASK = """
import torch, narrowgauge as ng
{early}
def make(batch: int = 4, seed: int = 0) -> ng.Task:
    def model():
        {late}
        return neighbor_layers.build()
    def draw(step, split):
        return torch.randn(batch, 16, generator=torch.Generator().manual_seed(seed * 1000 + step))
    return ng.Task(model=model, batch=draw, loss=lambda model, x: model(x).square().mean(), steps=3)
"""
LAYERS = "from torch import nn\nfrom neighbor_sizes import WIDTH\ndef build():\n    return nn.Linear(16, WIDTH)\n"


@pytest.fixture(autouse=True)
def restore_imports(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(own_modules, "_FOLDERS", set())
    yield
    for name in ("neighbor_layers.made", "neighbor_layers", "neighbor_sizes", "narrowgauge_task_mine"):
        sys.modules.pop(name, None)


def write_project(folder, width, early="import neighbor_layers", late="pass"):
    folder.mkdir(exist_ok=True)
    (folder / "mine.py").write_text(TASK.format(early=early, late=late))
    (folder / "neighbor_layers.py").write_text(LAYERS)
    (folder / "neighbor_sizes.py").write_text(f"WIDTH = {width}\n")
    return f"{folder / 'mine.py'}:make"


def test_a_function_may_import_a_neighbor_when_it_is_called(tmp_path):
    spec = write_project(tmp_path / "one", 16, early="", late="import neighbor_layers")
    assert tasks.find(spec).model().out_features == 16


def test_two_folders_may_have_modules_of_the_same_name(tmp_path):
    specs = [write_project(tmp_path / name, width) for name, width in (("one", 16), ("two", 32))]
    found = [tasks.find(spec).model().out_features for spec in (*specs, *specs)]
    assert found == [16, 32, 16, 32]


def test_a_file_of_a_package_may_import_the_package_by_name(tmp_path):
    specs = []
    for name, width in (("one", 16), ("two", 32)):
        package = tmp_path / name / "neighbor_layers"
        (package / "inner").mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "inner" / "__init__.py").touch()
        (package / "made.py").write_text(f"from torch import nn\ndef build():\n    return nn.Linear(16, {width})\n")
        text = TASK.format(early="import neighbor_layers.made", late="return neighbor_layers.made.build()")
        (package / "inner" / "mine.py").write_text(text)
        specs.append(f"{package / 'inner' / 'mine.py'}:make")
    assert [tasks.find(spec).model().out_features for spec in (*specs, *specs)] == [16, 32, 16, 32]


def test_files_that_a_file_imports(tmp_path):
    package = tmp_path / "parts"
    (package / "deep").mkdir(parents=True)
    names = ["mine.py", "one.py", "parts/__init__.py", "parts/two.py", "parts/deep/__init__.py", "parts/deep/three.py"]
    texts = [
        "import torch, os.path\nfrom parts import two\nimport narrowgauge\ndef later():\n    import one, missing\n",
        "from mine import later\n",
        "",
        "from .deep.three import x\nfrom . import two, nothing\n",
        "",
        "x = 1\n",
    ]
    for name, text in zip(names, texts, strict=True):
        (tmp_path / name).write_text(text)
    (tmp_path / "unused.py").write_text("")
    found = [str(path.relative_to(tmp_path)) for path in own_modules.list_own_files(tmp_path / "mine.py")]
    assert found == sorted(names[1:])
    (package / "two.py").write_text("this is not Python")
    assert own_modules.list_own_files(tmp_path / "mine.py") == [tmp_path / name for name in sorted(names[1:4])]


def test_files_of_a_package_that_imports_itself_by_name(tmp_path):
    """Also before the file has run, when the package's folder is not on the path yet: cached runs depend on them."""
    package = tmp_path / "own_package"
    package.mkdir()
    for name, text in (("__init__", ""), ("task", "from own_package.sizes import WIDTH\n"), ("sizes", "WIDTH = 4\n")):
        (package / f"{name}.py").write_text(text)
    assert own_modules.list_own_files(package / "task.py") == [package / "__init__.py", package / "sizes.py"]


def test_validation_trains_again_if_an_imported_file_has_changed(tmp_path):
    spec = write_project(tmp_path / "project", 16)

    def train():
        found = ng.validate(spec, ["bf16"], steps=2, seeds=1, device="cpu", out=tmp_path / "runs")
        return found.runs["fp32", 0]

    first = train()
    assert first.fresh and not train().fresh
    # Another size: bytecode is only known by the size and the second of its source.
    (tmp_path / "project" / "neighbor_sizes.py").write_text("WIDTH = 128\n")
    for name in ("neighbor_layers", "neighbor_sizes"):  # as in a new process
        sys.modules.pop(name, None)
    changed = train()
    assert changed.fresh and changed.loss != first.loss


def test_files_that_options_name(tmp_path):
    (tmp_path / "folder").mkdir()
    names = ["folder/a.csv", "folder/b.csv", "prices.csv"]
    for name in names:
        (tmp_path / name).write_text("text\nwords\n")
    paths = [tmp_path / name for name in names]
    assert list_input_files({"data": f"hf:{tmp_path / 'folder'}@train", "batch": 4}) == paths[:2]
    assert list_input_files({"data": str(tmp_path / "folder"), "prices": str(paths[2])}) == paths
    assert list_input_files({"data": "hf:user/name", "name": "~nobody", "long": "x" * 5000, "zero": "\0"}) == []
