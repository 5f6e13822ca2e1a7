"""A checkpoint is complete or absent; damaged ones are reported and skipped; a full disk keeps earlier ones."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from narrowgauge.errors import UsageError
from narrowgauge.runs.checkpoints import checkpoint, layout

WEIGHTS = {"layer.weight": torch.randn(4, 3), "layer.bias": torch.randn(4).bfloat16()}
STATE = {"optimizers": [{"state": {0: {"step": torch.tensor(7.0), "exp_avg": torch.randn(4, 3)}}}], "scale": 65536.0}


def save(run: Path, step: int, keep: int = 3) -> Path:
    return checkpoint.save(run, step, WEIGHTS, {**STATE, "step": step}, keep)


def test_round_trip(tmp_path: Path) -> None:
    path = save(tmp_path, 100)
    back = checkpoint.load(path)
    assert path == tmp_path / "checkpoints" / "step-00000100" and back.step == 100
    for name, weight in WEIGHTS.items():
        assert torch.equal(back.weights[name], weight) and back.weights[name].dtype == weight.dtype
    assert torch.equal(
        back.state["optimizers"][0]["state"][0]["exp_avg"], STATE["optimizers"][0]["state"][0]["exp_avg"]
    )
    assert back.state["scale"] == 65536.0


def test_weights_are_plain_safetensors_and_stay_tied(tmp_path: Path) -> None:
    tied = torch.randn(5, 2)
    path = checkpoint.save(tmp_path, 1, {"embedding.weight": tied, "head.weight": tied}, {})
    assert torch.equal(load_file(path / "weights.safetensors")["embedding.weight"], tied)
    back = checkpoint.load(path).weights
    assert back["head.weight"] is back["embedding.weight"]


def test_file_permissions_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        assert {file.stat().st_mode & 0o777 for file in save(tmp_path, 1).iterdir()} == {0o644}
    finally:
        os.umask(before)


def test_loaded_tensors_own_their_memory(tmp_path: Path) -> None:
    # A memory map of the file would be unaligned, and would vanish when old checkpoints are removed.
    path = save(tmp_path, 1)
    weight = checkpoint.load(path).weights["layer.weight"]
    (path / "weights.safetensors").write_bytes(b"")
    assert torch.equal(weight, WEIGHTS["layer.weight"])
    assert weight.data_ptr() % 16 == 0


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        save(tmp_path, step, keep=2)
    assert checkpoint.list_steps(tmp_path) == [30, 40]
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-00000030", "step-00000040"]


@pytest.mark.parametrize("name", [*layout.FILES, "manifest.json"])
@pytest.mark.parametrize("harm", ["flip", "truncate", "remove", "empty"])
def test_damaged_checkpoints_are_reported_and_skipped(tmp_path: Path, name: str, harm: str) -> None:
    save(tmp_path, 10)
    file = save(tmp_path, 20) / name
    data = file.read_bytes()
    if harm == "flip":
        middle = len(data) // 2
        # In the manifest, a flipped digit gives a checksum that does not match, and a flipped brace is not JSON.
        file.write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
    elif harm == "truncate":
        file.write_bytes(data[:-5])
    elif harm == "empty":
        file.write_bytes(b"")
    else:
        file.unlink()
    lines: list[str] = []
    found = checkpoint.load_newest(tmp_path, lines.append)
    assert found is not None and found.step == 10
    assert len(lines) == 1 and "step-00000020" in lines[0] and "\n" not in lines[0]
    with pytest.raises(UsageError, match="damaged"):
        checkpoint.load(file.parent)


def test_a_damaged_checkpoint_is_replaced(tmp_path: Path) -> None:
    save(tmp_path, 10)
    (save(tmp_path, 20) / "state.json").write_text("{}")
    save(tmp_path, 15)
    assert checkpoint.list_steps(tmp_path) == [10, 15, 20]  # the damaged one does not replace a good one
    save(tmp_path, 20)
    found = checkpoint.load_newest(tmp_path)
    assert found is not None and found.step == 20


def test_no_checkpoint_differs_from_no_intact_checkpoint(tmp_path: Path) -> None:
    assert checkpoint.load_newest(tmp_path) is None
    (save(tmp_path, 10) / "manifest.json").unlink()
    with pytest.raises(UsageError, match=r"no intact checkpoint left \(1 damaged\)"):
        checkpoint.load_newest(tmp_path)


def test_a_manifest_of_another_step_is_damage(tmp_path: Path) -> None:
    manifest = save(tmp_path, 10) / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "step": 11}))
    assert checkpoint.find_damage(manifest.parent) == "manifest.json is of step 11"


def test_another_format_version_is_refused(tmp_path: Path) -> None:
    manifest = save(tmp_path, 10) / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": 99}))
    assert checkpoint.find_damage(manifest.parent) == "its format is 99, this version reads 1"


def test_leftovers_of_interrupted_writes_are_removed(tmp_path: Path) -> None:
    save(tmp_path, 10)
    leftover = tmp_path / "checkpoints" / ".step-00000020.tmp"
    leftover.mkdir()
    (leftover / "weights.safetensors").write_bytes(b"half")
    checkpoint.clean(tmp_path)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-00000010"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("only root can mount a small disk")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_a_one_line_error_and_keeps_old_checkpoints(small_disk: Path) -> None:
    save(small_disk, 10)
    for tensors in ({"big": torch.zeros(100_000)}, {"many": torch.zeros(50_000)}):
        with pytest.raises(UsageError, match=r"cannot write .*step-00000020: No space left on device; free some"):
            checkpoint.save(small_disk, 20, WEIGHTS | tensors, {"more": torch.zeros(20_000)}, keep=1)
        assert [p.name for p in (small_disk / "checkpoints").iterdir()] == ["step-00000010"]
        assert checkpoint.find_damage(small_disk / "checkpoints" / "step-00000010") is None


def test_a_file_size_limit_is_a_one_line_error_and_keeps_old_checkpoints(tmp_path: Path) -> None:
    save(tmp_path, 10)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
        with pytest.raises(UsageError, match=r"cannot write .*File too large"):
            checkpoint.save(tmp_path, 20, {"big": torch.zeros(100_000)}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-00000010"]


def test_a_read_only_folder_is_a_one_line_error(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    with pytest.raises(UsageError, match=r"cannot write .*step-00000001"):
        save(tmp_path, 1)
