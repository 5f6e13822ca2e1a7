"""``memory --model FOLDER``: predicted from config.json and the headers, with loading in the form of the recipe."""

import dataclasses
import json

import pytest
import torch
from tiny_folders import EXPERTS, SMALL, save

from narrowgauge import hardware
from narrowgauge.cli import main
from narrowgauge.forecast.run import Scenario
from narrowgauge.pretrained import tensor_readers
from narrowgauge.recipe import parse
from narrowgauge.tasks import user_model

WIDE = {**SMALL, "num_hidden_layers": 1, "hidden_size": 256, "intermediate_size": 1024, "vocab_size": 16384}


@pytest.fixture
def no_reading(monkeypatch):
    def fail(*_):
        raise AssertionError("weights were read")

    monkeypatch.setattr(tensor_readers.FileReader, "read", fail)
    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", fail)


def test_loading_is_predicted_without_an_fp32_copy(tmp_path, no_reading, monkeypatch):
    monkeypatch.setattr(tensor_readers, "PIECE", 1 << 17)  # in proportion to the model
    save(tmp_path, dtype=torch.bfloat16, fields=WIDE)
    task = user_model.make_task(str(tmp_path), {}, 1, 32, small=False)
    gpu = hardware.find_gpu("h200")
    weights = 4 * task.facts["parameters"]
    for recipe in ("bf16-lean", "bf16"):
        memory = Scenario(task=task, gpu=gpu).predict_memory(parse(recipe))
        assert weights < memory.building < 1.25 * weights
        assert memory.peak > memory.building
    before = dataclasses.replace(task, model=lambda: task.model())  # an FP32 model that the engine narrows
    assert Scenario(task=before, gpu=gpu).predict_memory(parse("bf16-lean")).building > 1.5 * weights
    sharded = Scenario(task=task, gpu=gpu, shards=2).predict_memory(parse("bf16-lean"))
    assert sharded.total > 0


def test_the_command_takes_a_folder(tmp_path, no_reading, capsys):
    save(tmp_path / "llama", dtype=torch.bfloat16)
    options = ["--recipes", "bf16-lean", "--batch", "2", "--context", "32", "--gpu", "h200", "--no-search", "--json"]
    assert main(["memory", "--model", str(tmp_path / "llama"), *options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["batch"] == 2
    assert found["recipes"]["bf16-lean"]["fits"] is True
    (tmp_path / "llama" / "model.safetensors").write_bytes(b"")
    assert main(["memory", "--model", str(tmp_path / "llama"), *options]) == 2
    assert "cannot be loaded: it is truncated" in capsys.readouterr().err
    assert main(["memory", "gpt-tiny", "--model", str(tmp_path / "llama"), *options]) == 2
    assert "either the task gpt-tiny or --model" in capsys.readouterr().err
    assert main(["memory", "--config", "{}", *options]) == 2
    assert "--config is for --model" in capsys.readouterr().err


def test_mixtures_are_predicted_as_they_are_loaded(tmp_path, no_reading):
    save(tmp_path, "MixtralForCausalLM", torch.bfloat16, fields=EXPERTS | {"hidden_size": 256})
    task = user_model.make_task(str(tmp_path), {}, 1, 32, small=False)
    memory = Scenario(task=task, gpu=hardware.find_gpu("h200")).predict_memory(parse("bf16-lean"))
    assert memory.building < 4.3 * task.facts["parameters"] + 4 * tensor_readers.PIECE * 4


def test_models_that_transformers_has_to_load_are_predicted_in_fp32(tmp_path, no_reading, monkeypatch):
    save(tmp_path, "MixtralForCausalLM", torch.bfloat16, fields=EXPERTS)
    monkeypatch.setattr("narrowgauge.pretrained.match.find_stacking", lambda *_: None)
    task = user_model.make_task(str(tmp_path), {}, 1, 32, small=False)
    memory = Scenario(task=task, gpu=hardware.find_gpu("h200")).predict_memory(parse("bf16-lean"))
    assert memory.building > 4 * task.facts["parameters"]
