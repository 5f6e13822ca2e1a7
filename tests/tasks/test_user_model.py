"""Users' models as tasks: every kind of input, folders with and without weights, and one line for each mistake."""

import json
import re
from pathlib import Path

import pytest
import torch
import transformers

from narrowgauge import UsageError
from narrowgauge.pretrained import transformers_model
from narrowgauge.tasks import model_inputs, user_model

SMALL = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 96,
}  # fmt: skip
GROUPED = {**SMALL, "num_key_value_heads": 1, "head_dim": 16}
IMAGE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16}
BART = {
    "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "vocab_size": 96, "max_position_embeddings": 32,
}  # fmt: skip
T5 = {"d_model": 32, "d_ff": 64, "num_layers": 1, "num_heads": 2, "d_kv": 16, "vocab_size": 96}
LLAMA = "transformers:LlamaForCausalLM"


def make(spec, fields=None, batch=2, context=None):
    return user_model.make_task(spec, fields or {}, batch, context, small=True)


def failure(spec, fields=None, **options):
    with pytest.raises(UsageError) as caught:
        user_model.try_model(make(spec, fields, **options), "cpu")
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "fields", "context", "items"),
    [
        ("Qwen3ForCausalLM", GROUPED, 8, 16),
        ("GPT2LMHeadModel", {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 96, "n_positions": 16}, None, 32),
        ("RobertaForMaskedLM", {**SMALL, "max_position_embeddings": 18}, None, 32),  # 16 positions and 2 for padding
        ("BertForTokenClassification", {**SMALL, "num_labels": 5}, 8, 16),
        ("BertForSequenceClassification", {**SMALL, "num_labels": 1}, 8, 16),
        ("BertForSequenceClassification", {**SMALL, "problem_type": "multi_label_classification"}, 8, 16),
        ("LlamaForSequenceClassification", SMALL, 8, 16),  # needs a padding token for more than one row
        ("T5ForConditionalGeneration", T5, 8, 32),
        ("BartForConditionalGeneration", BART, None, 128),
        ("ViTForImageClassification", {**IMAGE, "patch_size": 8, "num_labels": 10}, None, 2),
        ("CLIPForImageClassification", {"vision_config": {**IMAGE, "patch_size": 8}}, None, 2),
    ],
)
def test_models_of_every_kind_run_on_their_random_batches(name, fields, context, items):
    task = make(f"transformers:{name}", fields, context=context)
    assert task.items_per_batch == items
    tried = user_model.try_model(task, "cpu")
    assert tried.flops_per_item > 0
    assert tried.facts["class"] == name
    model, batch = tried.model(), tried.batch(1, "train")
    loss = tried.loss(model, batch)
    loss.backward()
    assert torch.isfinite(loss)
    assert model.training
    assert all(len(tensor) == 2 for tensor in batch.values())
    assert tried.facts["parameters"] == sum(parameter.numel() for parameter in model.parameters())


def test_contestants_get_the_same_weights_and_batches_and_no_cache():
    task = make(LLAMA, SMALL, context=8)
    models = []
    for _ in range(2):
        torch.manual_seed(3)
        models.append(task.model())
    assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True))
    assert torch.equal(task.synthetic(1)["input_ids"], task.synthetic(1)["input_ids"])
    assert not torch.equal(task.synthetic(1)["input_ids"], task.synthetic(2)["input_ids"])
    assert models[0].config.use_cache is False
    assert make(LLAMA, {**SMALL, "use_cache": True}, context=8).model().config.use_cache is True


def test_tokens_are_never_the_padding_token():
    tokens = model_inputs.draw_tokens((1000,), 5, 2, torch.Generator().manual_seed(0))
    assert set(tokens.tolist()) == {0, 1, 3, 4}


@pytest.mark.parametrize(
    ("spec", "fields", "options", "message"),
    [
        ("transformers:Qwen9ForCausalLM", {}, {}, "no class 'Qwen9ForCausalLM'; did you mean Qwen"),
        ("transformers:", {}, {}, "has no class ''"),
        ("transformers:LlamaConfig", {}, {}, "LlamaConfig is not a model class"),
        ("transformers:AutoModelForCausalLM", {}, {}, "is not a model class"),
        ("transformers:PreTrainedModel", {}, {}, "is not a model class"),
        ("transformers:os", {}, {}, "is not a model class|has no class"),
        ("transformers:LlamaModel", SMALL, {}, "not known which inputs LlamaModel takes; use LlamaForCausalLM"),
        ("transformers:BertForPreTraining", SMALL, {}, "use BertLMHeadModel, BertForMaskedLM"),
        ("transformers:Wav2Vec2ForCTC", {}, {}, "known are models for|use "),
        (LLAMA, {"hidden_sise": 32}, {}, "LlamaConfig has no field 'hidden_sise'; did you mean hidden_size"),
        (LLAMA, {"zzz": 32}, {}, "LlamaConfig has no field 'zzz'; it has attention_bias"),
        (LLAMA, {"hidden_size": "wide"}, {}, "expected int"),
        (LLAMA, {**SMALL, "hidden_size": -32}, {}, "cannot be made|not a configuration"),
        (
            LLAMA,
            {**SMALL, "num_key_value_heads": 3},
            {"context": 8},
            "does not run on input_ids .*check --config|cannot",
        ),
        (LLAMA, {**SMALL, "vocab_size": 1}, {}, "vocab_size"),
        (LLAMA, {**SMALL, "max_position_embeddings": 64}, {"context": 65}, "takes 2 to 64"),
        (LLAMA, SMALL, {"context": 1}, "--context 1"),
        (LLAMA, SMALL, {"batch": 0}, "--batch 0 must be at least 1"),
        (LLAMA, {"attn_implementation": "kernels-community/flash"}, {}, "may be code from the hub, and is never run"),
        (LLAMA, {"attn_implementation": {"": "someone/code"}}, {}, "may be code from the hub"),
        ("transformers:ViTForImageClassification", IMAGE, {"context": 8}, "takes images, not tokens"),
        (
            "transformers:CLIPForImageClassification",
            {"vision_config": {"hiden_size": 32}},
            {},
            "--config, vision_config: CLIPVisionConfig has no field 'hiden_size'",
        ),
        ("transformers:BertForMaskedLM", {"_attn_implementation": "a/b"}, {}, "has no field '_attn_implementation'"),
    ],
)
def test_a_wrong_model_is_one_line(spec, fields, options, message):
    assert re.search(message, failure(spec, fields, **options))


