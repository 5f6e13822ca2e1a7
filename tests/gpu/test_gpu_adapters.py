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
from narrowgauge.nn.fused.modules import FusedBlock
from narrowgauge.nn.fused.verify import find_difference
from narrowgauge.nn.module_changes import find_change
from narrowgauge.nn.products.stored_fp8 import is_stored

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
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
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


def count_recorded(model: Any) -> int:
    changes = (find_change(module, FusedBlock) for module in model.modules())
    return max(change.graphs.recorded for change in changes if change is not None)


@pytest.mark.parametrize(
    ("recipe", "dropout"),
    [("bf16", 0.0), ("fp8[products=all]", 0.0), ("fp8[products=all]", 0.1), ("fp8-lean[products=all]", 0.0)],
)
def test_blocks_with_adapters_are_recorded(recipe: str, dropout: float) -> None:
    model = adapt("llama", dropout)
    expected = train(copy.deepcopy(model), recipe, True, cuda_graphs=False)
    found = train(model, recipe, True, cuda_graphs=True)
    assert count_recorded(model) >= 2
    assert found == pytest.approx(expected, rel=0.02 if dropout else 1e-3)  # graphs draw other random numbers


@pytest.mark.parametrize("name", ["fp8", "fp8-lean"])
@pytest.mark.parametrize("graphs", [False, True])
def test_frozen_weights_that_are_stored_in_fp8_change_nothing(name: str, graphs: bool) -> None:
    model = adapt("llama")
    expected = train(copy.deepcopy(model), f"{name}[products=all,frozen=bf16]", True, cuda_graphs=False)
    found = train(model, f"{name}[products=all,frozen=fp8]", True, cuda_graphs=graphs)
    stored = [module for module in model.modules() if is_stored(module)]
    assert len(stored) == 15 and bool(count_recorded(model)) == graphs
    assert found == pytest.approx(expected, rel=1e-3)


def test_stored_weights_take_one_byte_on_a_gpu_as_well() -> None:
    """Layers that are no block, compiled as one graph."""
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(4))).to(DEVICE)
    model[:3].requires_grad_(False)
    losses = []
    for frozen, compile in (("bf16", False), ("fp8", False), ("fp8", True)):
        own = copy.deepcopy(model)
        recipe = f"fp8[products=all,frozen={frozen}]"
        engine = Engine(own, torch.optim.AdamW(own[3].parameters(), 1e-3), recipe, compile=compile)
        torch.manual_seed(1)
        losses.append([])
        for _ in range(6):
            with engine.forward():
                loss = own(torch.randn(256, 1024, device=DEVICE)).float().square().mean()
            engine.backward(loss)
            engine.step()
            losses[-1].append(loss.item())
        sizes = {own[number].weight.element_size() for number in range(3)}
        assert sizes == {1 if frozen == "fp8" else 2}
    assert losses[0] == losses[1]
    assert losses[2] == pytest.approx(losses[1], rel=1e-2)


def test_an_adapter_that_is_switched_off_is_seen_by_recorded_blocks() -> None:
    model = adapt("llama")
    train(model, "fp8[products=all,frozen=fp8]", True, cuda_graphs=True)
    batch = tokens(0)
    model.eval()
    with torch.no_grad():
        on = model(input_ids=batch).logits.float()
        with model.disable_adapter():
            off = model(input_ids=batch).logits.float()
    assert (on - off).abs().max() > 0.01
