"""A base with adapters is loaded in the form of the recipe: frozen, stored once, with PEFT's own initialization."""

import json

import pytest
import torch
import transformers
from test_pretrained_load import CountBytes
from tiny_folders import EXPERTS, GPT2, SMALL, save

import narrowgauge as ng
from narrowgauge import hardware
from narrowgauge.cli import main
from narrowgauge.errors import UsageError
from narrowgauge.forecast.run import Scenario
from narrowgauge.nn.products.stored_fp8 import is_stored
from narrowgauge.optim.masters import has_master
from narrowgauge.pretrained import PretrainedModel, adapters, tensor_readers
from narrowgauge.pretrained.lora_options import parse_lora
from narrowgauge.pretrained.transformers_model import find_model
from narrowgauge.recipe import parse
from narrowgauge.tasks import user_model

peft = pytest.importorskip("peft")
TOKENS = torch.arange(40).view(2, 20)


def make(folder, lora="rank=4"):
    return PretrainedModel(find_model(str(folder), {}), parse_lora(lora))


def train(model, recipe, steps=3):
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine = ng.Engine(model, torch.optim.AdamW(trained, lr=1e-2), recipe)
    losses = []
    for _ in range(steps):
        with engine.forward():
            loss = model(input_ids=TOKENS, labels=TOKENS, use_cache=False).loss
        engine.backward(loss)
        assert engine.step().applied
        losses.append(loss.item())
    return engine, losses


@pytest.mark.parametrize(
    "recipe", ["fp32", "bf16[frozen=bf16]", "fp8-lean[frozen=fp8]", "bf16-lean[frozen=keep]", "bf16-lean[frozen=bf16]"]
)
def test_the_base_is_frozen_in_the_format_of_the_recipe(tmp_path, recipe):
    save(tmp_path, "Qwen3ForCausalLM", torch.float32)
    torch.manual_seed(5)
    model = make(tmp_path).load(recipe, "cpu")
    assert model.training
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    narrow = parse(recipe).frozen != "keep"
    stored = {name for name, module in model.named_modules() if is_stored(module)}
    assert len(stored) == (14 if "frozen=fp8" in recipe else 0)
    for name, parameter in model.named_parameters():
        assert not parameter.is_meta and not has_master(parameter)
        assert parameter.requires_grad is ("lora_" in name)
        dtype = torch.bfloat16 if narrow and parameter.dim() > 1 and "lora_" not in name else torch.float32
        assert parameter.dtype is (torch.uint8 if name.removesuffix(".weight") in stored else dtype), name
        if "lora_" not in name and name.removesuffix(".weight") not in stored:
            assert parameter.equal(base.get_parameter(name.replace(".base_layer", "")).to(dtype))
    engine, losses = train(model, recipe)
    assert losses[-1] < losses[0] and engine.lean is ("lean" in recipe)
    assert all(
        has_master(parameter) is ("lean" in recipe) for name, parameter in model.named_parameters() if "lora_" in name
    )
    with torch.no_grad():
        assert model(TOKENS).logits.isfinite().all()  # outside of engine.forward()


def test_the_seed_decides_the_adapters_by_the_rule_of_peft(tmp_path):
    save(tmp_path)
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        model = make(tmp_path, "rank=4,init=gaussian").load("fp32", "cpu")
        found.append(adapters.get_weights(model))
    one, same, other = found
    assert all(one[name].equal(same[name]) for name in one)
    for name, weight in one.items():
        if "lora_B" in name:
            assert not weight.any()
        else:
            assert not weight.equal(other[name]) and 0.15 < weight.std() < 0.35  # 1 / rank
    bound = make(tmp_path, "rank=4").load("fp32", "cpu").model.layers[0].mlp.down_proj.lora_A.default.weight
    assert 0.9 / 8 < bound.abs().max() <= 1 / 8  # kaiming: 1 / sqrt(64)


@pytest.mark.parametrize(("recipe", "size"), [("bf16-lean[frozen=bf16]", 2), ("bf16[frozen=keep]", 4)])
def test_the_base_is_allocated_once(tmp_path, monkeypatch, recipe, size):
    fields = {**SMALL, "hidden_size": 256, "intermediate_size": 1024, "vocab_size": 16384}
    save(tmp_path, dtype=torch.bfloat16, fields=fields, sharded=True)
    monkeypatch.setattr(tensor_readers, "PIECE", 1 << 16)
    factory = make(tmp_path)
    with CountBytes() as count:
        model = factory.load(recipe, "cpu")
    final = sum(p.numel() for p in model.parameters()) * size
    assert final > 15e6
    assert count.bytes < 1.05 * final and count.peak < 1.15 * final


