"""``narrowgauge train --model PATH --data FILE``: fine-tuning a Hugging Face folder from end to end on the CPU."""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import forked
from narrowgauge import tasks
from narrowgauge.cli import main

sys.path.append(str(Path(__file__).parents[1] / "data"))
from chat_folders import CHATML, GEMMA, LLAMA3, chat, make_folder, write_lines

SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 512, "max_position_embeddings": 256,
}  # fmt: skip
FAMILIES = {
    "llama": ("LlamaForCausalLM", LLAMA3, SIZES),
    "qwen3": ("Qwen3ForCausalLM", CHATML, {**SIZES, "tie_word_embeddings": True}),
    "gemma": ("Gemma2ForCausalLM", GEMMA, SIZES),
}
SMALL = ["--device", "cpu", "--context", "64", "--batch", "1", "--lr", "0.01", "--log", "none", "--watch", "0"]


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "chats.jsonl", [chat(f"What is {n}?", f"It is {n + 1}, I think.") for n in range(60)])


def make_model(family: str = "llama", dtype: torch.dtype = torch.bfloat16, **fields: Any) -> str:
    name, template, sizes = FAMILIES[family]
    cls = getattr(transformers, name)
    torch.manual_seed(3)
    cls(cls.config_class(**{**sizes, **fields})).to(dtype).save_pretrained(family)
    make_folder(Path(family), template)
    return family


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict[str, Any], str]:
    code = main([*argv, "--json"])
    captured = capsys.readouterr()
    return code, json.loads(captured.out), captured.err


def rejected(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["train", *argv]) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith("narrowgauge: ") and "Traceback" not in line
    return line


@pytest.mark.parametrize(
    ("family", "recipe"),
    [("llama", "fp8-lean"), ("qwen3", "bf16-lean"), ("gemma", "bf16"), ("qwen3", "fp32")],
)
def test_a_folder_is_fine_tuned(family: str, recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_model(family)
    code, result, said = run(
        capsys, "train", "--model", model, "--data", "chats.jsonl", "--recipe", recipe, "--out", "run", *SMALL,
        "--epochs", "0.4",
    )  # fmt: skip
    assert code == 0, result["findings"]
    assert result["loss_last"] < result["loss_first"] and result["loss_eval"] < result["loss_first"]
    assert "60 conversations: 5" in said and "of the data carries loss" in said
    saved = json.loads(Path("run/run.json").read_text())
    assert saved["options"]["model"] == str(Path(model).resolve()) and saved["facts"]["form"] == "messages"


def wait_for(path: Path) -> None:
    for _ in range(6000):
        if path.exists():
            return
        time.sleep(0.01)
    raise AssertionError(f"{path} was not written")


def test_a_killed_run_goes_on_where_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["train", "--model", make_model(), "--data", "chats.jsonl", "--recipe", "bf16-lean", *SMALL]
    command += ["--steps", "16", "--checkpoint-every", "2", "--accumulate", "2"]
    _, whole, _ = run(capsys, *command, "--out", "whole")

    with forked.start_cli([*command, "--out", "killed"]) as child:
        wait_for(Path("killed/checkpoints/step-00000002/manifest.json"))
        child.kill()
        child.wait(60)
    assert not Path("killed/checkpoints/step-00000016").exists()
    _, resumed, _ = run(capsys, "train", "--resume", "killed")
    assert resumed["steps"] == 16 and resumed["loss_last"] == whole["loss_last"]
    assert resumed["loss_eval"] == whole["loss_eval"]


def test_the_loss_of_an_update_is_the_mean_over_its_tokens() -> None:
    """However its batches are cut: four batches of one row are one batch of four rows."""
    model = make_model("llama", torch.float32)
    records = [chat("Tell me.", "A long answer, with many more words than others have. " * (n % 3)) for n in range(40)]
    write_lines(Path("uneven.jsonl"), [one for one in records if one["messages"][-1]["content"]])
    losses, grads = [], []
    for batch, accumulate in ((4, 1), (1, 4)):
        task = tasks.find(
            "finetune", model=model, data="uneven.jsonl", context=128, batch=batch, accumulate=accumulate
        )  # fmt: skip
        made = task.model()
        total = sum(task.loss(made, task.batch(number, "train")) / accumulate for number in range(accumulate))
        total.backward()
        losses.append(total.item())
        grads.append([parameter.grad for parameter in made.parameters()])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_what_cannot_work_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    model = make_model()
    shutil.copytree(model, "bare", ignore=shutil.ignore_patterns("tokenizer*", "chat_template*"))
    shutil.copytree(model, "weightless", ignore=shutil.ignore_patterns("*.safetensors"))
    shutil.copytree(model, "cut")
    weights = Path("cut/model.safetensors")
    weights.write_bytes(weights.read_bytes()[:-100])
    Path("empty.jsonl").write_text("")
    data = ["--data", "chats.jsonl"]
    for argv, words in (
        (["--model", model], "needs data"),
        (["gpt-tiny", "--model", model, *data], "not both"),
        (["--model", "bare", *data], "tokenizer"),
        (["--model", "weightless", *data], "no .safetensors"),
        (["--model", "cut", *data], "cut"),
        (["--model", "nowhere", *data], "nowhere"),
        (["--model", model, "--data", "empty.jsonl"], "empty"),
        (["--model", model, *data, "--context", "100000"], "at most 256 tokens"),
        (["--model", model, *data, "--epochs", "0"], "--epochs 0"),
        (["gpt-tiny", "--epochs", "2"], "--epochs is for --model"),
        (["--model", model, *data, "--vocab", "300"], "takes no --vocab"),
    ):
        line = rejected(capsys, *argv, "--device", "cpu", "--out", "never")
        assert words in line, (argv, line)
    assert not Path("never").exists()


def test_a_tokenizer_of_another_model_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    model = make_model(vocab_size=64)
    line = rejected(capsys, "--model", model, "--data", "chats.jsonl", "--device", "cpu", "--out", "never")
    assert "the model's vocabulary has 64" in line
