"""``narrowgauge train --lora`` and ``export``: from a Hugging Face folder to adapters and merged folders."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

import forked
from narrowgauge import tasks
from narrowgauge.cli import main
from narrowgauge.pretrained import PretrainedModel
from narrowgauge.pretrained.lora_options import parse_lora
from narrowgauge.pretrained.transformers_model import find_model
from narrowgauge.runs.checkpoints import checkpoint
from narrowgauge.runs.export.fp8_folder import quantize
from narrowgauge.runs.schedule import compute_factor
from narrowgauge.runs.trainer import Trainer

sys.path.append(str(Path(__file__).parents[1] / "data"))
from chat_folders import CHATML, GEMMA, LLAMA3, chat, make_folder, write_lines

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without BF16 products
SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 512, "max_position_embeddings": 256,
}  # fmt: skip
FAMILIES = {
    "llama": ("LlamaForCausalLM", LLAMA3, SIZES),
    "qwen3": ("Qwen3ForCausalLM", CHATML, {**SIZES, "tie_word_embeddings": True}),
    "gemma": ("Gemma2ForCausalLM", GEMMA, SIZES),
    "mixture": ("Qwen3MoeForCausalLM", CHATML, {**SIZES, "num_experts": 16, "moe_intermediate_size": 16}),
}
SMALL = ["--device", "cpu", "--context", "64", "--batch", "1", "--lr", "0.01", "--log", "none", "--watch", "0"]
TOKENS = torch.arange(1, 17)[None]
Train = Callable[..., Path]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the four models, an adapter made by PEFT, and data."""
    root = tmp_path_factory.mktemp("lora")
    for family, (name, template, sizes) in FAMILIES.items():
        cls = getattr(transformers, name)
        torch.manual_seed(3)
        model = cls(cls.config_class(**sizes)).to(torch.bfloat16)
        model.save_pretrained(root / family)
        make_folder(root / family, template)
    base = transformers.AutoModelForCausalLM.from_pretrained(root / "llama", dtype=torch.float32)
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    peft.get_peft_model(base, config).save_pretrained(root / "adapter")
    write_lines(root / "chats.jsonl", [chat(f"What is {n}?", f"It is {n + 1}, I think.") for n in range(40)])
    return root


@pytest.fixture(scope="module")
def trained(root: Path) -> Train:
    """Trains a run once for each family and recipe."""

    def train(family: str, recipe: str, lora: str = "rank=4") -> Path:
        run = root / f"{family}-{recipe}"
        if not run.exists():
            assert main(make_command(root, family, recipe, lora, run)) == 0
        return run

    return train


def read_events(run: Path, kind: str) -> list[dict[str, Any]]:
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [event for event in events if event["kind"] == kind]


def read_masters(run: Path) -> dict[str, Tensor]:
    saved = checkpoint.load_newest(run)
    assert saved is not None
    return saved.weights


