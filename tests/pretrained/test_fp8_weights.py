"""Folders with FP8 weights: the values are those of the stored numbers and their scales, in each known layout."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from narrowgauge import Engine, UsageError
from narrowgauge.nn.products.stored_fp8 import is_stored
from narrowgauge.optim import full_precision
from narrowgauge.pretrained import PretrainedModel, load_model, open_folder
from narrowgauge.pretrained.lora_options import parse_lora
from narrowgauge.pretrained.transformers_model import find_model

transformers = pytest.importorskip("transformers")
E4M3 = torch.float8_e4m3fn
BLOCK = (16, 24)
LAYOUTS = {
    "blocks": ("fp8", "weight_scale_inv", BLOCK),
    "tensor": ("compressed-tensors", "weight_scale", None),
    "rows": ("compressed-tensors", "weight_scale", (1, None)),
}


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A folder of a small Llama in BF16."""
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=96, max_position_embeddings=64,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def quantize(weight, block):
    """Return a weight in FP8, its scales, and its values, by a loop over blocks."""
    weight = weight.float()
    outputs, inputs = weight.shape
    rows, columns = block or (outputs, inputs)
    columns = columns or inputs
    scales = torch.zeros(-(-outputs // rows), -(-inputs // columns))
    stored, values = torch.zeros_like(weight, dtype=E4M3), torch.zeros_like(weight)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            scales[i, j] = weight[part].abs().max() / 448
            stored[part] = (weight[part] / scales[i, j]).to(E4M3)
            values[part] = stored[part].float() * scales[i, j]
    return stored, scales.reshape(-1) if block is None else scales, values


def save_quantized(original, folder, layout):
    """Copy a folder with the layers of its blocks in FP8; return the values of all tensors."""
    method, name, block = LAYOUTS[layout]
    tensors = load_file(original / "model.safetensors")
    written, expected = {}, {}
    for key, tensor in tensors.items():
        if "proj" in key:
            stored, scales, expected[key] = quantize(tensor, block)
            path = key.removesuffix("weight")
            written |= {key: stored, path + name: scales, path + "input_scale": torch.ones(1)}
        else:
            written[key] = expected[key] = tensor
    save_file(written, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((original / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, "weight_block_size": list(BLOCK)}
    (folder / "config.json").write_text(json.dumps(config))
    return expected


@pytest.mark.parametrize("recipe", ["fp32", "bf16-lean"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fp8_weights_are_loaded_with_their_scales(original, tmp_path, layout, recipe):
    expected = save_quantized(original, tmp_path, layout)
    model = load_model(open_folder(tmp_path), recipe, "cpu")
    assert not hasattr(model.config, "quantization_config")
    found = full_precision(model)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(found[name], values.float()), name


def test_pieces_start_anywhere(original, tmp_path, monkeypatch):
    expected = save_quantized(original, tmp_path, "blocks")
    monkeypatch.setattr("narrowgauge.pretrained.tensor_readers.PIECE", 256)
    found = load_model(open_folder(tmp_path), "fp32", "cpu").state_dict()
    assert all(torch.equal(found[name], values.float()) for name, values in expected.items())


def test_the_model_of_a_quantized_folder_is_made_without_a_recipe(original, tmp_path):
    expected = save_quantized(original, tmp_path, "rows")
    found = PretrainedModel(find_model(str(tmp_path), {}, quantized=True))().state_dict()
    assert all(torch.equal(found[name], values.float()) for name, values in expected.items())


def test_training_starts_from_fp8_weights(original, tmp_path):
    save_quantized(original, tmp_path, "blocks")
    model = load_model(open_folder(tmp_path), "fp8-lean", "cpu")
    engine = Engine(model, torch.optim.AdamW(model.parameters(), 1e-3), "fp8-lean")
    tokens = torch.randint(3, 96, (2, 16), generator=torch.Generator().manual_seed(0))
    losses = []
    for _ in range(4):
        with engine.forward():
            loss = model(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def drop_scale(tensors):
    del tensors["model.layers.0.mlp.up_proj.weight_scale_inv"]


def cut_scale(tensors):
    name = "model.layers.0.mlp.up_proj.weight_scale_inv"
    tensors[name] = tensors[name][:-1].clone()


def store_e5m2(tensors):
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].float().to(torch.float8_e5m2)


def pack(tensors):
    tensors["model.layers.0.mlp.up_proj.weight_packed"] = torch.zeros(4, dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop_scale, r"up_proj.weight is in FP8, but has no scale"),
        (cut_scale, r"weight_scale_inv is \[4, 2\], which is no scale of a weight \[80, 32\]"),
        (store_e5m2, r"is float8_e5m2 \[80, 32\]; expected E4M3"),
        (pack, "weight_packed is packed, and only FP8 weights can be loaded"),
    ],
)
def test_scales_that_do_not_fit_are_one_line(original, tmp_path, change, message):
    save_quantized(original, tmp_path, "blocks")
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match=message) as caught:
        load_model(open_folder(tmp_path), "bf16-lean", "cpu")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("layout", [None, "blocks"])
def test_a_frozen_base_is_loaded_as_the_engine_stores_it(original, tmp_path, layout):
    """Weights that are read in FP8 piece by piece have the bits of those that an engine makes from BF16 weights."""
    pytest.importorskip("peft")
    if layout is not None:
        save_quantized(original, tmp_path, layout)
    folder, recipe = str(original if layout is None else tmp_path), "fp8[products=all,frozen=fp8]"
    made = []
    for form in (recipe, "fp8[products=all,frozen=bf16]"):
        lora = parse_lora("rank=4,targets=all-linear")
        torch.manual_seed(0)
        model = PretrainedModel(find_model(folder, {}, quantized=True), lora).load(form, "cpu")
        if form == recipe:
            read = {name for name, module in model.named_modules() if is_stored(module)}
            assert len(read) == 15  # seven layers in each block, and the head
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        engine = Engine(model, torch.optim.AdamW(trained, 1e-3), recipe)
        assert set(engine.conversion.stored) == read
        made.append(model)
    one, other = (model.state_dict() for model in made)
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype is other[name].dtype, name
        assert torch.equal(tensor, other[name]), name
