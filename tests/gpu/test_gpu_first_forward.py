"""The first block's forward in BF16 on a GPU: near FP8 and BF16, in every way to keep activations, and with graphs."""

import pytest
import torch

from narrowgauge import Engine
from narrowgauge.models.gpt import GPT, GPTConfig
from narrowgauge.models.llama import Llama, LlamaConfig

pytestmark = pytest.mark.filterwarnings(
    "ignore:Synchronization debug mode", "ignore::narrowgauge.errors.SlowRecipeWarning"
)


def gpt():
    return GPT(GPTConfig(layers=6, width=256, heads=4, vocab=512, context=128))


def llama():
    return Llama(LlamaConfig(layers=6, width=256, heads=4, kv_heads=2, hidden=768, vocab=512, context=128))


def make(recipe, build=gpt, **options):
    torch.manual_seed(0)
    model = build().cuda()
    return Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True), recipe, **options)


def run_step(engine, tokens):
    with engine.forward():
        loss = engine.model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    engine.backward(loss)
    return loss.detach(), engine.step()


def train(engine, steps=12):
    tokens = torch.randint(0, 512, (8, 129), generator=torch.Generator().manual_seed(0)).cuda()
    found = [run_step(engine, tokens) for _ in range(steps)]
    assert all(step.applied for _, step in found)
    return [loss.item() for loss, _ in found]


def count_bf16(engine):
    return sum(layer.choice.output == "bf16" for layer in engine.conversion.layers)


@pytest.mark.parametrize("build", [gpt, llama])
@pytest.mark.parametrize(
    "fields",
    [
        "", ",activations=bf16", ",activations=8bit", ",activations=recompute", ",checkpoint=selective",
        ",checkpoint=full", ",checkpoint=full,offload=activations", ",scaling=current",
        ",master=split,moments=8bit,gradients=bf16",
    ],
)  # fmt: skip
def test_training_is_near_that_of_fp8_and_bf16(build, fields):
    mixed, narrow = (make(f"fp8[products=all{end}{fields}]", build) for end in ("", ",first_forward=fp8"))
    assert count_bf16(mixed) == (3 if build is gpt else 4) and count_bf16(narrow) == 0
    losses, plain = train(mixed), train(make("bf16", build))
    assert losses[-1] < losses[0] - 0.3
    assert losses == pytest.approx(train(narrow), rel=0.02) and losses == pytest.approx(plain, rel=0.03)


@pytest.mark.parametrize("build", [gpt, llama])
def test_graphs_of_blocks_change_nothing(build):
    with_graphs, without = (train(make("fp8[products=all]", build, cuda_graphs=on), 6) for on in (True, False))
    assert with_graphs == pytest.approx(without, rel=1e-3)


def test_a_step_does_not_wait_for_the_gpu():
    engine = make("fp8[products=all]")
    train(engine, 3)
    tokens = torch.randint(0, 512, (8, 129), device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run_step(engine, tokens)
    finally:
        torch.cuda.set_sync_debug_mode("default")
