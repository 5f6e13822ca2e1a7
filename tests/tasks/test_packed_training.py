"""Documents that are packed into rows train as if each had a row of its own: the same loss and gradients in FP32."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from narrowgauge import Engine
from narrowgauge.nn.blocks.find import find_blocks
from narrowgauge.nn.fused.modules import FusedBlock, mark_parts
from narrowgauge.nn.fused.verify import find_difference, make_fp32_plan
from narrowgauge.nn.module_changes import apply_change
from narrowgauge.runs.rank_batches import slice_rows
from narrowgauge.tasks.finetune import IGNORED, compute_loss

transformers = pytest.importorskip("transformers")
LENGTHS = [[9, 1, 14, 8], [17, 15], [32], [5, 6, 7, 8, 3, 3]]
"""Documents in rows of 32 tokens; the last tokens of the second and fourth row, if any are left, belong to none."""
CONTEXT, VOCABULARY = 32, 96
SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": VOCABULARY, "max_position_embeddings": 64,
}  # fmt: skip
FAMILIES = ["LlamaForCausalLM", "Qwen3ForCausalLM", "Gemma2ForCausalLM", "GPT2LMHeadModel"]


def make_model(name: str) -> Any:
    cls = getattr(transformers, name)
    sizes: dict[str, Any] = SIZES
    if name == "GPT2LMHeadModel":
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": 64,
                 "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # fmt: skip
    torch.manual_seed(0)
    return cls(cls.config_class(**sizes)).train()


def make_documents() -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Return tokens and labels of the documents of each row; a third of the tokens carry no loss."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for lengths in LENGTHS:
        row = []
        for length in lengths:
            tokens = torch.randint(3, VOCABULARY, (length,), generator=generator)
            labels = tokens.masked_fill(torch.rand(length, generator=generator) < 0.3, IGNORED)
            labels[0] = IGNORED
            row.append((tokens, labels))
        rows.append(row)
    return rows


def pack(documents: list[list[tuple[torch.Tensor, torch.Tensor]]], context: int, total: float) -> dict[str, Any]:
    """Return a batch as fine-tuning makes it."""
    batch: dict[str, Any] = {name: [] for name in ("input_ids", "labels", "position_ids")}
    for row in documents:
        missing = context - sum(len(tokens) for tokens, _ in row)
        tokens = [*(tokens for tokens, _ in row), torch.zeros(missing, dtype=torch.int64)]
        labels = [*(labels for _, labels in row), torch.full((missing,), IGNORED)]
        positions = [torch.arange(len(part)) for part in tokens]
        for name, parts in (("input_ids", tokens), ("labels", labels), ("position_ids", positions)):
            batch[name].append(torch.cat(parts))
    return {name: torch.stack(rows) for name, rows in batch.items()} | {"loss_tokens": torch.tensor(total)}


def fuse(model: Any) -> None:
    found = find_blocks(model, torch.device("cpu"), find_difference)
    assert len(found.specs) == 2, found.reasons
    for path, spec in found.specs.items():
        block = model.get_submodule(path)
        mark_parts(block, spec)
        apply_change(block, FusedBlock(make_fp32_plan(block, spec)))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_packed_and_unpacked_documents_give_the_same_gradients(name: str, fused: bool) -> None:
    documents = make_documents()
    total = float(sum(int((labels != IGNORED).sum()) for row in documents for _, labels in row))
    losses, grads = [], []
    for packed in (True, False):
        model = make_model(name)
        if fused:
            fuse(model)
        batches = [pack(documents, CONTEXT, total)]
        if not packed:
            batches = [pack([[document]], len(document[0]), total) for row in documents for document in row]
        losses.append(0.0)
        for batch in batches:
            loss = compute_loss(model, batch)
            loss.backward()
            losses[-1] += loss.item()
        grads.append({key: parameter.grad for key, parameter in model.named_parameters()})
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for key, grad in grads[0].items():
        other = grads[1][key]
        assert grad is not None and other is not None
        assert (grad - other).abs().max() <= 1e-5 * other.abs().max(), key


def test_packed_and_unpacked_documents_train_alike_under_an_engine() -> None:
    """Several updates: rows of documents at once, and the documents of a row one after another, accumulated."""
    documents = make_documents()
    total = float(sum(int((labels != IGNORED).sum()) for row in documents for _, labels in row))
    weights = []
    for packed in (True, False):
        model = make_model("LlamaForCausalLM")
        batches = [pack(documents, CONTEXT, total)]
        if not packed:
            count = sum(map(len, documents))
            batches = [pack([[one]], len(one[0]), total / count) for row in documents for one in row]
        engine = Engine(model, torch.optim.SGD(model.parameters(), 0.1), "fp32", accumulate=len(batches))
        for _ in range(3):
            for batch in batches:
                with engine.forward():
                    loss = compute_loss(model, batch)
                engine.backward(loss)
                engine.step()
        weights.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    assert (weights[0] - weights[1]).abs().max() < 1e-5


def test_ranks_that_take_rows_of_a_batch_average_to_its_loss() -> None:
    """Rows have different numbers of tokens with loss, so that a mean of means would be another number."""
    documents = make_documents()
    total = sum(int((labels != IGNORED).sum()) for row in documents for _, labels in row)
    batch = pack(documents, CONTEXT, 0.0) | {"loss_tokens": torch.full((4,), total / 4)}
    model = make_model("LlamaForCausalLM")
    whole = compute_loss(model, batch)
    parts = [compute_loss(model, slice_rows(batch, rank, 2)) for rank in range(2)]
    assert torch.stack(parts).mean().item() == pytest.approx(whole.item(), rel=1e-6)
    assert parts[0].item() != pytest.approx(whole.item(), rel=1e-3)
