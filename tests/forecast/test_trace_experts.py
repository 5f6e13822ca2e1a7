"""Grouped products in a dry run have the format of a GPU, and the FLOPs of their tokens."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrowgauge import hardware
from narrowgauge.forecast.memory.estimate import predict_memory
from narrowgauge.forecast.trace.trace_step import STEPS, trace_steps
from narrowgauge.recipe import parse
from narrowgauge.task import Task

EXPERTS, TOKENS, WIDTH, HIDDEN = 8, 512, 64, 128
FORMATS = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8": torch.bfloat16,
    "bf16-lean": torch.bfloat16,
}


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN))
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        ends = torch.arange(1, EXPERTS + 1, device=x.device, dtype=torch.int32) * (TOKENS // EXPERTS)
        hidden = F.relu(F.grouped_mm(x, self.up, offs=ends))
        return F.grouped_mm(hidden, self.down.transpose(1, 2), offs=ends)


@pytest.mark.parametrize("recipe", FORMATS)
def test_experts_are_traced_in_the_format_they_have_on_a_gpu(recipe: str) -> None:
    task = Task(
        model=Experts,
        batch=lambda step, split: torch.zeros(TOKENS, WIDTH),
        loss=lambda model, x: model(x).float().square().mean(),
        name="experts",
    )
    found = trace_steps(task, parse(recipe), hardware.find_gpu("h200"), compile=False)
    products = [op for op in found.trace.of_step(STEPS - 1) if op.name == "_grouped_mm"]
    assert len(products) == 2 + 3, "the batch itself needs no gradient"
    assert {op.kind for op in products} == {"product"}
    assert {piece.dtype for op in products for piece in op.reads if piece.dtype.is_floating_point} == {FORMATS[recipe]}
    assert {op.flops for op in products} == {2.0 * TOKENS * WIDTH * HIDDEN}
    assert predict_memory(found).total > 0
