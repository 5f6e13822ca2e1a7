"""Small, randomly initialized Hugging Face models of four families convert, train and save in FP8."""

import math

import pytest
import torch

from narrowgauge import Engine

transformers = pytest.importorskip("transformers")

SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}


def gpt2():
    config = transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=128, n_positions=32)
    return transformers.GPT2LMHeadModel(config), tokens


def llama():
    config = transformers.LlamaConfig(**SMALL, num_key_value_heads=2, vocab_size=128, max_position_embeddings=32)
    return transformers.LlamaForCausalLM(config), tokens


def bert():
    config = transformers.BertConfig(**SMALL, vocab_size=128, max_position_embeddings=32)
    return transformers.BertForMaskedLM(config), tokens


def vit():
    config = transformers.ViTConfig(**SMALL, image_size=16, patch_size=4, num_labels=16)
    return transformers.ViTForImageClassification(config), images


def tokens(seed):
    ids = torch.randint(0, 128, (4, 16), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids.clone()}


def images(seed):
    generator = torch.Generator().manual_seed(seed)
    return {"pixel_values": torch.randn(4, 3, 16, 16, generator=generator), "labels": torch.tensor([0, 1, 2, 3])}


@pytest.mark.parametrize("build", [gpt2, llama, bert, vit])
def test_models_convert_train_and_save(build, tmp_path):
    torch.manual_seed(0)
    model, batch = build()
    names = {name: value.shape for name, value in model.state_dict().items()}
    engine = Engine(model, torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True), "fp8", clip_norm=1.0)
    converted = [layer.path for layer in engine.conversion.layers if "fp8" in layer.choice]
    assert len(converted) >= 8 and len(engine.conversion.blocks) == 2, engine.conversion
    losses = []
    for _ in range(12):
        with engine.forward():
            loss = model(**batch(0)).loss
        engine.backward(loss)
        assert engine.step().applied
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert {name: value.shape for name, value in model.state_dict().items()} == names
    model.save_pretrained(tmp_path)
    plain = type(model).from_pretrained(tmp_path).eval()
    model.eval()
    with engine.evaluating():
        converted = model(**batch(0)).loss.item()
    with torch.no_grad():
        assert plain(**batch(0)).loss.item() == pytest.approx(converted, rel=3e-2)
    assert math.isfinite(converted)
