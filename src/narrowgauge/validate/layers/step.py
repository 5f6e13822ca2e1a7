"""Runs one step of a task with a recipe and hooks every module: its inputs, outputs and their gradients.

Fused blocks and heads are run unfused here, so that each of their modules can be observed: their linear layers run in
FP8 one by one, in the formats that conversion chose for them. In a first step the FP8 scales come from the tensors
themselves, so that the error is due to rounding and not to a missing amax history.
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
from narrowgauge.kernels.fp8_formats import FP8_DTYPES
from narrowgauge.nn.blocks.settings import OwnSettings
from narrowgauge.nn.convert import Conversion, convert_layers, is_lean
from narrowgauge.nn.experts.find import ExpertsSpec
from narrowgauge.nn.experts.modules import FusedExperts
from narrowgauge.nn.experts.plan import make_experts_plan
from narrowgauge.nn.module_changes import apply_change
from narrowgauge.nn.products import linear
from narrowgauge.nn.products.gemm import E4M3
from narrowgauge.nn.speed_advice import no_speed_warnings
from narrowgauge.nn.survey import Layer, get_granularity, list_sites
from narrowgauge.recipe import Recipe
from narrowgauge.scaling.tensor import TensorScales
from narrowgauge.task import Task
from narrowgauge.weight_copies.casts import WeightCastPlan

IGNORED = (nn.Identity, nn.modules.dropout._DropoutNd)
"""Modules without arithmetic that a format could affect."""


class StepRunner:
    """Runs the first step of a task repeatedly, always from the same weights, buffers, batch and random state."""

    def __init__(self, task: Task, batch: Any, device: str, seed: int) -> None:
        self.task, self.batch, self.device, self.seed = task, batch, torch.device(device), seed
        self.model = self._make()
        self._state = {name: value.detach().clone() for name, value in self.model.state_dict().items()}
        self._random = random_state.capture()

    def make_engine(self, recipe: Recipe, model: nn.Module | None = None) -> Engine:
        """Creates an engine for a model with the initial weights: the given model, or a new one."""
        if model is None:
            model = self._make()
            model.load_state_dict(self._state)
        recipe = reduce_recipe(recipe)
        device = hardware.detect(str(self.device))
        whole = convert_layers(model, recipe, device) if recipe.compute == "fp8" else Conversion()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.0)
        with no_speed_warnings():
            engine = Engine(model, optimizer, recipe, fused=False)  # undoes the changes of convert_layers
        if whole.layers:
            engine.conversion = _swap_linears(engine, whole.layers)
            engine.conversion.experts = _swap_experts(engine, whole)
        return engine

    def run(self, engine: Engine, hooks: Hooks | None = None) -> float:
        """Runs forward and backward. The gradients, multiplied by the loss scale, stay on the parameters."""
        engine.model.zero_grad(set_to_none=True)
        self.reset_buffers(engine.model)
        random_state.restore(self._random)
        with FormatIndependentDropout():
            with hooks.attach() if hooks is not None else contextlib.nullcontext(), engine.forward():
                loss = self.task.loss(engine.model, self.batch)
            engine.backward(loss)
        return float(loss.detach())

    def reset_buffers(self, model: nn.Module) -> None:
        """Restores the initial values of the buffers."""
        for name, buffer in model.named_buffers():
            if name in self._state:
                with torch.no_grad():
                    buffer.copy_(self._state[name])

    def _make(self) -> nn.Module:
        random_state.seed(self.seed)
        with self.device:
            model = self.task.model()
        model = getattr(model, "_orig_mod", model)  # the module inside torch.compile's wrapper
        for module in model.modules():
            if isinstance(module, nn.MultiheadAttention):
                module.dropout = 0.0  # its masks depend on the dtype, see FormatIndependentDropout
        return model.to(self.device)


def reduce_recipe(recipe: Recipe) -> Recipe:
    """The recipe without the fields that do not affect the numbers of one step."""
    changes: dict[str, Any] = {"checkpoint": "none", "moments": "fp32"}
    if recipe.gradients == "released":  # backward would otherwise update the weights
        changes["gradients"] = "fp32" if recipe.master == "fp32" else "bf16"
    if recipe.frozen == "fp8":  # the products read the same numbers, cast from BF16
        changes["frozen"] = "bf16"
    return recipe.replace(**changes)


def get_loss_scale(engine: Engine) -> float:
    return 1.0 if engine.scaler is None else float(engine.scaler.get_scale_tensor(engine.device))


def _swap_linears(engine: Engine, layers: list[Layer]) -> Conversion:
    """Converts each linear layer to FP8 separately. A head uses current scaling, as in nn/fused/head.py."""
    modules = dict(engine.model.named_modules())
    alone = {
        path for path, module in modules.items() if linear.is_linear(module)
    }  # not nn.MultiheadAttention's weights
    recipe, chosen = engine.recipe, [layer for layer in layers if "fp8" in layer.choice and layer.path in alone]
    options: dict[str, Any] = {"history": recipe.history, "margin": recipe.margin, "amax": recipe.amax}
    for layer in chosen:
        sites = {f"{layer.path}.{end}": dtype for end, dtype in operand_dtypes(layer, recipe).items()}
        options["in_backward"] = [f"{layer.path}.grad"]
        options["granularity"] = dict.fromkeys(sites, get_granularity(layer, recipe))
        scales = TensorScales(sites, engine.device, mode=get_scaling(layer, recipe), **options)
        source, weight, grad = scales.sites.values()
        module: Any = modules[layer.path]
        transposed_weight, lean = linear.has_transposed_weight(module), is_lean(recipe)
        plan = WeightCastPlan.of(
            module.weight, site=weight, scales=scales, transposed_weight=transposed_weight, lean=lean
        )
        linear.convert_linear(module, linear.LinearPlan(plan, layer.choice, source, grad, scales))
    return Conversion(chosen)


def _swap_experts(engine: Engine, whole: Conversion) -> dict[str, ExpertsSpec]:
    """Converts each module of experts to FP8 separately; returns their descriptions by path."""
    recipe, modules = engine.recipe, dict(engine.model.named_modules())
    options: dict[str, Any] = {"history": recipe.history, "margin": recipe.margin, "amax": recipe.amax}
    for path, spec in whole.experts.items():
        layers = [layer for layer in whole.layers if layer.path in (f"{path}.{spec.gate_up}", f"{path}.{spec.down}")]
        sites = {name: dtype for layer in layers for name, dtype in list_sites(layer, {}, recipe)}
        in_backward = [name for name in sites if name.endswith(".grad_output")]
        scales = TensorScales(sites, engine.device, mode=recipe.scaling, in_backward=in_backward, **options)
        wide = (layer.choice.output == "bf16" for layer in layers)
        plan = make_experts_plan(modules[path], path, spec, scales, is_lean(recipe), *wide)
        apply_change(modules[path], FusedExperts(plan, OwnSettings.of(modules[path])))
    return whole.experts


def operand_dtypes(layer: Layer, recipe: Recipe) -> dict[str, torch.dtype]:
    """The FP8 formats of the operands of a layer's products."""
    gradients = FP8_DTYPES[recipe.first_gradients_format]
    return {"input": E4M3, "weight": E4M3, "grad": E4M3 if layer.part_of == "head" else gradients}


