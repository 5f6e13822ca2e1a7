"""Experts without tokens, collapsed routers, growing logits and lost gradients are found; balanced routing is not."""

import json
import random

import pytest
import torch
from torch import nn

from narrowgauge import Engine
from narrowgauge.gauges.examiner import Examiner
from narrowgauge.gauges.rules.expert_rules import ExpertRules
from narrowgauge.gauges.watch.expert_reader import find_expert_layers
from narrowgauge.gauges.watch.expert_readings import ExpertReading, count_effective
from narrowgauge.gauges.watch.snapshots import Snapshot
from narrowgauge.models.moe import MoE, MoEConfig

SMALL = MoEConfig(layers=2, width=32, heads=2, kv_heads=2, experts=8, chosen=2, hidden=32, context=64, vocab=100)


def make(config=SMALL):
    torch.manual_seed(0)
    return MoE(config)


def batch(rows=8, length=64):
    return torch.randint(0, 100, (rows, length), generator=torch.Generator().manual_seed(1))


def compute_loss(model, inputs):
    if isinstance(model, MoE):
        return model(inputs, inputs)
    return model(input_ids=inputs, labels=inputs).loss


def train(model, recipe="bf16", steps=9, inputs=None, lr=1e-4, each=None):
    """Train with a snapshot in every second update, and return the findings by rule and place."""
    engine = Engine(model, torch.optim.AdamW(model.parameters(), lr=lr), recipe)
    examiner = Examiner(engine, every=2)
    for step in range(steps):
        with engine.forward():
            loss = compute_loss(model, batch() if inputs is None else inputs)
        engine.backward(loss)
        assert engine.step().applied
        examiner.collect(wait=True)
        if each is not None:
            each(step)
    examiner.finish()
    return {(one.rule, one.where): one for one in examiner.findings}


def prefer(model, routers, **sizes):
    """Give all tokens a common direction, in which only the given experts' rows of every router point."""
    with torch.no_grad():
        (model.tok if isinstance(model, MoE) else model.get_input_embeddings()).weight += 0.05
        for router in routers:
            router.weight -= router.weight.mean(-1, keepdim=True)
            router.weight *= 5
            for expert, size in sizes.items():
                router.weight[int(expert[1:])] = size


def list_routers(model):
    return [layer.router for layer in find_expert_layers(model)]


def reading(counts, chosen=2, **more):
    return ExpertReading(module="experts", chosen=chosen, counts=tuple(counts), **more)


def rules_of(*readings, rules=None):
    rules = rules or ExpertRules()
    found = []
    for update, one in enumerate(readings, 1):
        found = rules.check(Snapshot(update, [], True, experts=[one]))
    return {finding.rule for finding in found}


@pytest.mark.parametrize("recipe", ["fp32", "bf16", "fp16", "fp8", "fp8-lean", "bf16-lean[gradients=released]"])
def test_a_balanced_model_has_no_findings(recipe):
    assert train(make(), recipe, inputs=batch(4)) == {}


def test_an_expert_without_tokens():
    model = make()
    prefer(model, list_routers(model), e3=-1.0)
    found = train(model)
    assert set(found) == {("dead-experts", f"blocks.{layer}.mixture.experts") for layer in (0, 1)}
    assert "expert 3 of 8 got no token; an equal share would be" in next(iter(found.values())).detail


def test_a_router_that_collapses():
    """A second expert gets the rest, because each token needs two."""
    model = make()
    prefer(model, list_routers(model), e3=1.0, e5=0.7)
    found = train(model)
    assert {rule for rule, _ in found} == {"router-collapse"}
    detail = found["router-collapse", "blocks.1.mixture.experts"].detail
    assert "used as if there were 2 " in detail
    assert "expert 3 gets 50% of all choices, where 12.5% would be equal" in detail


def test_router_logits_that_are_too_large_or_grow():
    model = make()
    with torch.no_grad():
        for block in model.blocks:
            block.mixture.router.weight.mul_(1000)
    assert {rule for rule, _ in train(model)} == {"router-logits"}

    model = make()

    def grow(step):
        with torch.no_grad():
            for block in model.blocks:
                block.mixture.router.weight.mul_(4)

    found = train(model, steps=12, each=grow)
    assert {rule for rule, _ in found} == {"router-logits"}
    assert "at first it was" in next(iter(found.values())).detail


