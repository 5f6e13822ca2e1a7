"""Functions and modules that run in FP32 under every recipe, because 16 bits are not precise enough for them.

On CUDA torch's autocast already runs norms, softmax, losses and sums in FP32. On the CPU it does not: LayerNorm,
softmax, sum and exp stay in 16 bits there. ``Fp32Functions`` applies CUDA's list on the CPU, so that a CPU run predicts
the same run on a GPU. Users can also keep whole modules (``recipe.keep``) or single functions (``keep_fp32``) in FP32.
"""

from __future__ import annotations

import fnmatch
import functools
import types as python_types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.utils._pytree import tree_map_only

from narrowgauge.errors import UsageError
from narrowgauge.nn.eager_modes import EagerFunctionMode
from narrowgauge.nn.module_changes import Change, apply_change

Function = TypeVar("Function", bound=Callable[..., Any])

HALVES = (torch.float16, torch.bfloat16)
_NAMES = {
    torch: "acos asin cosh sinh tan exp expm1 log log10 log1p log2 pow reciprocal rsqrt erfinv prod sum cumprod cumsum "
    "softmax log_softmax layer_norm group_norm rms_norm norm renorm dist cdist cosine_similarity bilinear",
    F: "softmax log_softmax softmin softplus layer_norm group_norm rms_norm normalize cross_entropy nll_loss mse_loss "
    "l1_loss smooth_l1_loss huber_loss kl_div binary_cross_entropy_with_logits cosine_embedding_loss "
    "hinge_embedding_loss margin_ranking_loss multilabel_margin_loss multi_margin_loss poisson_nll_loss "
    "soft_margin_loss triplet_margin_loss gaussian_nll_loss",
    Tensor: "acos asin cosh sinh tan exp expm1 log log10 log1p log2 pow __pow__ __rpow__ reciprocal rsqrt erfinv prod "
    "sum cumprod cumsum softmax log_softmax norm renorm dist",
}
FP32_FUNCTIONS = frozenset(getattr(owner, name) for owner, names in _NAMES.items() for name in names.split())


def to_fp32(nest: Any) -> Any:
    """Return a nested structure with every FP16 or BF16 tensor cast to FP32."""
    if isinstance(nest, Tensor):
        return nest.float() if nest.dtype in HALVES else nest
    if nest is None or isinstance(nest, int | float | str):
        return nest
    if type(nest) is tuple or type(nest) is list:  # torch's tree functions are slow, and this is called for each op
        return type(nest)([to_fp32(one) for one in nest])
    return tree_map_only(Tensor, lambda tensor: tensor.float() if tensor.dtype in HALVES else tensor, nest)


