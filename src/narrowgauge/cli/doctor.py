"""``narrowgauge doctor``: checks this machine: devices, native formats, the recipe of ``auto``, and what works."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from narrowgauge.cli import Outcome, prose
from narrowgauge.cli.terminal import say

if TYPE_CHECKING:
    from torch import Tensor

    from narrowgauge.hardware import Device
    from narrowgauge.recipe import Recipe

ABOUT = "check this machine: devices, native formats, the recipe that auto selects and why, and what works"
NEEDED_PYTHON = (3, 11)
NEEDED_TORCH = (2, 11)
NEEDED_LIBRARIES = ("numpy", "safetensors")
OPTIONAL_LIBRARIES = {
    "rich": "coloured tables and the progress bar",
    "ml_dtypes": "a second opinion on the formats in the tests",
    "tensorboard": "TensorBoard logs of a run",
    "tokenizers": "the BPE of the larger tasks",
    "triton": "fused kernels on a GPU",
}
LEAST_DISK_BYTES = 1 << 30
TOLERANCE = {"fp32": 1e-5, "tf32": 5e-3, "fp16": 5e-3, "bf16": 2e-2, "fp8": 2e-2}
"""The largest relative error of a product of rounded operands: FP32 accumulation, then rounding to the format."""


@dataclasses.dataclass(frozen=True)
class Check:
    """The result of one check."""

    name: str
    ok: bool
    detail: str
    needed: bool
    """Whether narrowgauge cannot train on this machine without it."""


class Failure(Exception):
    """Raised by a check to fail with its own message."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    del parser  # the common options are enough


def run(args: argparse.Namespace) -> Outcome:
    from narrowgauge.hardware import detect
    from narrowgauge.recipe import choose

    device = detect(args.device)
    recipe, reason = choose(device)
    out = prose(args)
    if not args.json:
        _show_device(device, recipe, reason, out)
    checks = []
    for check in examine(device, recipe, Path(args.out or "."), args.seed):
        checks.append(check)
        if not args.json:
            mark = "ok" if check.ok else "FAIL" if check.needed else "no"
            say(f"  {mark:<4}  {check.name:<16}  {check.detail}", out)
    failed = [check.name for check in checks if check.needed and not check.ok]
    if not args.json:
        say("", out)
        say(f"Needed and not working: {', '.join(failed)}." if failed else "Everything needed works.", out)
    data = {
        "device": device.name,
        **{name: getattr(device, name) for name in ("kind", "torch_device", "capability", "memory_bytes", "features")},
        "native": device.native,
        "recipe": str(recipe),
        "reason": reason,
        "gpu": dataclasses.asdict(device.gpu) if device.gpu else None,
        "devices": _device_names(),
        "cores": cores(),
        "checks": [dataclasses.asdict(check) for check in checks],
    }
    return Outcome(data, exit_code=1 if failed else 0)


def examine(device: Device, recipe: Recipe, folder: Path, seed: int) -> Iterator[Check]:
    """Run all checks in order; a failing one does not stop the next."""
    yield attempt("python", partial(_python, sys.version_info[:2]))
    yield attempt("torch", _torch_version)
    for name in NEEDED_LIBRARIES:
        yield attempt(name, partial(library, name, "the program itself"))
    for name, use in OPTIONAL_LIBRARIES.items():
        yield attempt(name, partial(library, name, use), needed=False)
    rates: dict[str, float] = {}
    for format in device.native if device.kind == "cuda" else ("fp32", "fp16", "bf16"):
        needed = format in ("fp32", recipe.compute)
        yield attempt(f"{format} product", partial(_product, device, format, rates, seed), needed)
    if device.kind == "cuda":
        yield attempt("fused attention", partial(_attention, device), needed=recipe.compute in ("fp16", "bf16", "fp8"))
    yield attempt("training step", partial(_training_step, device, recipe, seed))
    yield attempt("torch.compile", partial(_compile, device), needed=False)
    yield attempt("disk", partial(_disk, folder))


