"""What torch.compile keeps and allocates in addition, as measured on an H200 (docs/forecast.md)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from narrowgauge import hardware
from narrowgauge.forecast.memory.estimate import predict_memory
from narrowgauge.forecast.memory.lifetimes import find_lifetimes
from narrowgauge.forecast.trace.trace_step import Traced, trace_steps
from narrowgauge.recipe import parse
from narrowgauge.task import Task

ROWS, WIDTH = 4096, 256


class Reader(nn.Module):
    """Three layers that read one tensor, and a head. Returns logits and the loss, like Hugging Face's models."""

    def __init__(self, words: int, returns_logits: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.head = nn.Linear(WIDTH, words, bias=False)
        self.returns_logits = returns_logits

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.norm(x)
        logits = self.head(self.query(x) * self.key(x) * self.value(x))
        loss = nn.functional.cross_entropy(logits, logits.new_zeros(ROWS, dtype=torch.long))
        return {"loss": loss, "logits": logits} if self.returns_logits else {"loss": loss}


def traced(words: int, returns_logits: bool = False, recipe: str = "bf16") -> Traced:
    task = Task(
        model=lambda: Reader(words, returns_logits), batch=lambda step, split: torch.zeros(ROWS, WIDTH),
        loss=lambda model, x: model(x)["loss"], name="reader", items_per_batch=ROWS,
    )  # fmt: skip
    return trace_steps(task, parse(recipe), hardware.find_gpu("h200"), compile=True)


def peak(words: int, returns_logits: bool = False, recipe: str = "bf16") -> int:
    return predict_memory(traced(words, returns_logits, recipe)).total


def test_outputs_other_than_the_loss_get_a_gradient_of_zeros() -> None:
    logits = 2 * ROWS * 8192
    assert 0.9 < (peak(8192, returns_logits=True) - peak(8192)) / logits < 1.1


def test_unaligned_operands_are_copied_in_16_bits_only() -> None:
    copied = 2 * ROWS * 8192
    assert 0.9 < (peak(8191) - peak(8192)) / copied < 1.1
    assert peak(8191, recipe="fp32") <= peak(8192, recipe="fp32")


def test_one_input_is_cast_once_for_three_layers() -> None:
    found = traced(8192)
    lifetimes, ops = find_lifetimes(found.trace), found.trace.ops
    casts = [
        op.writes[0].block for op in ops
        if op.name == "_to_copy" and op.phase == "forward" and op.step == 1 and op.writes[0].shape == (ROWS, WIDTH)
    ]  # fmt: skip
    assert len(casts) == 3 and len([block for block in casts if block not in lifetimes.dropped]) == 1
    kept = next(block for block in casts if block not in lifetimes.dropped)
    assert ops[lifetimes.died[kept]].phase == "backward", "all three weights' gradients read it"
