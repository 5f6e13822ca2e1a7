"""``recipe.frozen``: how an engine stores matrices that are not trained, and states with what is trained alone."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import narrowgauge as ng
from narrowgauge.nn.keep_fp32 import find_computed_parameters

pytestmark = pytest.mark.filterwarnings("ignore::narrowgauge.errors.SlowRecipeWarning")
BATCH = torch.randn(8, 32, generator=torch.Generator().manual_seed(0))


def make_model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 16))
    model[0].requires_grad_(False)
    model[1].requires_grad_(False)
    model[4].requires_grad_(False)
    return model


def make_engine(recipe, model=None):
    model = make_model() if model is None else model
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return ng.Engine(model, torch.optim.AdamW(trained, lr=1e-2), recipe, fused=False)


def step(engine):
    with engine.forward():
        loss = F.mse_loss(engine.model(BATCH).float(), BATCH[:, :16])
    engine.backward(loss)
    assert engine.step().applied
    return loss.item()


@pytest.mark.parametrize("recipe", ["bf16[frozen=bf16]", "bf16-lean[frozen=bf16]", "fp8[frozen=bf16]"])
def test_frozen_matrices_become_bf16(recipe):
    engine, before = make_engine(recipe), make_model()
    for (name, parameter), old in zip(engine.model.named_parameters(), before.parameters(), strict=True):
        if not parameter.requires_grad:
            assert parameter.dtype is (torch.bfloat16 if parameter.dim() > 1 else torch.float32), name
            assert parameter.equal(old.to(parameter.dtype))
    losses = [step(engine) for _ in range(5)]
    assert losses[-1] < losses[0]
    assert engine.model(BATCH).isfinite().all()  # outside of engine.forward()
    plain = engine.detach()
    assert {p.dtype for p in plain[2].parameters()} == {torch.float32}
    assert plain[0].weight.dtype is torch.bfloat16  # what was rounded off is gone


def test_kept_modules_and_other_recipes_change_nothing():
    for recipe in ("bf16", "bf16-lean", "fp32", "bf16[frozen=bf16,keep=0+4]"):
        model = make_engine(recipe).model
        assert {model[0].weight.dtype, model[4].weight.dtype} == {torch.float32}, recipe


def test_weights_are_computed_unless_they_are_parameters():
    class Wrapped(nn.Module):
        """A layer around another that shows its weight, as layers with adapters do."""

        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)

        @property
        def weight(self):
            return self.inner.weight

    normed = torch.nn.utils.spectral_norm(nn.Linear(4, 4))
    assert not list(find_computed_parameters(Wrapped()))
    assert normed.weight_orig in set(find_computed_parameters(normed))


@pytest.mark.parametrize("recipe", ["fp32", "bf16-lean[frozen=bf16]"])
def test_a_state_with_what_is_trained(recipe):
    engine = make_engine(recipe)
    step(engine)
    state = copy.deepcopy(engine.state_dict(trained_only=True))
    assert set(state["model"]) == {"2.weight", "2.bias"}
    assert all(value.dtype is torch.float32 for value in state["model"].values())
    assert len(engine.state_dict()["model"]) == 8
    expected = [step(engine) for _ in range(2)]
    other = make_engine(recipe)
    other.load_state_dict(state)
    assert [step(other) for _ in range(2)] == expected
    del state["model"]["2.bias"]
    with pytest.raises(RuntimeError, match="Missing"):
        other.load_state_dict(state)
