"""Four ranks shard mixtures of experts by FSDP2, with gauges on: the losses are those of one process."""

import pytest
import torch
from processes import run_ranks

from narrowgauge import Engine
from narrowgauge.gauges.examiner import Examiner
from narrowgauge.models.moe import MoE, MoEConfig
from narrowgauge.parameters import is_sharded
from narrowgauge.ranks import shard
from narrowgauge.ranks.world import SINGLE_PROCESS, join_world
from narrowgauge.runs.rank_batches import RankBatches

RANKS, STEPS = 4, 2
RECIPES = ("fp32", "bf16", "fp8-lean")


def make_own():
    """Without the balance loss: each rank balances its own tokens, which is not the balance of all."""
    return MoE(
        MoEConfig(
            layers=2, width=64, heads=4, kv_heads=2, experts=4, chosen=2, hidden=32, shared=1, context=16, vocab=100,
            balance_factor=0.0,
        )
    )  # fmt: skip


def make_olmoe():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    tokens = {"vocab_size": 100, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False}
    return transformers.OlmoeForCausalLM(
        transformers.OlmoeConfig(**sizes, **tokens, num_experts=4, num_experts_per_tok=2)
    )


MODELS = {"own": make_own, "olmoe": make_olmoe}


def train(name, recipe, world=SINGLE_PROCESS):
    torch.manual_seed(0)
    model = MODELS[name]()
    if world.size > 1:
        shard(model, recipe)
    engine = Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-3), recipe)
    routers = [p for name, p in model.named_parameters() if "router" in name or "mlp.gate." in name]
    assert [(p.dtype, is_sharded(p)) for p in routers] == [(torch.float32, False)] * 2  # every rank has them
    examiner = Examiner(engine, every=1)
    part, losses, tokens = RankBatches(world.rank, world.size, 1), [], 0
    for step in range(STEPS):
        inputs = torch.randint(0, 100, (8, 16), generator=torch.Generator().manual_seed(step))
        (rows,) = part.select_rows((inputs,))
        with engine.forward():
            loss = model(rows, rows) if name == "own" else model(input_ids=rows, labels=rows).loss
        engine.backward(loss)
        assert engine.step().applied
        losses.append(engine.update_sync.average(loss.detach()).item())
        (snapshot,), _, findings = examiner.collect(wait=True)
        assert not findings
        assert len(snapshot.experts) == 2
        tokens = sum(snapshot.experts[0].counts)
    assert tokens == rows.numel() * 2  # of this rank
    return losses


def train_all():
    with join_world("cpu") as world:
        return {f"{name} {recipe}": train(name, recipe, world) for name in MODELS for recipe in RECIPES}


@pytest.mark.timeout(240)
def test_four_ranks_train_like_one_process(tmp_path):
    found = run_ranks(RANKS, train_all, tmp_path)
    assert all(answer == found[0] for answer in found)
    for name in MODELS:
        for recipe in RECIPES:
            losses = train(name, recipe)
            assert found[0][f"{name} {recipe}"] == pytest.approx(losses, rel=1e-5 if recipe == "fp32" else 3e-3), recipe
