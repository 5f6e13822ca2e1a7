"""Norms, softmax, losses and modules that the user names run in FP32 on the CPU, as autocast does on CUDA."""

import pytest
import torch
import torch.nn.functional as F

from narrowgauge import Engine, keep_fp32

low = torch.ones(2, 8, dtype=torch.bfloat16)


def engine_for(model, recipe="bf16"):
    return Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), recipe)


@pytest.mark.parametrize("recipe", ["bf16", "fp16"])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.softmax(x, -1),
        lambda x: x.softmax(-1),
        lambda x: torch.log_softmax(x, -1),
        lambda x: F.layer_norm(x, (8,)),
        lambda x: F.rms_norm(x, (8,)),
        lambda x: F.cross_entropy(x, torch.zeros(2, dtype=torch.long)),
        lambda x: F.mse_loss(x, x),
        lambda x: x.sum(),
        lambda x: x.exp(),
        lambda x: x**2,
        lambda x: torch.nn.LayerNorm(8)(x),
    ],
)
def test_sensitive_functions_run_in_fp32(recipe, function):
    with engine_for(torch.nn.Linear(8, 8), recipe).forward():
        assert function(low).dtype is torch.float32


def test_products_run_in_the_compute_format():
    model = torch.nn.Linear(8, 8)
    for recipe, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)):
        with engine_for(model, recipe).forward():
            assert model(torch.ones(2, 8)).dtype is dtype


def test_named_modules_stay_in_fp32():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    engine = engine_for(model, "bf16[keep=2]")
    assert engine.kept == ["2"]
    with engine.forward():
        hidden = model[0](torch.ones(2, 8))
        assert hidden.dtype is torch.bfloat16
        assert model[2](hidden).dtype is torch.float32
    by_class = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Bilinear(8, 8, 2))
    assert engine_for(by_class, "bf16[keep=Bilin*]").kept == ["1"]


def test_decorated_functions_run_in_fp32():
    @keep_fp32
    def energy(x, *, weight):
        return x @ weight, torch.is_autocast_enabled("cpu")

    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, cast = energy(low, weight=low.t())
        assert torch.is_autocast_enabled("cpu")
    assert output.dtype is torch.float32
    assert not cast


def test_layer_norm_runs_in_fp32():
    """With a large mean and a small variance the statistics cancel in FP16; the result must be FP32's."""
    x = (torch.arange(8.0) / 8 + 1000).half().expand(2, 8)
    exact = F.layer_norm(x.double(), (8,))
    with engine_for(torch.nn.Linear(8, 8), "fp16").forward():
        kept = F.layer_norm(x, (8,))
    torch.testing.assert_close(kept.double(), exact, rtol=1e-4, atol=1e-4)


class Recomputing(torch.nn.Module):
    """A model with torch's own checkpointing around functions that need FP32, as models of transformers have it."""

    def __init__(self, reentrant):
        super().__init__()
        self.linear, self.reentrant, self.formats = torch.nn.Linear(8, 8), reentrant, []

    def block(self, x):
        weights = self.linear(x).softmax(-1)
        self.formats.append(weights.dtype)
        return (weights * F.softplus(self.linear(x))).exp()

    def forward(self, x):
        if self.reentrant is None:
            return self.block(x)
        return torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("recipe", ["bf16", "fp16", "bf16-lean"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_models_own_checkpointing_recomputes_in_the_same_formats(recipe, reentrant):
    gradients, x = [], torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    for own in (None, reentrant):
        torch.manual_seed(0)
        model = Recomputing(own)
        engine = Engine(model, torch.optim.AdamW(model.parameters(), lr=0.1), recipe)
        with engine.forward():
            loss = model(x).sum()
        engine.backward(loss)
        assert set(model.formats) == {torch.float32} and len(model.formats) == (1 if own is None else 2)
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


@pytest.mark.parametrize("function", [torch.autograd.backward, torch.autograd.grad])
def test_other_functions_that_compute_gradients_recompute_in_the_same_formats(function):
    model, x = Recomputing(False), torch.ones(4, 8, requires_grad=True)
    with engine_for(model).forward():
        loss = model(x).sum()
        function(loss, inputs=[x])
    assert model.formats == [torch.float32, torch.float32]
    with engine_for(model).forward(), pytest.raises(RuntimeError, match="only for scalar outputs"):
        model(x).backward()
