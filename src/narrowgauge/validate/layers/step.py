"""One step of a task under a recipe, module by module: who is called with what, and what comes back.

Blocks and heads that narrowgauge otherwise computes as one are taken apart here, so that each of their modules can be
seen: their linear layers run in FP8 one by one, in the formats that conversion chose for them. In a first step FP8
scales come from the tensors themselves, so that what is measured is rounding and not a missing history.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from narrowgauge import hardware, random_state
from narrowgauge.engine import Engine
from narrowgauge.nn.convert import Conversion, Layer, convert, is_lean
from narrowgauge.nn.products import linear
from narrowgauge.nn.products.gemm import E4M3, E5M2
from narrowgauge.nn.products.weight_casts import WeightCastPlan
from narrowgauge.recipe import Recipe
from narrowgauge.scaling.tensor import TensorScales
from narrowgauge.task import Task

QUIET = (nn.Identity, nn.modules.dropout._DropoutNd)
"""Modules that compute nothing a format could spoil."""


class Stage:
    """A task's model and first batch, and how to run its first step again and again, always from the same point."""

    def __init__(self, task: Task, batch: Any, device: str, seed: int) -> None:
        self.task, self.batch, self.device, self.seed = task, batch, torch.device(device), seed
        self.model = self._make()
        self._state = {name: value.detach().clone() for name, value in self.model.state_dict().items()}
        self._random = random_state.capture()

    def engine(self, recipe: Recipe, model: nn.Module | None = None) -> Engine:
        """An engine over a model with the stage's weights: a fresh one, unless one is given."""
        if model is None:
            model = self._make()
            model.load_state_dict(self._state)
        recipe = as_computed(recipe)
        layers = convert(model, recipe, hardware.detect(str(self.device))).layers if recipe.compute == "fp8" else []
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.0)
        engine = Engine(model, optimizer, recipe, fused=False)  # which takes back what convert swapped
        if layers:
            engine.conversion = _swap_linears(engine, layers)
        return engine

    def run(self, engine: Engine, hooks: Hooks | None = None) -> float:
        """Forward and backward; gradients are left on the parameters, as large as the loss scale makes them."""
        engine.model.zero_grad(set_to_none=True)
        self.rewind(engine.model)
        random_state.restore(self._random)
        with SameMasks():
            with hooks.on() if hooks is not None else contextlib.nullcontext(), engine.forward():
                loss = self.task.loss(engine.model, self.batch)
            engine.backward(loss)
        return float(loss.detach())

    def rewind(self, model: nn.Module) -> None:
        """Put buffers back to what they were before any step."""
        for name, buffer in model.named_buffers():
            if name in self._state:
                with torch.no_grad():
                    buffer.copy_(self._state[name])

    def _make(self) -> nn.Module:
        random_state.seed(self.seed)
        with self.device:
            model = self.task.model()
        model = getattr(model, "_orig_mod", model)  # what torch.compile wrapped
        for module in model.modules():
            if isinstance(module, nn.MultiheadAttention):
                module.dropout = 0.0  # its masks would depend on the format: see SameMasks
        return model.to(self.device)


def as_computed(recipe: Recipe) -> Recipe:
    """The recipe as far as it decides what one step computes."""
    changes: dict[str, Any] = {"checkpoint": "none", "moments": "fp32"}
    if recipe.gradients == "released":  # or backward would step
        changes["gradients"] = "fp32" if recipe.master == "fp32" else "bf16"
    return recipe.replace(**changes)


def loss_scale(engine: Engine) -> float:
    return 1.0 if engine.scaler is None else float(engine.scaler.tensor(engine.device))


def _swap_linears(engine: Engine, layers: list[Layer]) -> Conversion:
    """Let each linear layer compute in FP8 by itself; what a head reads is scaled by itself, as head.py does."""
    recipe, chosen = engine.recipe, [layer for layer in layers if "fp8" in layer.choice]
    options: dict[str, Any] = {"history": recipe.history, "margin": recipe.margin, "amax": recipe.amax}
    for layer in chosen:
        sites = {f"{layer.path}.{end}": dtype for end, dtype in operand_dtypes(layer).items()}
        scales = TensorScales(sites, engine.device, mode=scaling_of(layer, recipe), **options)
        source, weight, grad = scales.sites.values()
        module: Any = engine.model.get_submodule(layer.path)
        transposed_weight, lean = linear.has_transposed_weight(module), is_lean(recipe)
        plan = WeightCastPlan.of(
            module.weight, site=weight, scales=scales, transposed_weight=transposed_weight, lean=lean
        )
        linear.convert_linear(module, linear.LinearPlan(plan, layer.choice, source, grad, scales))
    return Conversion(chosen)


def operand_dtypes(layer: Layer) -> dict[str, torch.dtype]:
    """The FP8 formats of what a layer's products read."""
    return {"input": E4M3, "weight": E4M3, "grad": E4M3 if layer.part_of == "head" else E5M2}


def scaling_of(layer: Layer, recipe: Recipe) -> str:
    return "current" if layer.part_of == "head" else recipe.scaling