@pytest.mark.parametrize(
    ("text", "message"),
    [('{"a": 1', "not JSON"), ("[1]", "type list"), ("3", "type int"), ("null", "NoneType"), ("{'a': 1}", "not JSON")],
)
def test_config_must_be_a_json_object(text, message):
    with pytest.raises(UsageError, match=message):
        transformers_model.parse_fields(text)
    assert transformers_model.parse_fields('{"a": {"b": [1]}}') == {"a": {"b": [1]}}


def test_transformers_may_be_missing(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "transformers is not installed; pip install transformers" in failure(LLAMA)


@pytest.fixture
def folder(tmp_path: Path):
    """A folder of a Hugging Face model, with weights."""
    torch.manual_seed(7)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))
    model.save_pretrained(tmp_path)
    return tmp_path


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_folder_with_weights_is_loaded_in_fp32(folder):
    stored = transformers.LlamaForCausalLM.from_pretrained(folder).to(torch.bfloat16)
    stored.save_pretrained(folder)
    task = make(str(folder), context=8)
    assert task.facts["weights"] == "safetensors"
    loaded = task.model()
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}
    for name, parameter in stored.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], parameter.float())
    assert user_model.try_model(task, "cpu").flops_per_item > 0


def test_a_folder_without_weights_gets_random_ones_and_fields_can_be_changed(folder):
    (folder / "model.safetensors").unlink()
    task = make(str(folder), {"num_hidden_layers": 2}, context=8)
    assert task.facts["weights"] == "random"
    assert len(task.model().model.layers) == 2


def test_wrong_folders_are_one_line(folder, tmp_path_factory):
    empty = tmp_path_factory.mktemp("empty")
    assert "there is no such folder" in failure(str(empty / "missing"))
    assert "has no config.json" in failure(str(empty))
    assert "it is not a folder" in failure(str(folder / "config.json"))
    assert "has no field 'layers'" in failure(str(folder), {"layers": 2})
    assert "cannot be loaded" in failure(str(folder), {"vocab_size": 32}, context=8)
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[:100])
    assert "cannot be loaded" in failure(str(folder), context=8)
    (folder / "config.json").write_text("{")
    assert "config.json is not JSON" in failure(str(folder))
    (folder / "config.json").write_text("[]")
    assert "not a JSON object" in failure(str(folder))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": None}, 'names no class in "architectures"'),
        ({"architectures": ["Mine"]}, "has no class 'Mine'"),
        ({"architectures": [["LlamaForCausalLM"]]}, 'names no class in "architectures"'),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quantized"),
        ({"attn_implementation": "kernels-community/flash-attn"}, "may be code from the hub"),
        ({"_attn_implementation": "mine/flash"}, "may be code from the hub"),
        ({"_attn_implementation_internal": "flash_attention_2"}, "may be code from the hub"),
        ({"text_config": {"attn_implementation": "mine/flash"}}, "may be code from the hub"),
        ({"experts_implementation": "mine/experts"}, "may be code from the hub"),
        ({"hidden_size": "wide"}, "not a configuration"),
        ({"num_hidden_layers": [1]}, "not a configuration"),
    ],
)
def test_a_config_that_asks_for_what_is_not_there_is_one_line(folder, changes, message):
    change_config(folder, **changes)
    assert message in failure(str(folder))


def test_code_in_a_folder_is_never_run(folder):
    mark = folder / "ran"
    for name in ("modeling_mine.py", "configuration_mine.py", "custom_generate/generate.py", "__init__.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(f"open({str(mark)!r}, 'w')\nclass Mine: pass\n")
    make(str(folder), context=8).model()
    mapped = {"AutoConfig": "configuration_mine.Mine", "AutoModelForCausalLM": "modeling_mine.Mine"}
    for names in (["LlamaForCausalLM"], ["Mine"]):
        change_config(folder, auto_map=mapped, architectures=names)
        assert "(auto_map), which is never run" in failure(str(folder))
    assert not mark.exists()


def test_pickled_weights_and_adapters_are_refused(folder):
    (folder / "model.safetensors").rename(folder / "kept")
    mark = folder / "ran"
    (folder / "pytorch_model.bin").write_bytes(f"cbuiltins\nopen\n(V{mark}\nVw\ntR.".encode())
    assert "pytorch_model.bin, and only .safetensors files are read" in failure(str(folder))
    (folder / "kept").rename(folder / "model.safetensors")
    assert make(str(folder), context=8).facts["weights"] == "safetensors"
    make(str(folder), context=8).model()
    assert not mark.exists()
    (folder / "adapter_config.json").write_text("{}")
    assert "holds an adapter" in failure(str(folder))
