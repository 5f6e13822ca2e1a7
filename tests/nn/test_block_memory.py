"""What blocks may keep under each recipe, and that every mix of it computes the same."""

import copy

import pytest
import torch
from torch import nn

from narrowgauge import Engine, UsageError
from narrowgauge.integrations.hosted import Hosted
from narrowgauge.models.gpt import GPT, GPTConfig
from narrowgauge.nn.block_memory import find_block_memory
from narrowgauge.nn.fused.modules import FusedBlock
from narrowgauge.nn.memory_plan import MemoryPlan
from narrowgauge.nn.module_changes import find_change
from narrowgauge.nn.recompute import Recomputed
from narrowgauge.recipe import parse

VOCAB, CONTEXT, STEPS = 64, 32, 4
FP8 = "fp8[products=all]"
ALL_KEPT = {FP8: "fp8[products=all,activations=bf16]"}
"""Recipes that keep everything as it was computed, where that is not the default."""


def make_gpt():
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab=VOCAB, context=CONTEXT, layers=4, width=64, heads=4))


class Stack(nn.Module):
    """Blocks that are not fused: no attention."""

    def __init__(self):
        super().__init__()
        make = lambda: nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))  # noqa: E731
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(make() for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


def make_plan(*names, budget=10**9):
    return MemoryPlan(budget=budget, blocks={f"blocks.{number}": name for number, name in enumerate(names)})


def train(model, recipe, plan=None, batch=4, **options):
    """Return the engine, the losses of some steps and the weights at the end."""
    engine = Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-3), recipe, memory_budget=plan, **options)
    losses = []
    for step in range(STEPS):
        tokens = torch.randint(VOCAB, (batch, CONTEXT + 1), generator=torch.Generator().manual_seed(step))
        with engine.forward():
            if isinstance(model, Stack):
                loss = model(torch.nn.functional.one_hot(tokens % 32, 32).float()).square().mean()
            else:
                loss = model(tokens[:, :-1], tokens[:, 1:])
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return engine, losses, {name: value.detach().clone() for name, value in model.named_parameters()}


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        ("fp8", ["none", "normalized", "selective", "recompute", "8bit", "full", "offload"]),
        ("fp8-lean", ["none", "normalized", "selective", "recompute", "8bit", "full", "offload"]),
        ("bf16", ["none", "selective", "recompute", "full", "offload"]),
        ("bf16-lean", ["none", "selective", "recompute", "full", "offload"]),
        ("fp8[activations=recompute]", ["selective", "recompute", "full", "offload"]),
        ("fp8[activations=bf16]", ["none", "selective", "full", "offload"]),
        ("fp8[activations=normalized]", ["normalized", "selective", "full", "offload"]),
        ("fp8[activations=8bit]", ["selective", "8bit", "full", "offload"]),
        ("fp8-lean[checkpoint=selective]", ["selective", "full", "offload"]),
        ("bf16[checkpoint=selective]", ["selective", "full", "offload"]),
        ("fp8-lean[checkpoint=none]", ["none", "normalized", "recompute", "8bit", "full", "offload"]),
        ("fp8-lean[offload=activations]", ["none", "normalized", "selective", "recompute", "8bit", "full"]),
        ("bf16[checkpoint=full]", ["full", "offload"]),
    ],
)
def test_a_recipe_leaves_open_what_it_does_not_set(recipe, options):
    """``checkpoint=full`` of a lean recipe counts as not set: with memory to spare, its blocks keep more."""
    parsed = parse(recipe).replace(products="all") if recipe.startswith("fp8") else parse(recipe)
    model = make_gpt()
    Engine(model, torch.optim.AdamW(model.parameters()), parsed, fused=True)
    blocks = find_block_memory(model, parsed)
    assert [block.path for block in blocks] == [f"blocks.{number}" for number in range(4)]
    assert all(list(block.options) == options for block in blocks)
    if "activations=8bit" in recipe:
        assert all(fields["activations"] == "8bit" for fields in blocks[0].options.values())


@pytest.mark.parametrize(
    "recipe", [FP8, "bf16", "fp8-lean[products=all]", "fp8-lean[products=all,offload=activations]"]
)
def test_every_mix_computes_what_the_recipe_computes(recipe):
    _, losses, weights = train(make_gpt(), ALL_KEPT.get(recipe, recipe), fused=True)
    last = "full" if "offload" in recipe else "offload"
    for names in (("none", "selective", "full", "none"), (last, "full", "none", "selective"), (last, last, last, last)):
        engine, mixed_losses, mixed = train(make_gpt(), recipe, make_plan(*names), fused=True)
        assert mixed_losses == losses
        assert all(torch.equal(mixed[name], weights[name]) for name in weights)
        plans = [find_change(block, FusedBlock).plan.checkpoint for block in engine.model.blocks]
        assert plans == ["full" if name == "offload" else name for name in names]
        assert engine.checkpointed == [f"blocks.{i}" for i, name in enumerate(names) if name != "none"]


