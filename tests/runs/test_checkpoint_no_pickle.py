"""No file that narrowgauge reads can run code: pickles are put wherever a file is read, and none is ever loaded.

Except for a task's own source, every file must be JSON, raw numbers or text. A pickle in its place is a one-line error.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import narrowgauge
from narrowgauge.cli import main
from narrowgauge.runs.checkpoints import checkpoint, layout

TASK = f"{Path(__file__).parent / 'tiny_task.py'}:command_line"
SOURCE = Path(narrowgauge.__file__).parent


class Evil:
    """Creates a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.marker),)


def by_torch(path: Path, evil: Evil) -> None:
    with path.open("wb") as file:
        torch.save({"weights": evil}, file)


def by_numpy(path: Path, evil: Evil) -> None:
    with path.open("wb") as file:
        np.save(file, np.array([evil], dtype=object), allow_pickle=True)


def by_protocol(protocol: int) -> Callable[[Path, Evil], None]:
    return lambda path, evil: path.write_bytes(pickle.dumps(evil, protocol)) and None


WRITERS = {"protocol 0": by_protocol(0), "protocol 4": by_protocol(4), "torch": by_torch, "numpy": by_numpy}


@pytest.fixture(params=WRITERS, ids=lambda name: name.replace(" ", "-"))
def put(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[Path], None]]:
    """Puts a pickle at a path; afterwards none must have run."""
    marker = tmp_path / "the pickle was loaded"
    yield lambda path: WRITERS[request.param](path, Evil(marker))
    assert not marker.exists()


