"""``bench --model``: one command races a user's model, says which blocks run fused, and can be repeated as a gate."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from narrowgauge import hardware
from narrowgauge.bench import compare
from narrowgauge.cli import bench as verb
from narrowgauge.cli import main

pytestmark = pytest.mark.usefixtures("modules_are_not_collected")

FIELDS = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 96,
    "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
QWEN = ["bench", "--model", "transformers:Qwen3ForCausalLM", "--device", "cpu", "--config", json.dumps(FIELDS)]
SHORT = ["--batch", "2", "--context", "8", "--rounds", "1", "--steps", "1"]
MODEL_FILE = """
from dataclasses import dataclass
import torch
from torch import nn

@dataclass
class GPTConfig:
    block_size: int = 16
    vocab_size: int = 96
    width: int = 32

class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        print("number of parameters: few")
        self.embed = nn.Embedding(config.vocab_size, config.width)
        self.head = nn.Linear(config.width, config.vocab_size)

    def forward(self, idx, targets=None):
        logits = self.head(self.embed(idx))
        return logits, nn.functional.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))

class Plain(nn.Module):
    def __init__(self, vocab_size: int, width: int = 8):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, width)

    def forward(self, tokens, targets):
        return self.embed(tokens).square().mean()

class NoLoss(Plain):
    def forward(self, tokens, targets):
        return self.embed(tokens)

class Broken(Plain):
    def forward(self, tokens, targets):
        return self.embed(tokens).nothing

def make(width: int = 3):
    raise AssertionError("not a model")
