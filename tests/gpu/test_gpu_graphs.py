"""CUDA graphs of fused blocks: bit for bit what the blocks compute without, in every recipe and every kind of loop."""

from __future__ import annotations

import copy
import gc
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from narrowgauge import Engine, watch
from narrowgauge.models.gpt import GPT, GPTConfig
from narrowgauge.nn.fused.graphs import BlockGraphs
from narrowgauge.nn.fused.modules import FusedBlock
from narrowgauge.nn.module_changes import find_change

sys.path.append(str(Path(__file__).parents[1] / "nn"))
from model_families import LANGUAGE, OTHERS, VOCAB, without_dropout

DEVICE = torch.device("cuda")
pytestmark = pytest.mark.filterwarnings("ignore:.*defaults to a non-deterministic algorithm")
RECIPES = ["bf16", "fp8[products=all]", "fp8[products=all,scaling=current]", "bf16-lean", "fp8-lean"]
RECIPES += ["fp8[products=all,activations=8bit]", "bf16[activations=recompute]"]
RECIPES += ["fp8[products=all,activations=recompute]"]


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def tokens(seed: int, rows: int = 4, length: int = 128) -> Tensor:
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def get_graphs(engine: Engine) -> BlockGraphs:
    path = engine.conversion.blocks[0]
    change = find_change(engine.inner.get_submodule(path), FusedBlock)
    assert change is not None
    return change.graphs


def make_engine(model: nn.Module, recipe: str, graphs: bool, **options: Any) -> Engine:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    return Engine(model, optimizer, recipe, cuda_graphs=graphs, **options)


def compare(model: nn.Module, recipe: str, step: Any, steps: int = 9, **options: Any) -> int:
    """Train two copies, one with graphs and one without; every loss and weight must be equal. Return the graphs."""
    models = [copy.deepcopy(model), model]
    engines = [make_engine(one, recipe, graphs, **options) for one, graphs in zip(models, (True, False), strict=True)]
    for number in range(steps):
        losses = []
        for engine in engines:
            torch.manual_seed(number)
            losses.append(step(engine, number))
        assert losses[0] == losses[1], f"step {number}"
    for (name, one), other in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other), name
    assert not get_graphs(engines[1]).recorded
    return get_graphs(engines[0]).recorded


def train_step(engine: Engine, number: int, **inputs: Any) -> float:
    """Lean recipes run a block's forward again in backward; with a cache of keys and values that is not recorded."""
    batch = tokens(number % 3)
    if engine.recipe.checkpoint == "full" and hasattr(engine.inner.config, "use_cache"):
        inputs["use_cache"] = False
    with engine.forward():
        loss = engine.model(input_ids=batch, labels=batch, **inputs).loss
    engine.backward(loss)
    engine.step()
    return float(loss.item())


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "bert", "phi"])
def test_graphs_change_no_bit(family: str, recipe: str) -> None:
    model = without_dropout(LANGUAGE[family]()).to(DEVICE).train()
    assert compare(model, recipe, train_step) == 2


@pytest.mark.parametrize("family", ["gpt2", "bert"])
@pytest.mark.parametrize("recipe", ["bf16", "fp8[products=all]"])
def test_dropout_draws_the_same_numbers(family: str, recipe: str) -> None:
    model = LANGUAGE[family]().to(DEVICE).train()
    assert compare(model, recipe, train_step) == 2


@pytest.mark.parametrize("recipe", ["bf16", "fp8[products=all]"])
@pytest.mark.parametrize(("name", "value"), [("variance_epsilon", 0.3), ("skipped", True)])
def test_settings_that_change_have_their_effect(name: str, value: Any, recipe: str) -> None:
    """A new epsilon is another recording, an attribute that nothing reads is none."""
    model = without_dropout(LANGUAGE["llama"]()).to(DEVICE).train()

    def step(engine: Engine, number: int) -> float:
        if number == 7:
            for layer in engine.inner.model.layers:
                setattr(layer.input_layernorm, name, value)
        return train_step(engine, number)

    assert compare(model, recipe, step, 16) == (4 if name == "variance_epsilon" else 2)


