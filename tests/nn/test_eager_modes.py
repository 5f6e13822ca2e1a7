"""torch.compile does not make graphs of the handlers of modes where a model waits for the host."""

import pytest
import torch
from torch import nn

from narrowgauge import Engine
from narrowgauge.nn.cpu_emulation import EmulatedProducts
from narrowgauge.nn.plain_attention import NoticesPlainAttention


class Mixture(nn.Module):
    """Experts that add to their output in place. The loop waits for the host: torch.compile leaves it as it is."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(16, 3)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x):
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows, places = torch.where(chosen == index)
            out[rows] += weights[rows, places, None] * expert(x[rows])
        return out.float().square().sum()


def count_graphs(open_context):
    torch._dynamo.reset()
    torch.manual_seed(0)
    graphs, model, x = [], Mixture(), torch.randn(8, 16)
    compiled = torch.compile(model, backend=lambda graph, inputs: graphs.append(graph) or graph)
    with open_context(compiled, model):
        loss = compiled(x)
    loss.backward()
    return len(graphs)


def open_engine(compiled, model):
    return Engine(compiled, torch.optim.SGD(model.parameters(), lr=0.1), "bf16").forward()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch.compile reads it
@pytest.mark.parametrize("native", [("fp32",), ("fp32", "bf16")])
def test_handlers_of_modes_are_not_compiled_between_graphs(native, set_cpu_formats):
    """With and without the mode that emulates products in BF16."""
    set_cpu_formats(*native)
    plain = count_graphs(lambda *_: torch.autocast("cpu", torch.bfloat16))
    assert count_graphs(open_engine) <= plain + 1  # a cast of softmax's argument to FP32
    assert count_graphs(lambda *_: NoticesPlainAttention()) == plain
    assert count_graphs(lambda *_: EmulatedProducts()) == plain