"""


@pytest.fixture
def clocks(monkeypatch):
    """Makes every step take the same time, and skips the steps of rounds."""
    monkeypatch.setattr(compare, "time_round", lambda *_: 1.0)
    monkeypatch.setattr(compare, "time", SimpleNamespace(process_time=float, perf_counter=float))


def test_one_command_races_a_model_and_names_its_fused_blocks(capsys):
    assert main([*QWEN, *SHORT, "--recipes", "fp32,fp8"]) == 0
    out = capsys.readouterr().out
    assert "Qwen3ForCausalLM" in out
    assert "tokens/s" in out and "mJ/token" not in out
    for name in ("fp32", "torch-fp32", "fp8"):
        assert name in out
    fused = "fused: 2 Qwen3DecoderLayer (model.layers.0, ...): norms first, RMSNorm, rotary kernel, swiglu"
    assert fused in out
    assert "loss of fp8 compared with torch-fp32: " in out


def test_the_result_is_json_and_can_be_repeated_as_a_gate(tmp_path, capsys, clocks, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = [*QWEN, "--batch", "2", "--context", "8", "--recipes", "fp32", "--json"]
    assert main([*command, "--save", "base.json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data == json.loads(Path("base.json").read_text())
    assert data["model"] == data["task"] == "transformers:Qwen3ForCausalLM"
    assert data["class"] == "Qwen3ForCausalLM" and data["weights"] == "random" and data["parameters"] > 0
    assert data["options"] == {"config": FIELDS} and data["peers"] == ["torch"]
    assert (data["unit"], data["items_per_step"]) == ("token", 16)
    ours, plain = data["rows"]
    assert (ours["name"], plain["name"]) == ("fp32", "torch-fp32")
    assert ours["joules_per_token"] is None and ours["peak_bytes"] is None  # on a CPU
    assert ours["loss_first"] == pytest.approx(plain["loss_first"]) and ours["loss"] == pytest.approx(plain["loss"])
    assert ours["conversion"]["fused"] == [] and plain["conversion"] is None
    assert data["losses"][0]["comparable"] is True

    assert main(["bench", "--against", "base.json", "--device", "cpu", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["model"] == data["model"] and again["gate"]["ok"]
    changed = ["--config", json.dumps({**FIELDS, "num_hidden_layers": 1})]
    assert main(["bench", "--against", "base.json", "--device", "cpu", *changed]) == 2
    assert "was measured with options" in capsys.readouterr().err


def test_a_class_in_a_file_is_raced_and_its_prints_stay_out_of_the_json(tmp_path, capsys, monkeypatch):
    (tmp_path / "mine.py").write_text(MODEL_FILE)
    monkeypatch.chdir(tmp_path)
    command = ["bench", "--model", "mine.py:GPT", "--device", "cpu", *SHORT, "--recipes", "fp32", "--json"]
    assert main([*command, "--config", '{"width": 16}', "--save", "base.json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["items_per_step"] == 16 and data["class"] == "GPT"
    assert data["parameters"] == 96 * 16 + 97 * 16 + 96 - 16
    assert data["losses"][0]["comparable"]
    assert main(["bench", "--model=mine.py:Plain", "--device", "cpu", *SHORT, "--config", '{"vocab_size": 9}']) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["mine.py:Nothing"], "has no class 'Nothing'; it has Broken, GPT, GPTConfig, NoLoss, Plain"),
        (["mine.py:make"], "make is not a class of nn.Module"),
        (["missing.py:GPT"], "there is no file 'missing.py'"),
        (["mine.py:GPT", "--config", '{"depth": 1}'], "GPTConfig has no field 'depth'; it has block_size"),
        (["mine.py:GPT", "--config", '{"width": "x"}'], "cannot be made: TypeError"),
        (["mine.py:GPT", "--context", "17"], "takes 2 to 16 tokens"),
        (["mine.py:Plain"], "needs vocab_size: give it with --config"),
        (["mine.py:NoLoss", "--config", '{"vocab_size": 9}'], "must return one loss"),
        (["mine.py:Broken", "--config", '{"vocab_size": 9}'], "does not run on tokens (1, 128), targets (1, 128)"),
        (["transformers:Qwen3ForCausalLM", "--config", "{"], "--config is not JSON"),
        (["transformers:Qwen3Model"], "use Qwen3ForCausalLM"),
        (
            ["transformers:Qwen3ForCausalLM", "--config", '{"num_hidden_layers": 1, "vocab_size": 99999999}'],
            "million parameters: fp32 and 1 baseline",
        ),
        (["transformers:Qwen3ForCausalLM", "gpt-tiny"], "not both"),
        (["nowhere"], "there is no such folder"),
        (["."], "has no config.json"),
        ([""], "the value is empty"),
    ],
)
def test_wrong_models_end_with_one_line_and_exit_code_2(words, message, tmp_path, capsys, monkeypatch):
    (tmp_path / "mine.py").write_text(MODEL_FILE)
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "--device", "cpu", "--json", "--recipes", "fp32", "--model", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "Traceback" not in captured.err
    last = captured.err.strip().splitlines()[-1]
    assert last.startswith("narrowgauge: ") and message in last


def test_config_needs_a_model(capsys):
    assert main(["bench", "gpt-tiny", "--config", "{}"]) == 2
    assert "--config is for --model" in capsys.readouterr().err


def test_contestants_are_what_the_device_and_the_installation_have(monkeypatch):
    hopper = hardware.describe_gpu("NVIDIA H200", 0, (9, 0), 140 << 30)
    ampere = hardware.describe_gpu("NVIDIA A100-SXM4-80GB", 0, (8, 0), 80 << 30)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert verb._choose_contestants(hopper, True) == (["bf16", "fp8"], ["torch", "torchao"])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert verb._choose_contestants(ampere, False) == (["bf16"], ["torch"])
    cpu = hardware.detect("cpu")
    slow = [] if "bf16" in cpu.native else ["fp32"]
    assert verb._choose_contestants(cpu, False) == ([*slow, "bf16", "fp8"], ["torch"])
    assert verb._choose_contestants(cpu, True)[0] == (["fp32"] if slow else ["bf16"])  # emulation cannot be compiled
