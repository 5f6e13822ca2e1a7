"""Models that write values of another dtype into a tensor, on a GPU: they train as in FP32."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from narrowgauge import Engine

sys.path.append(str(Path(__file__).parents[1] / "nn"))
from test_mixed_writes import Experts, Masked

DEVICE = torch.device("cuda")
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # from torch.compile
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recipe", ["bf16", "fp16", "bf16-lean", "fp8[products=all]", "fp8-lean[products=all]"])
@pytest.mark.parametrize("part", [Experts, Masked])
def test_models_train(part: type[nn.Module], recipe: str, compiled: bool) -> None:
    if compiled and (part is Experts or "lean" in recipe):
        pytest.skip("compiled in pieces, or not at all")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(112, 64), part(), nn.Linear(64, 112)).to(DEVICE)
    exact = copy.deepcopy(model)
    ids = torch.randint(0, 112, (2, 16), device=DEVICE)
    engine = Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-3), recipe, compile=compiled)
    optimizer = torch.optim.AdamW(exact.parameters(), lr=1e-3)
    for _ in range(3):
        with engine.forward():
            loss = F.cross_entropy(engine.model(ids).float().flatten(0, 1), ids.flatten())
        engine.backward(loss)
        assert engine.step().applied
        expected = F.cross_entropy(exact(ids).flatten(0, 1), ids.flatten())
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert loss.item() == pytest.approx(expected.item(), rel=0.03)
