"""Packed documents on a GPU: FlashAttention of each against a mask, packed losses against unpacked, CUDA graphs."""

from __future__ import annotations

import copy
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrowgauge import Engine
from narrowgauge.kernels.document_attention import attend_documents, attend_documents_reference, can_attend
from narrowgauge.nn.fused import attention
from narrowgauge.nn.fused.documents import find_documents
from narrowgauge.nn.fused.graphs import BlockGraphs
from narrowgauge.nn.fused.modules import FusedBlock
from narrowgauge.nn.module_changes import find_change

sys.path.append(str(Path(__file__).parents[1] / "nn"))
from model_families import LANGUAGE, VOCAB, without_dropout

DEVICE = torch.device("cuda")
pytestmark = pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")  # first in backward's thread
ROWS, LENGTH = 2, 128
PACKED = [[[40, 88], [128]], [[17, 60, 51], [1, 127]], [[64, 64], [100, 27, 1]], [[9, 119], [30, 30, 68]]]
"""Lengths of documents by batch and row."""


def make_mask(rows: list[list[int]]) -> Tensor:
    numbers = torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in rows]).to(DEVICE)
    length = numbers.shape[1]
    same: Tensor = numbers[:, None, :, None] == numbers[:, None, None]
    return same & torch.ones(length, length, dtype=torch.bool, device=DEVICE).tril()


def make_parts(rows: int, length: int, heads: int, keys: int, size: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(0)
    qkv = torch.randn(rows, length, (heads + 2 * keys) * size, device=DEVICE, generator=generator).to(dtype)
    parts = qkv.split([heads * size, keys * size, keys * size], -1)
    return [part.view(rows, length, -1, size).transpose(1, 2).detach().requires_grad_() for part in parts]


def find_error(found: Tensor, expected: Tensor) -> float:
    found, expected = found.detach().float(), expected.detach().float()
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize(("heads", "keys", "size"), [(4, 4, 16), (4, 2, 64), (8, 1, 128), (6, 3, 72), (4, 2, 192)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lengths", [[[300, 1, 211], [512]], [[37] * 13 + [31], [5, 500, 7]]])
def test_flash_attention_computes_what_a_mask_says(
    heads: int, keys: int, size: int, dtype: torch.dtype, lengths: list[list[int]]
) -> None:
    """Output and gradients, with empty documents at the end; errors are measured from FP32 with the mask."""
    parts, mask = make_parts(2, 512, heads, keys, size, dtype), make_mask(lengths)
    exact = [part.detach().float().requires_grad_() for part in parts]
    found = find_documents(mask, 2)
    assert found is not None and found.bounds is not None and can_attend(DEVICE, dtype, size)
    assert found.bounds[-2] == found.bounds[-1] == 1024
    results = []
    grad = torch.randn(2, heads, 512, size, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(1)).to(dtype)
    for inputs, run in (
        (exact, lambda *qkv: F.scaled_dot_product_attention(*qkv, mask, scale=0.2, enable_gqa=True)),
        (parts, lambda *qkv: attend_documents(*qkv, found.bounds, found.longest, scale=0.2)),
        (parts, lambda *qkv: attend_documents_reference(*qkv, found.bounds, found.longest, scale=0.2)),
    ):
        output = run(*inputs)
        results.append([output, *torch.autograd.grad(output, inputs, grad.to(output.dtype))])
    assert results[1][0].transpose(1, 2).is_contiguous()
    for expected, flash, reference in zip(*results, strict=True):
        assert find_error(flash, expected) <= max(1.5 * find_error(reference, expected), 0.005)


def test_dropout_drops_weights() -> None:
    q, k, v = make_parts(2, 512, 4, 2, 64, torch.bfloat16)
    found = find_documents(make_mask([[256, 256], [100, 412]]), 2)
    assert found is not None and found.bounds is not None
    ones = torch.ones_like(v)
    torch.manual_seed(0)
    mixed = attend_documents(q, k, ones, found.bounds, found.longest, dropout=0.25).detach()
    assert mixed.float().mean().item() == pytest.approx(1.0, abs=0.02) and mixed.float().std() > 0.01


def test_a_mask_is_read_with_one_synchronization() -> None:
    mask = make_mask([[256, 256], [100, 412]])
    parts = make_parts(2, 512, 4, 2, 64, torch.bfloat16)
    find_documents(mask.clone(), 2)
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            found = find_documents(mask, 2)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert sum("called a synchronizing" in str(one.message) for one in seen) == 1
    assert found is not None and found.bounds is not None
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert find_documents(mask, 2) is found
        output = attend_documents(*parts, found.bounds, found.longest)
        torch.autograd.grad(output, parts, output.detach())
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_mask_is_not_read_while_a_graph_is_captured() -> None:
    """The graph will run again with other values in the same mask."""
    mask = make_mask([[256, 256], [100, 412]])
    assert find_documents(mask, 2) is not None
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        assert find_documents(mask, 2) is None
        mask.logical_not()  # an empty graph would be a warning


def make_model(family: str) -> nn.Module:
    """Return a model with weights so large that it matters what a token sees."""
    return without_dropout(LANGUAGE[family](initializer_range=0.2)).to(DEVICE).train()


def make_batch(number: int) -> dict[str, Any]:
    lengths = PACKED[number % len(PACKED)]
    tokens = torch.randint(3, VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(number)).to(DEVICE)
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in lengths]).to(DEVICE)
    labels = tokens.masked_fill(positions == 0, -100)
    return {"input_ids": tokens, "labels": labels, "position_ids": positions, "use_cache": False}


def compute_unpacked(model: nn.Module, number: int) -> Tensor:
    total, count = torch.zeros((), device=DEVICE), 0
    for row, lengths in zip(make_batch(number)["input_ids"], PACKED[number % len(PACKED)], strict=True):
        for part in row.split(lengths):
            if len(part) > 1:
                total = total + model(input_ids=part[None], labels=part[None]).loss.float() * (len(part) - 1)
                count += len(part) - 1
    return total / count


def count_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls, attend = [], attention.attend_documents

    def counted(*args: Any) -> Tensor:
        calls.append(1)
        return attend(*args)

    monkeypatch.setattr(attention, "attend_documents", counted)
    return calls


def make_engine(model: nn.Module, recipe: str, graphs: bool = False, lr: float = 1e-3, **options: Any) -> Engine:
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0, fused=True)
    return Engine(model, optimizer, recipe, cuda_graphs=graphs, **options)


