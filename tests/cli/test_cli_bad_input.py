"""Bad input to every verb: one-line error, exit code 2, no traceback, no hang, no files left behind."""

from __future__ import annotations

import os
import resource
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from narrowgauge import cli
from narrowgauge.cli import main, task_options

DEEP = "[" * 100_000 + "]" * 100_000
TASK = """
import torch
from narrowgauge import Task

def make(width: int = 4):
    return Task(
        model=lambda: torch.nn.Linear(width, width),
        batch=lambda step, split: torch.ones(2, width),
        loss=lambda model, batch: model(batch).square().mean(),
        steps=2,
    )
"""
SECONDS = 60
"""Time limit of a verb: longer means that it hangs."""


@pytest.fixture(autouse=True)
def folder_of_bad_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with every kind of bad file; memory and time of the test are limited."""
    monkeypatch.setenv("NARROWGAUGE_CACHE", str(tmp_path / "cache"))
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.chdir(home)
    for name in ("folder", "folder.json", "folder.jsonl", "folder.py", "folder.bin"):
        Path(name).mkdir()
    for name in ("pipe", "pipe.json", "pipe.jsonl", "pipe.bin", "pipe.py", "pipe.txt"):
        os.mkfifo(name)
    Path("circle").symlink_to("circle")
    Path("dangling").symlink_to("nowhere-at-all")
    Path("empty").write_bytes(b"")
    Path("binary").write_bytes(bytes(range(256)) * 64)
    Path("deep.json").write_text(DEEP)
    Path("deep.jsonl").write_text(f'{{"text": {DEEP}}}\n')
    Path("digits.json").write_text('{"rows": ' + "9" * 5000 + "}")
    Path("latin.json").write_bytes(b'{"rows": "\xff"}')
    Path("task.py").write_text(TASK)
    Path("wrong.py").write_text("def make(:\n")
    Path("zero.py").write_bytes(b"x = 1\0\n")
    Path("ends.py").write_text("import sys\nsys.exit(0)\n")
    Path("raises.py").write_text("import os\nos.environ['is not set']\n")
    for name, content in (("deep", DEEP), ("bytes", "\udcff\udcfe"), ("list", "[]"), ("odd", '{"task": ["a"]}')):
        Path(f"run-{name}").mkdir()
        Path(f"run-{name}/run.json").write_bytes(content.encode(errors="surrogateescape"))
    Path("run-pipe").mkdir()
    os.mkfifo("run-pipe/run.json")
    Path("run-zero").mkdir()
    Path("run-zero/run.json").symlink_to("/dev/zero")
    for name in ("deep", "pipe"):
        Path(f"saved-{name}/checkpoints/step-00000001").mkdir(parents=True)
        Path(f"step-{name}/captures/step-00000001").mkdir(parents=True)
    Path("saved-deep/checkpoints/step-00000001/manifest.json").write_text(DEEP)
    os.mkfifo("saved-pipe/checkpoints/step-00000001/manifest.json")
    Path("step-deep/captures/step-00000001/capture.json").write_text(DEEP)
    os.mkfifo("step-pipe/captures/step-00000001/capture.json")

    def time_out(*_: object) -> None:
        raise TimeoutError("the verb hangs")

    before, limits = signal.signal(signal.SIGALRM, time_out), resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (3 << 30), limits[1]))
    signal.alarm(SECONDS)
    yield home
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
    resource.setrlimit(resource.RLIMIT_AS, limits)


def assert_refused(capsys: pytest.CaptureFixture[str], argv: list[str]) -> str:
    """Run a verb, check that it fails cleanly and creates no files, and return its error line."""
    before = {path for path in Path().rglob("*") if "__pycache__" not in path.parts}
    try:
        code = main(argv)
    except SystemExit as end:
        code = end.code  # type: ignore[assignment]
    err = capsys.readouterr().err
    assert code == 2, f"{argv}: exit {code}: {err[-2000:]}"
    assert "Traceback" not in err
    line = err.strip().splitlines()[-1]
    assert line.startswith("narrowgauge: ") and line.isprintable(), line
    after = {path for path in Path().rglob("*") if "__pycache__" not in path.parts}
    assert after == before, f"{argv} left {after - before}"
    return line


NAMES = ["x" * 300, f"folder/{'x' * 300}", "no\0name", "/dev/zero", "/dev/full", "pipe", "circle", "dangling", "",
         "nowhere", "empty/inside", "binary", "deep.json", "digits.json", "latin.json", "~nobody-of-this-name/x",
         "\udcff", "\x1b[31mred"]  # fmt: skip
"""Names that no verb can use."""
READERS = [
    ["report"],
    ["export"],
    ["replay"],
    ["train", "--resume"],
    ["validate", "gpt:1x64", "--against"],
    ["bench", "gpt:1x64", "--against"],
    ["train", "gpt:1x64", "--steps", "1", "--tokenizer"],
    ["break"],
    ["doctor", "--device"],
    *([verb] for verb in ("train", "memory", "bench", "roofline", "validate")),
]


@pytest.mark.parametrize("verb", READERS, ids=" ".join)
@pytest.mark.parametrize("name", NAMES, ids=lambda name: ascii(name)[:24])
def test_unusable_names_are_refused(verb: list[str], name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(capsys, [*verb, name])


@pytest.mark.parametrize("verb", ["train", "memory", "bench", "roofline", "validate", "lint"])
@pytest.mark.parametrize(
    "file", [*NAMES, "folder", "folder.py", "pipe.py", "wrong.py", "zero.py", "ends.py", "raises.py"],
    ids=lambda name: ascii(name)[:24],
)  # fmt: skip
def test_files_without_a_task_are_refused(verb: str, file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(capsys, [verb, f"{file}:make"])


@pytest.mark.parametrize(
    "data",
    ["x" * 300, "no\0name", "/dev/zero", "/dev/full", "/dev/null", "pipe", "pipe.txt", "pipe.json", "pipe.jsonl",
     "pipe.bin", "circle", "dangling", "", "nowhere", "empty", "binary", "deep.json", "deep.jsonl", "digits.json",
     "latin.json", "folder", "folder.json", "folder.jsonl", "folder.bin", "hf:", "hf:no\0name", "~nobody-here/x"],
)  # fmt: skip
def test_unusable_data_is_refused(data: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(capsys, ["train", "gpt:1x64", "--device", "cpu", "--recipe", "fp32", "--steps", "1", "--data", data])


@pytest.mark.parametrize(
    "argv",
    [
        *(["lint", name] for name in ("x" * 300, "/dev/zero", "pipe", "circle", "", "binary", "wrong.py", "zero.py")),
        *(["validate", "--curves", name, name] for name in NAMES if name != "latin.json"),
        *(["report", f"run-{name}"] for name in ("deep", "bytes", "list", "pipe", "zero")),
        *(["train", "--resume", f"run-{name}"] for name in ("deep", "bytes", "list", "pipe", "zero", "odd")),
        *(["export", f"saved-{name}"] for name in ("deep", "pipe")),
        *(["replay", f"step-{name}"] for name in ("deep", "pipe")),
        ["formats", "1" * 5000 + "x"],
        ["report", "folder"],
        ["train", "task.py:make", "--capture", "3"],
        ["train", "task.py:make", "--out", "a/b/c", "--capture", "3"],
        ["train", "task.py:make", "--out", "empty"],
        ["train", "task.py:make", "--out", "empty/run"],
        ["train", "task.py:make", "--out", "dangling"],
        ["train", "task.py:make", "--out", "x" * 300],
        ["bench", "task.py:make", "--save", "folder"],
        ["bench", "task.py:make", "--save", "empty/file.json"],
        ["validate", "task.py:make", "--save", "folder"],
        ["lint", "task.py", "--sarif", "/dev/full"],
        ["lint", "task.py", "--sarif", "folder"],
        ["lint", "task.py", "--sarif", "pipe"],
    ],
    ids=lambda argv: ascii(" ".join(argv))[:60],
)
def test_other_bad_input_is_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(capsys, argv)


HUGE = ["9" * 20, "-" + "9" * 20, "9" * 5000, "abc", "", "1e999", "0x10", "٣٫٥"]
WHOLE = {
    "train gpt:1x64": ["steps", "batch", "context", "max-tokens", "vocab", "accumulate", "warmup", "eval-every",
                       "checkpoint-every", "keep", "capture", "watch", "seed"],
    "validate gpt:1x64": ["seeds", "steps", "batch", "context", "seed"],
    "bench gpt:1x64": ["batch", "context", "steps", "rounds", "seed"],
    "memory gpt:1x64": ["batch", "context", "accumulate", "gpus", "nodes", "shards", "seed"],
    "roofline gpt:1x64": ["batch", "context", "accumulate", "gpus", "nodes", "layers", "seed"],
    "export folder": ["step"],
    "report empty": ["serve"],
}  # fmt: skip
NUMBERS = {
    "train gpt:1x64": ["lr", "clip"],
    "validate gpt:1x64": ["margin", "budget", "lr"],
    "bench gpt:1x64": ["tolerance"],
    "roofline gpt:1x64": ["price", "tokens"],
}


@pytest.mark.parametrize("option", [f"{verb} --{name}" for verb, names in WHOLE.items() for name in names])
def test_invalid_whole_numbers_are_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    for value in HUGE:
        line = assert_refused(capsys, f"{option}={value}".split())
        assert len(line) < 400


@pytest.mark.parametrize("option", [f"{verb} --{name}" for verb, names in NUMBERS.items() for name in names])
def test_invalid_numbers_are_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    for value in ("abc", "", "nan", "inf", "-inf", "-1", "1e999"):
        if not (option.endswith("--budget") and value in ("inf", "1e999")):  # no time limit
            assert_refused(capsys, f"{option}={value}".split())


def test_a_pipe_with_a_writer_is_read(folder_of_bad_files: Path) -> None:
    """As in the shell's ``<(narrowgauge lint --json)``."""
    code = (
        f"{sys.executable} -m narrowgauge report <(echo '{{\"findings\": []}}') --out page.html"
        f" && {sys.executable} -m narrowgauge lint task.py --sarif /dev/stdout | head -c 20"
    )
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert Path("page.html").is_file()


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads and writes everything")
def test_missing_permissions_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    Path("task.py").chmod(0)
    Path("folder").chmod(stat.S_IRUSR)
    assert_refused(capsys, ["train", "task.py:make"])
    assert_refused(capsys, ["lint", "task.py"])
    assert_refused(capsys, ["train", "gpt:1x64", "--out", "folder/run"])


@pytest.mark.parametrize("verb", sorted(task_options.VERBS - {"replay"}))
def test_a_verb_without_arguments_uses_the_default_task(verb: str) -> None:
    """As in `make run`."""
    assert callable(cli._parse([verb]).run)
