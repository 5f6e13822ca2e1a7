"""A norm as an autograd function of narrowgauge's kernel: statistics in FP32, one pass each way, no FP32 copies.

The last norm of a language model belongs to no block, and some norms belong to code that is not fused. Written in plain
torch, as in transformers, a norm makes three FP32 copies of its input in forward and five in backward: of a long
sequence, more than all of a fused block. If it is of the same class as the norms inside of fused blocks, with the same
attributes, then what was found out about those holds for it too, and it runs as one kernel on a GPU
(``ConvertedNorm``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.kernels import norm
from narrowgauge.nn.blocks.settings import OwnSettings
from narrowgauge.nn.blocks.spec import BlockSpec, NormSpec
from narrowgauge.nn.module_changes import Change, apply_change, has_own_method, original_class

BF16 = torch.bfloat16


def run_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    kind: str,
    *,
    bias: Tensor | None = None,
    offset: float = 0.0,
    dtype: torch.dtype = BF16,
) -> Tensor:
    """Return norm(x) * (offset + weight) + bias for x [..., D], as rows [N, D]; ``kind`` is layer or rms."""
    with torch.autocast(x.device.type, enabled=False):
        output: Tensor = _Norm.apply(x, weight, bias, NormSpec("", kind, eps, offset), dtype)  # type: ignore[no-untyped-call]
    return output


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, spec: NormSpec, dtype: torch.dtype) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        whole = weight + spec.offset if spec.offset else weight
        made = norm.norm(rows, whole, bias, eps=spec.eps, kind=spec.kind, dtype=dtype)
        ctx.save_for_backward(rows, weight, made.rstd, *([] if made.mean is None else [made.mean]))
        ctx.spec, ctx.shape, ctx.bias_dtype = spec, x.shape, None if bias is None else bias.dtype
        return made.out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        rows, weight, rstd, *mean = ctx.saved_tensors
        spec: NormSpec = ctx.spec
        whole = weight + spec.offset if spec.offset else weight
        grad_input, _, of_weight, of_bias = norm.norm_backward(
            grad, rows, whole, mean[0] if mean else None, rstd, kind=spec.kind, has_bias=ctx.bias_dtype is not None
        )
        of_bias = None if of_bias is None else of_bias.to(ctx.bias_dtype)
        return grad_input.view(ctx.shape), of_weight.to(weight.dtype), of_bias, None, None


class ConvertedNorm(Change):
    """A norm outside of blocks that runs as one kernel on a GPU, and returns the dtype that it returned before."""

    differentiable_twice = False

    def __init__(self, spec: NormSpec, settings: OwnSettings) -> None:
        self.spec, self.settings = spec, settings
        self._dtypes: dict[Any, torch.dtype] = {}

    def run(self, module: Any, inner: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        x = args[0] if len(args) == 1 and not kwargs else None
        weight, bias = getattr(module, self.spec.weight), getattr(module, self.spec.bias, None)
        fits = type(x) is Tensor and type(weight) is nn.Parameter and is_on_gpu(x) and x.numel() > 0
        if x is None or not fits or torch.compiler.is_compiling() or x.shape[-1:] != weight.shape:
            return inner(*args, **kwargs)
        if not self.settings.are_those_of(module):
            return inner(*args, **kwargs)
        dtype = self._find_dtype(inner, x)
        made = run_norm(
            x.contiguous(), weight, self.spec.eps, self.spec.kind, bias=bias, offset=self.spec.offset, dtype=dtype
        )
        return made.view(x.shape)

    def _find_dtype(self, inner: Callable[..., Any], x: Tensor) -> torch.dtype:
        """Return the dtype of the module's own result, which depends on its code and on autocast."""
        kind = x.device.type
        key = x.dtype, torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        if key not in self._dtypes:
            with torch.no_grad():
                self._dtypes[key] = inner(x.reshape(-1, x.shape[-1])[:1]).dtype
        return self._dtypes[key]


def is_on_gpu(x: Tensor) -> bool:
    """Whether a kernel will run. On a CPU, the model's own code is as good."""
    return x.is_cuda and x.dtype in (torch.float32, BF16)


def find_other_norms(model: nn.Module, specs: Mapping[str, BlockSpec]) -> dict[str, NormSpec]:
    """Return the norms that fused blocks do not compute, and that are like those which they compute, by path.

    They are outside of blocks, in a block's own attention (norms of queries over all heads), or in an MLP that is a
    module.
    """
    known: dict[Any, NormSpec] = {}
    for path, spec in specs.items():
        for one in filter(lambda norm: norm.weight, spec.norms):
            known.setdefault(_describe(model.get_submodule(f"{path}.{one.path}")), one)
    inside = tuple(f"{path}." for path in specs)
    own = tuple(
        place for path, spec in specs.items() for place in (
            *([f"{path}."] if spec.attention.kind == "own" else []), *([f"{path}.{spec.mlp}."] if spec.mlp else []),
        )
    )  # fmt: skip
    computed = {f"{path}.{one.path}" for path, spec in specs.items() for one in spec.norms}
    found = {}
    for path, module in model.named_modules():
        is_outside = not path.startswith(inside) or (path.startswith(own) and path not in computed)
        is_candidate = is_outside and next(module.children(), None) is None
        like = known.get(_describe(module)) if is_candidate else None
        if like is not None and not has_own_method(module, "forward"):
            found[path] = like
    return found


def convert_norm(module: nn.Module, spec: NormSpec) -> None:
    apply_change(module, ConvertedNorm(spec, OwnSettings.of(module)))


def _describe(module: nn.Module) -> Any:
    """Return what decides a norm's result: its class, the shapes of its parameters, and its other attributes."""
    settings = {name: value for name, value in vars(module).items() if not name.startswith(("_", "narrowgauge"))}
    settings.pop("training", None)
    return original_class(module), repr([(n, p.shape) for n, p in module.named_parameters()]), repr(settings)
