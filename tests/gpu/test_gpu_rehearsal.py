"""Rehearsals on a GPU: kernels are compiled in other threads, and training computes as without them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import narrowgauge as ng
from narrowgauge import tasks
from narrowgauge.kernels.experts import activation, products, rows, slots, wide
from narrowgauge.nn.fused import rehearse

SCRIPT = """
import json, sys, threading
import torch
from triton.runtime import jit
import narrowgauge as ng
from narrowgauge import tasks

made = []
compile_kernel = jit.JITFunction._do_compile


def count(self, *args, **kwargs):
    made.append((getattr(self, "__name__", str(self)), threading.current_thread() is threading.main_thread()))
    return compile_kernel(self, *args, **kwargs)


jit.JITFunction._do_compile = count
task = tasks.find(sys.argv[2], batch=8, context=256)
with torch.device("cuda"):
    model = task.model()
engine = ng.Engine(model, torch.optim.AdamW(model.parameters(), 1e-3), sys.argv[1])
steps = []
for number in range(3):
    batch = tuple(tensor.cuda() for tensor in task.batch(number, "train"))
    with engine.forward():
        loss = task.loss(engine.model, batch)
    engine.backward(loss)
    engine.step()
    steps.append(len(made))
print(json.dumps({"made": made, "steps": steps, "loss": loss.item()}))
"""


def train(recipe: str, steps: int = 3, name: str = "gpt:3x256") -> tuple[list[float], Any]:
    torch.manual_seed(0)
    task = tasks.find(name, batch=8, context=256)
    with torch.device("cuda"):
        model = task.model()
    engine = ng.Engine(model, torch.optim.AdamW(model.parameters(), 1e-3), recipe)
    losses, amaxes = [], []
    for number in range(steps):
        batch = tuple(tensor.cuda() for tensor in task.batch(number, "train"))
        with engine.forward():
            loss = task.loss(engine.model, batch)
        engine.backward(loss)
        scales = engine.conversion.scales
        amaxes.append(None if scales is None else (scales.amax.tolist(), scales.counts.tolist()))
        engine.step()
        losses.append(loss.item())
    return losses, amaxes


RECIPES = ["fp8", "fp8-lean", "bf16", "fp8[activations=8bit]"]
MIXTURES = ["fp8[products=all]", "fp8-lean[products=all]", "bf16", "bf16-lean"]


@pytest.mark.parametrize(
    ("task", "recipe"),
    [*(("gpt:3x256", recipe) for recipe in RECIPES), *(("moe-tiny", recipe) for recipe in MIXTURES)],
)
def test_training_computes_as_without_rehearsals(task: str, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearse, "_done", set())
    monkeypatch.setattr(rehearse, "_places", {})
    losses, amaxes = train(recipe, name=task)
    assert rehearse._done
    monkeypatch.setattr(rehearse, "MOST_REHEARSALS", 0)
    plain, wanted = train(recipe, name=task)
    assert losses[0] == plain[0] and amaxes[0] == wanted[0]  # later steps add gradients in any order
    assert losses == pytest.approx(plain, rel=1e-3)


def compile_kernels(recipe: str, task: str, cache: Path) -> Any:
    """Return the kernels that are compiled in a process with an empty cache, and whether its main thread does it."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, "-c", SCRIPT, recipe, task]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("recipe", ["fp8[products=all]", "bf16"])
def test_kernels_of_experts_are_compiled_in_other_threads(recipe: str, tmp_path: Path) -> None:
    found = compile_kernels(recipe, "moe-tiny", tmp_path)
    names = {name for module in (activation, products, rows, slots, wide) for name in vars(module)}
    of_experts = [(name, is_main) for name, is_main in found["made"] if name in names]
    assert len(of_experts) >= 6 and not any(is_main for _, is_main in of_experts), of_experts
    assert found["steps"][2] == found["steps"][1]


@pytest.mark.parametrize("recipe", ["fp8", "bf16"])
def test_kernels_of_blocks_and_head_are_compiled_in_other_threads(recipe: str, tmp_path: Path) -> None:
    found = compile_kernels(recipe, "gpt:3x256", tmp_path)
    here = [name for name, is_main in found["made"] if is_main]
    assert len(here) < 0.4 * len(found["made"]), here
    first, second, third = found["steps"]
    assert second - first <= 3 and third == second  # what later steps launch was compiled with the first


def test_dropout_draws_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_head=4, n_embd=256, vocab_size=512, n_positions=128)
    assert config.resid_pdrop > 0 and config.attn_pdrop > 0
    ids = torch.randint(0, 512, (8, 128), device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    losses = []
    for most in (256, 0):
        monkeypatch.setattr(rehearse, "_done", set())
        monkeypatch.setattr(rehearse, "_places", {})
        monkeypatch.setattr(rehearse, "MOST_REHEARSALS", most)
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(config).cuda().train()
        engine = ng.Engine(model, torch.optim.AdamW(model.parameters(), 1e-3), "fp8[products=all]")
        assert len(engine.conversion.blocks) == 2
        torch.manual_seed(2)
        with engine.forward():
            loss = engine.model(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        losses.append((loss.item(), torch.cuda.get_rng_state()))
        assert bool(rehearse._done) == (most > 0)
    (first, state), (plain, wanted) = losses
    assert first == plain and torch.equal(state, wanted)
