"""Forecasts of long sequences: what must not grow with the square of the tokens or with tokens times vocabulary."""

from __future__ import annotations

from typing import Any

import pytest

from narrowgauge import hardware
from narrowgauge.cli import main
from narrowgauge.forecast.memory.estimate import Memory, predict_memory
from narrowgauge.forecast.run import Scenario
from narrowgauge.forecast.trace.trace_step import STEPS, Traced
from narrowgauge.nn.fused import head, tiles
from narrowgauge.recipe import parse
from narrowgauge.tasks import user_model

pytest.importorskip("transformers")
WIDTH, HIDDEN, VOCAB, LAYERS = 256, 1024, 65536, 3
SIZES = {
    "hidden_size": WIDTH, "intermediate_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCAB, "max_position_embeddings": 1 << 20,
}  # fmt: skip


def trace(recipe: str, length: int, vocab: int = VOCAB) -> Traced:
    fields = {**SIZES, "vocab_size": vocab}
    task = user_model.make_task("transformers:LlamaForCausalLM", fields, 1, length, small=False)
    return Scenario(task=task, gpu=hardware.find_gpu("h200")).trace(parse(recipe))


def predict(recipe: str, length: int) -> Memory:
    return predict_memory(trace(recipe, length, 1024))  # so that the peak is in a block


def find_largest(traced: Traced) -> int:
    """Return the bytes of the largest block of memory that the last step allocates."""
    ops = traced.trace.ops
    born = [block for block in traced.trace.blocks if block.born < len(ops) and ops[block.born].step == STEPS - 1]
    return max(block.bytes for block in born)


def test_nothing_has_the_size_of_all_pairs_of_tokens_or_of_all_logits() -> None:
    """An ordinary batch has no mask, also where transformers looks for packed documents in positions; views of logits
    that do not exist take no memory."""
    length = 1 << 17
    largest = find_largest(trace("fp8-lean", length))
    assert largest <= 4 << 30  # one chunk of logits
    assert length * length > 4 * largest and 2 * length * VOCAB > 3 * largest


@pytest.mark.parametrize("recipe", ["fp8-lean", "bf16-lean"])
def test_the_head_makes_one_tensor_of_all_tokens(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With labels given to the model: the gradient of the hidden states; backward casts it to their dtype."""
    for name in ("CHUNK_BYTES", "WIDE_CHUNK_BYTES", "GROUP_BYTES"):
        monkeypatch.setattr(head, name, 1 << 22)
    length, vocab = 50_048, 2048  # tensors of the weight's size are other ones
    traced = trace(recipe, length, vocab)
    ops = traced.trace.ops
    made = [
        (ops[block.born].phase, block.bytes)
        for block in traced.trace.blocks
        if block.born < len(ops)
        and ops[block.born].step == STEPS - 1
        and ops[block.born].where.startswith("lm_head")
        and block.bytes >= length * WIDTH // 2
        and block.bytes not in (4 * vocab * WIDTH, 2 * vocab * WIDTH, vocab * WIDTH)  # of the weight
    ]
    assert made == [("forward", 2 * length * WIDTH), ("backward", 4 * length * WIDTH)]


def test_packed_documents_have_their_mask() -> None:
    task = user_model.make_task("transformers:LlamaForCausalLM", SIZES, 1, 3072, small=False)
    make = task.synthetic

    def with_positions(index: int) -> Any:
        batch = make(index)  # type: ignore[misc]
        return {**batch, "position_ids": batch["input_ids"]}

    from dataclasses import replace

    packed = replace(task, synthetic=with_positions)
    found = [
        Scenario(task=one, gpu=hardware.find_gpu("h200")).trace(parse("bf16-lean")).trace.blocks
        for one in (task, packed)
    ]
    sizes = [[block.bytes for block in blocks] for blocks in found]
    assert 3072 * 3072 not in sizes[0] and 3072 * 3072 in sizes[1]


def test_memory_of_the_mlp_does_not_grow_with_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two lengths, the peak grows by what attention and residuals need; without tiles by the MLP as well."""
    monkeypatch.setattr(tiles, "TILE_BYTES", 1 << 26)
    short, long = 1 << 16, 1 << 17
    tiled = (predict("fp8-lean", long).total - predict("fp8-lean", short).total) / (long - short)
    monkeypatch.setattr(tiles, "TILE_BYTES", 1 << 60)
    whole = (predict("fp8-lean", long).total - predict("fp8-lean", short).total) / (long - short)
    assert whole - tiled > 2 * 2 * HIDDEN + 2 * HIDDEN  # u in BF16 and its gradient in FP8 at least
    assert tiled < 2 * WIDTH * (LAYERS + 13)  # in multiples of the residual stream


def test_offloaded_inputs_are_on_the_host() -> None:
    length = 1 << 17
    plain, moved = predict("fp8-lean", length), predict("fp8-lean[offload=activations]", length)
    one = 2 * length * WIDTH
    assert moved.host == LAYERS * one and plain.host == 0
    assert plain.total - moved.total == pytest.approx(one, rel=0.05)  # in the last block, two of three are on the GPU


def test_extrapolated_models_offload_all_blocks() -> None:
    fields = {**SIZES, "num_hidden_layers": 12}
    task = user_model.make_task("transformers:LlamaForCausalLM", fields, 1, 2048, small=False)
    scenario = Scenario(task=task, gpu=hardware.find_gpu("h200"), shards=2)
    recipe = parse("fp8-lean[offload=activations]")
    assert scenario.trace_model(recipe).memory(2).host == 12 * 2 * 2048 * WIDTH


def test_the_command_says_what_goes_to_the_host(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["memory", "gpt:2x64", "--gpu", "h200", "--no-search", "--recipes", "fp8-lean[offload=activations]"]
    main(command)
    assert "in host memory between forward and backward" in capsys.readouterr().out