@pytest.mark.parametrize("checkpoint", ["selective", "full"])
def test_recomputation_is_recorded_too(checkpoint: str) -> None:
    model = without_dropout(LANGUAGE["llama"]()).to(DEVICE).train()
    assert compare(model, f"fp8[products=all,checkpoint={checkpoint}]", train_step) == 2


@pytest.mark.parametrize("recipe", ["bf16", "fp8[products=all]"])
def test_a_chain_of_built_in_blocks(recipe: str) -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab=VOCAB, layers=3, heads=4, width=128, context=128)).to(DEVICE)

    def step(engine: Engine, number: int) -> float:
        batch = tokens(number % 3)
        with engine.forward():
            loss = engine.model(batch, batch)
        engine.backward(loss)
        engine.step()
        return float(loss.item())

    assert compare(model, recipe, step) == 3


def test_gradients_accumulate_over_microbatches() -> None:
    def step(engine: Engine, number: int) -> float:
        total = 0.0
        for part in range(3):
            batch = tokens(3 * number + part)
            with engine.forward():
                loss = engine.model(input_ids=batch, labels=batch).loss
            engine.backward(loss)
            total += loss.item()
        engine.step()
        return total

    assert compare(without_dropout(LANGUAGE["llama"]()).to(DEVICE).train(), "fp8", step, 5, accumulate=3) >= 2


def test_two_forwards_before_one_backward() -> None:
    """The second forward finds the first one's tensors still in use, and runs without graphs."""

    def step(engine: Engine, number: int) -> float:
        first, second = tokens(number), tokens(number + 1)
        with engine.forward():
            loss = engine.model(input_ids=first, labels=first).loss
            loss = loss + engine.model(input_ids=second, labels=second).loss
        engine.backward(loss)
        engine.step()
        return float(loss.item())

    assert compare(without_dropout(LANGUAGE["llama"]()).to(DEVICE).train(), "fp8", step) >= 2


def test_backward_twice_through_one_graph() -> None:
    def step(engine: Engine, number: int) -> float:
        batch = tokens(number)
        with engine.forward():
            loss = engine.model(input_ids=batch, labels=batch).loss
        engine.backward(loss, retain_graph=True)
        engine.backward(loss)
        engine.step()
        return float(loss.item())

    assert compare(without_dropout(LANGUAGE["llama"]()).to(DEVICE).train(), "bf16", step, accumulate=2) == 2


