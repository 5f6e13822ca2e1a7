"""Blocks with experts that are recomputed: the same losses, gradients and statistics to the bit, and less memory."""

import copy
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from test_experts import FAMILIES, built_in, deepseek, mixtral, olmoe, qwen3

import narrowgauge as ng
from narrowgauge.nn.block_memory import find_block_memory
from narrowgauge.nn.experts.routers import find_routers
from narrowgauge.nn.fused import blocks, passes
from narrowgauge.nn.fused.modules import FusedBlock
from narrowgauge.nn.memory_plan import MemoryPlan
from narrowgauge.nn.module_changes import find_change
from narrowgauge.nn.recompute_cost import Rates, estimate_module

TOKENS = torch.randint(0, 256, (2, 48), generator=torch.Generator().manual_seed(1))


def make_engine(make, recipe, prepare=None, memory_budget=None, **changes):
    torch.manual_seed(0)
    model = make(**changes).train()
    if prepare is not None:
        prepare(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    engine = ng.Engine(model, optimizer, recipe=recipe, fused=True, memory_budget=memory_budget)
    assert len(engine.conversion.blocks) == 2 and not engine.conversion.unfused
    return engine


def compute_loss(model, tokens=TOKENS):
    return (
        model(tokens, tokens)
        if "narrowgauge" in type(model).__module__
        else model(input_ids=tokens, labels=tokens).loss
    )


def run_steps(engine, steps=2):
    """Return losses, gradients, statistics of FP8 tensors, and the state of random numbers."""
    found = []
    torch.manual_seed(5)
    for _ in range(steps):
        with engine.forward():
            loss = compute_loss(engine.model)
        engine.backward(loss)
        scales = engine.conversion.scales
        entry = {name: p.grad for name, p in engine.model.named_parameters() if p.grad is not None}
        entry |= {"loss": loss.detach(), "random": torch.get_rng_state()}
        if scales is not None:
            entry |= {"amax": scales.amax, "counts": scales.counts}
        found.append({name: value.clone() for name, value in entry.items()})
        assert engine.step().applied
        found[-1] |= {f"new {name}": p.detach().clone() for name, p in engine.model.named_parameters()}
    return found


def assert_equal(made, expected):
    for one, other in zip(made, expected, strict=True):
        assert one.keys() == other.keys() and len(one) > 4
        different = [name for name in one if not torch.equal(one[name], other[name])]
        assert not different


RECIPES = [
    "fp8[products=all,activations=bf16]",
    "fp8[products=all,activations=bf16,scaling=current]",
    "fp8[products=all,activations=bf16,first_forward=bf16]",
    "fp8-lean[products=all,activations=bf16,checkpoint=none]",
    "fp8-lean[products=all,activations=bf16,gradients=released,checkpoint=none]",
    "bf16",
    "bf16-lean[checkpoint=none]",
]


def recompute(recipe, checkpoint):
    return str(ng.recipe(recipe).replace(checkpoint=checkpoint))


@pytest.mark.parametrize("checkpoint", ["full", "selective"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("make", FAMILIES)
def test_training_is_the_same_to_the_bit(make, recipe, checkpoint):
    expected = run_steps(make_engine(make, recipe))
    engine = make_engine(make, recompute(recipe, checkpoint))
    assert engine.checkpointed == engine.conversion.blocks
    assert_equal(run_steps(engine), expected)


@pytest.mark.parametrize("name", ["fp8-lean", "bf16-lean"])
def test_lean_recipes_recompute_fused_blocks_by_default(name):
    engine = make_engine(olmoe, name)
    assert engine.conversion.blocks == engine.checkpointed == ["model.layers.0", "model.layers.1"]
    plans = [find_change(block, FusedBlock).plan for block in engine.model.model.layers]
    assert [plan.checkpoint for plan in plans] == ["full", "full"]


def add_noise(engine):
    """Let the mixtures of a model of transformers draw random numbers before and after their experts."""
    for layer in engine.model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda _, args: (args[0] * torch.empty_like(args[0]).uniform_(0.7, 1.3),))
        layer.mlp.register_forward_hook(lambda module, _, output: F.dropout(output, 0.2, module.training))
    return engine


@pytest.mark.parametrize("checkpoint", ["full", "selective"])
@pytest.mark.parametrize("recipe", ["fp8[products=all]", "bf16"])
@pytest.mark.parametrize("make", [mixtral, deepseek])
def test_dropout_of_attention_and_noise_in_the_mixture_are_the_same(make, recipe, checkpoint):
    recipe = str(ng.recipe(recipe).replace(activations="bf16")) if "fp8" in recipe else recipe

    def train(checkpoint, dropout=0.2):
        return run_steps(add_noise(make_engine(make, recompute(recipe, checkpoint), attention_dropout=dropout)))

    expected = train("none")
    assert expected[0]["loss"] != train("none", 0.0)[0]["loss"]
    assert_equal(train(checkpoint), expected)


@pytest.mark.parametrize("make", [mixtral, olmoe, qwen3])
@pytest.mark.parametrize("checkpoint", ["full", "selective"])
def test_router_logits_are_collected_once_and_the_auxiliary_loss_counts(make, checkpoint, monkeypatch):
    found, halves = [], []
    half = blocks.run_half
    monkeypatch.setattr(blocks, "run_half", lambda plan, *rest: halves.append(plan.path) or half(plan, *rest))
    for recipe in ("fp8[products=all]", f"fp8[products=all,checkpoint={checkpoint}]"):
        engine = make_engine(make, recipe, output_router_logits=True, router_aux_loss_coef=5.0)
        halves.clear()
        with engine.forward():
            made = engine.model(input_ids=TOKENS, labels=TOKENS)
        assert halves == engine.conversion.blocks  # they run fused: the argument for it and hooks change nothing
        logits = made.router_logits
        assert len(logits) == 2 and all(part.shape[0] == TOKENS.numel() and part.requires_grad for part in logits)
        engine.backward(made.loss)
        assert len(made.router_logits) == 2
        routers = {path: router.weight.grad for path, router in find_routers(engine.model).items()}
        assert len(routers) == 2 and all(grad.any() for grad in routers.values())
        found.append({"aux": made.aux_loss.detach(), "loss": made.loss.detach(), **routers})
        found[-1] |= {str(number): part.detach() for number, part in enumerate(logits)}
    assert_equal(found[:1], found[1:])
    plain = make_engine(make, "fp8[products=all]", output_router_logits=True, router_aux_loss_coef=0.0)
    with plain.forward():
        loss = plain.model(input_ids=TOKENS, labels=TOKENS).loss
    plain.backward(loss)
    path, router = next(iter(find_routers(plain.model).items()))
    assert not torch.equal(router.weight.grad, found[1][path])  # the auxiliary loss has changed it


@pytest.mark.parametrize("checkpoint", ["none", "full"])
def test_calls_that_collect_something_else_run_as_written_and_are_recomputed(checkpoint):
    """Hidden states are those of blocks as modules. Attention weights exist in the model's own code only."""
    engine = make_engine(mixtral, f"fp8[products=all,checkpoint={checkpoint}]", attn_implementation="eager")
    with engine.forward():
        made = engine.model(input_ids=TOKENS, labels=TOKENS, output_attentions=True, output_router_logits=True)
    assert len(made.attentions) == 2 and made.attentions[0].shape[-1] == TOKENS.shape[1]
    engine.backward(made.loss)
    counts = engine.conversion.scales.counts.clone()
    with engine.forward():
        hidden = engine.model(input_ids=TOKENS, output_hidden_states=True).hidden_states
    assert len(hidden) == 3 and len(made.attentions) == 2
    assert torch.equal(engine.conversion.scales.counts >= counts, torch.ones_like(counts, dtype=torch.bool))


def test_a_hook_on_attention_stops_the_fusion_and_not_the_recomputation():
    found = []
    for checkpoint in ("none", "full"):
        engine = make_engine(olmoe, f"fp8[products=all,checkpoint={checkpoint}]")
        seen = []
        for layer in engine.model.model.layers:
            layer.self_attn.register_forward_hook(lambda *_, seen=seen: seen.append(1))
        inputs = watch_inputs(engine.model)
        with engine.forward():
            loss = compute_loss(engine.model)
        gc.collect()
        assert len(seen) == 2 and all((one() is None) is (checkpoint == "full") for one in inputs)
        engine.backward(loss)
        assert len(seen) == (4 if checkpoint == "full" else 2)
        scales = engine.conversion.scales
        found.append({name: p.grad for name, p in engine.model.named_parameters()} | {"counts": scales.counts.clone()})
    assert_equal(found[:1], found[1:])


def test_an_auxiliary_loss_alone_is_differentiated():
    """Its backward asks the mixture for what it discarded, and may never reach the output of the block."""
    grads = []
    for recipe in ("fp8[products=all]", "fp8[products=all,checkpoint=full]"):
        engine = make_engine(mixtral, recipe, output_router_logits=True)
        with engine.forward():
            made = engine.model(input_ids=TOKENS)
            assert len(made.router_logits) == 2
            loss = sum((part.float() * torch.linspace(0, 1, part.shape[-1])).sum() for part in made.router_logits)
        engine.backward(loss)
        grads.append({name: p.grad for name, p in engine.model.named_parameters() if p.grad is not None})
    assert_equal(grads[:1], grads[1:])


@pytest.mark.parametrize("make", [olmoe, deepseek, built_in])
def test_each_half_runs_twice_and_each_mixture_twice(make, monkeypatch):
    again, mixtures = [], []
    repeat = passes.repeat_forward
    count = lambda left, tensors: again.append(left.given.plan.path) or repeat(left, tensors)  # noqa: E731
    monkeypatch.setattr(blocks, "repeat_forward", count)
    monkeypatch.setattr(passes, "repeat_forward", count)
    engine = make_engine(make, "fp8[products=all,checkpoint=full]")
    for path, router in find_routers(engine.model).items():
        router.register_forward_hook(lambda *_, path=path: mixtures.append(path))
    with engine.forward():
        loss = compute_loss(engine.model)
    once = list(mixtures)
    engine.backward(loss)
    halves = [
        path
        for path in engine.conversion.blocks
        if find_change(engine.model.get_submodule(path), FusedBlock).plan.spec.mlp
    ]
    assert [path for path in again if path in halves] == halves[::-1]
    assert mixtures == once + once[::-1] and len(once) == len(halves)


def watch_inputs(model):
    """Return references to what each mixture reads."""
    seen = []
    for path in find_routers(model):
        owner = model.get_submodule(path.rpartition(".")[0])
        owner.register_forward_pre_hook(lambda _, args: seen.append(weakref.ref(args[0].untyped_storage())))
    return seen


@pytest.mark.parametrize("make", [olmoe, deepseek, built_in])
def test_a_recomputed_block_keeps_nothing_but_its_input(make):
    bytes_kept = {}
    gc.collect()
    before = find_storages()  # other tests in this process may have left tensors
    for checkpoint in ("none", "selective", "full"):
        engine = make_engine(make, f"fp8[products=all,activations=bf16,checkpoint={checkpoint}]")
        seen = watch_inputs(engine.model)
        with engine.forward():
            loss = compute_loss(engine.model)
        gc.collect()
        assert all((reference() is None) is (checkpoint == "full") for reference in seen)
        bytes_kept[checkpoint] = count_bytes(engine, before)
        engine.backward(loss)
        engine.step()
        del loss
        gc.collect()
        engine.optimizers[0].zero_grad()
        with engine.forward():
            loss = compute_loss(engine.model)
        gc.collect()
        # Nothing is left over from the first step.
        assert count_bytes(engine, before) == pytest.approx(bytes_kept[checkpoint], rel=0.02)
        del loss
    assert bytes_kept["full"] < 0.6 * bytes_kept["selective"] < 0.6 * bytes_kept["none"]
    stream = TOKENS.numel() * 128
    per_block = [4 * stream, 2 * stream]  # FP32 input, and its 16-bit form before the head
    assert bytes_kept["full"] < 6 * sum(per_block) + 2_000_000


def find_storages():
    """Return the size of each storage of a tensor that is alive, by its address."""
    tensors = (thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, torch.nn.Parameter))
    return {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}


def count_bytes(engine, before):
    """Return the bytes of new tensors, without parameters, optimizer states and scales."""
    known = [*engine.model.parameters(), *engine.model.buffers(), TOKENS]
    known += [v for state in engine.optimizers[0].state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    outside = {tensor.untyped_storage()._cdata for tensor in known}
    return sum(size for place, size in find_storages().items() if place not in outside and place not in before)


def test_what_forward_leaves_on_modules_stays():
    """The losses of routers would hold all of a recomputed graph."""
    engine = make_engine(built_in, "fp8[products=all,checkpoint=full]")
    mixture = engine.model.blocks[0].mixture
    mixture.calls = 0
    mixture.register_forward_hook(lambda module, *_: setattr(module, "calls", module.calls + 1))
    run_steps(engine, 2)
    assert mixture.losses is None and mixture.calls == 2


@pytest.mark.parametrize("recipe", ["fp8[products=all]", "bf16"])
def test_two_backwards_of_one_forward_give_the_same_gradients(recipe):
    """Of hidden states, as the fused head frees what it has computed."""
    for checkpoint in ("none", "full"):
        engine = make_engine(olmoe, recompute(recipe, checkpoint))
        with engine.forward():
            hidden = engine.model.model(input_ids=TOKENS).last_hidden_state
        weights = list(engine.model.model.layers.parameters())
        with engine.step_context.backward():
            first = torch.autograd.grad(hidden.float().sum(), weights, retain_graph=True)
            second = torch.autograd.grad(hidden.float().sum(), weights)
        assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("recipe", ["fp8[products=all]", "bf16"])
def test_a_backward_that_never_asks_the_mixture(recipe):
    def train(checkpoint):
        engine = make_engine(mixtral, recompute(recipe, checkpoint))
        for layer in engine.model.model.layers:
            layer.mlp.register_forward_hook(lambda module, args, output: output.detach())
        return run_steps(engine)

    assert_equal(train("full"), train("none"))


@pytest.mark.parametrize("trained", ["experts", "self_attn", "gate", "mlp"])
@pytest.mark.parametrize("recipe", ["fp8[products=all]", "bf16"])
def test_frozen_parts(recipe, trained):
    """With experts or routers alone, nothing before the first mixture needs a gradient."""

    def prepare(model):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(trained in name)

    expected = run_steps(make_engine(mixtral, recipe, prepare))
    assert_equal(run_steps(make_engine(mixtral, recompute(recipe, "full"), prepare)), expected)


@pytest.mark.parametrize("checkpoint", ["full", "selective"])
def test_steps_of_several_microbatches(checkpoint):
    found = []
    for recipe in ("fp8[products=all]", f"fp8[products=all,checkpoint={checkpoint}]"):
        torch.manual_seed(0)
        model = olmoe()
        engine = ng.Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-3), recipe=recipe, accumulate=2)
        for _ in range(2):
            for part in TOKENS.chunk(2):
                with engine.forward():
                    loss = compute_loss(model, part)
                engine.backward(loss)
            engine.step()
        scales = engine.conversion.scales
        found.append({"scale": scales.scale, "history": scales.history, "counts": scales.counts})
        found[-1] |= {name: p.detach() for name, p in model.named_parameters()}
    assert_equal(found[:1], found[1:])


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("recipe", ["fp8[products=all,activations=bf16,checkpoint=full]", "bf16[checkpoint=full]"])
def test_inside_transformers_own_checkpointing(recipe, reentrant):
    def prepare(model):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})

    expected = run_steps(make_engine(olmoe, recipe.replace("full", "none")), 1)[0]
    made = run_steps(make_engine(olmoe, recipe, prepare), 1)[0]
    if not reentrant:  # where the first forward has no gradients, and evaluates with scales of its own
        assert_equal([made], [expected])
    assert made["loss"] == pytest.approx(float(expected["loss"]), rel=1e-3)