def get_scaling(layer: Layer, recipe: Recipe) -> str:
    return "current" if layer.part_of == "head" else recipe.scaling


class FormatIndependentDropout(TorchFunctionMode):
    """Draws dropout masks in FP32 for every dtype; on GPUs the mask would otherwise depend on the dtype.

    Dropout inside attention kernels is turned off.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.dropout or func is torch.dropout:
            return _apply_dropout(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs.pop("dropout_p", None)
        return func(*args, **kwargs)


def _apply_dropout(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, **named: bool
) -> Tensor:
    if not named.get("train", training) or not p:
        return input
    mask = torch.rand(input.shape, device=input.device) >= p
    return input * (mask / (1 - p) if p < 1 else torch.zeros_like(mask)).to(input.dtype)


def find_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules to compare: those with their own parameters, and leaves."""
    found = {}
    for path, module in model.named_modules():
        own = any(True for _ in module.parameters(recurse=False))
        if (own or not any(True for _ in module.children())) and not isinstance(module, IGNORED):
            found[path] = module
    return found


@dataclass
class Call:
    """One call of a module in the reference's step: copies of its inputs and outputs, and their gradients."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: list[Tensor]
    """The floating-point tensors among the arguments, without duplicates."""
    needs: list[bool]
    """Which of the inputs require a gradient."""
    grad_inputs: dict[int, Tensor] = field(default_factory=dict)
    outputs: list[Tensor] = field(default_factory=list)
    grad_outputs: dict[int, Tensor] = field(default_factory=dict)

    def output(self, index: int) -> Tensor | None:
        return self.outputs[index] if index < len(self.outputs) else None

    def fill_arguments(self, inputs: list[Tensor]) -> tuple[Any, Any]:
        """The arguments with the inputs replaced by other tensors."""
        others = {id(old): new for old, new in zip(self.inputs, inputs, strict=True)}
        return map_tensors((self.args, self.kwargs), lambda tensor: others.get(id(tensor), tensor))  # type: ignore[no-any-return]


class Hooks:
    """Hooks on modules for one forward and its backward. Subclasses define what happens with the tensors."""

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        self.modules = modules
        self._open: dict[str, list[Any]] = {path: [] for path in modules}

    def on_call(self, path: str, args: Any, kwargs: Any, inputs: list[Tensor]) -> Any:
        """Called before a module's forward. The return value identifies the call in ``on_tensor``."""
        raise NotImplementedError

    def on_tensor(self, call: Any, quantity: str, index: int, tensor: Tensor) -> None:
        """Called with an output, the gradient of an output (grad_output) or of an input (grad_input)."""
        raise NotImplementedError

    @contextlib.contextmanager
    def attach(self) -> Iterator[None]:
        """Attaches the hooks within a with statement."""
        with contextlib.ExitStack() as stack:
            for path, module in self.modules.items():
                before = module.register_forward_pre_hook(partial(self._before, path), with_kwargs=True)
                stack.callback(before.remove)
                stack.callback(module.register_forward_hook(partial(self._after, path)).remove)
            yield

    def _before(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Replaces each input by an alias, whose gradient is only this module's contribution.

        Modules that work in place keep their inputs, because an alias has another autograd history.
        """
        inputs = list({id(tensor): tensor for tensor in iter_float_tensors((args, kwargs))}.values())
        call = self.on_call(path, args, kwargs, inputs)
        self._open[path].append(call)
        if not torch.is_grad_enabled() or getattr(module, "inplace", False):
            return None
        aliases: dict[int, Tensor] = {}
        for index, tensor in enumerate(inputs):
            if tensor.requires_grad:
                aliases[id(tensor)] = alias = tensor.view_as(tensor)
                alias.register_hook(partial(self._grad, call, "grad_input", index))
        return map_tensors((args, kwargs), lambda tensor: aliases.get(id(tensor), tensor))

    def _after(self, path: str, module: nn.Module, args: Any, output: Any) -> None:
        call = self._open[path].pop()
        for index, tensor in enumerate(iter_float_tensors(output)):
            self.on_tensor(call, "output", index, tensor.detach())
            if tensor.requires_grad:
                tensor.register_hook(partial(self._grad, call, "grad_output", index))

    def _grad(self, call: Any, quantity: str, index: int, grad: Tensor) -> None:
        self.on_tensor(call, quantity, index, grad.detach())


class Recorder(Hooks):
    """Keeps copies of the activations of a step and of their gradients."""

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        super().__init__(modules)
        self.calls: dict[str, list[Call]] = {path: [] for path in modules}

    def on_call(self, path: str, args: Any, kwargs: Any, inputs: list[Tensor]) -> Call:
        copies: dict[int, Tensor] = {}

        def copy(tensor: Tensor) -> Tensor:
            if id(tensor) not in copies:
                copies[id(tensor)] = tensor.detach().clone()
            return copies[id(tensor)]

        own_args, own_kwargs = map_tensors((args, kwargs), copy)
        call = Call(
            own_args, own_kwargs, [copy(tensor) for tensor in inputs], [tensor.requires_grad for tensor in inputs]
        )
        self.calls[path].append(call)
        return call

    def on_tensor(self, call: Call, quantity: str, index: int, tensor: Tensor) -> None:
        if quantity == "output":
            call.outputs.append(tensor.clone())
        else:
            (call.grad_inputs if quantity == "grad_input" else call.grad_outputs)[index] = tensor.clone()


def iter_float_tensors(nest: Any) -> Iterator[Tensor]:
    """Every floating-point tensor in nested tuples, lists and dictionaries."""
    if isinstance(nest, Tensor):
        if nest.is_floating_point():
            yield nest
    elif isinstance(nest, tuple | list):
        for item in nest:
            yield from iter_float_tensors(item)
    elif isinstance(nest, dict):
        for item in nest.values():
            yield from iter_float_tensors(item)


def map_tensors(nest: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Applies a function to each tensor in nested tuples, lists and dictionaries; other containers are unchanged."""
    if isinstance(nest, Tensor):
        return change(nest)
    if type(nest) is dict:
        return {key: map_tensors(item, change) for key, item in nest.items()}
    return type(nest)(map_tensors(item, change) for item in nest) if type(nest) in (tuple, list) else nest
