"""Fused blocks match the model's own forward, in BF16 and FP8, with every checkpointing mode."""

import copy

import pytest
import torch

from narrowgauge import Engine
from narrowgauge.models.gpt import GPT, GPTConfig
from narrowgauge.models.llama import Llama, LlamaConfig
from narrowgauge.nn.convert import convert
from narrowgauge.nn.fused import blocks, pre_norm
from narrowgauge.scaling.operand import Operand


def gpt():
    torch.manual_seed(0)
    return GPT(GPTConfig(layers=2, width=64, heads=2, vocab=128, context=32))


def llama():
    torch.manual_seed(0)
    return Llama(LlamaConfig(layers=2, width=64, heads=4, kv_heads=2, hidden=96, vocab=128, context=32))


MODELS = {"gpt": gpt, "llama": llama}


def batch(seed=1):
    tokens = torch.randint(0, 128, (4, 33), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def enlarge_weights(model):
    """Enlarge the weights, so that attention and activations are not nearly linear, as they are at initialization."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(4)
    return model


def gradients(model, scale=1.0, seed=1):
    model.zero_grad()
    loss = model(*batch(seed))
    (loss * scale).backward()
    return loss.detach(), {name: p.grad.double() / scale for name, p in model.named_parameters()}


def sqnr(value, reference):
    return 10 * torch.log10(reference.square().sum() / (value - reference).square().sum()).item()


def converted(name, recipe):
    model = enlarge_weights(MODELS[name]())
    exact = copy.deepcopy(model).double()
    return model, exact, convert(model, recipe)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("recipe", "least"), [("bf16", 35), ("fp8[scaling=current]", 13), ("fp8", 13)])
def test_gradients_match_the_model_up_to_rounding(name, recipe, least):
    """FP8's bound is for gradients through the whole model, where E5M2's rounding errors (about 26 dB each) add up.

    The worst value observed was 14.8 dB. test_linear.py checks the 20 dB that a single feed-forward must keep.
    """
    model, exact, conversion = converted(name, recipe)
    assert conversion.blocks == ["blocks.0", "blocks.1"]
    wanted_loss, wanted = gradients(exact)
    loss, found = gradients(model)
    if conversion.scales is not None:  # the second step uses delayed scales
        conversion.scales.update()
        loss, found = gradients(model)
    assert loss.item() == pytest.approx(wanted_loss.item(), rel=1e-2)
    ratios = {key: sqnr(found[key], wanted[key]) for key in wanted}
    assert min(ratios.values()) > least, ratios


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mode", ["selective", "full"])
@pytest.mark.parametrize("recipe", ["bf16", "fp8"])
def test_recomputation_changes_no_bit(name, mode, recipe):
    plain, _, first = converted(name, f"{recipe}[activations=bf16]")
    again, _, second = converted(name, f"{recipe}[checkpoint={mode}]")
    for _ in range(2):
        loss_a, a = gradients(plain)
        loss_b, b = gradients(again)
        assert torch.equal(loss_a, loss_b)
        assert all(torch.equal(a[key], b[key]) for key in a)
        if first.scales is not None:
            assert torch.equal(first.scales.amax, second.scales.amax)
            assert torch.equal(first.scales.counts, second.scales.counts)
            first.scales.update()
            second.scales.update()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("recipe", ["bf16", "fp8", "fp8[scaling=current]", "fp8[checkpoint=full]"])
def test_a_chain_of_blocks_matches_single_blocks(name, recipe):
    """A hook splits the chain, because the block must then be called.

    No bit may differ without FP8. With it, the stream's gradients are BF16 within a chain, and FP32 where autograd
    passes them from block to block: roundings to FP8 differ then, and no gradient may be less accurate for it.
    """
    chain, exact, first = converted(name, recipe)
    apart, _, second = converted(name, recipe)
    seen, lost = [], {}
    apart.blocks[1].register_forward_hook(lambda module, arguments, output: seen.append(output))
    for seed in range(8):
        loss_a, a = gradients(chain, seed=seed)
        loss_b, b = gradients(apart, seed=seed)
        assert torch.equal(loss_a, loss_b)
        if first.scales is None:
            assert all(torch.equal(a[key], b[key]) for key in a)
            continue
        _, wanted = gradients(exact, seed=seed)
        for key, value in wanted.items():
            lost.setdefault(key, []).append(sqnr(b[key], value) - sqnr(a[key], value))
        torch.testing.assert_close(first.scales.amax, second.scales.amax, rtol=0.1, atol=0)
        first.scales.update()
        second.scales.update()
    assert len(seen) == 8
    means = {key: sum(found) / len(found) for key, found in lost.items()}
    assert abs(sum(means.values())) <= 0.1 * len(means), means
    for key, mean in means.items():  # decibels: a single batch scatters by 1, and 64 numbers of a norm more
        assert mean < (0.5 if wanted[key].dim() > 1 else 1.0), (key, mean)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_changed_gradient_is_not_taken_from_the_handoff(dtype):
    """With a gradient in BF16, autograd passes zeros, and whatever it adds to them counts."""
    link = blocks.GradientHandoff(None)
    made, operand = torch.randn(4, 4).to(dtype), Operand(torch.randn(4, 4))
    same = dtype is torch.float32
    passed = link.put(made, operand, torch.float32)
    assert passed.dtype is torch.float32 and passed.shape == made.shape
    assert passed is made if same else not passed.any() and passed.untyped_storage().nbytes() == 4
    gradient, found = link.take(passed)
    assert gradient is made and found is operand
    assert link.take(made) == (made, None)  # returned only once
    passed = link.put(made, operand, torch.float32)
    changed = passed + 3
    gradient, found = link.take(changed)
    assert found is None and torch.equal(gradient, changed if same else made.float() + 3)
    if same:
        link.put(made, operand, torch.float32)
        made.mul_(2)
        assert link.take(made) == (made, None)
        link.put(made, operand, torch.float32)
        assert link.take(made[1:])[1] is None


@pytest.mark.parametrize("name", MODELS)
def test_evaluation_touches_no_scale_and_sampling_still_works(name):
    model, exact, conversion = converted(name, "fp8")
    gradients(model)
    conversion.scales.update()
    before = {key: value.clone() for key, value in conversion.scales.state_dict().items() if torch.is_tensor(value)}
    with torch.no_grad():
        loss = model(*batch())
        logits = model(batch()[0])
    after = conversion.scales.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert logits.shape == (4, 32, 128)
    assert loss.item() == pytest.approx(exact(*batch()).item(), rel=1e-2)


def test_state_dictionaries_do_not_change():
    model, exact, _ = converted("gpt", "fp8")
    assert list(model.state_dict()) == list(exact.state_dict())
    model.load_state_dict(exact.state_dict())


def test_only_training_changes_the_delayed_scales_of_weights():
    model, _, conversion = converted("gpt", "fp8")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    site = conversion.scales.sites["blocks.0.up.weight"]
    weight = model.blocks[0].up.weight

    def step():
        gradients(model)
        optimizer.step()
        seen = site.amax.item()
        conversion.scales.update()
        return seen

    first = weight.abs().max().item()
    assert step() == first  # without a delayed scale, the weight's own amax is used and recorded
    assert site.scale.item() == pytest.approx(448 / first)
    with torch.no_grad():
        model(*batch())
    assert site.amax.item() == 0
    second = weight.abs().max().item()
    assert second != first
    assert step() == second
    with torch.no_grad():
        weight.mul_(64)  # a manual change: the scale of earlier steps would saturate
    before = site.counts[0].item()
    gradients(model)
    assert site.counts[0].item() == before
    assert site.amax.item() == weight.abs().max().item() > 32 * second


@pytest.mark.parametrize("fused", [True, False])
def test_weights_are_cast_again_after_any_optimizer_step(fused):
    """Fused optimizers do not increment the tensor's version."""
    model, _, _ = converted("gpt", "fp8")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    first = gradients(model)[0]
    assert gradients(model)[0] == first
    optimizer.step()
    assert gradients(model)[0] != first


def test_weights_are_cast_again_after_a_change_in_place():
    model, _, _ = converted("gpt", "fp8")
    first = gradients(model)[0]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    assert gradients(model)[0] != first


@pytest.mark.parametrize("keep", ["blocks.1.down", "blocks.1.norm2", "blocks.1"])
def test_a_block_with_a_part_kept_in_fp32_is_not_fused(keep):
    """The kept part stays in FP32; the other layers of its block are converted one by one, as reported."""
    torch.manual_seed(0)
    model = gpt()
    engine = Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-3), f"fp8[keep={keep}]")
    parts = {layer.path: layer.part_of for layer in engine.conversion.layers}
    assert engine.conversion.blocks == ["blocks.0"]
    assert parts["blocks.0.down"] == "block"
    assert parts["blocks.1.down"] == ("linear" if "norm" in keep else "kept")
    assert parts["blocks.1.qkv"] == ("kept" if keep == "blocks.1" else "linear")
    with engine.forward():
        loss = model(*batch())
    engine.backward(loss)
    assert engine.step().applied
    seen = dict(zip(engine.conversion.scales.sites, engine.conversion.scales.history[0].tolist(), strict=True))
    assert all(amax > 0 for amax in seen.values()), seen  # every reported site is actually cast


