"""MoE: parameter counts, experts against a loop over tokens, routing in FP32, its two losses, and one graph."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F

from narrowgauge import Engine, recipe
from narrowgauge.errors import UsageError
from narrowgauge.hardware import detect
from narrowgauge.models.moe import Experts, MoE, MoEConfig, Router
from narrowgauge.nn.convert import plan_conversion

SMALL = MoEConfig(
    layers=2, width=32, heads=4, kv_heads=2, experts=8, chosen=2, hidden=48, shared=1, context=16, vocab=100
)
OLMOE = MoEConfig(
    layers=16, width=2048, heads=16, kv_heads=16, experts=64, chosen=8, hidden=1024, context=4096, vocab=50304
)


def tokens(batch=2, length=16, vocab=100):
    return torch.randint(0, vocab, (batch, length), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return MoE(SMALL)


@pytest.fixture
def experts():
    torch.manual_seed(0)
    made = Experts(SMALL)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=0.2)
    return made


def compute_by_token(experts, hidden, index, weights):
    """What the module should compute: one token and one expert at a time."""
    rows = []
    for token, numbers, factors in zip(hidden, index.tolist(), weights, strict=True):
        row = torch.zeros_like(token)
        for number, factor in zip(numbers, factors, strict=True):
            gate, up = (experts.gate_up_proj[number] @ token).chunk(2)
            row = row + factor * (experts.down_proj[number] @ (F.silu(gate) * up))
        rows.append(row)
    return torch.stack(rows)


@pytest.mark.parametrize("config", [SMALL, dataclasses.replace(SMALL, shared=0), OLMOE])
def test_parameters_are_counted_without_building(config):
    with torch.device("meta"):
        built = MoE(config)
    assert config.parameters() == sum(p.numel() for p in built.parameters())
    stacked = sum(p.numel() for p in built.parameters() if p.dim() == 3)
    active = config.parameters() - stacked + stacked * config.chosen // config.experts
    assert config.active_parameters() == active
    multiplied = active - config.padded_vocab * config.width
    assert config.flops_per_token() == 6 * multiplied + 12 * config.layers * config.width * config.context


def test_olmoe_has_its_published_sizes():
    """6.92B parameters, of which a token meets 1.28B; the published model also has norms of queries and keys."""
    assert OLMOE.parameters() == 6_919_161_856 - 16 * 2 * 2048
    assert OLMOE.active_parameters() == pytest.approx(1.28e9, rel=0.005)


@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_experts_compute_what_a_loop_over_tokens_computes(experts, tokens):
    """Also with experts that get no token, and with all gradients."""
    hidden = torch.randn(tokens, 32, requires_grad=True)
    index = torch.rand(tokens, 8).topk(2).indices
    weights = torch.rand(tokens, 2, requires_grad=True)
    sources = [hidden, weights, *experts.parameters()]
    direction = torch.randn(tokens, 32)
    made, expected = experts(hidden, index, weights), compute_by_token(experts, hidden, index, weights)
    torch.testing.assert_close(made, expected)
    found = torch.autograd.grad((made * direction).sum(), sources)
    for one, other in zip(found, torch.autograd.grad((expected * direction).sum(), sources), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("number", [0, 7])
def test_one_expert_may_get_every_token(experts, number):
    hidden, index, weights = torch.randn(9, 32), torch.full((9, 1), number), torch.rand(9, 1)
    torch.testing.assert_close(experts(hidden, index, weights), compute_by_token(experts, hidden, index, weights))


def test_experts_compute_what_those_of_transformers_compute(experts):
    """The same names and shapes of parameters, and the same arguments."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.olmoe.modeling_olmoe import OlmoeExperts

    config = transformers.OlmoeConfig(hidden_size=32, intermediate_size=48, num_experts=8, num_experts_per_tok=2)
    config._experts_implementation = "eager"
    theirs = OlmoeExperts(config)
    theirs.load_state_dict(experts.state_dict())
    hidden, index, weights = torch.randn(9, 32), torch.rand(9, 8).topk(2).indices, torch.rand(9, 2)
    torch.testing.assert_close(experts(hidden, index, weights), theirs(hidden, index, weights))


def test_the_router_chooses_the_most_probable_experts():
    torch.manual_seed(0)
    router = Router(SMALL)
    with torch.no_grad():
        router.weight.normal_()
    hidden = torch.randn(20, 32)
    index, weights, (balance, z) = router(hidden)
    logits = hidden @ router.weight.T
    shares = logits.softmax(-1)
    best, expected = shares.topk(2)
    assert torch.equal(index, expected)
    torch.testing.assert_close(weights, best / best.sum(-1, keepdim=True))
    counts = torch.bincount(index.flatten(), minlength=8) / index.numel()
    torch.testing.assert_close(balance, 8 * (counts * shares.mean(0)).sum())
    torch.testing.assert_close(z, logits.logsumexp(-1).square().mean())