def test_inputs_on_the_host():
    expected = run_steps(make_engine(olmoe, "fp8[products=all]"))
    engine = make_engine(olmoe, "fp8[products=all,checkpoint=full,offload=activations]")
    assert_equal(run_steps(engine), expected)


@pytest.mark.parametrize(
    "recipe", ["fp8[products=all,activations=bf16]", "bf16", "fp8-lean[products=all,activations=bf16]"]
)
@pytest.mark.parametrize("make", [olmoe, deepseek, built_in])
def test_every_mix_of_a_memory_plan_computes_the_same(make, recipe):
    expected = run_steps(make_engine(make, recompute(recipe, "none")))
    paths = ["blocks.0", "blocks.1"] if make is built_in else ["model.layers.0", "model.layers.1"]
    for names in (("none", "full"), ("full", "selective"), ("offload", "none"), ("selective", "offload")):
        plan = MemoryPlan(budget=10**9, blocks=dict(zip(paths, names, strict=True)))
        engine = make_engine(make, recipe, memory_budget=plan)
        assert_equal(run_steps(engine), expected)
        plans = [find_change(engine.model.get_submodule(path), FusedBlock).plan for path in paths]
        assert [plan.checkpoint for plan in plans] == ["full" if name == "offload" else name for name in names]
        assert engine.checkpointed == [path for path, name in zip(paths, names, strict=True) if name != "none"]


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        ("fp8", ["none", "selective", "full", "offload"]),
        ("bf16-lean", ["none", "selective", "full", "offload"]),
        ("fp8[activations=8bit]", ["none", "selective", "full", "offload"]),
        ("fp8-lean[checkpoint=selective]", ["selective", "full", "offload"]),
        ("fp8-lean[offload=activations]", ["none", "selective", "full"]),
        ("bf16[checkpoint=full]", ["full", "offload"]),
    ],
)
def test_what_blocks_with_experts_may_keep(recipe, options):
    engine = make_engine(deepseek, recipe)
    dense, mixture = find_block_memory(engine.model, engine.recipe)
    assert list(mixture.options) == options and set(options) <= {*dense.options, "none"}
    run_steps(engine, 1)
    costs = mixture.estimate_costs("fp8", None, 1)
    assert costs["none"] == 0 < costs["selective"] < costs["full"] <= costs["offload"]
    assert mixture.estimate_costs("fp8", None, 2)["full"] == pytest.approx(2 * costs["full"])


