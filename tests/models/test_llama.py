"""Llama: parameter counts, rotary positions, grouped attention, the norm, and one graph."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F

from narrowgauge.errors import UsageError
from narrowgauge.models.llama import Llama, LlamaConfig, RMSNorm, compute_angles, rotate

SMALL = LlamaConfig(layers=2, width=32, heads=4, kv_heads=2, hidden=48, context=16, vocab=100)


def tokens(batch=2, length=16, vocab=100):
    return torch.randint(0, vocab, (batch, length), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Llama(SMALL)


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (SMALL, None),
        # Llama 2 7B as published: 6,738,415,616.
        (
            LlamaConfig(layers=32, width=4096, heads=32, kv_heads=32, hidden=11008, context=2048, vocab=32000),
            6_738_415_616,
        ),
        # Llama 3 8B as published: 8,030,261,248 with its vocabulary of 128,256.
        (
            LlamaConfig(layers=32, width=4096, heads=32, kv_heads=8, hidden=14336, context=8192, vocab=128256),
            8_030_261_248,
        ),
    ],
)
def test_parameters_are_counted_without_building(config, parameters):
    with torch.device("meta"):
        built = Llama(config)
    assert config.parameters() == sum(p.numel() for p in built.parameters())
    if parameters:
        assert config.parameters() == parameters
    matmuls = sum(p.numel() for n, p in built.named_parameters() if n != "tok.weight")
    assert config.flops_per_token() == 6 * matmuls + 12 * config.layers * config.width * config.context


def test_loss_is_the_cross_entropy_of_the_logits(model):
    inputs, targets = tokens(), tokens().flip(0)
    logits = model(inputs)
    assert logits.shape == (2, 16, 128)
    torch.testing.assert_close(model(inputs, targets), F.cross_entropy(logits.flatten(0, 1), targets.flatten()))
    assert model(inputs, targets).item() == pytest.approx(math.log(128), abs=0.2)


def test_attention_is_causal(model):
    inputs = tokens()
    changed = inputs.clone()
    changed[:, 10:] = (changed[:, 10:] + 1) % 100
    before, after = model(inputs), model(changed)
    torch.testing.assert_close(before[:, :10], after[:, :10])
    assert not torch.allclose(before[:, 10:], after[:, 10:])


def test_rotation_keeps_norms_and_depends_only_on_distance():
    cos, sin = compute_angles(64, 8, 10_000.0, torch.device("cpu"))
    q, k = torch.randn(8), torch.randn(8)
    turned_q, turned_k = (rotate(x.expand(64, 8), cos, sin) for x in (q, k))
    torch.testing.assert_close(turned_q.norm(dim=-1), q.norm().expand(64))
    torch.testing.assert_close(turned_q[0], q)
    scores = turned_q @ turned_k.T
    for distance in (0, 1, 5):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(scores[0, 1], scores[0, 5])


def test_rotation_computes_in_fp32_and_keeps_the_dtype():
    cos, sin = compute_angles(2048, 8, 10_000.0, torch.device("cpu"))
    assert cos.dtype == torch.float32
    x = torch.randn(2048, 8, dtype=torch.bfloat16)
    turned = rotate(x, cos, sin)
    assert turned.dtype == torch.bfloat16
    torch.testing.assert_close(turned, rotate(x.float(), cos, sin).bfloat16(), atol=0, rtol=0)


def test_grouped_heads_match_repeated_heads(model):
    """A model with one key-value head per query head, and repeated weights, computes the same."""
    full = Llama(dataclasses.replace(SMALL, kv_heads=4))
    state = model.state_dict()
    for index in range(SMALL.layers):
        q, k, v = state[f"blocks.{index}.qkv.weight"].split([32, 16, 16])
        k, v = (w.view(2, 8, 32).repeat_interleave(2, dim=0).reshape(32, 32) for w in (k, v))
        state[f"blocks.{index}.qkv.weight"] = torch.cat([q, k, v])
    full.load_state_dict(state)
    torch.testing.assert_close(full(tokens()), model(tokens()))


def test_the_norm_matches_torch_beyond_the_range_of_fp16():
    norm = RMSNorm(16)
    x = torch.randn(3, 16)
    torch.testing.assert_close(norm(x), F.rms_norm(x, (16,), norm.weight, 1e-5))
    large = torch.full((1, 16), 1000.0, dtype=torch.float16)  # its square is beyond FP16's 65,504
    assert norm(large).dtype == torch.float16
    torch.testing.assert_close(norm(large), torch.ones(1, 16, dtype=torch.float16))


def test_every_parameter_has_a_gradient_and_a_batch_is_learned(model):
    inputs, targets = tokens(), tokens().roll(1, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = model(inputs, targets).item()
    for _ in range(40):
        optimizer.zero_grad()
        loss = model(inputs, targets)
        loss.backward()
        optimizer.step()
    assert all(p.grad is not None and bool(p.grad.abs().sum() > 0) for p in model.parameters())
    assert loss.item() < 0.5 * first


def test_the_model_compiles_to_one_graph(model):
    inputs = tokens()
    traced = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(traced(inputs, inputs), model(inputs, inputs))
    traced(inputs, inputs).backward()


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_the_residual_stream_stays_fp32_under_autocast(model):
    seen = []
    for block in model.blocks:
        block.register_forward_hook(lambda _module, _inputs, output: seen.append(output.dtype))
        block.gate.register_forward_hook(lambda _module, _inputs, output: seen.append(output.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(tokens(), tokens())
    assert seen == [torch.bfloat16, torch.float32] * 2
    assert loss.dtype == torch.float32


@pytest.mark.parametrize("change", [{"layers": 0}, {"heads": 32}, {"kv_heads": 3}, {"hidden": 0}])
def test_invalid_dimensions_are_refused(change):
    with pytest.raises(UsageError):
        dataclasses.replace(SMALL, **change)
