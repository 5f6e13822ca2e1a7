"""An optimizer step at 1.31B parameters (the shapes of a 24 x 2048 GPT): narrowgauge, torch, FlashOptim and torchao.

usage: python bench/optimizers.py [LAYERS WIDTH]      (default 24 2048; JSON to $OUT/optimizers.json where OUT is set)

All run in one process, one after the other, each with its own tensors. Each runs twice, and the faster turn counts:
milliseconds of the step alone, and of clipping by the norm of all gradients with the step. Bytes are those of weights,
gradients and states, at the peak of a step.
"""

import gc
import importlib.util
import json
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from narrowgauge.kernels.adamw import launch_grad_norms
from narrowgauge.optim import AdamW, narrow

layers, width = (int(a) for a in sys.argv[1:3]) if len(sys.argv) > 2 else (24, 2048)
SHAPES = [(50304, width), (2048, width), (width,)]
SHAPES += [shape for _ in range(layers) for shape in (
    (width,), (3 * width, width), (width, width), (width,), (4 * width, width), (width, 4 * width),
)]  # fmt: skip
COUNT = sum(torch.Size(shape).numel() for shape in SHAPES)


def parameters(dtype: torch.dtype) -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    made = [torch.nn.Parameter(torch.randn(shape, device="cuda").mul_(0.02).to(dtype)) for shape in SHAPES]
    for p in made:
        p.grad = torch.randn(p.shape, device="cuda").mul_(1e-3).to(dtype)
    return made


def timed(work: Callable[[], Any], repeat: int = 10) -> float:
    for _ in range(3):
        work()
    times = []
    for _ in range(3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        begin.record()
        for _ in range(repeat):
            work()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / repeat)
    return statistics.median(times)


def torch_clip(made: list[torch.nn.Parameter]) -> None:
    torch.nn.utils.clip_grad_norm_(made, 1e9)


def ours(master: str, moments: str, dtype: torch.dtype) -> tuple[list[torch.nn.Parameter], Any, Callable[[], None]]:
    made = parameters(torch.float32 if master == "split" else dtype)
    if master == "split":
        for p in made:
            gradient, p.grad = p.grad, None
            narrow(p).grad = gradient.to(torch.bfloat16)  # type: ignore[union-attr]
    optimizer = AdamW(made, lr=1e-4, master=master, moments=moments)

    def clip() -> None:
        norms = launch_grad_norms([p.grad for p in made])  # type: ignore[misc]
        total = torch.linalg.vector_norm(norms)
        optimizer.grad_scale = ((total + 1e-6) / 1e9).clamp(min=1.0)
        optimizer.found_inf = (~torch.isfinite(total)).float()

    return made, optimizer, clip


def plain(dtype: torch.dtype, make: Callable[[Any], Any]) -> tuple[list[torch.nn.Parameter], Any, Callable[[], None]]:
    made = parameters(dtype)
    return made, make(made), lambda: torch_clip(made)


contestants: dict[str, Callable[[], Any]] = {
    "torch AdamW fused, FP32": lambda: plain(torch.float32, lambda p: torch.optim.AdamW(p, lr=1e-4, fused=True)),
    "torch AdamW fused, BF16": lambda: plain(torch.bfloat16, lambda p: torch.optim.AdamW(p, lr=1e-4, fused=True)),
    "ours split, 8bit": lambda: ours("split", "8bit", torch.bfloat16),
    "ours split, fp32": lambda: ours("split", "fp32", torch.bfloat16),
    "ours fp32, fp32": lambda: ours("fp32", "fp32", torch.float32),
    "ours none, 8bit": lambda: ours("none", "8bit", torch.bfloat16),
}
if importlib.util.find_spec("flashoptim"):
    import flashoptim

    for bits in (24, 32):
        contestants[f"FlashOptim AdamW, {bits} bit"] = lambda bits=bits: plain(
            torch.bfloat16, lambda p: flashoptim.FlashAdamW(p, lr=1e-4, master_weight_bits=bits)
        )
if importlib.util.find_spec("torchao") and "no-torchao" not in sys.argv:
    from torchao.optim import AdamW8bit

    contestants["torchao AdamW8bit, BF16 + SR"] = lambda: plain(
        torch.bfloat16, lambda p: AdamW8bit(p, lr=1e-4, bf16_stochastic_round=True)
    )
rows: dict[str, dict[str, float]] = {}
print(f"{torch.cuda.get_device_name()}, {COUNT / 1e9:.3f}B parameters in {len(SHAPES)} tensors", flush=True)
for turn in range(2):
    for name, make in contestants.items():
        gc.collect()
        torch.cuda.empty_cache()
        start = torch.cuda.memory_allocated()
        try:
            made, optimizer, clip = make()
            optimizer.step()
            torch.cuda.reset_peak_memory_stats()
            optimizer.step()
            peak = (torch.cuda.max_memory_allocated() - start) / COUNT
            step = timed(optimizer.step)
            both = timed(lambda clip=clip, optimizer=optimizer: (clip(), optimizer.step()))
            best = rows.setdefault(name, {"step_ms": step, "clip_step_ms": both, "bytes": peak})
            best["step_ms"], best["clip_step_ms"] = min(step, best["step_ms"]), min(both, best["clip_step_ms"])
            print(f"{turn} {name:32s} step {step:7.2f} ms  clip + step {both:7.2f} ms  {peak:6.2f} bytes", flush=True)
        except Exception as error:
            print(f"{turn} {name}: {type(error).__name__}: {str(error)[:200]}", flush=True)
        made = optimizer = clip = None
base = rows["torch AdamW fused, FP32"]
for name, row in rows.items():
    step, both = (row[key] / base[key] for key in ("step_ms", "clip_step_ms"))
    print(f"{name:32s} step {step:.3f}, clip + step {both:.3f} of torch's in FP32")
if "OUT" in os.environ:
    (Path(os.environ["OUT"]) / "optimizers.json").write_text(json.dumps({"parameters": COUNT, "rows": rows}, indent=1))