def attempt(name: str, probe: Callable[[], str], needed: bool = True) -> Check:
    """Run a check, which returns what it found or raises; its warnings are ignored."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return Check(name, True, probe(), needed)
    except Failure as failure:
        return Check(name, False, str(failure), needed)
    except Exception as error:  # any error is the result of the check
        lines = str(error).strip().splitlines() or [""]
        return Check(name, False, f"{type(error).__name__}: {lines[0][:200]}".rstrip(": "), needed)


def library(name: str, use: str) -> str:
    """The version of an installed library, without importing it: some take seconds."""
    if importlib.util.find_spec(name) is None:
        raise Failure(f"not installed; it is for {use}")
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "installed, version unknown"


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def judge_rate(format: str, flops_per_s: float, fp32: float | None, device: Device) -> str:
    """A measured rate as text, compared with FP32's and the datasheet's; a rate above the datasheet's is a failure."""
    text = f"{_flops(flops_per_s)}"
    if fp32 and format != "fp32":
        text += f", {flops_per_s / fp32:.2g} x FP32"
    if device.gpu is not None:
        peak = device.gpu.peak(format)
        if flops_per_s > peak:
            raise Failure(f"{text}: above the {_flops(peak)} of {device.gpu.source}: the clock or the table is wrong")
        text += f", {flops_per_s / peak:.0%} of the datasheet's {_flops(peak)}"
    return text if format in device.native else f"{text}; not native, so narrowgauge computes in FP32 instead"


def _python(version: tuple[int, ...]) -> str:
    if version < NEEDED_PYTHON:
        raise Failure(f"{platform.python_version()}; {'.'.join(map(str, NEEDED_PYTHON))} or later is needed")
    return platform.python_version()


def _torch_version() -> str:
    import torch

    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < NEEDED_TORCH:
        raise Failure(f"{torch.__version__}; {'.'.join(map(str, NEEDED_TORCH))} or later is needed")
    return f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}"


def _product(device: Device, format: str, rates: dict[str, float], seed: int) -> str:
    """Multiply two matrices, compare with float64, and time it. FP32 runs first, as the others are compared with it."""
    import torch

    from narrowgauge.nn.step_context import StepContext
    from narrowgauge.recipe import NAMED

    # Without native support torch is up to 250 times slower than in FP32 (BF16, Neoverse-N1): keep it small there.
    size = 4096 if device.kind == "cuda" else 256 if format in device.native else 64
    generator = torch.Generator(device.torch_device).manual_seed(seed)
    a, b = (torch.randn(size, size, generator=generator, device=device.torch_device) for _ in range(2))
    with StepContext(NAMED[format], torch.device(device.torch_device), emulated=False).backward():
        a_lp, b_lp, multiply = _operands(a, b, format)
        result = multiply()
        reference = a_lp[:64].double() @ b_lp.double()
        error = float((result[:64].double() - reference).norm() / reference.norm())
        if not error <= TOLERANCE[format]:
            raise Failure(f"wrong result: relative error {error:.2g}, at most {TOLERANCE[format]:g} expected")
        rate = 2 * size**3 / _best_seconds(multiply, device)
    if format == "fp32":
        rates["fp32"] = rate
        if device.kind == "cpu":  # the small size, for what is measured at it
            small_a, small_b = a[:64, :64].contiguous(), b[:64, :64].contiguous()
            rates["small"] = 2 * 64**3 / _best_seconds(lambda: small_a @ small_b, device)
    return judge_rate(format, rate, rates.get("small" if size == 64 else "fp32"), device)