def test_a_collapse_that_passes_is_not_reported():
    """A router that starts at zero chooses the same experts for every token, until it has learned."""
    model = make()
    with torch.no_grad():
        for block in model.blocks:
            block.mixture.router.weight.zero_()
    assert train(model, lr=1e-2, steps=12) == {}


def draw(total, experts, chosen, weights, seed):
    """Counts of tokens that each choose different experts, with the given preferences."""
    scores = torch.rand(total, experts, generator=torch.Generator().manual_seed(seed)).log() / torch.tensor(weights)
    return torch.bincount(scores.topk(chosen).indices.flatten(), minlength=experts).tolist()


@pytest.mark.parametrize("tokens", [1, 4, 16, 64, 256, 4096])
@pytest.mark.parametrize(("experts", "chosen"), [(2, 1), (2, 2), (4, 1), (8, 2), (64, 8), (256, 8)])
def test_balanced_routing_of_any_size_shows_nothing(tokens, experts, chosen):
    for seed in range(5):
        rules = ExpertRules()
        for step in range(8):
            counts = draw(tokens, experts, chosen, [1.0] * experts, 100 * seed + step)
            assert not rules.check(Snapshot(step, [], True, experts=[reading(counts, chosen)])), counts


@pytest.mark.parametrize("tokens", [1, 16, 256, 4096])
def test_unequal_routing_that_still_uses_all_experts_shows_nothing(tokens):
    """One expert of 16 gets a tenth of an equal share, and one five times as much."""
    weights = [1.0] * 14 + [0.1, 5.0]
    for seed in range(20):
        rules = ExpertRules()
        for step in range(8):
            counts = draw(tokens, 16, 2, weights, 100 * seed + step)
            assert not rules.check(Snapshot(step, [], True, experts=[reading(counts)])), counts


def test_few_tokens_are_added_up_until_they_say_something():
    one = reading([5, 5, 5, 0, 5, 5, 5, 5])
    assert rules_of(*[one] * 8) == set()
    many = reading([50, 50, 50, 0, 50, 50, 50, 50])
    assert rules_of(*[many] * 4) == set()
    assert rules_of(*[many] * 5) == {"dead-experts"}
    assert rules_of(*[many] * 5, reading([50] * 8)) == set()


def test_a_collapse_hides_the_dead_experts_that_follow_from_it():
    assert rules_of(reading([5000, 5000, 0, 0, 0, 0, 0, 0])) == {"router-collapse"}
    assert rules_of(reading([3000, 3000, 3000, 3000, 0, 0, 0, 0])) == {"dead-experts"}
    assert rules_of(reading([5000, 5000], chosen=2)) == set()  # no choice, no collapse


def test_experts_with_tokens_and_without_a_gradient():
    assert rules_of(reading([100] * 4, idle=(2,))) == {"expert-underflow"}
    assert rules_of(reading([100, 100, 3, 100], idle=(2,))) == set()  # too few tokens to tell
    assert rules_of(reading([100] * 4, idle=(0, 1, 2, 3))) == set()  # the whole tensor: other rules say it


def test_gradients_of_zeros_are_read():
    """One expert's output is multiplied by zero, so its weights get no gradient."""
    model = make()

    class Loses(nn.Module):
        def __init__(self, experts):
            super().__init__()
            self.gate_up_proj, self.down_proj = experts.gate_up_proj, experts.down_proj
            self.inner = [experts]

        def forward(self, hidden, index, weights):
            return self.inner[0](hidden, index, torch.where(index == 6, 0.0, weights))

    for block in model.blocks:
        block.mixture.experts = Loses(block.mixture.experts)
    found = train(model)
    assert {rule for rule, _ in found} == {"expert-underflow"}
    assert "expert 6 of 8 got" in next(iter(found.values())).detail


def test_effective_experts():
    assert count_effective([7, 7, 7, 7]) == pytest.approx(4)
    assert count_effective([7, 0, 0, 0]) == pytest.approx(1)
    assert count_effective([0, 0]) == 0
    random.seed(0)
    for _ in range(50):
        counts = [random.randrange(1, 100) for _ in range(6)]
        assert 1 < count_effective(counts) <= 6 + 1e-9