def test_the_balance_loss_is_one_if_balanced_and_the_number_of_experts_if_collapsed():
    config = dataclasses.replace(SMALL, width=8, heads=1, kv_heads=1, chosen=1)
    router = Router(config)
    with torch.no_grad():
        router.weight.copy_(50 * torch.eye(8))
    assert router(torch.eye(8))[2][0].item() == pytest.approx(1, abs=1e-4)
    assert router(torch.eye(8)[:1].expand(16, 8))[2][0].item() == pytest.approx(8, abs=1e-4)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_router_computes_in_fp32_under_autocast(dtype):
    torch.manual_seed(0)
    router = Router(SMALL)
    with torch.no_grad():
        router.weight.normal_()
    hidden = torch.randn(64, 32)
    exact = router(hidden)
    with torch.autocast("cpu", dtype):
        index, weights, losses = router(hidden)
    assert weights.dtype == losses.dtype == torch.float32
    for one, other in zip((index, weights, losses), exact, strict=True):
        assert torch.equal(one, other)


def test_the_losses_of_the_routers_are_added_in_training_only(model):
    inputs, targets = tokens(), tokens().flip(0)
    logits = model(inputs)
    assert logits.shape == (2, 16, 128)
    cross_entropy = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    balance, z = model(inputs, routing=True)
    torch.testing.assert_close(model(inputs, targets), cross_entropy + 0.01 * balance + 0.001 * z)
    torch.testing.assert_close(model.eval()(inputs, targets), cross_entropy)
    assert balance.item() == pytest.approx(1, abs=0.5)
    assert z.item() == pytest.approx(math.log(8) ** 2, rel=0.05)


def test_training_balances_a_router_that_prefers_an_expert(model):
    inputs, targets = tokens(8), tokens(8).roll(1, 0)
    with torch.no_grad():
        model.tok.weight += 0.1  # a direction that all tokens share, and that expert 0 gets
        for block in model.blocks:
            block.mixture.router.weight[0] = 0.1
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first, before = model(inputs, targets).item(), model(inputs, routing=True)[0].item()
    for _ in range(40):
        optimizer.zero_grad()
        loss = model(inputs, targets)
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.7 * first
    assert before > 3
    assert model(inputs, routing=True)[0].item() < 2
    assert all(bool(p.grad.abs().sum() > 0) for p in model.parameters())


def test_attention_is_causal(model):
    inputs = tokens()
    changed = inputs.clone()
    changed[:, 10:] = (changed[:, 10:] + 1) % 100
    before, after = model(inputs), model(changed)
    torch.testing.assert_close(before[:, :10], after[:, :10])
    assert not torch.allclose(before[:, 10:], after[:, 10:])


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_the_model_compiles_to_one_graph_in_bf16(model):
    inputs = tokens()
    traced = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        made, expected = traced(inputs, inputs), model(inputs, inputs)
    torch.testing.assert_close(made, expected)
    made.backward()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # from torch, where a graph ends
def test_the_model_compiles_in_fp32(model):
    inputs = tokens()
    torch.testing.assert_close(torch.compile(model, backend="aot_eager")(inputs, inputs), model(inputs, inputs))


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_experts_compute_in_16_bits_under_autocast_without_an_engine(experts):
    index, weights = torch.rand(9, 8).topk(2).indices, torch.rand(9, 2)
    hidden = torch.randn(9, 32)
    with torch.autocast("cpu", torch.bfloat16):
        made = experts(hidden, index, weights)
    exact = experts(hidden, index, weights)
    assert made.dtype == torch.float32
    assert 0 < (made - exact).abs().max() < 0.02 * exact.abs().max()


def test_matrices_that_add_to_the_residual_stream_start_smaller():
    deep = MoE(dataclasses.replace(SMALL, layers=8))
    mixture = deep.blocks[0].mixture
    assert mixture.experts.gate_up_proj.std().item() == pytest.approx(0.02, rel=0.05)
    assert mixture.experts.down_proj.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert mixture.router.weight.std().item() == pytest.approx(0.02, rel=0.2)


def test_large_blocks_are_described_without_running_them():
    with torch.device("meta"):
        large = MoE(dataclasses.replace(SMALL, width=1024, hidden=1024))
    conversion = plan_conversion(large, recipe("fp8"), detect("cpu"))  # a small block of the same class runs
    assert conversion.blocks == ["blocks.0", "blocks.1"] and not conversion.unfused


@pytest.fixture(scope="module")
def exact_losses():
    return train("fp32")


def train(name, steps=4):
    torch.manual_seed(0)
    model = MoE(SMALL)
    engine = Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-2), name)
    losses = []
    for _ in range(steps):
        with engine.forward():
            loss = model(tokens(), tokens().roll(1, 0))
        engine.backward(loss)
        assert engine.step().applied
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    "name", ["bf16", "fp16", "fp8", "bf16-lean", "fp8-lean", "fp8-lean[gradients=released]", "bf16[checkpoint=full]"]
)
def test_every_recipe_trains_it_like_fp32(name, exact_losses):
    assert train(name) == pytest.approx(exact_losses, rel=0.02)


@pytest.mark.parametrize(
    "change",
    [{"layers": 0}, {"heads": 32}, {"kv_heads": 3}, {"hidden": 0}, {"chosen": 9}, {"shared": -1}, {"hidden": 20}],
)
def test_invalid_dimensions_are_refused(change):
    with pytest.raises(UsageError):
        dataclasses.replace(SMALL, **change)