def refused(capfd: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Return the one-line error of a command that must fail."""
    try:
        code = main([str(argument) for argument in arguments])
    except SystemExit as end:
        code = int(end.code or 0)
    said = capfd.readouterr().err.strip().splitlines()
    assert code == 2 and said[-1].startswith("narrowgauge: "), (code, said)
    return said[-1]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a checkpoint in its middle, which can be resumed, and a capture."""
    run = tmp_path_factory.mktemp("pickles") / "run"
    options = ["--recipe", "fp32", "--device", "cpu", "--log", "none", "--watch", "0", "--capture", "1"]
    assert main(["train", TASK, *options, "--steps", "4", "--checkpoint-every", "2", "--out", str(run)]) in (0, 1)
    shutil.rmtree(checkpoint.make_path(run, 4))
    lines = [line for line in (run / "events.jsonl").read_text().splitlines(True) if '"kind":"end"' not in line]
    (run / "events.jsonl").write_text("".join(lines))
    return run


def describe(folder: Path) -> None:
    """Update the manifest to the files in the folder: an attacker who plants a pickle can write a manifest too."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    for file in folder.iterdir():
        if file.name in manifest["files"]:
            data = file.read_bytes()
            manifest["files"][file.name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    path.write_text(json.dumps(manifest))


@pytest.mark.parametrize("name", [*layout.FILES, "manifest.json"])
def test_pickle_in_place_of_a_checkpoint_file_is_refused(
    tmp_path: Path, trained: Path, put: Callable[[Path], None], capfd: pytest.CaptureFixture[str], name: str
) -> None:
    run = shutil.copytree(trained, tmp_path / "run")
    folder = checkpoint.make_path(run, 2)
    put(folder / name)
    if name != "manifest.json":
        describe(folder)
    refused(capfd, "export", run)
    refused(capfd, "train", "--resume", run)


@pytest.mark.parametrize("name", [".metadata", "shards.json", "shard-0.safetensors", "weights.pt", "data.pkl"])
def test_pickle_next_to_checkpoint_files_is_never_opened(
    tmp_path: Path, trained: Path, put: Callable[[Path], None], name: str
) -> None:
    run = shutil.copytree(trained, tmp_path / "run")
    put(checkpoint.make_path(run, 2) / name)
    assert main(["export", str(run)]) == 0
    assert main(["train", "--resume", str(run)]) in (0, 1)


def test_the_old_multi_rank_format_is_refused_with_advice(
    tmp_path: Path, trained: Path, put: Callable[[Path], None], capfd: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(trained, tmp_path / "run")
    folder = checkpoint.make_path(run, 2)
    put(folder / ".metadata")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][".metadata"] = {}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    describe(folder)
    for arguments in (["export", run], ["export", folder], ["train", "--resume", run]):
        assert "dcp_to_torch" in refused(capfd, *arguments)


@pytest.mark.parametrize("name", ["run.json", "events.jsonl"])
def test_pickle_in_place_of_the_record_is_refused(
    tmp_path: Path, trained: Path, put: Callable[[Path], None], capfd: pytest.CaptureFixture[str], name: str
) -> None:
    run = shutil.copytree(trained, tmp_path / "run")
    put(run / name)
    if name == "events.jsonl":  # bytes without a line end count as an incomplete last line
        (run / name).write_bytes((run / name).read_bytes() + b"\n")
    refused(capfd, "train", "--resume", run)


@pytest.mark.parametrize("name", ["capture.json", "state.safetensors", "state.pt"])
def test_pickle_in_a_capture_is_refused(
    tmp_path: Path, trained: Path, put: Callable[[Path], None], capfd: pytest.CaptureFixture[str], name: str
) -> None:
    capture = shutil.copytree(trained / "captures" / "step-00000001", tmp_path / "capture")
    put(capture / name)
    facts = json.loads((trained / "captures" / "step-00000001" / "capture.json").read_text())
    data = (capture / name).read_bytes()
    if name != "capture.json":
        facts[name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        facts["format"] = 1 if name == "state.pt" else facts["format"]
        (capture / "capture.json").write_text(json.dumps(facts))
    refused(capfd, "replay", capture)


@pytest.mark.parametrize(
    "arguments",
    [
        ("report", "F"),
        ("validate", TASK, "--against", "F", "--candidates", "bf16", "--seeds", "2"),
        ("bench", TASK, "--against", "F", "--recipes", "fp32", "--steps", "1", "--rounds", "1"),
        ("validate", "--curves", "F", "F"),
        ("train", "--resume", "F"),
        ("export", "F"),
        ("replay", "F"),
        ("train", "gpt:1x64", "--tokenizer", "F", "--steps", "1", "--recipe", "fp32"),
    ],
    ids=lambda arguments: "-".join(arguments[:1] + tuple(a for a in arguments if a.startswith("--"))[:1]),
)
@pytest.mark.parametrize(
    "name", ["x.json", "x.jsonl", "x.csv", "events.out.tfevents.1", "x.parquet", "x.bin", "x.jsonl.gz"]
)
def test_pickle_as_a_command_line_file_is_refused(
    tmp_path: Path,
    put: Callable[[Path], None],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    name: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    put(tmp_path / name)
    refused(capfd, *[str(tmp_path / name) if argument == "F" else argument for argument in arguments])


@pytest.mark.parametrize("name", ["x.parquet", "x.bin", "x.jsonl", "x.jsonl.gz", "x.npy", "x.txt"])
def test_pickle_as_data_is_refused_or_read_as_text(tmp_path: Path, put: Callable[[Path], None], name: str) -> None:
    put(tmp_path / name)
    options = ["--data", str(tmp_path / name), "--steps", "1", "--recipe", "fp32", "--device", "cpu", "--context", "8"]
    assert main(["train", "gpt:1x64", *options, "--log", "none", "--out", str(tmp_path / "run")]) in (0, 1, 2)


def test_pickle_in_the_cache_is_never_loaded(
    tmp_path: Path, put: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache of tokens is raw numbers, and its metadata is JSON. Other content is never loaded."""
    monkeypatch.setenv("NARROWGAUGE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "x.jsonl").write_text("".join(json.dumps({"text": f"text {i} " * 20}) + "\n" for i in range(200)))
    (tmp_path / "y.txt").write_text("some words to be learned, again and again. " * 400)
    options = ["--steps", "1", "--recipe", "fp32", "--device", "cpu", "--context", "8", "--log", "none", "--watch", "0"]

    def train(data: str, out: str) -> int:
        arguments = ["--data", str(tmp_path / data), "--vocab", "300", "--out", str(tmp_path / out)]
        return main(["train", "gpt:1x64", *options, *arguments])

    readers: dict[Path, str] = {}
    for data in ("x.jsonl", "y.txt"):
        assert train(data, f"first-{data}") in (0, 1)
        files = (path for path in (tmp_path / "cache").rglob("*") if path.is_file() and path.suffix != ".lock")
        readers |= {path: data for path in files if path not in readers}
    assert len(readers) >= 3 and set(readers.values()) == {"x.jsonl", "y.txt"}
    for number, (path, data) in enumerate(readers.items()):
        whole = path.read_bytes()
        put(path)
        assert train(data, str(number)) in (0, 1, 2, 3)  # tokens out of range end the training
        path.write_bytes(whole)


FORBIDDEN_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
FORBIDDEN_CALLS = {"torch.load", "torch.save", "numpy.load", "np.load", "yaml.load", "yaml.unsafe_load", "eval", "exec"}


def test_the_source_never_unpickles() -> None:
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name.partition(".")[0] for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [(node.module or "").partition(".")[0]]
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in FORBIDDEN_CALLS:
                found.append(f"{path.name}:{node.lineno} {ast.unparse(node.func)}")
            found += [f"{path.name}:{node.lineno} {name}" for name in names if name in FORBIDDEN_MODULES]
            if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
                found.append(f"{path.name}:{node.lineno} allow_pickle")
    assert found == []