def load(folder: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()


@torch.no_grad()
def compute_logits(model: Any) -> Tensor:
    logits: Tensor = model(TOKENS).logits
    return logits


def rejected(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    capsys.readouterr()
    assert main(list(argv)) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[-1].startswith("narrowgauge: ") and "Traceback" not in lines[-1]
    return lines[-1]


@pytest.mark.parametrize(
    ("family", "recipe"),
    [
        ("llama", "fp8-lean"), ("qwen3", "bf16-lean"), ("gemma", "bf16"), ("llama", "fp32"), ("mixture", "fp8-lean"),
        ("mixture", "bf16"),
    ],
)  # fmt: skip
def test_adapters_are_trained_and_exported(trained: Train, root: Path, family: str, recipe: str) -> None:
    run = trained(family, recipe)
    steps = read_events(run, "step")
    assert all(step["applied"] for step in steps) and steps[-1]["loss"] < steps[0]["loss"]
    masters = read_masters(run)
    assert len(masters) == (16 if family == "mixture" else 28)  # experts have no adapters
    assert all("lora_" in name and one.dtype is torch.float32 for name, one in masters.items())
    assert all(bool(one.any()) for one in masters.values())
    saved = json.loads((run / "run.json").read_text())
    frozen = {"fp8-lean": "[frozen=fp8]", "bf16-lean": "[frozen=bf16]", "bf16": "[frozen=bf16]", "fp32": ""}
    assert saved["settings"]["recipe"] == recipe + frozen[recipe]

    adapter, merged = run / "peft", run / "hf"
    assert main(["export", str(run), "--format", "peft", "--out", str(adapter)]) == 0
    stored = load_file(adapter / "adapter_model.safetensors")
    for name, master in masters.items():
        assert stored.pop(f"base_model.model.{name.replace('.default', '')}").equal(master)
    assert not stored
    base = load(root / family, dtype=torch.float32)
    loaded = peft.PeftModel.from_pretrained(base, adapter).eval()
    own = PretrainedModel(find_model(str(root / family), {}), parse_lora("rank=4")).load("fp32", "cpu").eval()
    own.load_state_dict(masters, strict=False)
    logits = compute_logits(own)
    assert compute_logits(loaded).equal(logits) and not logits.equal(compute_logits(load(root / family).float()))

    whole = loaded.merge_and_unload()
    assert main(["export", str(run), "--format", "hf", "--dtype", "fp32", "--out", str(merged)]) == 0
    for name, parameter in load(merged).named_parameters():
        assert parameter.equal(whole.get_parameter(name)), name
    small = run / "bf16"
    assert main(["export", str(run), "--format", "hf", "--max-shard-size", "30KB", "--out", str(small)]) == 0
    assert len(list(small.glob("*.safetensors"))) > 1
    assert load(small).dtype is torch.bfloat16
    for parameter in whole.parameters():
        parameter.data = parameter.data.bfloat16().float()
    assert compute_logits(load(small, dtype=torch.float32)).equal(compute_logits(whole))


def test_fp8_export_quantizes_the_merged_weights(trained: Train, root: Path, tmp_path: Path) -> None:
    run = trained("llama", "fp8-lean")
    assert main(["export", str(run), "--format", "hf", "--dtype", "fp32", "--out", str(tmp_path / "hf")]) == 0
    assert main(["export", str(run), "--format", "fp8", "--out", str(tmp_path / "fp8")]) == 0
    whole, stored = load_file(tmp_path / "hf/model.safetensors"), load_file(tmp_path / "fp8/model.safetensors")
    layers = [name for name in stored if name.endswith(".weight_scale")]
    assert len(layers) == 14
    for name in layers:
        weight = name.removesuffix("_scale")
        expected, scale = quantize(whole[weight], weight)
        assert stored[weight].view(torch.uint8).equal(expected.view(torch.uint8)) and stored[name].equal(scale)
        assert name.replace("weight_scale", "input_scale") in stored
    assert main(["export", str(run), "--out", str(tmp_path)]) == 0  # the checkpoint's own weights: the adapters
    assert load_file(next(tmp_path.glob("weights-*"))).keys() == read_masters(run).keys()


def make_command(root: Path, family: str, recipe: str, lora: str, run: Path) -> list[str]:
    options = ["--model", str(root / family), "--data", str(root / "chats.jsonl"), "--lora", lora, *SMALL]
    return ["train", *options, "--recipe", recipe, "--steps", "4", "--out", str(run)]


def stop_in_step_three(end: Callable[[], None]) -> Callable[..., None]:
    """Return a step of the trainer that ends the third time."""
    step = Trainer._step

    def run(self: Trainer, batches: list[Any]) -> None:
        if self.result.step == 2:
            end()
        step(self, batches)

    return run


def run_until_killed(argv: list[str]) -> int:
    Trainer._step = stop_in_step_three(lambda: os.kill(os.getpid(), signal.SIGKILL))  # type: ignore[method-assign]
    return forked.run_verb(argv)


def assert_equal_runs(run: Path, other: Path) -> None:
    assert read_events(run, "resume") and not read_events(other, "resume")
    for kind in ("step", "eval"):
        assert [event["loss"] for event in read_events(run, kind)] == [e["loss"] for e in read_events(other, kind)]
    ours, theirs = read_masters(run), read_masters(other)
    assert ours.keys() == theirs.keys() and all(ours[name].equal(theirs[name]) for name in theirs)


def test_a_killed_run_continues_bit_for_bit(trained: Train, root: Path, tmp_path: Path) -> None:
    command = make_command(root, "llama", "fp8-lean", "rank=4", tmp_path / "killed")
    with forked.start(run_until_killed, command) as child:
        assert child.wait(200) == -signal.SIGKILL
    assert len(list((tmp_path / "killed/checkpoints").iterdir())) == 2
    assert main(["train", "--resume", str(tmp_path / "killed"), "--recipe", "fp8-lean", "--lora", "rank=4"]) == 0
    assert_equal_runs(tmp_path / "killed", trained("llama", "fp8-lean"))


def test_dropout_continues_bit_for_bit(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError("the disk is gone")

    lora = "rank=4,dropout=0.2,init=gaussian"
    assert main(make_command(root, "qwen3", "fp32", lora, tmp_path / "whole")) == 0
    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "_step", stop_in_step_three(fail))
        assert main(make_command(root, "qwen3", "fp32", lora, tmp_path / "stopped")) != 0
    assert main(["train", "--resume", str(tmp_path / "stopped")]) == 0
    assert_equal_runs(tmp_path / "stopped", tmp_path / "whole")


def test_training_continues_from_an_adapter_as_plain_peft_does(root: Path, tmp_path: Path) -> None:
    """Every step of FP32 training equals that of PEFT with torch's AdamW."""
    steps, rate = 4, 0.02
    options = {"model": str(root / "llama"), "data": str(root / "chats.jsonl")}
    command = ["train", *(part for name, value in options.items() for part in (f"--{name}", value)), *SMALL]
    command += ["--lora", str(root / "adapter"), "--recipe", "fp32", "--lr", str(rate), "--steps", str(steps)]
    command += ["--checkpoint-every", "1", "--keep", str(steps), "--warmup", "1", "--out", str(tmp_path / "run")]
    assert main(command) == 0
    task = tasks.find("finetune", **options, context=64, batch=1)
    base = transformers.AutoModelForCausalLM.from_pretrained(root / "llama", dtype=torch.float32)
    plain = peft.PeftModel.from_pretrained(base, root / "adapter", is_trainable=True).train()
    named = {name.removeprefix("base_model.model."): p for name, p in plain.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(named.values(), betas=(0.9, 0.95), weight_decay=0.0)
    losses = [event["loss"] for event in read_events(tmp_path / "run", "step")]
    for step in range(steps):
        loss = task.loss(plain, task.batch(step, "train"))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(named.values(), 1.0)
        optimizer.param_groups[0]["lr"] = rate * compute_factor(step, steps, 1)
        optimizer.step()
        optimizer.zero_grad()
        assert losses[step] == pytest.approx(loss.item(), abs=1e-5)
        saved = checkpoint.load(checkpoint.make_path(tmp_path / "run", step + 1)).weights
        assert saved.keys() == named.keys()
        for name, value in saved.items():
            torch.testing.assert_close(value, named[name].detach(), rtol=1e-5, atol=1e-5)
    assert main(["export", str(tmp_path / "run"), "--format", "peft", "--out", str(tmp_path / "again")]) == 0
    config = json.loads((tmp_path / "again/adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (3, 5, ["q_proj", "up_proj"])


def test_the_output_says_how_much_is_trained(trained: Train, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--model", str(root / "qwen3"), "--data", str(root / "chats.jsonl"), *SMALL, "--steps", "1"]
    lora = "rank=2,alpha=3.5,targets=q_proj+down_proj,rslora=true"
    assert main(["train", *argv, "--lora", lora, "--recipe", "fp32", "--out", str(root / "one")]) == 0
    # ranks of 2: 2 layers of (32 + 32) values for q_proj and (64 + 32) for down_proj
    assert "training 640 of 35,680 parameters (1.79%): LoRA rank 2 on 4 layers" in capsys.readouterr().out
    saved = json.loads((root / "one/run.json").read_text())
    assert saved["facts"]["lora"]["use_rslora"] is True and saved["options"]["lora"] == lora
    assert tasks.find("finetune", **saved["options"]).learning_rate == 2e-4


def test_what_cannot_work_is_one_line(root: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = ["--model", str(root / "llama"), "--data", str(root / "chats.jsonl"), "--device", "cpu"]
    for lora, words in (
        ("rank=0", "rank=0 must be a whole number"),
        ("rnak=4", "there is no 'rnak'"),
        ("targets=nothing", "nothing is no module of LlamaForCausalLM; its linear layers are down_proj"),
        ("targets=embed_tokens", "embed_tokens is an Embedding; adapters are for linear layers"),
        ("targets=q_proj+self_attn", "PEFT cannot add the adapter"),
        (str(root / "llama"), "no adapter_config.json"),
        ("nowhere", "no such folder"),
    ):
        assert words in rejected(capsys, "train", *model, "--lora", lora, "--out", str(tmp_path / "never")), lora
    line = rejected(capsys, "train", "gpt-tiny", "--lora", "rank=4")
    assert "--lora is for --model" in line
    line = rejected(capsys, "train", *model, "--lora", "rank=4", "--recipe", "fp32[frozen=bf16]")
    assert "frozen=bf16" in line
    wrong = ["--model", str(root / "gemma"), *model[2:], "--out", str(tmp_path / "never")]
    shutil.copytree(root / "adapter", tmp_path / "cut")
    weights = tmp_path / "cut/adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    assert "truncated" in rejected(capsys, "train", *model, "--lora", str(tmp_path / "cut"))
    config = json.loads((tmp_path / "cut/adapter_config.json").read_text())
    (tmp_path / "cut/adapter_config.json").write_text(json.dumps({**config, "r": 5}))
    shutil.copy(root / "adapter/adapter_model.safetensors", weights)
    assert "expected float [5, 32]" in rejected(capsys, "train", *wrong, "--lora", str(tmp_path / "cut"))
    assert "the adapter with --lora" in rejected(capsys, "train", "--model", str(root / "adapter"), *model[2:])
    assert not (tmp_path / "never").exists()


def test_a_changed_base_is_refused(trained: Train, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copied = root / "base"
    shutil.copytree(root / "llama", copied)
    run = root / "changed"
    command = ["train", "--model", str(copied), "--data", str(root / "chats.jsonl"), "--lora", "rank=2", *SMALL]
    assert main([*command, "--recipe", "fp32", "--steps", "2", "--checkpoint-every", "1", "--out", str(run)]) == 0
    weights = copied / "model.safetensors"
    original = weights.read_bytes()
    weights.write_bytes(original[:-1500] + bytes(1500))  # the same header and size
    for argv in (["train", "--resume", str(run)], ["export", str(run), "--format", "hf"]):
        assert "is not the base that the run started from" in rejected(capsys, *argv)
    weights.unlink()
    assert "base" in rejected(capsys, "train", "--resume", str(run))
    assert "base" in rejected(capsys, "export", str(run), "--format", "peft")
    shutil.rmtree(copied)
    assert "there is no such folder" in rejected(capsys, "export", str(run), "--format", "peft")
    there = str(root / "llama")  # the same files in another folder
    assert main(["export", str(run), "--format", "peft", "--model", there, "--out", str(root / "moved")]) == 0


def test_formats_of_other_runs_are_refused(root: Path, trained: Train, capsys: pytest.CaptureFixture[str]) -> None:
    full = root / "full"
    command = ["train", "--model", str(root / "llama"), "--data", str(root / "chats.jsonl"), *SMALL]
    assert main([*command, "--recipe", "fp32", "--steps", "1", "--out", str(full)]) == 0
    assert "trained all weights" in rejected(capsys, "export", str(full), "--format", "peft")
    run = trained("llama", "fp32")
    assert "--max-shard-size is for" in rejected(
        capsys, "export", str(run), "--format", "peft", "--max-shard-size", "1GB"
    )
    resumed = ["train", "--resume", str(run), "--lora", "rank=8"]
    assert "--lora rank=8 differs" in rejected(capsys, *resumed)
    assert len(read_masters(full)) == 21  # checkpoints of full fine-tuning have all weights
