"""The step of Muon on a GPU: torch.optim.Muon, a plain loop over matrices, and narrowgauge's, in turns in one process.

usage: python bench/muon.py [TASK] [ROUNDS]          (default gpt2-124m 8; JSON to $OUT/muon-TASK.json)

Only the matrices that Muon steps (``split_for_muon``) take part, with gradients that stay the same. Also prints the
bytes per parameter of weights and states, without gradients.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from narrowgauge import optim, tasks
from narrowgauge.optim.newton_schulz import adjust_rate, orthogonalize

spec = sys.argv[1] if len(sys.argv) > 1 else "gpt2-124m"
rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 8
STEPS, LR, MOMENTUM, DECAY = 5, 1e-3, 0.95, 0.1


def make_matrices(dtype: torch.dtype) -> list[nn.Parameter]:
    """Return the matrices of the task's model, with gradients."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = tasks.find(spec).model()
    inner = optim.split_for_muon(model)[0]["params"]
    made = [nn.Parameter(p.detach().to(dtype)) for p in inner]
    for parameter in made:
        parameter.grad = torch.randn_like(parameter)
    return made


def make_loop(parameters: list[nn.Parameter]) -> Callable[[], None]:
    """Return a step in plain torch: foreach for the momentum, one matrix after another for the rest."""
    momenta = [torch.zeros_like(p) for p in parameters]

    @torch.no_grad()
    def step() -> None:
        grads = [p.grad for p in parameters]
        torch._foreach_lerp_(momenta, grads, 1 - MOMENTUM)
        directions = torch._foreach_lerp(grads, momenta, MOMENTUM)
        torch._foreach_mul_(parameters, 1 - LR * DECAY)
        for parameter, direction in zip(parameters, directions, strict=True):
            parameter.add_(orthogonalize(direction), alpha=-adjust_rate(LR, None, parameter.shape))

    return step


def count_bytes(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> float:
    tensors: list[Tensor] = list(parameters)
    tensors += [value for p in parameters for value in optimizer.state[p].values() if isinstance(value, Tensor)]
    return sum(t.numel() * t.element_size() for t in tensors) / sum(p.numel() for p in parameters)


contestants: dict[str, Callable[[], object]] = {}
optimizers: dict[str, tuple[list[nn.Parameter], torch.optim.Optimizer]] = {}
for name, dtype, formats in (
    ("torch.optim.Muon", torch.float32, None), ("plain loop", torch.float32, None),
    ("ng.optim.Muon, FP32", torch.float32, {}),
    ("ng.optim.Muon, split masters", torch.bfloat16, {"master": "split"}),
    ("ng.optim.Muon, split masters, 8 bits", torch.bfloat16, {"master": "split", "moments": "8bit"}),
):  # fmt: skip
    matrices = make_matrices(dtype)
    if name == "plain loop":
        contestants[name] = make_loop(matrices)
        continue
    made: torch.optim.Optimizer
    if formats is None:
        made = torch.optim.Muon(matrices, lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
    else:
        made = optim.Muon(matrices, lr=LR, momentum=MOMENTUM, weight_decay=DECAY, **formats)  # type: ignore[arg-type]
    contestants[name], optimizers[name] = made.step, (matrices, made)
times: dict[str, list[float]] = {name: [] for name in contestants}
for number in range(rounds + 1):  # the first round compiles
    for name, step in contestants.items():
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        step()
        begin.record()
        for _ in range(STEPS):
            step()
        end.record()
        torch.cuda.synchronize()
        if number:
            times[name].append(begin.elapsed_time(end) / STEPS)
results = {}
base = sorted(times["torch.optim.Muon"])[rounds // 2]
for name, all_ms in times.items():
    median = sorted(all_ms)[rounds // 2]
    size = count_bytes(*optimizers[name]) if name in optimizers else None
    results[name] = {"ms": median, "ratio": median / base, "bytes_per_parameter": size, "all_ms": all_ms}
    bytes_text = "" if size is None else f"{size:.2f} bytes per parameter"
    print(f"{name:40s} {median:8.3f} ms  {median / base:.3f} of torch.optim.Muon  {bytes_text}", flush=True)
if "OUT" in os.environ:
    (Path(os.environ["OUT"]) / f"muon-{spec.replace(':', '-')}.json").write_text(json.dumps(results, indent=1))
