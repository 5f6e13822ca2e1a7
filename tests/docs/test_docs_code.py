"""Every code block in the documentation runs: Python in one namespace per page, commands through ``cli.main``."""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from doc_blocks import ELSEWHERE, Block, blocks_of, pages, shorten
from tokenizers import ByteLevelBPETokenizer
from torch import nn

import forked
import narrowgauge as ng
from narrowgauge import kernels
from narrowgauge.cli import main

sys.path.append(str(Path(__file__).parents[1] / "data"))
from chat_folders import CHATML, chat, make_folder, write_lines

pytestmark = pytest.mark.usefixtures("modules_are_not_collected")

PAGES = [page for page in pages() if page.name not in ELSEWHERE]
NOT_RUN_AT_MOST = 6
LIMIT_S = 120
EXITS = {
    "narrowgauge train odds.py:make --recipe fp16 --out run": 1,
    "narrowgauge replay run": 1,
    "narrowgauge train fixed.py:make --recipe fp16 --out fixed": 0,
    "narrowgauge lint next_byte.py:make --recipe fp8": 0,
    "narrowgauge train next_byte.py:make --recipe fp8 --steps 30 --batch 64 --out runs/fp8": 0,
    "narrowgauge report runs/fp8 validation.json --out report.html": 0,
    "narrowgauge doctor": 0,
}
"""Exit codes that pages document. Other commands may exit with 0 or with a finding (1), never with 2."""

