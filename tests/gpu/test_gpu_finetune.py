"""Fine-tuning on a GPU: the commands from end to end, loading in FP8, and memory of the loaded base."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from narrowgauge import Engine
from narrowgauge.cli import main
from narrowgauge.nn.products.stored_fp8 import is_stored, widen_stored
from narrowgauge.pretrained import PretrainedModel
from narrowgauge.pretrained.lora_options import parse_lora
from narrowgauge.pretrained.transformers_model import find_model

sys.path.append(str(Path(__file__).parents[1] / "data"))
from chat_folders import LLAMA3, chat, make_folder, write_lines

transformers = pytest.importorskip("transformers")
pytest.importorskip("peft")
SIZES: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 8192, "max_position_embeddings": 512,
}  # fmt: skip
pytestmark = pytest.mark.filterwarnings("ignore:.*defaults to a non-deterministic algorithm")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp("finetune")
    torch.manual_seed(3)
    config = transformers.LlamaConfig(**SIZES)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(made / "llama")
    make_folder(made / "llama", LLAMA3)
    write_lines(made / "chats.jsonl", [chat(f"What is {n}?", f"It is {n + 1}, I think.") for n in range(200)])
    return made


def run(folder: Path, out: str, capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, Any]:
    arguments = [
        "train", "--model", str(folder / "llama"), "--data", str(folder / "chats.jsonl"), "--out", str(folder / out),
        "--context", "256", "--batch", "4", "--steps", "12", "--log", "none", "--device", "cuda", "--json",
    ]  # fmt: skip
    assert main([*arguments, *more]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("recipe", ["bf16-lean", "fp8-lean[products=all]", "fp8[products=all]"])
@pytest.mark.parametrize("lora", [False, True])
def test_the_command_trains_and_exports(
    folder: Path, capsys: pytest.CaptureFixture[str], recipe: str, lora: bool
) -> None:
    name = f"{recipe.partition('[')[0]}-{lora}"
    rate = "2e-3" if lora else "5e-4"
    run(folder, name, capsys, "--recipe", recipe, "--lr", rate, *(["--lora", "rank=8"] if lora else []))
    events = [json.loads(line) for line in (folder / name / "events.jsonl").read_text().splitlines()]
    losses = [event["loss"] for event in events if event["kind"] == "step"]
    assert losses[-1] < losses[0] - 0.05
    assert main(["export", str(folder / name), "--format", "hf", "--out", str(folder / f"{name}-hf")]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / f"{name}-hf")
    assert torch.isfinite(model(torch.arange(3, 40)[None]).logits.float()).all()


def load(folder: Path, recipe: str) -> Any:
    torch.manual_seed(0)
    found = find_model(str(folder / "llama"), {}, quantized=True)
    return PretrainedModel(found, parse_lora("rank=8")).load(recipe, "cuda")


def test_a_base_is_loaded_in_fp8_as_the_engine_stores_it(folder: Path) -> None:
    states = []
    for form in ("fp8[products=all,frozen=fp8]", "fp8[products=all,frozen=bf16]"):
        model = load(folder, form)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        engine = Engine(model, torch.optim.AdamW(trained, 1e-3), "fp8[products=all,frozen=fp8]")
        assert len(engine.conversion.stored) == 16 and len(engine.conversion.blocks) == 2
        states.append(model.state_dict())
    for name, tensor in states[0].items():
        assert tensor.dtype is states[1][name].dtype and torch.equal(tensor, states[1][name]), name


def test_a_loaded_fp8_base_takes_a_byte_per_parameter(folder: Path) -> None:
    for _ in range(2):  # the first time also allocates what a process keeps, and collects what earlier tests left
        model = None
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        model = load(folder, "fp8-lean[products=all,frozen=fp8]")
    torch.cuda.synchronize()
    matrices = [p for p in model.parameters() if p.dim() > 1 and not p.requires_grad]
    adapters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert torch.cuda.memory_allocated() - before < 1.1 * sum(p.numel() for p in matrices) + 8 * adapters
    head = model.get_submodule("lm_head")
    assert is_stored(head) and widen_stored(head).dtype is torch.bfloat16