class Fp32Functions(EagerFunctionMode):
    """Function mode that runs the functions of CUDA autocast's FP32 list in FP32 on the CPU too.

    It stays active in backward, where torch.utils.checkpoint runs parts of the forward again.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _BACKWARD:
            return self._run_backward(func, *args, **kwargs)
        if func not in FP32_FUNCTIONS or not torch.is_autocast_enabled("cpu"):  # as on CUDA
            return func(*args, **kwargs)
        with torch.autocast("cpu", enabled=False):
            return func(*to_fp32(args), **{name: to_fp32(value) for name, value in kwargs.items()})

    def _run_backward(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a function that computes gradients, with this mode active in autograd's engine.

        torch deactivates a mode while the mode handles a function, and autograd's engine computes in the state that it
        is called in. These functions cannot be called with the mode active: it would only handle them again. So a copy
        of them calls the engine with the mode active.
        """

        def run_engine(*values: Any, **options: Any) -> Any:
            with self:
                return torch.autograd.graph._engine_run_backward(*values, **options)

        own = _BACKWARD[func]
        names = own.__globals__ | {"_engine_run_backward": run_engine}
        copy = python_types.FunctionType(own.__code__, names, own.__name__, own.__defaults__, own.__closure__)
        copy.__kwdefaults__ = own.__kwdefaults__
        return (_call_backward if func is Tensor.backward else _call)(copy, *args, **kwargs)


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def _call_backward(
    backward: Callable[..., Any],
    tensor: Tensor,
    gradient: Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    """Call torch.autograd.backward as Tensor.backward does."""
    backward(tensor, gradient, retain_graph, create_graph, inputs=inputs)


_BACKWARD: dict[Any, Any] = {
    Tensor.backward: torch.autograd.backward,
    torch.autograd.backward: torch.autograd.backward,
    torch.autograd.grad: torch.autograd.grad,
}
"""Functions that compute gradients, and those of torch.autograd that call its engine."""


def keep_fp32(function: Function) -> Function:
    """Decorate a function (a custom op, a loss) so that it runs in FP32 under every recipe.

    Inside the function autocast is off. FP16 and BF16 tensors among its arguments are cast to FP32.

    Args:
        function: Any function of tensors. Tensors may be nested in lists, tuples and dicts.

    Returns:
        The wrapped function, with the same signature.

    Example:
        >>> @narrowgauge.keep_fp32
        ... def energy(scores): return torch.logsumexp(scores.square(), -1)
    """

    @functools.wraps(function)
    def kept(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):
            return function(*to_fp32(args), **to_fp32(kwargs))

    return kept  # type: ignore[return-value]


class KeptInFp32(Change):
    """A module that computes in FP32, and why, if not because of the recipe."""

    def __init__(self, reason: str = "") -> None:
        self.reason = reason

    def run(self, module: Any, inner: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        return keep_fp32(inner)(*args, **kwargs)


def keep_modules(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Keep the modules that match a pattern (by path or by class) in FP32; return their paths."""
    kept = find_modules(model, patterns)
    for module in kept.values():
        apply_change(module, KeptInFp32())
    return sorted(kept)


def find_modules(model: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    """Return the modules whose path or class matches a pattern, by path."""
    named: dict[str, nn.Module] = {}
    for pattern in patterns:
        found = {
            path: module
            for path, module in model.named_modules()
            if path and (fnmatch.fnmatchcase(path, pattern) or fnmatch.fnmatchcase(_class_of(module), pattern))
        }
        if not found:
            some = [path for path, _ in model.named_modules() if path][:8]
            raise UsageError(
                f"recipe: keep={pattern} names no module; use a path ({', '.join(some)}, ...) or a class name"
            )
        named |= found
    return named


def _class_of(module: nn.Module) -> str:
    """Return the name of a module's class, without the prefix of FSDP2's derived class."""
    name = type(module).__name__
    return name.removeprefix("FSDP") if hasattr(module, "set_requires_gradient_sync") else name


def keep_recurrent(model: nn.Module) -> list[str]:
    """Keep nn.RNN, nn.LSTM and nn.GRU in FP32, on a device that cannot train them in 16 bits."""
    kept = {path: module for path, module in model.named_modules() if isinstance(module, nn.RNNBase)}
    for module in kept.values():
        apply_change(module, KeptInFp32(f"{_class_of(module)} has no 16-bit products on this device"))
    return sorted(kept)


def find_computed_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield parameters that modules read outside of autocast's products, and that stay in FP32 under every recipe.

    These are parameters from which weights are computed (parametrizations, the older weight_norm and spectral_norm),
    nn.Bilinear's, and those of recurrent layers, which cuDNN needs in one contiguous buffer.
    """
    for module in model.modules():
        # A weight that is a parameter is not computed: layers with adapters return that of the layer inside them.
        weight = None if "weight" in module._parameters else getattr(module, "weight", None)
        older = isinstance(weight, Tensor) and not isinstance(weight, nn.Parameter)
        if older or is_parametrized(module) or isinstance(module, nn.Bilinear | nn.RNNBase):
            yield from module.parameters()