def test_the_state_round_trips():
    rules, again = ExpertRules(), ExpertRules()
    rules_of(*[reading([50, 50, 50, 0, 50, 50, 50, 50], logits=3.0)] * 4, rules=rules)
    again.load_state_dict(json.loads(json.dumps(rules.state_dict())))
    assert again.state_dict() == rules.state_dict()
    assert rules_of(reading([50, 50, 50, 0, 50, 50, 50, 50], logits=31.0), rules=again) == {
        "dead-experts", "router-logits",
    }  # fmt: skip
    again.load_state_dict({})


def test_a_reading_round_trips():
    one = reading([3, 0, 9], logits=1.5, idle=(1,))
    assert ExpertReading.from_event(json.loads(json.dumps(one.as_event()))) == one
    for wrong in (
        [],
        ["a", 0, [1], None, []],
        ["a", 1, [], None, []],
        ["a", 1, [-1], None, []],
        ["a", 1, "x", None, []],
    ):
        with pytest.raises((ValueError, TypeError)):
            ExpertReading.from_event(wrong)


def test_counts_are_those_of_the_routers():
    """In every snapshot, for all layers; an expert that another rank holds is not counted."""
    model = make()
    seen = {}
    for index, block in enumerate(model.blocks):
        block.mixture.router.register_forward_hook(
            lambda _m, _i, made, path=f"blocks.{index}.mixture.experts": seen.update({path: made[0]})
        )
    engine = Engine(model, torch.optim.AdamW(model.parameters()), "fp32")
    examiner = Examiner(engine, every=1)
    with engine.forward():
        loss = compute_loss(model, batch(2))
    engine.backward(loss)
    engine.step()
    (snapshot,), _, _ = examiner.collect(wait=True)
    assert len(snapshot.experts) == 2
    for one in snapshot.experts:
        assert list(one.counts) == torch.bincount(seen[one.module].flatten(), minlength=8).tolist()
        assert one.chosen == 2
        assert one.logits > 0
    assert Snapshot(1, [], True).as_event() == {"applied": True, "readings": []}
    assert len(snapshot.as_event()["experts"]) == 2


FAMILIES = {
    "Mixtral": {"num_local_experts": 8},
    "Qwen3Moe": {"num_experts": 8, "moe_intermediate_size": 32, "head_dim": 16},
    "Olmoe": {"num_experts": 8},
    "DeepseekV3": {
        "n_routed_experts": 8, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
        "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
        "n_shared_experts": 1,
    },
}  # fmt: skip


def transformers_model(family):
    transformers = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": 100, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 4, "use_cache": False, "num_experts_per_tok": 2, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2,
    }  # fmt: skip
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**sizes, **FAMILIES[family])
    return getattr(transformers, f"{family}ForCausalLM")(config)


@pytest.mark.parametrize(("family", "way"), [*((family, "grouped_mm") for family in FAMILIES), ("Mixtral", "eager")])
def test_models_of_transformers(family, way):
    """Healthy, with an expert that is never chosen, and with two that are always chosen."""
    model = transformers_model(family)
    model.set_experts_implementation(way)
    layers = find_expert_layers(model)
    places = {layer.path for layer in layers}
    assert len(places) == (1 if family == "DeepseekV3" else 2)  # its first layer is dense
    assert all(layer.experts == 8 and layer.router is not None for layer in layers)
    assert train(model) == {}
    prefer(model, list_routers(model), e1=-1.0)
    assert set(train(model)) == {("dead-experts", path) for path in places}
    prefer(model, list_routers(model), e1=1.0, e2=0.8)
    assert set(train(model)) >= {("router-collapse", path) for path in places}


def test_modules_that_are_no_experts():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Parameter(torch.randn(4, 3, 2)), nn.Parameter(torch.randn(5, 3, 2))

    assert find_expert_layers(nn.Sequential(nn.Conv1d(4, 4, 3), Odd(), nn.LazyLinear(4))) == []


@pytest.mark.parametrize("recipe", ["fp32", "bf16", "fp8-lean"])
def test_watching_changes_no_bit(recipe):
    ends = []
    for every in (0, 1):
        model = make()
        engine = Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-2), recipe)
        examiner = Examiner(engine, every=every)
        for _ in range(3):
            with engine.forward():
                loss = compute_loss(model, batch(2))
            engine.backward(loss)
            engine.step()
            examiner.collect(wait=True)
        ends.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))