def get_graphs(engine: Engine) -> BlockGraphs:
    change = find_change(engine.inner.get_submodule(engine.conversion.blocks[0]), FusedBlock)
    assert change is not None
    return change.graphs


def run_apart(model: nn.Module, number: int) -> Tensor:
    """Return the logits of a batch's documents, each run by itself."""
    found = []
    for row, lengths in zip(make_batch(number)["input_ids"], PACKED[number % len(PACKED)], strict=True):
        found.append(torch.cat([model(input_ids=part[None]).logits[0] for part in row.split(lengths)]))
    return torch.stack(found)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize(
    ("recipe", "noise", "uses"),
    [
        ("bf16", 0.05, True), ("fp8[products=all]", 0.3, True), ("bf16[checkpoint=full]", 0.05, True),
        ("bf16[attention=math]", 0.05, False),
    ],
)  # fmt: skip
def test_packed_losses_are_those_of_the_documents_alone(
    family: str, recipe: str, noise: float, uses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(family)
    plain, calls = make_engine(copy.deepcopy(model), "bf16", fused=False), count_calls(monkeypatch)
    engine = make_engine(model, recipe, fused=True)
    for number in range(4):
        batch = make_batch(number)
        with plain.forward(), engine.forward(), torch.no_grad():
            logits = run_apart(plain.model, number)
            assert find_error(engine.model(**batch).logits, logits) < noise
            assert find_error(engine.model(**{**batch, "position_ids": None}).logits, logits) > 1.5 * noise
        with plain.forward():
            expected = compute_unpacked(plain.model, number)
        with engine.forward():
            found = engine.model(**batch).loss
        assert found.item() == pytest.approx(expected.item(), rel=noise / 10)
        plain.backward(expected)
        engine.backward(found)
        for (name, one), two in zip(model.named_parameters(), plain.model.parameters(), strict=True):
            assert one.grad is not None and two.grad is not None
            assert recipe.startswith("fp8") or find_error(one.grad, two.grad) < 2 * noise, name
        for one in (plain, engine):
            one.optimizers[0].zero_grad()
    assert bool(calls) == uses


@pytest.mark.parametrize("recipe", ["bf16", "fp8[products=all]", "bf16[checkpoint=full]"])
def test_graphs_see_the_documents_of_each_batch(recipe: str) -> None:
    """Batches of documents, without and with padding alternate. Weights stay, so that only the batch makes a loss."""
    model = make_model("llama")
    engines = [make_engine(copy.deepcopy(model), recipe, graphs, lr=0.0) for graphs in (True, False)]
    padding = torch.ones(ROWS, LENGTH, dtype=torch.long, device=DEVICE)
    padding[1, 100:] = 0
    for number in range(48):
        batch = make_batch(number // 3)
        if number % 3:
            batch |= {"position_ids": None, "attention_mask": padding if number % 3 == 2 else None}
        losses, grads = [], []
        for engine in engines:
            with engine.forward():
                loss = engine.model(**batch).loss
            engine.backward(loss)
            grads.append([p.grad.clone() for p in engine.model.parameters() if p.grad is not None])
            engine.step()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], rel=2e-3), f"step {number}"
        for one, two in zip(*grads, strict=True):
            assert find_error(one, two) < 0.2  # with the documents of another batch, 0.25 to 1.4
    assert get_graphs(engines[0]).recorded >= 6 and not get_graphs(engines[1]).recorded  # 2 layers, 3 kinds of calls