class SameMasks(TorchFunctionMode):
    """Dropout draws its mask in FP32 whatever it is given: on GPUs the mask would else depend on the format.

    Attention's own dropout, which is drawn inside its kernels, is off.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.dropout or func is torch.dropout:
            return _drop(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs.pop("dropout_p", None)
        return func(*args, **kwargs)


def _drop(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, **named: bool) -> Tensor:
    if not named.get("train", training) or not p:
        return input
    mask = torch.rand(input.shape, device=input.device) >= p
    return input * (mask / (1 - p) if p < 1 else torch.zeros_like(mask)).to(input.dtype)


def watched(model: nn.Module) -> dict[str, nn.Module]:
    """Modules that compute: those with parameters of their own, and leaves."""
    found = {}
    for path, module in model.named_modules():
        own = any(True for _ in module.parameters(recurse=False))
        if (own or not any(True for _ in module.children())) and not isinstance(module, QUIET):
            found[path] = module
    return found


@dataclass
class Call:
    """One call of a module in the reference's step: copies of what it read and made, and the gradients of both."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: list[Tensor]
    """The floating tensors among the arguments, each once."""
    needs: list[bool]
    """Which of them have a gradient."""
    grad_inputs: dict[int, Tensor] = field(default_factory=dict)
    outputs: list[Tensor] = field(default_factory=list)
    grad_outputs: dict[int, Tensor] = field(default_factory=dict)

    def output(self, index: int) -> Tensor | None:
        return self.outputs[index] if index < len(self.outputs) else None

    def filled(self, inputs: list[Tensor]) -> tuple[Any, Any]:
        """The arguments with other tensors in the place of the inputs."""
        others = {id(old): new for old, new in zip(self.inputs, inputs, strict=True)}
        return swap((self.args, self.kwargs), lambda tensor: others.get(id(tensor), tensor))  # type: ignore[no-any-return]


class Hooks:
    """Hooks on modules for one forward and its backward. What comes of it is up to who derives from it."""

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        self.modules = modules
        self._open: dict[str, list[Any]] = {path: [] for path in modules}

    def begin(self, path: str, args: Any, kwargs: Any, inputs: list[Tensor]) -> Any:
        """A module is called; what is returned comes with everything else about the call."""
        raise NotImplementedError

    def see(self, call: Any, quantity: str, index: int, tensor: Tensor) -> None:
        """An output, or the gradient of an output (grad_output) or of an input (grad_input), by its number."""
        raise NotImplementedError

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for path, module in self.modules.items():
                before = module.register_forward_pre_hook(partial(self._before, path), with_kwargs=True)
                stack.callback(before.remove)
                stack.callback(module.register_forward_hook(partial(self._after, path)).remove)
            yield

    def _before(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Give the module another name of each input, whose gradient is then the module's share alone.

        Not where it writes over its input: it would write over one that has another history.
        """
        inputs = list({id(tensor): tensor for tensor in floats((args, kwargs))}.values())
        call = self.begin(path, args, kwargs, inputs)
        self._open[path].append(call)
        if not torch.is_grad_enabled() or getattr(module, "inplace", False):
            return None
        names: dict[int, Tensor] = {}
        for index, tensor in enumerate(inputs):
            if tensor.requires_grad:
                names[id(tensor)] = alias = tensor.view_as(tensor)
                alias.register_hook(partial(self._grad, call, "grad_input", index))
        return swap((args, kwargs), lambda tensor: names.get(id(tensor), tensor))

    def _after(self, path: str, module: nn.Module, args: Any, output: Any) -> None:
        call = self._open[path].pop()
        for index, tensor in enumerate(floats(output)):
            self.see(call, "output", index, tensor.detach())
            if tensor.requires_grad:
                tensor.register_hook(partial(self._grad, call, "grad_output", index))

    def _grad(self, call: Any, quantity: str, index: int, grad: Tensor) -> None:
        self.see(call, quantity, index, grad.detach())


class Recorder(Hooks):
    """Keeps what it sees: the activations of a step and their gradients, each once."""

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        super().__init__(modules)
        self.calls: dict[str, list[Call]] = {path: [] for path in modules}

    def begin(self, path: str, args: Any, kwargs: Any, inputs: list[Tensor]) -> Call:
        copies: dict[int, Tensor] = {}

        def copied(tensor: Tensor) -> Tensor:
            if id(tensor) not in copies:
                copies[id(tensor)] = tensor.detach().clone()
            return copies[id(tensor)]

        own_args, own_kwargs = swap((args, kwargs), copied)
        call = Call(
            own_args, own_kwargs, [copied(tensor) for tensor in inputs], [tensor.requires_grad for tensor in inputs]
        )
        self.calls[path].append(call)
        return call

    def see(self, call: Call, quantity: str, index: int, tensor: Tensor) -> None:
        if quantity == "output":
            call.outputs.append(tensor.clone())
        else:
            (call.grad_inputs if quantity == "grad_input" else call.grad_outputs)[index] = tensor.clone()


def floats(nest: Any) -> Iterator[Tensor]:
    """Every floating tensor in a nest."""
    if isinstance(nest, Tensor):
        if nest.is_floating_point():
            yield nest
    elif isinstance(nest, tuple | list):
        for item in nest:
            yield from floats(item)
    elif isinstance(nest, dict):
        for item in nest.values():
            yield from floats(item)


def swap(nest: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The nest with each tensor changed. Nests of other classes than tuple, list and dict are left as they are."""
    if isinstance(nest, Tensor):
        return change(nest)
    if type(nest) is dict:
        return {key: swap(item, change) for key, item in nest.items()}
    return type(nest)(swap(item, change) for item in nest) if type(nest) in (tuple, list) else nest
