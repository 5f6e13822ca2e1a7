"""Folders that are opened: every tensor is found, and each damage is one line before any weight is read."""

import json
import re

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_folders import save

from narrowgauge import UsageError
from narrowgauge.pretrained import load_model, open_folder
from narrowgauge.pretrained.folder import INDEX


@pytest.fixture
def folder(tmp_path):
    return save(tmp_path, dtype=torch.bfloat16, sharded=True)


@pytest.fixture
def whole(tmp_path):
    return save(tmp_path, dtype=torch.bfloat16)


def change_json(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def refusal(folder):
    with pytest.raises(UsageError) as caught:
        load_model(open_folder(folder), "bf16-lean", "cpu")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_tensors_are_those_that_safetensors_reads(folder):
    opened = open_folder(folder)
    assert len({tensor.file for tensor in opened.tensors.values()}) > 2
    for name, tensor in opened.tensors.items():
        with safe_open(tensor.file, "pt") as file:
            expected = file.get_tensor(name)
        assert (tensor.dtype, tensor.shape) == (expected.dtype, tuple(expected.shape))
        data = tensor.file.read_bytes()[tensor.offset : tensor.offset + tensor.nbytes]
        assert torch.equal(torch.frombuffer(bytearray(data), dtype=tensor.dtype).view(tensor.shape), expected)
    assert opened.config["model_type"] == "llama"
    assert opened.quantization is None
    assert opened.nbytes == json.loads((folder / INDEX).read_text())["metadata"]["total_size"]


def first_shard(folder):
    return min(folder.glob("model-*.safetensors"))


def damage_truncate(folder):
    path = first_shard(folder)
    path.write_bytes(path.read_bytes()[:-10])


def damage_extend(folder):
    path = first_shard(folder)
    path.write_bytes(path.read_bytes() + b"more")


def damage_header(folder):
    path = first_shard(folder)
    data = path.read_bytes()
    path.write_bytes(data[:20] + b"\xff" + data[21:])


def damage_length(folder):
    path = first_shard(folder)
    path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:])


def damage_empty(folder):
    first_shard(folder).write_bytes(b"")


def damage_missing_shard(folder):
    first_shard(folder).unlink()


def damage_index_json(folder):
    (folder / INDEX).write_text("{")


def damage_index_empty(folder):
    (folder / INDEX).write_text("{}")


def damage_index_outside(folder):
    index = json.loads((folder / INDEX).read_text())
    change_json(folder / INDEX, weight_map={**index["weight_map"], "x": "../model.safetensors"})


def damage_index_extra(folder):
    index = json.loads((folder / INDEX).read_text())["weight_map"]
    change_json(folder / INDEX, weight_map={**index, "model.extra": min(index.values())})


def damage_index_lost(folder):
    index = json.loads((folder / INDEX).read_text())["weight_map"]
    del index["model.norm.weight"]
    change_json(folder / INDEX, weight_map=index)


def damage_config(folder):
    (folder / "config.json").write_text("{")


def damage_auto_map(folder):
    change_json(folder / "config.json", auto_map={"AutoModelForCausalLM": "modeling_mine.Mine"})


def damage_quantized(folder):
    change_json(folder / "config.json", quantization_config={"quant_method": "gptq", "bits": 4})


def damage_no_weights(folder):
    for path in (*folder.glob("*.safetensors"), folder / INDEX):
        path.unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_truncate, r"model-00001.*cannot be loaded: it is truncated \([\d,]+ bytes, expected [\d,]+\)"),
        (damage_extend, "cannot be loaded: it is longer than its header says"),
        (damage_header, "cannot be loaded: its header is damaged"),
        (damage_length, "cannot be loaded: it is truncated or not a .safetensors file"),
        (damage_empty, "cannot be loaded: it is truncated or not a .safetensors file"),
        (damage_missing_shard, "index.json names model-00001.*which is not there"),
        (damage_index_json, "index.json is not JSON"),
        (damage_index_empty, 'index.json has no "weight_map"'),
        (damage_index_outside, "names the file '../model.safetensors'; expected a .safetensors file beside it"),
        (damage_index_extra, "says that model.extra is in model-00001.*but it is not"),
        (damage_index_lost, "has the tensor model.norm.weight, which .*index.json does not list"),
        (damage_config, "config.json is not JSON"),
        (damage_auto_map, r"\(auto_map\), which is never run"),
        (damage_quantized, r"its weights are quantized \(gptq\), and only FP8 weights .* can be loaded"),
        (damage_no_weights, "the folder has no weights"),
    ],
)
def test_a_damaged_folder_is_one_line(folder, damage, message):
    damage(folder)
    assert re.search(message, refusal(folder))


def change_weights(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "model.layers.1.mlp.up_proj.weight is missing;"),
        (lambda t: t.update(other=torch.zeros(3)), "the model has no other;"),
        (
            lambda t: t.update({"lm_head.weight": torch.zeros(90, 32)}),
            r"lm_head.weight is float32 \[90, 32\], expected \[96, 32\];",
        ),
        (lambda t: t.update({"lm_head.weight": torch.zeros(96, 32, dtype=torch.int8)}), r"is int8 \[96, 32\], exp"),
        (
            lambda t: t.update({"lm_head.weight": t["lm_head.weight"].to(torch.float8_e4m3fn)}),
            "in FP8, but has no scale",
        ),
    ],
)
def test_weights_of_another_model_are_one_line(whole, change, message):
    change_weights(whole, change)
    assert re.search(message, refusal(whole))


def test_a_config_of_another_size_is_one_line(whole):
    change_json(whole / "config.json", num_hidden_layers=1, vocab_size=100)
    message = refusal(whole)
    assert "[96, 32], expected [100, 32] (and 1 more), the model has no model.layers.1." in message
    assert "(and 8 more); config.json and the weights do not belong together" in message


def test_pickled_weights_are_never_opened(whole):
    mark = whole / "ran"
    (whole / "model.safetensors").unlink()
    (whole / "pytorch_model.bin").write_bytes(f"cbuiltins\nopen\n(V{mark}\nVw\ntR.".encode())
    assert "pytorch_model.bin, and only .safetensors files are read" in refusal(whole)
    assert not mark.exists()


def test_quantized_weights_are_recognized(whole):
    for method in ("fp8", "compressed-tensors"):
        change_json(whole / "config.json", quantization_config={"quant_method": method})
        assert open_folder(whole).quantization.method == method


def test_tied_tensors_must_be_equal(tmp_path):
    save(tmp_path, "Qwen3ForCausalLM")
    same = lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()})  # noqa: E731
    change_weights(tmp_path, same)
    model = load_model(open_folder(tmp_path), "bf16-lean", "cpu")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    change_weights(tmp_path, lambda t: t["lm_head.weight"].mul_(2))
    assert "ties model.embed_tokens.weight and lm_head.weight, but the stored tensors differ" in refusal(tmp_path)
    change_weights(tmp_path, lambda t: t.pop("model.embed_tokens.weight"))
    assert load_model(open_folder(tmp_path), "fp32", "cpu").lm_head.weight.shape == (96, 32)
