"""Forecasts of runs with Muon: one moment less for the matrices of blocks, and no step on a GPU."""

import json

import pytest

from narrowgauge import hardware, tasks
from narrowgauge.cli import main
from narrowgauge.forecast.run import Scenario
from narrowgauge.recipe import parse
from narrowgauge.runs.optimizers import with_optimizer

LAYERS, WIDTH = 4, 256


@pytest.mark.parametrize(("recipe", "bytes_each"), [("bf16", 4.0), ("fp8", 4.0), ("fp8-lean", 1.0 + 1 / 32)])
def test_moments_of_matrices_are_half(recipe, bytes_each):
    found = {}
    for name in ("adamw", "muon"):
        task = with_optimizer(tasks.find(f"gpt:{LAYERS}x{WIDTH}", batch=4, context=128), name)
        found[name] = Scenario(task=task, gpu=hardware.find_gpu("h200")).predict_memory(parse(recipe))
    matrices = LAYERS * 12 * WIDTH**2
    assert found["adamw"].moments - found["muon"].moments == pytest.approx(bytes_each * matrices, rel=0.02)
    assert found["adamw"].master == found["muon"].master


def run(capsys, *arguments):
    code = main([*arguments, "--json"])
    said = capsys.readouterr()
    return code, json.loads(said.out) if code == 0 else said.err


def test_commands_take_the_optimizer(capsys):
    size = [f"gpt:{LAYERS}x{WIDTH}", "--batch", "4", "--context", "128", "--recipes", "bf16", "--gpu", "h200"]
    moments, optimizer_flops, times = {}, {}, {}
    for name in ("adamw", "muon"):
        code, found = run(capsys, "memory", *size, "--no-search", "--optimizer", name)
        assert code == 0 and found["optimizer"] == name
        moments[name] = found["recipes"]["bf16"]["moments"]
        code, found = run(capsys, "roofline", *size, "--quick", "--optimizer", name)
        assert code == 0 and found["optimizer"] == name
        own = [layer for layer in found["layers"] if layer["phase"] == "step"]
        optimizer_flops[name] = sum(layer["flops"] for layer in own)
        times[name] = found["recipes"]["bf16"]["step_ms"]
    assert moments["muon"] < 0.6 * moments["adamw"]
    # Five steps, of a matrix [r, c] with r <= c: 2 r r c, 2 r r r and 2 r r c.
    shapes = [(WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (WIDTH, 4 * WIDTH), (WIDTH, 4 * WIDTH)]
    expected = LAYERS * sum(5 * 2 * r * r * (2 * c + r) for r, c in shapes)
    assert optimizer_flops["muon"] - optimizer_flops["adamw"] == pytest.approx(expected, rel=0.02)
    assert times["muon"] > times["adamw"]


@pytest.mark.parametrize("command", ["memory", "roofline"])
def test_unknown_optimizers_are_one_line(command, capsys):
    code, said = run(capsys, command, "gpt:2x64", "--optimizer", "sophia")
    assert code == 2 and "--optimizer sophia: expected adamw or muon" in said
