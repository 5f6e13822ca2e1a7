"""``narrowgauge validate --model FOLDER --data FILE``: recipes compared in fine-tuning, on held-out answers."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from narrowgauge.cli import main

sys.path.append(str(Path(__file__).parents[1] / "data"))
from chat_folders import CHATML, chat, make_folder, write_lines

SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 384, "max_position_embeddings": 128,
}  # fmt: skip
COMMAND = [
    "validate",
    "--model",
    "llama",
    "--data",
    "chats.jsonl",
    "--device",
    "cpu",
    "--context",
    "64",
    "--batch",
    "1",
]
SHORT = ["--steps", "3", "--lr", "0.01", "--out", "runs", "--no-layers", "--seeds"]


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change to a folder with a small model in BF16 and its tokenizer, and with conversations."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(3)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).bfloat16().save_pretrained("llama")
    make_folder(Path("llama"), CHATML)
    write_lines(Path("chats.jsonl"), [chat(f"What is {n}?", f"It is {n + 1}, I think.") for n in range(60)])


def validate(capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, dict[str, Any], str]:
    code = main([*COMMAND, *more, "--json"])
    captured = capsys.readouterr()
    return code, json.loads(captured.out), captured.err


def test_recipes_are_compared_in_fine_tuning(capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--candidates", "bf16-lean,fp16[loss_scale=1e-7]", *SHORT, "3", "--margin", "0.02"]
    code, data, said = validate(capsys, *more, "--accumulate", "2", "--save", "saved.json")
    assert code == 1  # a loss scale with which all gradients vanish trains nothing
    verdicts = {name: found["verdict"] for name, found in data["candidates"].items()}
    assert verdicts == {"bf16-lean": "equivalent", "fp16[loss_scale=1e-7]": "worse"}
    assert len(set(data["losses"])) == 3 and max(data["losses"]) < 5.9  # the seed changes the order; ln 384 = 5.95
    assert data["task"] == "finetune" and data["steps"] == 3
    assert data["options"]["model"] == str(Path("llama").resolve()) and data["options"]["accumulate"] == 2
    assert "fine-tuning llama on chats.jsonl: comparing" in said and "60 conversations: 5" in said

    code, again, said = validate(capsys, *more, "--accumulate", "2")
    assert again["losses"] == data["losses"] and "s left" not in said  # all runs are cached
    write_lines(Path("chats.jsonl"), [chat(f"What is {n}?", f"It is {n + 2}, I am sure.") for n in range(60)])
    _, other, said = validate(capsys, *SHORT, "1", "--accumulate", "2", "--candidates", "bf16-lean")
    assert other["losses"][0] != data["losses"][0] and "cached" not in said  # other data, other runs


def test_modules_are_compared_and_a_saved_validation_is_a_gate(capsys: pytest.CaptureFixture[str]) -> None:
    write_lines(Path("held-out.jsonl"), [chat("What is 99?", "It is 100, I think.")])
    command = ["--candidates", "bf16", "--steps", "1", "--seeds", "1", "--eval-data", "held-out.jsonl"]
    _, data, _ = validate(capsys, *command, "--save", "saved.json")
    modules = json.dumps(data["candidates"]["bf16"]["layers"])
    assert "model.layers.0" in modules and "lm_head" in modules
    assert main(["validate", "--against", "saved.json", "--device", "cpu", "--no-layers", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["gate"]["ok"] and again["losses"] == data["losses"] and again["options"] == data["options"]


def test_what_cannot_work_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree("llama", "bare", ignore=shutil.ignore_patterns("tokenizer*", "chat_template*"))
    write_lines(Path("one.jsonl"), [chat("What is 1?", "It is 2.")] * 30)
    data = ["--data", "chats.jsonl"]
    for argv, words in (
        (["--model", "llama"], "needs data"),
        (["gpt-tiny", "--model", "llama", *data], "not both"),
        (["--model", "bare", *data], "tokenizer"),
        (["--model", "nowhere", *data], "nowhere"),
        (["--model", "llama", "--data", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--model", "llama", *data, "--eval-share", "0"], "held-out documents"),
        (["--model", "llama", "--data", "one.jsonl"], "held-out documents"),
        (["--model", "llama", *data, "--candidates", "fp8@gpt-tiny"], "omit @gpt-tiny"),
        (["--model", "llama", *data, "--context", "4096"], "at most 128 tokens"),
        (["gpt-tiny", *data], "has no field 'text' or 'content'; its fields are messages"),
        (["gpt-tiny", "--eval-share", "0.1"], "--eval-share is for --model"),
        (["gpt-tiny", "--accumulate", "2"], "--accumulate is for --model"),
        (["--model", "llama", *data, "--curves", "a", "b"], "omit the task, --model"),
    ):
        assert main(["validate", *argv, "--device", "cpu"]) == 2, argv
        line = capsys.readouterr().err.strip().splitlines()[-1]
        assert line.startswith("narrowgauge: ") and words in line, (argv, line)
