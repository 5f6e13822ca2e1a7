"""Writes of values into tensors of another dtype: torch raises under autocast, an engine's context converts them."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import narrowgauge as ng
from narrowgauge.nn.autocast_rules import autocast_rules
from narrowgauge.nn.mixed_writes import IN_PLACE, NEW

pytestmark = pytest.mark.filterwarnings("ignore:index_reduce")
ROWS = torch.tensor([0, 2])
PLACES = torch.tensor([[0, 1, 2], [1, 0, 0]])
MASK = torch.tensor([True, False, True, False])
CALLS = {
    "index_add": lambda x, y, end: getattr(x, "index_add" + end)(0, ROWS, y, alpha=2),
    "index_copy": lambda x, y, end: getattr(x, "index_copy" + end)(0, ROWS, y),
    "index_put": lambda x, y, end: getattr(x, "index_put" + end)((ROWS,), y, accumulate=True),
    "index_reduce": lambda x, y, end: getattr(x, "index_reduce" + end)(0, ROWS, y, "mean"),
    "masked_scatter": lambda x, y, end: getattr(x, "masked_scatter" + end)(MASK[:, None], y),
    "scatter.src": lambda x, y, end: getattr(x, "scatter" + end)(0, PLACES, y),
    "scatter_add": lambda x, y, end: getattr(x, "scatter_add" + end)(0, PLACES, y),
    "scatter_reduce.two": lambda x, y, end: getattr(x, "scatter_reduce" + end)(0, PLACES, y, "sum"),
}
FORMATS = [torch.float32, torch.bfloat16, torch.float16]


def autocast():
    return torch.autocast("cpu", dtype=torch.bfloat16)


def test_every_operation_is_tried():
    assert set(CALLS) == set(NEW) == {name.replace("_.", ".").removesuffix("_") for name in IN_PLACE}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("into", FORMATS)
@pytest.mark.parametrize("of", FORMATS)
def test_values_get_the_dtype_of_what_they_are_written_to(name, into, of):
    if name == "index_copy" and torch.float16 in (into, of):
        pytest.skip("on a CPU, torch has a rule of its own")
    torch.manual_seed(0)
    x, y = torch.randn(4, 3).to(into), torch.randn(2, 3).to(of)
    run = CALLS[name]
    with autocast_rules(), autocast():
        written = run(x.clone(), y, "_")
        made = run(x, y, "")
    wide = torch.promote_types(into, of)
    assert torch.equal(written, run(x.clone(), y.to(into), "_")) and written.dtype is into
    assert torch.equal(made, run(x.to(wide), y.to(wide), "")) and made.dtype is wide


@pytest.mark.parametrize("name", CALLS)
def test_gradients_arrive_in_their_own_dtypes(name):
    x, y = torch.randn(4, 3, requires_grad=True), torch.randn(2, 3).bfloat16().requires_grad_()
    with autocast_rules(), autocast():
        made = CALLS[name](x * 1, y, "_")
    made.square().sum().backward()
    assert x.grad.dtype is torch.float32
    assert y.grad.dtype is torch.bfloat16
    assert y.grad.abs().sum() > 0


def test_without_an_engine_without_autocast_and_for_other_dtypes_torch_decides():
    x, y = torch.zeros(4, 3), torch.ones(2, 3)
    with autocast(), pytest.raises(RuntimeError):
        x.index_add_(0, ROWS, y.bfloat16())
    with autocast_rules(), pytest.raises(RuntimeError):
        x.index_add_(0, ROWS, y.bfloat16())
    with autocast_rules(), autocast():
        for other in (y.double(), y.long(), y.bool()):
            with pytest.raises(RuntimeError):
                x.index_add_(0, ROWS, other)
        with pytest.raises(RuntimeError):
            x.index_add_(0, ROWS, torch.ones(3, 3).bfloat16())  # its shape does not fit
    assert not x.any()


def test_assignment_with_an_index():
    x, y = torch.zeros(4, 3), torch.ones(2, 3).bfloat16()
    with autocast_rules(), autocast():
        x[MASK] = y
        x[torch.tensor([1])] = 3 * y[:1]
    assert torch.equal(x[:, 0], torch.tensor([1.0, 3.0, 1.0, 0.0]))


def test_compiled_code_converts_too():
    x, y = torch.zeros(4, 3), torch.randn(2, 3)

    def run(x, y):
        with autocast():
            out = x.clone()
            out.index_add_(0, ROWS, y.bfloat16())
            out[ROWS] = y.bfloat16()
            return out.index_add(0, ROWS, y.bfloat16())

    with autocast_rules():
        eager, compiled = run(x, y), torch.compile(run, backend="aot_eager", fullgraph=True)(x, y)
    assert torch.equal(eager, compiled)


class Experts(nn.Module):
    """A loop over experts as people write it, with the router's weights in FP32."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(64, 4, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 64)) for _ in range(4))

    def forward(self, x):
        rows = x.flatten(0, 1)
        weights, chosen = torch.topk(self.gate(rows), 2, -1)
        weights = torch.softmax(weights.float(), -1)
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(chosen == number)
            if len(token):
                out.index_add_(0, token, expert(rows[token]) * weights[token, place, None])
        return out.view_as(x)


class Masked(nn.Module):
    """Puts computed rows in place of masked ones."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x):
        rows = x.flatten(0, 1)
        mask = torch.arange(len(rows)) % 3 == 0
        out = torch.zeros_like(rows)
        out[mask] = self.layer(rows[mask])
        out[~mask] = rows[~mask]
        return out.view_as(x)


@pytest.mark.parametrize("recipe", ["bf16", "fp16", "bf16-lean", "fp8[products=all]", "fp8-lean[products=all]"])
@pytest.mark.parametrize("part", [Experts, Masked])
def test_models_that_autocast_rejects_in_fp32_or_bf16_train(part, recipe):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(100, 64), part(), nn.Linear(64, 100))
    exact = copy.deepcopy(model)
    ids = torch.randint(0, 100, (2, 16))

    def compute_loss(model):
        return F.cross_entropy(model(ids).float().flatten(0, 1), ids.flatten())

    with pytest.raises(RuntimeError), autocast():
        compute_loss(exact if part is Masked else copy.deepcopy(exact).bfloat16())
    engine = ng.Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-3), recipe)
    optimizer = torch.optim.AdamW(exact.parameters(), lr=1e-3)
    for _ in range(3):
        with engine.forward():
            loss = compute_loss(model)
        engine.backward(loss)
        assert engine.step().applied
        expected = compute_loss(exact)
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert loss.item() == pytest.approx(expected.item(), rel=0.03)
