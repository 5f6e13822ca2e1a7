"""The surroundings a step runs in: autocast, the FP32 mode of matrix products, attention's backend, CPU keepers.

Everything torch keeps as a global is set on the way in and put back on the way out.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from narrowgauge.errors import UsageError
from narrowgauge.nn.changes import Change
from narrowgauge.nn.cpu_emulation import EmulatedProducts
from narrowgauge.nn.grouped_mm import grouped_in_autocast
from narrowgauge.nn.keep_fp32 import Fp32Functions
from narrowgauge.recipe import Recipe

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.bfloat16}
"""What autocast computes in; under FP8 that is whatever is not converted."""
BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
FUSED = ("cudnn", "flash", "efficient")
"""Fastest first: on Hopper cuDNN's kernel beats FlashAttention 2's (docs/results.md)."""


@dataclass(frozen=True)
class StepContext:
    """What a recipe asks of torch on a device."""

    recipe: Recipe
    device: torch.device
    emulated: bool
    """The device has no native products in the compute format: widen, multiply, round."""

    def __post_init__(self) -> None:
        if self.device.type == "cuda":
            settle_attention_order(self.device)

    @property
    def device_type(self) -> str:
        return self.device.type

    @property
    def dtype(self) -> torch.dtype | None:
        """The format autocast computes in, or None where it is off."""
        return DTYPES.get(self.recipe.compute)

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """For the forward pass and the loss."""
        with self.backward(), self.autocast():
            yield

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Products in the compute format; nothing where that is FP32."""
        if self.dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device_type, dtype=self.dtype)

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """For the backward pass: everything but autocast."""
        with contextlib.ExitStack() as stack:
            if self.device_type == "cuda":
                stack.enter_context(torch.cuda.device(self.device))  # kernels run where the current device is
                stack.enter_context(_fp32_products("tf32" if self.recipe.compute == "tf32" else "ieee"))
            stack.enter_context(self.attention())
            stack.enter_context(self._cpu_modes())
            if self.dtype is not None:
                stack.enter_context(grouped_in_autocast())  # also for blocks that backward computes again
            yield

    def recomputation(self) -> Callable[[], contextlib.AbstractContextManager[None]] | None:
        """For blocks that are recomputed in backward. Only the CPU's modes must be entered again."""
        return self._cpu_modes if self.device_type == "cpu" and self.dtype is not None else None

    @contextlib.contextmanager
    def _cpu_modes(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if self.device_type == "cpu" and self.dtype is not None:
                if self.emulated:
                    stack.enter_context(EmulatedProducts())  # type: ignore[no-untyped-call]
                stack.enter_context(Fp32Functions())
            yield

    def attention(self) -> contextlib.AbstractContextManager[None]:
        """Only the attention backends the recipe allows."""
        choice = self.recipe.attention
        if choice == "any" or (choice == "auto" and (self.device_type != "cuda" or self.dtype is None)):
            return contextlib.nullcontext()
        if choice == "auto":
            return sdpa_kernel([BACKENDS[name] for name in FUSED], set_priority=True)
        return sdpa_kernel([BACKENDS[choice]])


_settled = False


def settle_attention_order(device: torch.device) -> None:
    """Let torch decide its own order of attention backends before a context of ours notes it, to put it back.

    torch puts cuDNN first on Hopper when a process first asks for attention, not before. A context that notes the order
    earlier would leave cuDNN last for all that comes after it: another loop in the process, a peer in a benchmark.
    """
    global _settled
    modes = [mode for mode in _get_current_function_mode_stack() if not isinstance(mode, DeviceContext)]
    if not _settled and not modes and not _get_current_dispatch_mode_stack():  # a forecast's GPU is not there
        _settled = True
        x = torch.zeros(1, 1, 16, 64, dtype=torch.bfloat16, device=device)
        torch._fused_sdp_choice(x, x, x)


@contextlib.contextmanager
def _fp32_products(mode: str) -> Iterator[None]:
    """How FP32 matrix products and convolutions run on CUDA: "ieee" or "tf32"."""
    matmul, conv = torch.backends.cuda.matmul, torch.backends.cudnn.conv  # type: ignore[attr-defined]
    before = matmul.fp32_precision, conv.fp32_precision
    matmul.fp32_precision = conv.fp32_precision = mode
    try:
        yield
    finally:
        matmul.fp32_precision, conv.fp32_precision = before


@dataclass
class OwnStepContext(Change):
    """A model with BF16 weights that is called outside of ``engine.forward()``: it opens the surroundings itself.

    So does a copy of it, an average of weights, say. Without them torch refuses BF16 weights and FP32 inputs.
    """

    step_context: StepContext

    def run(self, module: Any, inner: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if torch.is_autocast_enabled(self.step_context.device_type):
            return inner(*args, **kwargs)
        with self.step_context.forward():
            return inner(*args, **kwargs)


MIXED = re.compile(
    r"same dtype|expected scalar type|expected .*dtype|not implemented for '(BFloat16|Half)'|[Uu]nsupported dtype"
)
"""What torch says where formats meet that it cannot compute with."""


def explain(error: RuntimeError, recipe: Recipe, model: nn.Module) -> UsageError | None:
    """The clear form of an error of torch's that has to do with precision, or None for any other."""
    first = (str(error).strip().splitlines() or [""])[0]
    if "No available kernel" in first:
        allowed = " or ".join(FUSED) if recipe.attention == "auto" else recipe.attention
        return UsageError(
            f"recipe {recipe}: attention cannot run by {allowed} for the shapes, types or mask it was given; change "
            "those (a mask must not be expanded along its last dimension, as that of a compiled Hugging Face encoder "
            "without attention_mask is), or allow any backend with attention=any"
        )
    if "selective activation checkpoint has been mutated" in first:
        return UsageError(
            f"recipe {recipe}: checkpoint=selective keeps the results of products, and the model changes one of them "
            "in place (add_ on a product, say); take checkpoint=full"
        )
    if "_grouped_mm" in str(error) and "Expected inputs of BF16 type" in str(error):
        return UsageError(
            f"recipe {recipe}: torch.compile knows grouped products (of experts) in BF16 alone; leave compile off, or "
            "take a recipe that computes in BF16"
        )
    path = innermost(error, model)
    if recipe.compute in ("fp32", "tf32") or path is None or not MIXED.search(first):
        return None
    module = type(model.get_submodule(path)).__name__
    return UsageError(
        f"recipe {recipe}: {path or 'the model'} ({module}) cannot compute in the formats that it was given: {first} "
        + (f"Keep it in FP32 with keep={path} in the recipe" if path else "Keep the part in FP32 with keep=... in it")
        + ", or put @narrowgauge.keep_fp32 on the function"
    )


def innermost(error: BaseException, model: nn.Module) -> str | None:
    """The path of the module of the model in whose forward an error was raised."""
    paths = {id(module): path for path, module in model.named_modules()}
    found, frame = None, error.__traceback__
    while frame is not None:
        owner = frame.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and id(owner) in paths:
            found = paths[id(owner)]
        frame = frame.tb_next
    return found
