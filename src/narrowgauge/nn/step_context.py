"""The context a step runs in: autocast, the FP32 mode of matrix products, attention's backend, FP32 functions on CPU.

Global settings of torch are set on entry and restored on exit.
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
from narrowgauge.hardware import is_assumed
from narrowgauge.nn.autocast_rules import autocast_rules
from narrowgauge.nn.cpu_emulation import BACKWARD_WITHOUT_KERNEL, EmulatedProducts
from narrowgauge.nn.keep_fp32 import Fp32Functions
from narrowgauge.nn.module_changes import Change, apply_change
from narrowgauge.nn.plain_attention import NoticesPlainAttention
from narrowgauge.recipe import Recipe

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.bfloat16}
"""The dtype of autocast; with FP8 it applies to everything that is not converted."""
BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
ENABLED: dict[str, Callable[[], bool]] = {
    "cudnn": torch.backends.cuda.cudnn_sdp_enabled,
    "flash": torch.backends.cuda.flash_sdp_enabled,
    "efficient": torch.backends.cuda.mem_efficient_sdp_enabled,
    "math": torch.backends.cuda.math_sdp_enabled,
}
"""Whether torch may use each backend. Fastest first: on Hopper cuDNN's kernel beats FlashAttention 2's
(docs/results.md)."""


@dataclass(frozen=True)
class StepContext:
    """The settings of torch that a recipe needs on a device."""

    recipe: Recipe
    device: torch.device
    emulated: bool
    """The device has no native products in the compute format, so they are emulated in FP32."""

    def __post_init__(self) -> None:
        if self.device.type == "cuda":
            settle_attention_order(self.device)

    @property
    def device_type(self) -> str:
        return self.device.type

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of autocast, or None if it is off."""
        return DTYPES.get(self.recipe.compute)

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Context manager for the forward pass and the loss."""
        with self._common(), self.autocast():
            yield

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return autocast to the compute format; a null context for FP32."""
        if self.dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device_type, dtype=self.dtype)

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Context manager for the backward pass: as forward, without autocast."""
        with self._common(), contextlib.ExitStack() as stack:
            if self.device_type == "cpu" and self.dtype is torch.float16 and not self.emulated:
                stack.enter_context(EmulatedProducts(BACKWARD_WITHOUT_KERNEL))
            yield

    @contextlib.contextmanager
    def _common(self) -> Iterator[None]:
        """Context manager for what forward and backward have in common: everything but autocast."""
        with contextlib.ExitStack() as stack:
            if self.device_type == "cuda":
                stack.enter_context(torch.cuda.device(self.device))  # kernels run on the current device
                stack.enter_context(_fp32_products("tf32" if self.recipe.compute == "tf32" else "ieee"))
            stack.enter_context(self.attention())
            stack.enter_context(self._cpu_modes())
            if self.dtype is not None:
                stack.enter_context(autocast_rules())  # also for blocks recomputed in backward
            yield

    def recomputation(self) -> Callable[[], contextlib.AbstractContextManager[None]] | None:
        """Return the context for blocks recomputed in backward. Only the CPU's modes must be entered again."""
        return self._cpu_modes if self.device_type == "cpu" and self.dtype is not None else None

    @contextlib.contextmanager
    def _cpu_modes(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if self.device_type == "cpu" and self.dtype is not None:
                if self.emulated:
                    stack.enter_context(EmulatedProducts())
                stack.enter_context(Fp32Functions())
            yield

    def notice_plain_attention(self) -> contextlib.AbstractContextManager[Any]:
        """Context manager for an engine's first forward: warns if attention runs in torch's plain implementation."""
        if self.recipe.attention != "auto" or self.device_type != "cuda" or self.dtype is None or is_assumed():
            return contextlib.nullcontext()
        return NoticesPlainAttention()

    def attention(self) -> contextlib.AbstractContextManager[None]:
        """Allow only the attention backends of the recipe; with ``auto`` torch's plain one if nothing else fits.

        With ``auto``, what the user turned off stays off, and so does cuDNN's with torch's deterministic algorithms:
        its backward adds up in no fixed order.
        """
        choice = self.recipe.attention
        if choice == "any" or (choice == "auto" and (self.device_type != "cuda" or self.dtype is None)):
            return contextlib.nullcontext()
        if choice != "auto":
            return sdpa_kernel([BACKENDS[choice]])
        allowed = [name for name, is_enabled in ENABLED.items() if is_enabled()]
        if "cudnn" in allowed and torch.are_deterministic_algorithms_enabled():
            allowed.remove("cudnn")
        backends = [BACKENDS[name] for name in allowed]
        return sdpa_kernel(backends, set_priority=True) if backends else contextlib.nullcontext()


_settled = False


def settle_attention_order(device: torch.device) -> None:
    """Make torch decide its order of attention backends before one of our contexts saves and restores that order.

    torch puts cuDNN first on Hopper when a process first runs attention, not before. A context that saves the order
    earlier would leave cuDNN last for everything after it: another loop in the process, or a baseline in a benchmark.
    """
    global _settled
    modes = [mode for mode in _get_current_function_mode_stack() if not isinstance(mode, DeviceContext)]
    if not _settled and not modes and not _get_current_dispatch_mode_stack():  # a forecast's GPU does not exist
        _settled = True
        x = torch.zeros(1, 1, 16, 64, dtype=torch.bfloat16, device=device)
        torch._fused_sdp_choice(x, x, x)


@contextlib.contextmanager
def _fp32_products(mode: str) -> Iterator[None]:
    """Context manager that runs FP32 matrix products and convolutions on CUDA as "ieee" or "tf32"."""
    matmul, conv = torch.backends.cuda.matmul, torch.backends.cudnn.conv  # type: ignore[attr-defined]
    before = matmul.fp32_precision, conv.fp32_precision
    matmul.fp32_precision = conv.fp32_precision = mode
    try:
        yield
    finally:
        matmul.fp32_precision, conv.fp32_precision = before


@dataclass
class OpensStepContext(Change):
    """A model that opens the step context itself when called outside of ``engine.forward()``.

    A copy of the model (an average of weights, for example) does so as well. Without the context torch rejects BF16
    weights with FP32 inputs, and the BF16 output of a converted layer as the input of one with FP32 weights.
    """

    step_context: StepContext

    def run(self, module: Any, inner: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if torch.is_autocast_enabled(self.step_context.device_type):
            return inner(*args, **kwargs)
        # torch.compile traces autocast, which is what dtypes depend on, but none of the other settings
        with self.step_context.autocast() if torch.compiler.is_compiling() else self.step_context.forward():
            return inner(*args, **kwargs)


def open_step_context(model: nn.Module, step_context: StepContext) -> None:
    """Make a model open the step context itself, and if it only wraps another, that one as well.

    A wrapper's own methods, such as ``generate`` or ``sample``, call the model inside, not the wrapper.
    """
    inner: nn.Module | None = model
    while inner is not None:
        apply_change(inner, OpensStepContext(step_context))
        inner = _find_wrapped(inner)


def _find_wrapped(wrapper: nn.Module) -> nn.Module | None:
    """Return the attribute of a module that has all of its parameters, and parts of its own; else None."""
    if wrapper._parameters:
        return None
    parts = [(name, part) for name, part in wrapper.named_children() if any(True for _ in part.parameters())]
    if len(parts) != 1 or parts[0][0].isdigit():  # a member of a row
        return None
    wrapped = parts[0][1]
    calls_parts = not isinstance(wrapped, nn.ModuleList | nn.ModuleDict)
    return wrapped if calls_parts and any(True for _ in wrapped.children()) else None


MIXED = re.compile(
    r"same (dtypes?|scalar type)|expected scalar type|expected .*dtype|not implemented for '(BFloat16|Half)'"
    r"|[Uu]nsupported dtype"
)
"""Error messages of torch about operands of different or unsupported dtypes."""

FUNCTORCH = ("an autograd.Function with functorch transforms", "Batching rule not implemented for")
"""Error messages of torch about functions that torch.func cannot transform."""


def explain_error(error: RuntimeError, recipe: Recipe, model: nn.Module) -> UsageError | None:
    """Return a clear error for a torch error that is about precision, or None for any other error."""
    first = (str(error).strip().splitlines() or [""])[0]
    if "No available kernel" in first:
        return UsageError(
            f"recipe {recipe}: {recipe.attention} attention does not support the given shapes, dtypes or mask; change "
            "them (a mask must not be expanded along its last dimension, or be transposed), or use attention=auto"
        )
    if "selective activation checkpoint has been mutated" in first:
        return UsageError(
            f"recipe {recipe}: checkpoint=selective saves the results of matrix products, and the model changes one of "
            "them in place (add_ on a product, for example); use checkpoint=full"
        )
    if "_grouped_mm" in str(error) and "Expected inputs of BF16 type" in str(error):
        return UsageError(
            f"recipe {recipe}: torch.compile supports grouped products (of experts) only in BF16; turn compile off, or "
            "use a recipe that computes in BF16"
        )
    if any(text in first for text in FUNCTORCH):
        return UsageError(
            f"recipe {recipe}: torch.func (grad, vmap, jvp, ...) cannot transform converted layers; compute that part "
            "under engine.forward(double_backward=True), where layers compute in 16 bits as they were written"
        )
    path = find_failing_module(error, model)
    if recipe.compute in ("fp32", "tf32") or path is None or not MIXED.search(first):
        return None
    module = type(model.get_submodule(path)).__name__
    return UsageError(
        f"recipe {recipe}: {path or 'the model'} ({module}) cannot compute with the given dtypes: {first} "
        + (f"Keep it in FP32 with keep={path} in the recipe" if path else "Keep a module in FP32 with keep=...")
        + ", or decorate the function with @narrowgauge.keep_fp32"
    )


def find_failing_module(error: BaseException, model: nn.Module) -> str | None:
    """Return the path of the innermost module in whose forward an error was raised."""
    paths = {id(module): path for path, module in model.named_modules()}
    found, frame = None, error.__traceback__
    while frame is not None:
        owner = frame.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and id(owner) in paths:
            found = paths[id(owner)]
        frame = frame.tb_next
    return found
