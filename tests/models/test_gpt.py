"""GPT: parameter and FLOP counts, causality, training, one graph, and an FP32 residual stream."""

import math

import pytest
import torch

from narrowgauge.errors import UsageError
from narrowgauge.models import pad_vocab
from narrowgauge.models.gpt import GPT, Block, GPTConfig

SMALL = GPTConfig(layers=2, width=32, heads=4, context=16, vocab=100)


def tokens(batch=2, length=16, vocab=100):
    return torch.randint(0, vocab, (batch, length), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return GPT(SMALL)


@pytest.mark.parametrize(
    ("config", "millions"),
    [
        (SMALL, None),
        (GPTConfig(layers=12, width=768, heads=12, context=1024, vocab=50257), 124),
        (GPTConfig(layers=24, width=1024, heads=16, context=1024, vocab=50257), 355),
        (GPTConfig(layers=24, width=2048, heads=16, context=2048, vocab=50257), 1315),
    ],
)
def test_parameters_are_counted_without_building(config, millions):
    with torch.device("meta"):
        built = GPT(config)
    assert config.parameters() == sum(p.numel() for p in built.parameters())
    if millions:
        assert round(config.parameters() / 1e6) == pytest.approx(millions, abs=1)


def test_flops_match_torchs_flop_counter(model):
    from torch.utils.flop_counter import FlopCounterMode

    inputs = tokens()
    with FlopCounterMode(display=False) as counter:
        model(inputs, inputs).backward()
    # Norms and the loss multiply too, but are no GEMMs; and the counter may or may not know the CPU's attention.
    norms = 6 * (2 * SMALL.layers + 1) * SMALL.width
    attention = 12 * SMALL.layers * SMALL.width * SMALL.context
    gemms = SMALL.flops_per_token() - norms - attention
    counted = counter.get_total_flops() / inputs.numel()
    assert gemms <= counted <= gemms + 1.5 * attention


def test_vocabularies_are_padded():
    assert [pad_vocab(v) for v in (1, 128, 129, 256, 32000, 50257)] == [128, 128, 256, 256, 32000, 50304]


def test_loss_is_the_cross_entropy_of_the_logits(model):
    inputs, targets = tokens(), tokens().flip(0)
    logits = model(inputs)
    assert logits.shape == (2, 16, 128)
    expected = -logits.log_softmax(-1).gather(-1, targets[..., None]).mean()
    torch.testing.assert_close(model(inputs, targets), expected)
    assert expected.item() == pytest.approx(math.log(128), abs=0.2)


def test_attention_is_causal(model):
    inputs = tokens()
    changed = inputs.clone()
    changed[:, 10:] = (changed[:, 10:] + 1) % 100
    before, after = model(inputs), model(changed)
    torch.testing.assert_close(before[:, :10], after[:, :10])
    assert not torch.allclose(before[:, 10:], after[:, 10:])


def test_head_and_embedding_share_their_weights(model):
    assert model.lm_head.weight is model.tok.weight
    assert [type(block) for block in model.blocks] == [Block, Block]


def test_residual_projections_start_smaller():
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=8, width=128, heads=2, context=16, vocab=256))
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            expected = 0.02 / math.sqrt(16) if name.endswith(("out.weight", "down.weight")) else 0.02
            assert parameter.std().item() == pytest.approx(expected, rel=0.1), name
        else:
            assert torch.equal(parameter, torch.ones_like(parameter)), name


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
        block.up.register_forward_hook(lambda _module, _inputs, output: seen.append(output.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(tokens(), tokens())
    assert seen == [torch.bfloat16, torch.float32] * 2
    assert loss.dtype == torch.float32


@pytest.mark.parametrize("change", [{"layers": 0}, {"heads": 5}, {"context": -1}, {"vocab": 0}])
def test_invalid_dimensions_are_refused(change):
    sizes = {"layers": 2, "width": 32, "heads": 4, "context": 16, "vocab": 100}
    with pytest.raises(UsageError):
        GPTConfig(**sizes | change)
