"""Whether a subclass of nn.Linear that has its own forward computes what nn.Linear computes.

Many models cast the weight to the input's type in a forward of their own, in place of autocast (nanochat, Whisper):

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype))

Such a layer can run in another format as nn.Linear can. A forward that does anything else must be left alone, also if
what it does shows in no result: it may collect its input, or read a setting that changes later. So two things are
asked:

    code      the forward takes one tensor, calls nothing but torch, stores nothing, and reads of the layer only its
              weight and bias, in the type of the input: one that names a type wants that type
    results   on a small copy its output is that of F.linear, in FP32 and, if it takes BF16, in that
"""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import types
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

OUTPUTS, INPUTS = 16, 32
READ = frozenset({
    "weight", "bias", "dtype", "device", "to", "type_as", "T", "t", "mT", "linear", "matmul", "forward",
    "nn", "functional", "Linear",
})  # fmt: skip
"""Attributes that such a forward may read, of the layer, its tensors and torch."""
STORES = frozenset({"STORE_ATTR", "STORE_SUBSCR", "STORE_GLOBAL", "STORE_NAME", "IMPORT_NAME", "MAKE_FUNCTION"})


def computes_as_linear(cls: type[nn.Linear], has_bias: bool) -> bool:
    """Return whether the class's forward computes ``x @ weight.T + bias`` and does nothing else.

    Args:
        cls: A subclass of nn.Linear.
        has_bias: Whether the layer has a bias.
    """
    key: Any = cls, cls.forward  # a class may get another forward later
    return cls.forward is nn.Linear.forward or _is_equivalent(*key, has_bias)


@functools.lru_cache(maxsize=1024)
def _is_equivalent(cls: Any, forward: Any, has_bias: bool) -> bool:
    own = [vars(base)["forward"] for base in cls.__mro__[: cls.__mro__.index(nn.Linear)] if "forward" in vars(base)]
    return own[:1] == [forward] and all(_only_multiplies(one, cls) for one in own) and _agrees(cls, has_bias)


def _only_multiplies(forward: Any, cls: type[nn.Linear]) -> bool:
    """Whether the code of a forward can do nothing but compute a result from its input, weight and bias."""
    if not isinstance(forward, types.FunctionType) or hasattr(forward, "__wrapped__"):
        return False
    names = list(inspect.signature(forward).parameters.values())
    if len(names) != 2 or any(name.kind not in (name.POSITIONAL_ONLY, name.POSITIONAL_OR_KEYWORD) for name in names):
        return False
    for step in dis.get_instructions(forward):
        if step.opname in STORES:
            return False
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR") and step.argval not in READ:
            return False
        if step.opname == "LOAD_GLOBAL" and not _is_known(forward.__globals__, step.argval, cls):
            return False
        if step.opname in ("LOAD_DEREF", "LOAD_CLASSDEREF") and step.argval != "__class__":
            return False
    return True


def _is_known(space: dict[str, Any], name: str, cls: type[nn.Linear]) -> bool:
    """Whether a global name stands for torch, a part of it, or a class whose forward was looked at."""
    if name not in space:
        return name == "super"
    value = space[name]
    package = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None) or ""
    return package.partition(".")[0] == "torch" or value in cls.__mro__


def _agrees(cls: type[nn.Linear], has_bias: bool) -> bool:
    """Whether a small layer of the class computes F.linear, but for the order of additions."""
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        try:
            return all(
                result.shape == expected.shape
                and result.dtype == expected.dtype
                and torch.allclose(result, expected, rtol=0, atol=16 * float(torch.finfo(expected.dtype).eps))
                for result, expected in _run(cls, has_bias)
            )
        except Exception:  # whatever a forward of somebody else raises
            return False


def _run(cls: type[nn.Linear], has_bias: bool) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator("cpu").manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)

    weight, bias = INPUTS**-0.5 * draw(OUTPUTS, INPUTS), draw(OUTPUTS) if has_bias else None
    layer: Any = object.__new__(cls)
    nn.Module.__init__(layer)
    layer.in_features, layer.out_features = INPUTS, OUTPUTS
    layer.register_parameter("weight", nn.Parameter(weight))
    layer.register_parameter("bias", None if bias is None else nn.Parameter(bias))
    for training in (True, False):
        layer.training = training
        for shape in ((3, INPUTS), (2, 3, INPUTS)):
            x = draw(*shape)
            with torch.autocast("cpu", enabled=False):
                yield cls.forward(layer, x), F.linear(x, weight, bias)
                narrow, bias_lp = x.bfloat16(), None if bias is None else bias.bfloat16()
                with contextlib.suppress(RuntimeError):  # nn.Linear does not take an input of another type either
                    yield cls.forward(layer, narrow), F.linear(narrow, weight.bfloat16(), bias_lp)
