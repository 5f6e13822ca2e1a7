"""``bench --model`` on a GPU: energy and memory are measured, blocks run fused, and folders load to the device."""

import json

import pytest
import torch

from narrowgauge.bench.energy import open_counter
from narrowgauge.cli import main

pytestmark = pytest.mark.filterwarnings("ignore:torch.get_autocast_gpu_dtype")  # torchao calls it
transformers = pytest.importorskip("transformers")

FIELDS = {
    "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 8192,
}  # fmt: skip
SHORT = ["--batch", "4", "--context", "1024", "--rounds", "2", "--steps", "2", "--no-compile", "--json"]


def run_bench(capsys, *words):
    assert main(["bench", *words, *SHORT]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_class_is_raced_with_energy_memory_and_fused_blocks(capsys):
    data = run_bench(capsys, "--model", "transformers:Qwen3ForCausalLM", "--config", json.dumps(FIELDS))
    rows = {row["name"]: row for row in data["rows"]}
    assert {"bf16", "torch-bf16"} <= set(rows)
    for row in data["rows"]:
        assert row["peak_bytes"] > 12 * data["parameters"]
        assert 0 < row["mfu"] < 1
        if open_counter("cuda") is not None:
            assert 50 < row["joules_per_token"] * row["tokens_per_s"] < 1500  # watts
    assert rows["bf16"]["conversion"]["fused"][0]["count"] == 4
    assert all(gap["comparable"] for gap in data["losses"])


def test_the_counter_advances_while_the_gpu_works():
    counter = open_counter("cuda")
    if counter is None:
        pytest.skip("this GPU has no energy counter")
    before = counter.read_joules()
    x = torch.randn(8192, 8192, device="cuda")
    for _ in range(200):
        x @ x
    torch.cuda.synchronize()
    assert counter.read_joules() > before


def test_a_folder_is_loaded_to_the_gpu(tmp_path, capsys):
    transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**FIELDS)).save_pretrained(tmp_path)
    data = run_bench(capsys, "--model", str(tmp_path), "--recipes", "bf16", "--peers", "torch")
    assert data["weights"] == "safetensors"
    first = {row["name"]: row["loss_first"] for row in data["rows"]}
    assert first["bf16"] == pytest.approx(first["torch-bf16"], rel=1e-2)
