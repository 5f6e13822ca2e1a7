"""Several optimizers in one engine: which parameters they may have."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from narrowgauge import Engine
from narrowgauge.errors import UsageError


class TiedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.inner, self.head = nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.inner(self.embedding(ids)))
        return out


def run_backward(engine: Engine) -> None:
    ids = torch.arange(16).view(2, 8)
    with engine.forward():
        loss = nn.functional.cross_entropy(engine.model(ids).float().flatten(0, 1), ids.flatten())
    engine.backward(loss)


@pytest.mark.parametrize("recipe", ["fp32", "bf16", "bf16-lean", "bf16-lean[gradients=released]"])
def test_a_tied_weight_in_two_optimizers_is_refused(recipe: str) -> None:
    """Both would step it, and gradients would be divided by the clipping factor twice."""
    model = TiedModel()
    heads = torch.optim.SGD([model.head.weight], lr=0.1)
    others = torch.optim.AdamW([*model.embedding.parameters(), *model.inner.parameters()], lr=1e-3)
    engine = Engine(model, [heads, others], recipe)
    run_backward(engine)
    with pytest.raises(UsageError, match=r"two optimizers have embedding\.weight, and both would step it"):
        engine.step()


def test_two_optimizers_of_the_same_parameters_may_take_turns() -> None:
    model = TiedModel()
    first, second = torch.optim.AdamW(model.parameters(), lr=1e-3), torch.optim.SGD(model.parameters(), lr=0.1)
    engine = Engine(model, [first, second], "fp32", clip_norm=1.0)
    for optimizer in (first, first, second):
        before = model.inner.weight.detach().clone()
        run_backward(engine)
        assert engine.step(optimizer).applied
        assert not torch.equal(before, model.inner.weight)
