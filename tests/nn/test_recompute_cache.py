"""Blocks that are recomputed layer by layer, in models that pass a cache of keys in training as transformers does."""

import pytest
import torch

import narrowgauge as ng

transformers = pytest.importorskip("transformers")
SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 64}


def compute_gradients(recipe, **options):
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, intermediate_size=64))
    engine = ng.Engine(model, torch.optim.AdamW(model.parameters()), recipe=recipe, fused=False)
    tokens = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(1))
    with engine.forward():
        made = model(input_ids=tokens, labels=tokens, **options)
    engine.backward(made.loss)
    return made, [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("checkpoint", ["selective", "full"])
@pytest.mark.parametrize("masked", [False, True])
def test_the_cache_is_not_filled_twice(checkpoint, masked):
    mask = torch.ones(2, 16, dtype=torch.int64)
    mask[0, :5] = 0
    options = {"use_cache": True, "attention_mask": mask if masked else None}
    _, expected = compute_gradients("fp32", **options)
    made, found = compute_gradients(f"fp32[checkpoint={checkpoint}]", **options)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    assert made.past_key_values.get_seq_length() == 0  # as in transformers, with gradient checkpointing
