"""Several ranks save without pickle: files are JSON and raw numbers, and a pickle in place of one is never loaded."""

import contextlib
import hashlib
import io
import json
import os
import pickle
import resource
import shutil

import pytest
from processes import run_ranks

from narrowgauge.cli import main
from narrowgauge.runs import record
from narrowgauge.runs.checkpoints import checkpoint

TASK = ["gpt:2x64", "--context", "16", "--batch", "8", "--device", "cpu", "--log", "none", "--watch", "0"]


class Evil:
    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return os.mkdir, (self.marker,)


def cli(*arguments):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(list(arguments))
    return code, out.getvalue(), err.getvalue()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run of two ranks with the checkpoint of step 2 of 4, which can be resumed from there."""
    home = tmp_path_factory.mktemp("ranked")
    asked = ["train", *TASK, "--recipe", "bf16-lean", "--steps", "4", "--checkpoint-every", "2", "--parallel", "fsdp"]
    answers = run_ranks(2, cli, home / "two", *asked, "--out", str(home / "run"))
    assert [code for code, _, _ in answers] == [0, 0], answers
    shutil.rmtree(checkpoint.make_path(home / "run", 4))
    record.truncate_after(home / "run", 2)
    return home / "run"


def test_no_checkpoint_file_is_a_pickle(saved):
    files = list(checkpoint.make_path(saved, 2).iterdir())
    assert {file.name for file in files} == {
        "shards.json", "shard-0.safetensors", "shard-1.safetensors", "state.json", "manifest.json",
        "random-0.safetensors", "random-1.safetensors",
    }  # fmt: skip
    for file in files:
        if file.suffix == ".json":
            json.loads(file.read_text())
        else:  # safetensors: the length of a JSON header, then the header
            data = file.read_bytes()
            json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert len({file.stat().st_mode for file in files}) == 1  # set by the umask


def test_a_pickle_in_place_of_any_file_is_refused(saved, tmp_path):
    marker = tmp_path / "the pickle was loaded"
    for name in sorted(file.name for file in checkpoint.make_path(saved, 2).iterdir()):
        run = shutil.copytree(saved, tmp_path / "run")
        folder = checkpoint.make_path(run, 2)
        (folder / name).write_bytes(pickle.dumps(Evil(marker)))
        if name != "manifest.json":
            manifest = json.loads((folder / "manifest.json").read_text())
            data = (folder / name).read_bytes()
            manifest["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            (folder / "manifest.json").write_text(json.dumps(manifest))
        if not name.startswith("random"):  # a single process does not read it
            for arguments in (["export", str(run)], ["train", "--resume", str(run)]):
                code, _, said = cli(*arguments)
                assert code == 2 and "Traceback" not in said, (name, said)
        else:
            answers = run_ranks(2, cli, tmp_path / name, "train", "--resume", str(run))
            assert all(code == 2 and "Traceback" not in said for code, _, said in answers), answers
        shutil.rmtree(run)
    assert not marker.exists()


def test_a_pickle_next_to_the_files_is_never_opened(saved, tmp_path):
    marker = tmp_path / "the pickle was loaded"
    run = shutil.copytree(saved, tmp_path / "run")
    (checkpoint.make_path(run, 2) / ".metadata").write_bytes(pickle.dumps(Evil(marker)))
    assert cli("export", str(run))[0] == 0
    assert cli("train", "--resume", str(run))[0] == 0
    assert not marker.exists()


def limited(*arguments):
    """Limit the files of the second rank to 20 kB, which fails like a full disk."""
    if os.environ["RANK"] == "1":
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    return cli(*arguments)


def test_a_full_disk_on_one_rank_is_an_error_on_all(saved, tmp_path):
    run = shutil.copytree(saved, tmp_path / "run")
    answers = run_ranks(2, limited, tmp_path / "two", "train", "--resume", str(run))
    assert all(code == 2 and "Traceback" not in said for code, _, said in answers), answers
    assert all("File too large; raise the file size limit" in said for _, _, said in answers), answers
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000002"]
    assert checkpoint.find_damage(checkpoint.make_path(run, 2)) is None