def test_what_a_user_keeps_is_not_overwritten() -> None:
    """Outputs of blocks, their gradients, and gradients of parameters keep their values over the next steps."""
    model = without_dropout(LANGUAGE["llama"]()).to(DEVICE).train()
    engine = make_engine(model, "fp8", True)
    kept: list[tuple[Tensor, Tensor]] = []

    def keep(tensor: Tensor) -> None:
        kept.append((tensor, tensor.clone()))

    def keep_output(module: nn.Module, args: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        keep(hidden.detach())
        hidden.register_hook(keep)

    for path in engine.conversion.blocks:
        model.get_submodule(path).register_forward_hook(keep_output)
    for number in range(14):
        batch = tokens(number)
        with engine.forward():
            loss = model(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        for parameter in model.parameters():
            if parameter.grad is not None:
                keep(parameter.grad)
        engine.step()
        assert len(kept) >= 4
        for now, before in kept:
            assert torch.equal(now, before)
        if number % 3 == 2:
            kept.clear()
    assert get_graphs(engine).recorded >= 2


def test_replaced_weights_and_other_shapes_are_seen() -> None:
    def step(engine: Engine, number: int) -> float:
        if number == 7:
            for parameter in engine.model.parameters():
                parameter.data = parameter.data.clone()
        batch = tokens(number, 2 + number % 2, 64 + 64 * (number % 2))
        with engine.forward():
            loss = engine.model(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        engine.step()
        return float(loss.item())

    assert compare(without_dropout(LANGUAGE["qwen3"]()).to(DEVICE).train(), "fp8", step, 26) >= 4


@pytest.mark.parametrize("recipe", ["bf16", "fp8[products=all]", "fp8-lean[products=all]"])
def test_weights_written_in_place_are_read_by_a_replay(recipe: str) -> None:
    """A graph contains the casts of its weights, so a write through ``.data`` needs no new recording."""

    def step(engine: Engine, number: int) -> float:
        if number > 5:
            for parameter in engine.model.parameters():
                parameter.data.mul_(0.9 if number % 2 else 1.1)
        return train_step(engine, number)

    assert compare(without_dropout(LANGUAGE["qwen3"]()).to(DEVICE).train(), recipe, step, 12) >= 2


def test_masks_evaluation_and_frozen_layers_between() -> None:
    def step(engine: Engine, number: int) -> float:
        model, batch = engine.model, tokens(number)
        if number % 4 == 3:
            model.eval()
            with torch.no_grad(), engine.forward():
                model(input_ids=batch)
            model.train()
            mask = torch.ones_like(batch)
            mask[:, 100:] = 0
            return train_step(engine, number, attention_mask=mask)
        if number == 10:
            next(model.parameters()).requires_grad_(False)
        return train_step(engine, number)

    assert compare(without_dropout(LANGUAGE["llama"]()).to(DEVICE).train(), "fp8", step, 16) >= 2


@pytest.mark.parametrize("recipe", ["bf16", "fp8[products=all]", "fp8-lean"])
@pytest.mark.parametrize("family", ["llama", "bert"])
def test_padding_masks_are_inputs_of_a_graph(family: str, recipe: str) -> None:
    def step(engine: Engine, number: int) -> float:
        mask = torch.ones(4, 128, dtype=torch.long, device=DEVICE)
        mask[1, 128 - 7 * (number % 4 + 1) :] = 0
        return train_step(engine, number, attention_mask=mask)

    model = without_dropout(LANGUAGE[family]()).to(DEVICE).train()
    assert compare(model, recipe, step) == 2


def test_gauges_see_every_block() -> None:
    model = without_dropout(LANGUAGE["llama"]()).to(DEVICE).train()
    engine = make_engine(model, "fp8", True)
    watched = watch(engine)
    for number in range(9):
        train_step(engine, number)
    assert watched is not None


def test_copies_of_a_model_have_their_own_graphs() -> None:
    model = without_dropout(LANGUAGE["llama"]()).to(DEVICE).train()
    engine = make_engine(model, "bf16", True)
    for number in range(7):
        train_step(engine, number)
    twin = copy.deepcopy(model)
    batch = tokens(1)
    for one in (model, twin):
        one.zero_grad()
        with engine.forward():
            one(input_ids=batch, labels=batch).loss.backward()
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert mine.grad is not None and other.grad is not None
        assert torch.equal(mine.grad, other.grad)


def test_memory_is_returned_with_the_model() -> None:
    def train() -> None:
        model = without_dropout(LANGUAGE["llama"]()).to(DEVICE).train()
        engine = make_engine(model, "fp8", True)
        for number in range(7):
            train_step(engine, number)
        assert get_graphs(engine).recorded == 2

    train()
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    for _ in range(3):
        train()
        gc.collect()
        torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before + 2**22


def test_a_failed_recording_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = without_dropout(LANGUAGE["llama"]()).to(DEVICE).train()
    engine = make_engine(copy.deepcopy(model), "fp8", True)

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no room")

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", fail)
        losses = [train_step(engine, number) for number in range(8)]
    assert [str(one.message) for one in seen if "CUDA graphs" in str(one.message)] == [
        "blocks run without CUDA graphs: recording one failed (no room)"
    ]
    other = make_engine(model, "fp8", False)
    assert losses == [train_step(other, number) for number in range(8)]


def test_a_small_model_is_found_to_be_bound_by_the_host() -> None:
    model = without_dropout(LANGUAGE["llama"]()).to(DEVICE).train()
    engine = Engine(model, torch.optim.AdamW(model.parameters(), fused=True), "fp8")
    for number in range(9):
        train_step(engine, number)
    assert get_graphs(engine).recorded == 2


def test_images() -> None:
    model = without_dropout(OTHERS["vit"]()).to(DEVICE).train()

    def step(engine: Engine, number: int) -> float:
        size = model.config.image_size
        pixels = torch.randn(4, 3, size, size, generator=torch.Generator().manual_seed(number)).to(DEVICE)
        with engine.forward():
            loss = engine.model(pixel_values=pixels).last_hidden_state.float().square().mean()
        engine.backward(loss)
        engine.step()
        return float(loss.item())

    assert compare(model, "fp8[products=all]", step) == 2
