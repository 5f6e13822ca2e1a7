"""On a GPU, weights that are used as one are adjacent, have storages of their own, and models with them are saved."""

import gc

import pytest
import torch
from torch import nn

import narrowgauge as ng
from narrowgauge.weight_copies import adjacent
from narrowgauge.weight_copies.adjacent import store_contiguously, view_as_one

MIB = 2**20


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_weight_has_its_own_storage_in_the_same_memory(dtype):
    values = [torch.randn(rows, 64, device="cuda", dtype=dtype) for rows in (64, 16, 16)]
    weights = [nn.Parameter(value.clone()) for value in values]
    store_contiguously(weights)
    assert all(torch.equal(weight, value) for weight, value in zip(weights, values, strict=True))
    assert [weight.untyped_storage().nbytes() for weight in weights] == [value.nbytes for value in values]
    joint = view_as_one(weights)
    with torch.no_grad():
        weights[1].fill_(3)
    assert (joint[64:80] == 3).all() and joint.device == weights[0].device


def test_memory_is_freed_when_the_weights_move_away():
    gc.collect()
    before = torch.cuda.memory_allocated()
    weights = [nn.Parameter(torch.randn(1024, 1024, device="cuda")) for _ in range(2)]
    store_contiguously(weights)
    assert torch.cuda.memory_allocated() - before == 8 * MIB
    address = weights[0].data_ptr()
    for weight in weights:
        weight.data = weight.data.cpu()
    gc.collect()
    assert torch.cuda.memory_allocated() == before and address not in adjacent._joints


@pytest.mark.parametrize("recipe", ["fp8", "bf16", "fp8-lean"])
def test_a_model_in_training_is_saved_whole_and_training_goes_on(recipe, tmp_path):
    transformers = pytest.importorskip("transformers")
    safetensors = pytest.importorskip("safetensors.torch")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).cuda()
    engine = ng.Engine(model, torch.optim.AdamW(model.parameters(), 1e-3), recipe)
    ids = torch.randint(0, 256, (4, 128), device="cuda")
    losses = []
    for step in range(6):
        with engine.forward():
            loss = model(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if step == 3:
            safetensors.save_model(model, str(tmp_path / "model.safetensors"))
            wanted = {name: value.clone() for name, value in model.state_dict().items()}
    attention = model.model.layers[0].self_attn
    assert view_as_one([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]) is not None
    assert losses[-1] < losses[0]
    saved = safetensors.load_file(str(tmp_path / "model.safetensors"))
    assert saved.keys() == wanted.keys()
    assert all(torch.equal(saved[name], value.cpu()) for name, value in wanted.items())