def test_blocks_wider_than_our_norm_are_converted_layer_by_layer(monkeypatch):
    monkeypatch.setattr("narrowgauge.nn.survey.MAX_COLUMNS", 32)
    monkeypatch.setattr("narrowgauge.nn.fused.make_plan.MAX_COLUMNS", 32)
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=2, width=64, heads=2, context=16, vocab=128))
    conversion = convert(model, "fp8[products=all]")
    assert not conversion.blocks and {layer.part_of for layer in conversion.layers} == {"linear", "lazy head"}
    assert "not fused: blocks.0 and 1 more: its norms have 64 columns, more than 32" in str(conversion)
    tokens = torch.randint(0, 128, (2, 16))
    model(tokens, tokens).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("recipe", ["bf16", "fp8", "fp8[scaling=current]"])
@pytest.mark.parametrize("name", MODELS)
def test_attention_is_kept_while_it_takes_less_memory_than_future_gradients(name, recipe, monkeypatch):
    kept = []
    run_rest = pre_norm.run_rest
    monkeypatch.setattr(pre_norm, "run_rest", lambda *args: kept.append(args) or run_rest(*args))
    tokens = torch.randint(0, 128, (1, 17), generator=torch.Generator().manual_seed(1))
    begin = recipe.removesuffix("]") + ("," if "[" in recipe else "[")
    found = {}
    for checkpoint in ("none", "full"):
        model, _, _ = converted(name, f"{begin}activations=bf16,checkpoint={checkpoint}]")
        for step in range(2):  # gradients of the first step exist in the second, so nothing is kept there
            kept.clear()
            model(tokens[:, :-1], tokens[:, 1:]).backward()
            assert len(kept) == (2 if checkpoint == "full" and step == 0 else 0)
        found[checkpoint] = [p.grad for p in model.parameters()]
    for plain, recomputed in zip(found["none"], found["full"], strict=True):
        assert torch.equal(plain, recomputed)


@pytest.mark.parametrize(("recipe", "rows"), [("bf16[checkpoint=full]", 16), ("bf16-lean[gradients=released]", 1)])
def test_attention_is_not_kept_for_many_tokens_or_released_gradients(recipe, rows, monkeypatch):
    monkeypatch.setattr(pre_norm, "run_rest", lambda *_: pytest.fail("attention was kept"))
    model = gpt()
    engine = Engine(model, torch.optim.AdamW(model.parameters()), recipe, fused=True)
    tokens = torch.randint(0, 128, (rows, 32), generator=torch.Generator().manual_seed(1))
    with engine.forward():
        loss = model(tokens, tokens)
    engine.backward(loss)
