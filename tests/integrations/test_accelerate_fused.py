"""Accelerate saves and loads models with fused blocks, whose query, key and value weights are adjacent in memory."""

import pytest
import torch

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")

from safetensors.torch import load_file  # noqa: E402

from narrowgauge.integrations.accelerate import prepare  # noqa: E402

SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 128,
}  # fmt: skip
BATCHES = torch.randint(0, 128, (4, 2, 16))


def make(recipe, **sizes):
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES | sizes)).train()
    accelerator = accelerate.Accelerator(cpu=True)
    return accelerator, *prepare(accelerator, model, torch.optim.AdamW(model.parameters(), lr=1e-2), recipe=recipe)


def train(accelerator, model, optimizer, batches):
    losses = []
    for tokens in batches:
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("recipe", ["bf16", "fp8[products=all]", "fp8-lean[products=all]"])
def test_resume_continues_bit_exactly(recipe, tied, tmp_path):
    first = make(recipe, tie_word_embeddings=tied)
    train(*first, BATCHES[:2])
    first[0].save_state(tmp_path)
    first[0].save_model(first[1], tmp_path / "model")
    names = set(first[1].state_dict()) - ({"lm_head.weight"} if tied else set())
    assert names <= load_file(tmp_path / "model.safetensors").keys()
    assert names <= load_file(tmp_path / "model" / "model.safetensors").keys()
    expected = train(*first, BATCHES[2:])
    second = make(recipe, tie_word_embeddings=tied)
    second[0].load_state(tmp_path)
    assert train(*second, BATCHES[2:]) == expected


def test_a_state_of_another_model_is_refused(tmp_path):
    accelerator, *_ = make("fp8[products=all]")
    accelerator.save_state(tmp_path)
    with pytest.raises(RuntimeError, match=r"Missing key.*model.layers.1.self_attn.q_proj.weight"):
        make("fp8[products=all]", num_hidden_layers=2)[0].load_state(tmp_path)
