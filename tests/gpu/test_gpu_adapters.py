"""Low-rank adapters on a GPU: blocks are found as on a CPU, and losses agree with PEFT in plain BF16."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from narrowgauge import Engine
from narrowgauge.nn.blocks.find import find_blocks
from narrowgauge.nn.fused.verify import find_difference

sys.path.append(str(Path(__file__).parents[1] / "nn"))
from model_families import BLOCKS, LANGUAGE, VOCAB, without_dropout

peft = pytest.importorskip("peft")
DEVICE = torch.device("cuda")
FAMILIES = ("llama", "qwen3", "gpt2", "bert", "gpt-neox", "bart")
pytestmark = pytest.mark.filterwarnings("ignore:.*defaults to a non-deterministic algorithm")


def adapt(family: str, dropout: float = 0.0) -> Any:
    """Return a model with adapters that add something: PEFT's own start at zero."""
    config = peft.LoraConfig(
        r=16, target_modules="all-linear", lora_dropout=dropout, fan_in_fan_out=family == "gpt2",
        init_lora_weights=False,
    )  # fmt: skip
    torch.manual_seed(0)
    return peft.get_peft_model(without_dropout(LANGUAGE[family]()), config).to(DEVICE).train()


def tokens(seed: int) -> Tensor:
    return torch.randint(3, VOCAB, (4, 128), generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def train(model: Any, recipe: str, fused: bool, count: int = 2, **options: Any) -> list[float]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine = Engine(model, torch.optim.AdamW(trained, lr=1e-3, fused=True), recipe, fused=fused, **options)
    assert len(engine.conversion.blocks) == (count if fused else 0), engine.conversion.unfused
    losses = []
    for step in range(12):
        torch.manual_seed(step)
        batch = tokens(step % 3)
        with engine.forward():
            loss = model(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        assert engine.step().applied
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_blocks_are_found_on_a_gpu_as_on_a_cpu(family: str, dropout: float) -> None:
    model = adapt(family, dropout)
    on_gpu = find_blocks(model, DEVICE, find_difference)
    on_cpu = find_blocks(model.cpu(), torch.device("cpu"), find_difference)
    assert on_cpu.specs and on_cpu.specs == on_gpu.specs and on_cpu.reasons == on_gpu.reasons


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("recipe", ["bf16", "fp8[products=all]", "bf16-lean", "fp8-lean"])
def test_losses_agree_with_plain_bf16(family: str, recipe: str) -> None:
    model = adapt(family)
    expected = train(copy.deepcopy(model), "bf16", False)
    found = train(model, recipe, True, BLOCKS.get(family, 2))
    assert found == pytest.approx(expected, rel=0.01 if recipe == "bf16" else 0.03)


@pytest.mark.parametrize("checkpoint", ["selective", "full"])
def test_recomputation_changes_nothing(checkpoint: str) -> None:
    model = adapt("llama", 0.1)
    expected = train(copy.deepcopy(model), "fp8[products=all]", True)
    found = train(model, f"fp8[products=all,checkpoint={checkpoint}]", True)
    assert found == pytest.approx(expected, rel=1e-3)


def test_blocks_with_adapters_are_not_recorded() -> None:
    model = adapt("llama")
    expected = train(copy.deepcopy(model), "fp8[products=all]", True, cuda_graphs=False)
    assert train(model, "fp8[products=all]", True, cuda_graphs=True) == pytest.approx(expected, rel=1e-3)
