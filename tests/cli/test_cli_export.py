"""``narrowgauge export``: where it writes, with which permissions, and what it never replaces."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
from safetensors.torch import load_file

from narrowgauge.cli import main

TASK = f"{Path(__file__).parent.parent / 'runs' / 'tiny_task.py'}:command_line"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "run"
    small = ["--device", "cpu", "--recipe", "fp32", "--steps", "4", "--checkpoint-every", "2", "--log", "none"]
    assert main(["train", TASK, *small, "--out", str(folder)]) == 0
    return folder


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077, 0o002])
def test_the_file_has_ordinary_permissions(run: Path, umask: int, capsys: pytest.CaptureFixture[str]) -> None:
    before = os.umask(umask)
    try:
        assert main(["export", str(run), "--file", "here/weights.safetensors", "--json"]) == 0
        Path("plain").write_text("")
    finally:
        os.umask(before)
    assert json.loads(capsys.readouterr().out)["path"] == "here/weights.safetensors"
    made = Path("here/weights.safetensors")
    assert stat.S_IMODE(made.stat().st_mode) == stat.S_IMODE(Path("plain").stat().st_mode) == 0o666 & ~umask
    assert load_file(made) and [path.name for path in Path("here").iterdir()] == ["weights.safetensors"]


def test_an_older_export_is_replaced_and_keeps_its_permissions(run: Path) -> None:
    Path("w.safetensors").write_text("old")
    Path("w.safetensors").chmod(0o640)
    assert main(["export", str(run), "--file", "w.safetensors"]) == 0
    assert load_file("w.safetensors") and stat.S_IMODE(Path("w.safetensors").stat().st_mode) == 0o640


def test_only_a_regular_file_is_replaced(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("folder").mkdir()
    Path("target").write_text("precious")
    Path("link").symlink_to("target")
    Path("dangling").symlink_to("new")
    os.mkfifo("pipe")
    if os.geteuid() == 0:
        os.mknod("device", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    for name, kind in {"folder": "a folder", "link": "a symbolic link", "dangling": "a symbolic link", "pipe": "a pipe",
                       "/dev/null": "a device", "device": "a device"}.items():  # fmt: skip
        if name == "device" and os.geteuid() != 0:
            continue
        before = os.lstat(name)
        assert main(["export", str(run), "--file", name]) == 2
        err = capsys.readouterr().err
        assert f"{name} is {kind}" in err and "Traceback" not in err
        after = os.lstat(name)
        assert (after.st_mode, after.st_ino, after.st_rdev) == (before.st_mode, before.st_ino, before.st_rdev)
    assert Path("target").read_text() == "precious" and not Path("new").exists()
    left = sorted(path.name for path in Path().iterdir() if path.name != "device")
    assert left == ["dangling", "folder", "link", "pipe", "target"]


def test_a_link_in_the_run_folder_is_not_followed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("target").write_text("precious")
    Path("out").mkdir()
    Path("out/weights-00000004.safetensors").symlink_to(Path("target").absolute())
    assert main(["export", str(run), "--out", "out"]) == 2
    assert "symbolic link" in capsys.readouterr().err and Path("target").read_text() == "precious"


def test_a_full_disk_leaves_the_old_file(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A limit on the file size fails like a full disk."""
    import resource
    import signal

    Path("w.safetensors").write_text("old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
    try:
        code = main(["export", str(run), "--file", "w.safetensors"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert code == 2 and "cannot write w.safetensors" in capsys.readouterr().err
    assert Path("w.safetensors").read_text() == "old" and [path.name for path in Path().iterdir()] == ["w.safetensors"]