def _operands(a: Tensor, b: Tensor, format: str) -> tuple[Tensor, Tensor, Callable[[], Tensor]]:
    """The operands rounded to a format, and a function that multiplies them."""
    import torch

    if format == "fp8":
        low = torch.float8_e4m3fn
        a_lp, b_lp = a.to(low), b.t().contiguous().to(low).t()  # the FP8 GEMM needs its second operand column-major
        one = torch.ones((), device=a.device)
        return a_lp, b_lp, lambda: torch._scaled_mm(a_lp, b_lp, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(format, torch.float32)
    a_lp, b_lp = a.to(dtype), b.to(dtype)
    return a_lp, b_lp, lambda: a_lp @ b_lp


def _best_seconds(call: Callable[[], Any], device: Device) -> float:
    """Seconds of the fastest of several runs: other processes disturb the rest."""
    import torch

    def clock() -> float:
        if device.kind == "cuda":
            torch.cuda.synchronize(device.torch_device)
        return time.perf_counter()

    call()
    repeats = 10 if device.kind == "cuda" else 3  # back to back, so that a GPU's launch latency does not count
    best, started = float("inf"), clock()
    for _ in range(20):
        start = clock()
        for _ in range(repeats):
            call()
        now = clock()
        best = min(best, (now - start) / repeats)
        if now - started > 0.3:
            break
    return best


def _attention(device: Device) -> str:
    import torch
    from torch.nn.attention import sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    from narrowgauge.nn.step_context import BACKENDS

    dtype = torch.bfloat16 if "bf16" in device.native else torch.float16
    fused = [name for name in BACKENDS if name != "math"]
    ran, refused = [], []
    for name in fused:
        q, k, v = (torch.randn(1, 4, 256, 64, device=device.torch_device, dtype=dtype, requires_grad=True)
                   for _ in range(3))  # fmt: skip
        try:
            with sdpa_kernel(BACKENDS[name]):
                scaled_dot_product_attention(q, k, v, is_causal=True).float().square().sum().backward()
            ran.append(name)
        except RuntimeError:
            refused.append(name)
    if not ran:
        raise Failure(f"none of {', '.join(fused)} works here")
    return ", ".join(ran) + (f" (not {', '.join(refused)})" if refused else "")


def _training_step(device: Device, recipe: Recipe, seed: int) -> str:
    """A few real updates of a tiny model under the recipe that ``auto`` selects."""
    import torch

    from narrowgauge.engine import Engine

    with torch.random.fork_rng(devices=[device.torch_device] if device.kind == "cuda" else []):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
        model = model.to(device.torch_device)
        x = torch.randn(64, 16, device=device.torch_device)
    engine = Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-2), recipe, clip_norm=1.0)
    losses = []
    for _ in range(20):
        with engine.forward():
            loss = (model(x).float().squeeze(1) - x.sum(1)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    if not losses[-1] < losses[0]:
        raise Failure(f"20 updates with {recipe} changed the loss from {losses[0]:.3g} to {losses[-1]:.3g}")
    return f"20 updates with {recipe}: loss {losses[0]:.3g} to {losses[-1]:.3g}"


def _compile(device: Device) -> str:
    import torch

    if device.kind == "cpu":  # compiling is slow on a CPU, and needs only a C++ compiler in addition to torch
        names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++", "c++"]
        found = next(filter(None, map(shutil.which, names)), None)
        if found is None:
            raise Failure("no C++ compiler (g++ or clang++), which torch.compile needs on a CPU")
        return f"C++ compiler {found}"
    x = torch.randn(1024, device=device.torch_device)
    start = time.perf_counter()
    compiled = torch.compile(lambda t: torch.nn.functional.gelu(t) * 2)(x)
    torch.testing.assert_close(compiled, torch.nn.functional.gelu(x) * 2)
    return f"compiled and ran in {time.perf_counter() - start:.1f} s"


def _disk(folder: Path) -> str:
    present = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(present).free
    text = f"{_size(free)} free in {present}"
    if free < LEAST_DISK_BYTES:
        raise Failure(f"{text}; checkpoints need at least {_size(LEAST_DISK_BYTES)}")
    return text


def _device_names() -> list[str]:
    import torch

    return [f"cuda:{i} {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count())] + ["cpu"]


def _show_device(device: Device, recipe: Recipe, reason: str, out: TextIO) -> None:
    memory = _size(device.memory_bytes) if device.memory_bytes else "unknown memory"
    if device.kind == "cuda":
        known = "in the table of GPUs" if device.gpu else "not in the table of GPUs: its peaks are unknown"
        capability = ".".join(map(str, device.capability)) if device.capability else "unknown"
        more = f"{memory}, compute capability {capability}, {known}"
    else:
        more = f"{cores()} cores, {memory}, features {', '.join(device.features) or 'unknown'}"
    others = [name for name in _device_names() if name.split()[0] != device.torch_device]
    say(f"Device   {device.name} ({device.torch_device}): {more}", out)
    if others:
        say(f"Others   {', '.join(others)}", out)
    say(f"Native   {', '.join(device.native)}", out)
    say(f"Recipe   {recipe}: {reason}", out)
    say("", out)


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"


def _flops(rate: float) -> str:
    return f"{rate / 1e12:.0f} TFLOP/s" if rate >= 1e13 else f"{rate / 1e9:.3g} GFLOP/s"
