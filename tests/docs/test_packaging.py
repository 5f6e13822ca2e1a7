"""Wheel and sdist: they are complete, run from any folder, and all versions agree."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import narrowgauge
from narrowgauge.cli import VERBS

pytest.importorskip("setuptools", minversion="77", reason="pyproject.toml needs setuptools 77 or later")

ROOT = Path(__file__).parent.parent.parent
VERSION = narrowgauge.__version__
NEEDED = ["hardware.toml", "peak_fractions.toml", "py.typed", "cli/break_.py"]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Build wheel and sdist from a copy of the files of a clean checkout, as the build writes into the source."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"):
        shutil.copy(ROOT / name, copy)
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    script = "from setuptools import build_meta as b; print(b.build_wheel('dist')); print(b.build_sdist('dist'))"
    done = subprocess.run([sys.executable, "-c", script], cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    yield copy / "dist"
    shutil.rmtree(copy)


def test_the_wheel_has_everything(built):
    (wheel,) = built.glob("*.whl")
    assert wheel.name == f"narrowgauge-{VERSION}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
    source = ROOT / "src" / "narrowgauge"
    modules = {f"narrowgauge/{path.relative_to(source).as_posix()}" for path in source.rglob("*.py")}
    assets = {f"narrowgauge/report/assets/{path.name}" for path in (source / "report" / "assets").iterdir()}
    assert modules | assets | {f"narrowgauge/{name}" for name in NEEDED} <= inside
    assert not [name for name in inside if not name.startswith(("narrowgauge/", f"narrowgauge-{VERSION}.dist-info/"))]


def test_the_sdist_has_everything(built):
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        inside = set(archive.getnames())
    home = f"narrowgauge-{VERSION}"
    wanted = {"pyproject.toml", "README.md", "LICENSE", *(f"src/narrowgauge/{name}" for name in NEEDED)}
    assert {f"{home}/{name}" for name in wanted} <= inside
    assert any(name.startswith(f"{home}/src/narrowgauge/report/assets/") for name in inside)


def test_the_wheel_runs_from_any_folder(built, tmp_path):
    (wheel,) = built.glob("*.whl")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile"]
    subprocess.run([*install, "--target", str(tmp_path / "there"), str(wheel)], check=True, capture_output=True)
    where = "import narrowgauge; print(narrowgauge.__file__)"
    for arguments, wanted in (
        (["-m", "narrowgauge", "--version"], f"narrowgauge {VERSION}\n"),
        (["-c", where], f"{tmp_path}/there/narrowgauge/__init__.py\n"),
        (["-c", "from narrowgauge import hardware; print(hardware.find_gpu('h200').name)"], "H200"),
    ):
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env={"PYTHONPATH": str(tmp_path / "there"), "PATH": ""},
            capture_output=True,
            text=True,
        )
        assert done.stdout.startswith(wanted), done.stdout + done.stderr
    assert (tmp_path / "there" / "bin" / "narrowgauge").is_file()


def test_a_type_checker_reads_types_from_the_installed_wheel(built, tmp_path):
    """Without py.typed an installed package is Any to type checkers. torch is left out: it takes mypy half a minute."""
    pytest.importorskip("mypy")
    (wheel,) = built.glob("*.whl")
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    python = tmp_path / "venv" / "bin" / "python"
    (site,) = (tmp_path / "venv" / "lib").glob("python3.*/site-packages")
    zipfile.ZipFile(wheel).extractall(site)
    (tmp_path / "user.py").write_text("import narrowgauge as ng\nreveal_type(ng.Recipe().moments)\nng.recipe(8)\n")
    command = [sys.executable, "-m", "mypy", "--python-executable", str(python), "--config-file="]
    done = subprocess.run([*command, "user.py"], cwd=tmp_path, env={"PATH": ""}, capture_output=True, text=True)
    assert 'Revealed type is "str"' in done.stdout and "[arg-type]" in done.stdout, done.stdout + done.stderr
    assert "Found 1 error in 1 file" in done.stdout, done.stdout


def test_the_changelog_covers_this_version():
    text = (ROOT / "CHANGELOG.md").read_text()
    newest = re.search(r"^## (.*)$", text, re.MULTILINE)[1]
    assert VERSION in newest, f"the newest heading of CHANGELOG.md is {newest!r}, the version is {VERSION}"
    missing = [verb for verb in VERBS if verb not in text]
    assert set(missing) <= {"formats"}, f"CHANGELOG.md does not mention {missing}"
