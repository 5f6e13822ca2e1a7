"""Inputs of recomputed blocks wait for backward in host memory: the same gradients, and pages that are used again."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from model_families import LANGUAGE, make_batch, without_dropout
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge import UsageError
from narrowgauge.nn.fused import blocks, offload
from narrowgauge.nn.memory_plan import MemoryPlan

RECIPES = ["fp8-lean[products=all]", "fp8[products=all,checkpoint=full]"]


def add_offload(recipe: str) -> str:
    return f"{recipe[:-1]},offload=activations]"


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return offloaders of their own, with small pages."""
    monkeypatch.setattr(offload, "PAGE_BYTES", 1000)
    monkeypatch.setattr(offload, "_OFFLOADERS", {})
    return lambda: offload._get_offloader(torch.device("cpu"), False)


def train(recipe: str, family: str = "llama", steps: int = 3, **options: Any) -> tuple[list[float], dict[str, Tensor]]:
    model = without_dropout(LANGUAGE[family]())
    engine = ng.Engine(model, torch.optim.AdamW(model.parameters(), 1e-3), recipe, **options)
    assert len(engine.conversion.blocks) > 1
    losses = []
    for step in range(steps * engine.accumulate):
        ids = make_batch(step, rows=2, length=24 + 8 * (step % 2))  # of two lengths
        with engine.forward():
            loss = engine.model(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        losses.append(loss.item())
        if (step + 1) % engine.accumulate == 0:
            engine.step()
    return losses, {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("family", ["llama", "bert", "gpt-neox", "t5"])
def test_training_is_the_same_to_the_bit(recipe, family, pages):
    plain, wanted = train(recipe, family)
    assert pages().pool.allocated_bytes == 0
    moved, got = train(add_offload(recipe), family)
    assert moved == plain and all(torch.equal(wanted[name], got[name]) for name in wanted)
    assert pages().pool.allocated_bytes > 0


class Transposed(nn.Module):
    """A model whose first block is given a stream that is transposed in memory, as Whisper's encoder does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide = nn.Conv1d(8, 64, 3, padding=1)
        layer = nn.TransformerEncoderLayer(64, 4, 96, batch_first=True, norm_first=True, dropout=0.0)
        self.layers = nn.ModuleList([layer, nn.TransformerEncoderLayer(64, 4, 96, 0.0, batch_first=True)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.wide(x).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def test_a_transposed_input_comes_back_with_its_strides(pages):
    """Sums over rows that are not contiguous round differently."""
    found = []
    for offloaded in ("none", "activations"):
        model = Transposed()
        recipe = f"bf16[checkpoint=full,offload={offloaded}]"
        engine = ng.Engine(model, torch.optim.AdamW(model.parameters(), 1e-3), recipe, fused=True)
        assert engine.conversion.blocks
        for step in range(3):
            x = torch.randn(1, 8, 40, generator=torch.Generator().manual_seed(step))
            with engine.forward():
                loss = model(x)
            engine.backward(loss)
            engine.step()
        found.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    x = torch.randn(3, 5, 7).permute(2, 0, 1)
    for one in (x, x[:, :1], x[::2], x[:1].expand(4, 3, 5)):
        moved = pages().put(one)
        moved.drop_original()
        back = moved.take()
        assert torch.equal(back, one)
    assert offload._is_dense(x) and not offload._is_dense(x[::2]) and not offload._is_dense(x[:1].expand(4, 3, 5))


def test_the_chain_of_blocks_of_a_built_in_model(pages):
    from narrowgauge.models.llama import Llama, LlamaConfig

    found = []
    for recipe in ("fp8-lean[products=all]", "fp8-lean[products=all,offload=activations]"):
        torch.manual_seed(0)
        model = Llama(LlamaConfig(layers=4, width=64, heads=4, kv_heads=2, hidden=96, vocab=128, context=32))
        engine = ng.Engine(model, torch.optim.AdamW(model.parameters(), 1e-3), recipe)
        tokens = torch.randint(0, 128, (2, 33), generator=torch.Generator().manual_seed(1))
        for _ in range(3):
            with engine.forward():
                loss = engine.model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
            engine.backward(loss)
            engine.step()
        found.append([loss.item(), *(p.detach().clone() for p in model.parameters())])
    assert found[0][0] == found[1][0]
    assert all(torch.equal(one, other) for one, other in zip(found[0][1:], found[1][1:], strict=True))
    assert pages().pool.allocated_bytes > 0


def test_microbatches(pages):
    plain, wanted = train(RECIPES[0], accumulate=2)
    moved, got = train(add_offload(RECIPES[0]), accumulate=2)
    assert moved == plain and all(torch.equal(wanted[name], got[name]) for name in wanted)


def test_later_steps_allocate_nothing(pages):
    train(add_offload(RECIPES[0]), steps=2)
    before = pages().pool.allocated_bytes
    train(add_offload(RECIPES[0]), steps=4)
    pool = pages().pool
    assert pool.allocated_bytes == before
    assert sum(len(page) for page in pool._free) == before  # all are free again


def test_a_forward_without_backward_gives_its_pages_back(pages):
    model = without_dropout(LANGUAGE["llama"]())
    engine = ng.Engine(model, torch.optim.AdamW(model.parameters(), 1e-3), add_offload(RECIPES[0]))
    ids = make_batch(0, rows=2, length=32)
    for _ in range(3):
        with engine.forward():
            loss = engine.model(input_ids=ids, labels=ids).loss
        del loss
        gc.collect()
    pool = pages().pool
    assert sum(len(page) for page in pool._free) == pool.allocated_bytes > 0


def test_a_retained_graph_runs_again(pages):
    model = without_dropout(LANGUAGE["llama"]())
    engine = ng.Engine(model, torch.optim.AdamW(model.parameters(), 1e-3), add_offload(RECIPES[1]))
    ids = make_batch(0, rows=2, length=32)
    with engine.forward():
        loss = engine.model(input_ids=ids, labels=ids).loss
    found = []
    for retain in (True, False):
        model.zero_grad()
        loss.backward(retain_graph=retain)
        found.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_evaluation_moves_nothing(pages):
    model = without_dropout(LANGUAGE["llama"]())
    engine = ng.Engine(model, torch.optim.AdamW(model.parameters(), 1e-3), add_offload(RECIPES[0]))
    with torch.no_grad(), engine.forward():
        engine.model(input_ids=make_batch(0, rows=2, length=32))
    assert pages().pool.allocated_bytes == 0


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what happens to offloaded tensors, which are numbered as they come."""
    log: list[str] = []
    names: dict[int, int] = {}
    for name in ("drop_original", "fetch", "take"):
        original = getattr(offload.Offloaded, name)

        def run(self: Any, *args: Any, original: Any = original, name: str = name) -> Any:
            number = names.setdefault(id(self), len(names))
            had = self._fetched is None
            result = original(self, *args)
            if result is True or name == "take" or (name == "fetch" and had and self._fetched is not None):
                log.append(f"{name} {number}")
            return result

        monkeypatch.setattr(offload.Offloaded, name, run)
    return log


def test_the_input_is_freed_while_the_next_block_runs(pages, log):
    """Only the newest input stays on the device, and backward fetches one block ahead."""
    model = without_dropout(LANGUAGE["llama"](num_hidden_layers=4))
    engine = ng.Engine(model, torch.optim.AdamW(model.parameters(), 1e-3), add_offload(RECIPES[0]))
    ids = make_batch(0, rows=2, length=32)
    with engine.forward():
        loss = engine.model(input_ids=ids, labels=ids).loss
    assert log == ["drop_original 0", "drop_original 1", "drop_original 2"]
    log.clear()
    engine.backward(loss)
    wanted = ["fetch 2", "take 3", "fetch 1", "take 2", "fetch 0", "take 1", "take 0"]
    assert log == wanted


def test_a_block_that_keeps_everything_fetches_the_input_before_it(pages, log):
    """In a mix, an input leaves the device as the next block begins, and comes back during its backward."""
    model = without_dropout(LANGUAGE["llama"](num_hidden_layers=4))
    paths = [f"model.layers.{number}" for number in range(4)]
    plan = MemoryPlan(budget=1, blocks=dict(zip(paths, ("offload", "full", "offload", "none"), strict=True)))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    engine = ng.Engine(model, optimizer, RECIPES[0], fused=True, memory_budget=plan)
    ids = make_batch(0, rows=2, length=32)
    for _ in range(2):  # all blocks of the first step are recomputed
        log.clear()
        with engine.forward():
            loss = engine.model(input_ids=ids, labels=ids).loss
        forward = list(log)
        log.clear()
        engine.backward(loss)
        engine.step()
    assert forward == ["drop_original 0", "drop_original 1"]
    assert log == ["fetch 1", "fetch 0", "take 1", "take 0"]


def test_a_plan_leaves_room_on_the_host(monkeypatch):
    monkeypatch.setattr(offload.os, "sysconf", lambda name: {"SC_PHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}[name])
    assert 0 < offload.get_host_room() <= 0.5 * 1000 * 4096


def test_a_tensor_that_was_changed_comes_from_the_host(pages):
    x = torch.arange(600.0)
    moved = offload.offload(x)
    x.zero_()
    assert torch.equal(moved.take(), torch.arange(600.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_of_any_size(dtype, pages):
    values = [
        torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype) for size in (1, 249, 250, 1777)
    ]
    moved = [offload.offload(value.clone()) for value in values]
    for value, one in reversed(list(zip(values, moved, strict=True))):
        assert torch.equal(one.take(), value)


def test_blocks_that_are_not_recomputed_keep_their_input(pages, monkeypatch):
    """As a plan of blocks may be mixed."""
    moved: list[Tensor] = []
    monkeypatch.setattr(blocks, "offload", lambda x: moved.append(x) or offload.offload(x))
    from dataclasses import replace

    from narrowgauge.nn.fused.modules import FusedBlock
    from narrowgauge.nn.module_changes import find_change

    model = without_dropout(LANGUAGE["llama"]())
    engine = ng.Engine(model, torch.optim.AdamW(model.parameters(), 1e-3), add_offload(RECIPES[1]))
    change = find_change(model.model.layers[0], FusedBlock)
    assert change is not None and change.plan.offload
    change.plan = replace(change.plan, checkpoint="none")
    ids = make_batch(0, rows=2, length=32)
    with engine.forward():
        loss = engine.model(input_ids=ids, labels=ids).loss
    engine.backward(loss)
    assert len(moved) == 1


def test_a_model_without_fused_blocks_warns():
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    with pytest.warns(UserWarning, match="offload=activations has no effect: no block runs fused"):
        ng.Engine(model, torch.optim.AdamW(model.parameters(), 1e-3), "bf16-lean[offload=activations]")


def test_too_little_host_memory_is_one_line(pages, monkeypatch):
    def fail(*args: Any, **options: Any) -> Tensor:
        raise RuntimeError("CUDA error: out of memory")

    pool = offload.PagePool(False)
    monkeypatch.setattr(torch, "empty", fail)
    with pytest.raises(UsageError, match=r"the host has no .* use offload=none") as caught:
        pool.take(10)
    assert "\n" not in str(caught.value)