@pytest.mark.parametrize("recipe", [FP8, "bf16", "fp8-lean[products=all]"])
def test_recomputed_inputs_of_some_activations_change_no_bit(recipe):
    _, losses, weights = train(make_gpt(), ALL_KEPT.get(recipe, recipe), fused=True)
    engine, mixed_losses, mixed = train(
        make_gpt(), recipe, make_plan("recompute", "full", "none", "recompute"), fused=True
    )
    assert mixed_losses == losses and all(torch.equal(mixed[name], weights[name]) for name in weights)
    plans = [find_change(block, FusedBlock).plan for block in engine.model.blocks]
    assert [plan.activations for plan in plans] == ["recompute", "bf16", "bf16", "recompute"]
    assert engine.checkpointed == ["blocks.1"]


def test_eight_bits_in_some_blocks_change_gradients_little():
    _, losses, _ = train(make_gpt(), ALL_KEPT[FP8], fused=True)
    _, mixed, _ = train(make_gpt(), FP8, make_plan("8bit", "normalized", "full", "8bit"), fused=True)
    assert mixed[:2] == losses[:2]  # the first step, without scales, recomputes
    assert torch.allclose(torch.tensor(mixed), torch.tensor(losses), atol=1e-3)


def test_blocks_that_are_not_fused_mix_as_well():
    _, losses, weights = train(Stack(), "fp32")
    engine, mixed_losses, mixed = train(Stack(), "fp32", make_plan("none", "selective", "full", "none"))
    blocks = find_block_memory(engine.model, engine.recipe)
    assert len(blocks) == 4 and all(isinstance(block.change, Recomputed) for block in blocks)
    assert mixed_losses == losses and all(torch.equal(mixed[name], weights[name]) for name in weights)


def test_a_larger_batch_than_planned_is_recomputed():
    engine, *_ = train(make_gpt(), FP8, make_plan("none", "selective", "8bit", "full"), fused=True)
    change = find_change(engine.model.blocks[0], FusedBlock)
    planned, larger = torch.zeros(4, CONTEXT, 64), torch.zeros(5, CONTEXT, 64)
    assert change.get_plan(planned).checkpoint == "none" and change.get_plan(larger).checkpoint == "full"
    with torch.no_grad():  # an evaluation keeps nothing
        assert change.get_plan(larger).checkpoint == "none"
    changed = find_change(copy.deepcopy(engine.model).blocks[0], FusedBlock)
    assert changed.size == change.size and changed.size is not change.size


def test_a_plan_for_another_model_is_refused():
    model = make_gpt()
    optimizer = torch.optim.AdamW(model.parameters())
    for plan in (make_plan("none", "full"), make_plan("none", "8bit", "full", "none")):
        with pytest.raises(UsageError, match="plan was made for another model or recipe"):
            Engine(model, optimizer, "bf16", fused=True, memory_budget=plan)


def test_a_cpu_has_no_budget_and_graphs_do_not_free():
    model = make_gpt()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(UsageError, match="torch does not count what a CPU allocates"):
        Engine(model, optimizer, "bf16", memory_budget="2GB")
    with pytest.raises(UsageError, match="CUDA graphs free nothing"):
        Engine(model, optimizer, "bf16", memory_budget=make_plan(), cuda_graphs=True)


def test_a_resumed_run_adopts_the_plan_of_its_state():
    names = "8bit", "none", "full", "selective"
    saved = train(make_gpt(), FP8, make_plan(*names), fused=True)[0].state_dict()
    model = make_gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    other = make_plan(*["full"] * 4)
    engine = Engine(model, optimizer, FP8, fused=True, memory_budget=other)
    engine.load_state_dict(saved)
    assert tuple(engine.memory_plan.blocks.values()) == names
    engine = Engine(model, optimizer, FP8, fused=True, memory_budget=make_plan(*["full"] * 4, budget=2 * 10**9))
    engine.load_state_dict(saved)  # of another budget
    assert set(engine.memory_plan.blocks.values()) == {"full"}
    engine = Engine(model, optimizer, FP8, fused=True)
    engine.load_state_dict(saved)
    assert engine.memory_plan is None


def test_a_hosted_engine_takes_a_plan():
    """Lightning, Accelerate and transformers pass their options on to it."""
    model, names = make_gpt(), ("none", "selective", "8bit", "full")
    engine = Hosted(model, torch.optim.AdamW(model.parameters()), FP8, memory_budget=make_plan(*names))
    assert tuple(engine.memory_plan.blocks.values()) == names