def test_transposed_layers_and_models_that_transformers_loads(tmp_path):
    save(tmp_path / "gpt2", "GPT2LMHeadModel", fields=GPT2)
    save(tmp_path / "experts", "MixtralForCausalLM", torch.bfloat16, fields=EXPERTS)
    for folder, lora in (("gpt2", "rank=4"), ("experts", "rank=4,targets=q_proj+v_proj")):
        model = make(tmp_path / folder, lora).load("bf16[frozen=bf16]", "cpu")
        _, losses = train(model, "bf16[frozen=bf16]")
        assert losses[-1] < losses[0]
        matrices = {name: p.dtype for name, p in model.named_parameters() if p.dim() > 1 and "lora" not in name}
        routers = {name for name, dtype in matrices.items() if dtype is torch.float32}  # they stay in FP32
        assert all(name.endswith("mlp.gate.weight") for name in routers) and bool(routers) == (folder == "experts")
        assert {matrices[name] for name in matrices.keys() - routers} == {torch.bfloat16}
    layers = adapters.find_layers(make(tmp_path / "gpt2").match().model)
    assert all(layer.fan_in_fan_out for layer in layers.values()) and len(layers) == 8
    layer = peft.get_peft_model(
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "gpt2"),
        peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False),
    ).base_model.model.transformer.h[0].attn.c_attn  # fmt: skip
    a, b = (getattr(layer, part)["default"].weight.detach() for part in ("lora_A", "lora_B"))
    assert adapters.compute_update(layer, a, b).equal(layer.get_delta_weight("default").detach())


def test_the_folder_of_an_adapter(tmp_path):
    save(tmp_path / "llama")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "llama")
    config = peft.LoraConfig(
        r=4, lora_alpha=3, target_modules=r".*\.(q|o)_proj", rank_pattern={"q_proj": 2}, use_rslora=True,
        init_lora_weights=False,
    )  # fmt: skip
    plain = peft.get_peft_model(base, config)
    for parameter in plain.parameters():
        parameter.data = parameter.data.half() if parameter.requires_grad else parameter.data
    plain.save_pretrained(tmp_path / "adapter")
    model = make(tmp_path / "llama", str(tmp_path / "adapter")).load("fp32", "cpu")
    with torch.no_grad():
        assert model.eval()(TOKENS).logits.equal(plain.float().eval()(TOKENS).logits)
    assert "ranks 2 to 4 on 4 layers" in adapters.describe(model, parse_lora(str(tmp_path / "adapter")))
    stored = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    stored["target_modules"] = ["q_proj"]
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(stored))
    with pytest.raises(UsageError, match=r"o_proj.*which the adapter has not"):
        make(tmp_path / "llama", str(tmp_path / "adapter")).match()


def test_memory_is_predicted_without_reading_weights(tmp_path, monkeypatch, capsys):
    def fail(*_):
        raise AssertionError("weights were read")

    monkeypatch.setattr(tensor_readers.FileReader, "read", fail)
    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", fail)
    monkeypatch.setattr(tensor_readers, "PIECE", 1 << 16)
    wide = {**SMALL, "num_hidden_layers": 1, "hidden_size": 256, "intermediate_size": 1024, "vocab_size": 16384}
    save(tmp_path / "llama", dtype=torch.bfloat16, fields=wide)
    task = user_model.make_task(str(tmp_path / "llama"), {}, 1, 32, small=False, lora="rank=4")
    memory = Scenario(task=task, gpu=hardware.find_gpu("h200")).predict_memory(parse("bf16-lean[frozen=bf16]"))
    assert 2 * task.facts["parameters"] < memory.building < 2.3 * task.facts["parameters"]
    assert memory.moments < 0.02 * memory.weights
    options = ["--recipes", "fp8-lean", "--batch", "1", "--context", "32", "--gpu", "h200", "--no-search", "--json"]
    assert main(["memory", "--model", str(tmp_path / "llama"), "--lora", "rank=4", *options]) == 0
    assert next(iter(json.loads(capsys.readouterr().out)["recipes"])).endswith("frozen=fp8]")
    assert main(["memory", "gpt-tiny", "--lora", "rank=4", *options]) == 2
    assert "--lora is for --model" in capsys.readouterr().err
    assert main(["memory", "--model", str(tmp_path / "llama"), "--lora", "rank=x", *options]) == 2
    assert "rank=x must be a whole number" in capsys.readouterr().err
    quick = ["--recipes", "bf16-lean", "--batch", "1", "--context", "32", "--gpu", "h200", "--quick", "--json"]
    assert main(["roofline", "--model", str(tmp_path / "llama"), "--lora", "rank=4", *quick]) == 0