def test_the_cost_of_recomputing_experts_counts_those_of_a_token():
    """Twice as many experts per token, and more experts: the products take twice as long, however many there are."""
    rates, found = Rates(None), []
    for chosen, experts in ((2, 8), (4, 8)):
        engine = make_engine(built_in, "fp8[products=all]", chosen=chosen, experts=experts)
        run_steps(engine, 1)
        found.append(estimate_module(engine.model.blocks[0].mixture, 1 << 24, rates))
    assert found[1] == pytest.approx(2 * found[0], rel=0.1)


def test_a_larger_batch_than_planned_is_recomputed():
    plan = MemoryPlan(budget=10**9, blocks={"model.layers.0": "none", "model.layers.1": "none"})
    engine = make_engine(olmoe, "fp8[products=all]", memory_budget=plan)
    run_steps(engine, 3)
    inputs = watch_inputs(engine.model)
    for tokens, is_kept in ((TOKENS, True), (TOKENS.repeat(2, 1), False)):
        with engine.forward():
            loss = compute_loss(engine.model, tokens)
        gc.collect()
        assert [one() is not None for one in inputs] == [is_kept] * 2
        engine.backward(loss)
        inputs.clear()


def test_evaluation_records_nothing():
    engine = make_engine(olmoe, "fp8[products=all,checkpoint=full]")
    with torch.no_grad(), engine.forward():
        loss = compute_loss(engine.model)
    assert not engine.conversion.scales.amax.any() and not loss.requires_grad


def test_a_copy_recomputes_itself():
    engine = make_engine(olmoe, "fp8[products=all,checkpoint=full]")
    other = copy.deepcopy(engine.model)
    for parameter in other.parameters():
        parameter.data.mul_(1.1)
    with engine.forward():
        loss = compute_loss(other)
    loss.backward()
    assert all(p.grad is None for p in engine.model.parameters())
    assert other.model.layers[0].mlp.experts.down_proj.grad.any()


def test_an_error_in_a_recomputation_leaves_statistics_and_modules_alone():
    engine = make_engine(built_in, "fp8[products=all,checkpoint=full]")
    run_steps(engine, 1)
    mixture, scales = engine.model.blocks[1].mixture, engine.conversion.scales
    with engine.forward():
        loss = compute_loss(engine.model)
    counts, amax = scales.counts.clone(), scales.amax.clone()

    def fail(*_):
        raise RuntimeError("broken")

    handle = mixture.experts.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="broken"):
        engine.backward(loss)
    handle.remove()
    assert mixture.losses is None and scales.delayed
    forward = [row for row, site in enumerate(scales.sites.values()) if not site.in_backward]
    assert torch.equal(scales.counts[forward], counts[forward]) and torch.equal(scales.amax[forward], amax[forward])