READERS_TASK = '''
"""The task that pages assume: a small one. ``bad`` has a batch whose loss is not finite."""

import torch
import torch.nn.functional as F

import narrowgauge as ng


def make(batch: int = 16, seed: int = 0, width: int = 32) -> ng.Task:
    def draw(step, split):
        x = torch.randn(batch, 16, generator=torch.Generator().manual_seed(1000 * seed + step))
        return x, x.sum(1).gt(0).long()

    return ng.Task(
        model=lambda: torch.nn.Sequential(torch.nn.Linear(16, width), torch.nn.GELU(), torch.nn.Linear(width, 16)),
        batch=draw,
        loss=lambda model, pair: F.cross_entropy(model(pair[0]), pair[1]),
        steps=4,
    )


def with_my_softmax(seed: int = 0) -> ng.Task:
    return make(seed=seed)


def bad(seed: int = 0) -> ng.Task:
    task = make(seed=seed)

    def draw(step, split):
        return *task.batch(step, split), torch.tensor(float(step != 2 or split == "eval"))

    return ng.Task(
        model=task.model, batch=draw, loss=lambda model, batch: task.loss(model, batch[:2]) / batch[2], steps=4
    )
'''
READERS_SCRIPT = """
import torch

def train(model, optimizer, loader):
    scaler = torch.amp.GradScaler("cuda")
    for inputs, targets in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        scaler.scale(loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
"""
READERS_MODEL = "llama-3.1-8b"
"""The folder of a model that pages assume: a small one."""
RUN = re.compile(r"runs/[\w.:/-]+|\brun-[ab]\b")
ran: set[tuple[str, ...]] = set()
"""Commands that were run for an earlier page and write nothing that a page reads."""


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    """Create a folder with a run, its captured step, a saved validation, a saved benchmark, and their cache."""
    folder = tmp_path_factory.mktemp("reader")
    (folder / "my_task.py").write_text(READERS_TASK)
    task = f"{folder}/my_task.py"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("NARROWGAUGE_CACHE", str(folder / "cache"))
        assert main(["train", f"{task}:bad", "--recipe", "bf16", "--out", "run", "--log", "none"]) == 1
        validate = ["validate", f"{task}:make", "--candidates", "bf16", "--steps", "2", "--seeds", "2", "--no-layers"]
        assert main([*validate, "--save", "validation.json"]) in (0, 1)
        bench = ["bench", f"{task}:make", "--recipes", "fp32", "--peers", "torch", "--steps", "1", "--rounds", "2"]
        assert main([*bench, "--save", "base.json"]) == 0
    shutil.copy(folder / "base.json", folder / "bench.json")
    stories = [f"Story {number}: once upon a time there was a number, and it was {number}." for number in range(200)]
    (folder / "stories.jsonl").write_text("".join(json.dumps({"text": story}) + "\n" for story in stories))
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(stories, vocab_size=300, show_progress=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    write_lines(folder / "chats.jsonl", [chat(f"What is {n}?", f"It is {n + 1}, I think.") for n in range(40)])
    make_folder(folder / READERS_MODEL, CHATML, pad_token="</s>")
    small = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=384, max_position_embeddings=128,
    )  # fmt: skip
    transformers.LlamaForCausalLM(small).bfloat16().save_pretrained(folder / READERS_MODEL)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def reader(assets, tmp_path, monkeypatch):
    """Change to an empty folder with the files that pages mention."""
    monkeypatch.chdir(tmp_path)
    for name, value in {
        "NARROWGAUGE_CACHE": str(assets / "cache"),
        "WANDB_MODE": "offline",
        "HF_DATASETS_CACHE": str(assets / "datasets"),
        "COLUMNS": "120",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(kernels, "interpreting", False)
    for name in ("my_task.py", "task.py", "my.py"):
        shutil.copy(assets / "my_task.py", name)
    for name in ("validation.json", "bench.json", "base.json", "stories.jsonl", "tokenizer.json", "chats.jsonl"):
        shutil.copy(assets / name, name)
    Path(READERS_MODEL).symlink_to(assets / READERS_MODEL)
    Path("src").mkdir()
    for path in (Path("train.py"), Path("src/train.py")):
        path.write_text(READERS_SCRIPT)
    modules = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - modules:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def namespace() -> dict[str, object]:
    """Return the names that pages use without defining them: the reader's model, optimizer and data."""
    torch.manual_seed(0)
    model = nn.Sequential(OrderedDict(body=nn.Linear(64, 64), act=nn.GELU(), lm_head=nn.Linear(64, 16)))
    optimizer = torch.optim.AdamW(model.parameters())
    return {
        "__name__": "page",
        "torch": torch,
        "nn": nn,
        "F": F,
        "ng": ng,
        "Path": Path,
        "model": model,
        "optimizer": optimizer,
        "engine": ng.Engine(model, optimizer, recipe="bf16"),
        "loader": [(torch.randn(32, 64), torch.randint(0, 16, (32,))) for _ in range(4)],
        "array": np.linspace(0, 1, 5),
    }


@pytest.mark.filterwarnings("default")  # as a reader runs it
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_code_blocks_of_a_page_run(page, reader, assets, capfd):
    space = namespace()
    blocks = blocks_of(page)
    scripts = {command for block in blocks if block.kind == "shell" for command in block.commands()}
    for block in blocks:
        provide_runs(block.code, assets)
        if block.kind == "python":
            run_python(block, space, is_script=f"python {block.file}" in scripts)
        elif block.kind == "shell":
            for command in block.commands():
                run_command(command, block)
    assert "Traceback" not in capfd.readouterr().err


def run_python(block: Block, space: dict[str, object], *, is_script: bool) -> None:
    """Run a block here, unless it is a file that a command of the page runs."""
    name = block.place
    if block.file:
        path = Path(block.file)
        path.parent.mkdir(exist_ok=True)
        path.write_text(block.code)
        name = str(path.resolve())
        if is_script:
            return
    code = "\n" * (0 if block.file else block.line) + block.code
    exec(compile(code, name, "exec"), space)


def run_command(command: str, block: Block) -> None:
    """Run a line as the shell would. Commands that are not run are counted by the last test."""
    words = shlex.split(command)
    environment = dict(os.environ)
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        environment[name] = value
    if not is_run(command):
        return
    if words[0] == "python":
        runpy.run_path(words[1], run_name="__main__")
    elif words[0] == "pytest":
        arguments = ["-q", "-p", "no:cacheprovider", *words[1:]]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        with forked.start(forked.run_pytest, arguments, env=environment, **streams) as process:
            out, _ = process.communicate(LIMIT_S)
        assert process.returncode == 0, out
    else:
        run_verb(command, shorten(words[1:]), block)


def run_verb(command: str, words: list[str], block: Block) -> None:
    writes = {"--save", "--out", "--file", "--sarif", "--against", "--resume"} & set(words) or block.file
    if not writes and tuple(words) in ran and command not in EXITS:
        return
    ran.add(tuple(words))
    if words[0] == "train" and not {"--out", "--resume"} & set(words):
        words = [*words, "--out", f"runs/number-{len(ran)}"]  # default names have seconds, so two runs could share one
    try:
        code = main(words)
    except SystemExit as left:  # argparse: an unknown option
        code = left.code
    expected = (EXITS[command],) if command in EXITS else (0, 1)
    assert code in expected, f"{block.place}: {command!r}, run as {' '.join(words)!r}, exited with {code}"


def is_run(command: str) -> bool:
    words = [word for word in shlex.split(command) if "=" not in word or word.startswith("-")]
    return words[0] in ("narrowgauge", "python", "pytest") and "--serve" not in words


def provide_runs(code: str, assets: Path) -> None:
    """Create the runs that a page mentions without creating them (``runs/...``)."""
    made = set(re.findall(r"^narrowgauge .*--out (\S+)", code, re.MULTILINE))
    for name in set(RUN.findall(code)) - made:
        folder, inside = Path(name.split("/captures/")[0]), "/captures/" in name
        if not folder.exists():
            shutil.copytree(assets / "run", folder)
        if inside and not Path(name).exists():
            shutil.copytree(next((assets / "run" / "captures").iterdir()), name)


def test_few_blocks_are_not_run():
    """Blocks that cannot be run are marked, and there are few."""
    found = [block for page in PAGES for block in blocks_of(page)]
    marked = [f"{block.place}: {block.code}" for block in found if block.kind == "not run"]
    unrun = [
        f"{block.place}: {command}"
        for block in found
        if block.kind == "shell"
        for command in block.commands()
        if not is_run(command)
    ]
    allowed = [line for line in unrun if ": torchrun " in line or "--serve" in line]
    assert unrun == allowed, "an unknown command: run it in run_command, or mark it as not run"
    assert len(marked) + len(unrun) <= NOT_RUN_AT_MOST, "\n".join(marked + unrun)
    assert sum(block.kind == "python" for block in found) >= 30
    assert sum(len(block.commands()) for block in found if block.kind == "shell") >= 60
