"""AdamW whose masters, moments and gradients each have a format of their own, stepping all parameters at once.

    master     fp32    the parameter itself where it is FP32; beside a BF16 parameter an FP32 copy
               split   a BF16 parameter and a 16-bit remainder: together the FP32 master, bit for bit (split.py)
               none    a BF16 parameter alone, rounded stochastically
    moments    fp32, bf16, or 8bit with a scale for every 128 values (moments.py)
    gradients  of BF16 parameters: bf16, or fp32, in which autograd then sums them

Everything else is torch.optim.AdamW's: groups, schedulers, learning rates as tensors, maximize; ``grad_scale`` and
``found_inf`` as fused torch optimizers take them, so that unscaling, clipping and skipping cost no pass of their own.
Parameters may be DTensors (sharded.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from narrowgauge.errors import UsageError
from narrowgauge.kernels import use_triton
from narrowgauge.optim import moments as eight_bit
from narrowgauge.optim import sharded
from narrowgauge.optim.copies import copy_of
from narrowgauge.optim.reference import Rates, update
from narrowgauge.optim.sharded import is_sharded, like, local
from narrowgauge.optim.split import join, split
from narrowgauge.optim.together import step_together

MASTERS = ("fp32", "split", "none")
MOMENTS = ("fp32", "bf16", "8bit")
GRADIENTS = ("bf16", "fp32")
FORMATS = {"master": MASTERS, "moments": MOMENTS, "gradients": GRADIENTS}
_STEP = torch.float32


class AdamW(Optimizer):
    """``torch.optim.AdamW`` with ``master``, ``moments`` and ``gradients``, which may differ between groups."""

    _step_supports_amp_scaling = True
    dithers = True
    """Weights without masters are rounded stochastically."""
    grad_scale: Tensor | None
    found_inf: Tensor | None

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        master: str = "fp32",
        moments: str = "fp32",
        gradients: str = "bf16",
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "master": master,
            "moments": moments,
            "gradients": gradients,
        }
        super().__init__(params, defaults)
        self.grad_scale = self.found_inf = None
        self.stands_for: Optimizer | None = None
        """The user's optimizer whose groups these are; its schedulers ask whether it has stepped."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        try:
            _check(self.param_groups[-1])
            for parameter in self.param_groups[-1]["params"]:
                widen_gradient(parameter, self.param_groups[-1]["gradients"])
        except UsageError:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        factor, found = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        for group in self.param_groups:
            alike: dict[tuple[Any, ...], list[nn.Parameter]] = {}
            for parameter in group["params"]:
                grad = parameter.grad
                if grad is None:
                    continue
                if grad.is_sparse:
                    raise UsageError("AdamW: a gradient is sparse; train sparse embeddings with torch.optim.SparseAdam")
                copied = copy_of(parameter) is not None
                alike.setdefault((parameter.device, parameter.dtype, grad.dtype, copied), []).append(parameter)
            for parameters in alike.values():
                self.step_some(parameters, group, factor, found)
        if self.stands_for is not None:
            self.stands_for._opt_called = True  # type: ignore[attr-defined]
        return loss

    def step_some(
        self, parameters: list[nn.Parameter], group: dict[str, Any], factor: Tensor | None, found: Tensor | None
    ) -> None:
        """Step parameters that have a group, a device and formats in common."""
        weights, grads, shards, copies = [], [], [], []
        for parameter in parameters:
            state = self.prepare(parameter, group)
            weight, grad, shard = sharded.own(parameter, state)
            if weight.numel():
                weights.append(weight)
                grads.append(grad)
                shards.append((state, shard))
                copies.append(None if is_sharded(parameter) else copy_of(parameter))
            else:  # a rank may have nothing of a parameter
                state["step"] += 1.0 if found is None else 1.0 - found
        states = [shard for _, shard in shards]
        if not weights:
            return
        if use_triton(weights[0]) and all(weight.is_contiguous() for weight in weights):
            written = [copy for copy in copies if copy is not None]
            same = len(written) == len(copies) and all(copy.scales is written[0].scales for copy in written)
            step_together(weights, grads, states, group, factor, found, written if same else None)
        elif found is None or not bool(found.item()):
            for weight, grad, state in zip(weights, grads, states, strict=True):
                update(weight, grad, state, _rates(group), factor)
        for state, shard in shards:
            state["step"] = shard["step"]

    @torch.no_grad()
    def make_states(self) -> None:
        """Make the states that the first step would make, for a checkpoint to be loaded into."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad:
                    self.prepare(parameter, group)

    def prepare(self, parameter: nn.Parameter, group: dict[str, Any]) -> dict[str, Any]:
        """The parameter's state, made where there is none yet."""
        state: dict[str, Any] = self.state[parameter]
        if state:
            return state
        state["step"] = torch.zeros((), dtype=_STEP, device=parameter.device)
        if group["moments"] == "8bit":
            groups = eight_bit.groups_of(local(parameter).numel())
            state["exp_avg"] = _filled(parameter, 0, torch.int8)
            state["exp_avg_sq"] = _filled(parameter, 1, torch.uint8)
            state["exp_avg_scale"] = torch.zeros(groups, device=parameter.device)
            state["exp_avg_sq_scale"] = torch.zeros(groups, device=parameter.device)
        else:
            dtype = torch.float32 if group["moments"] == "fp32" else torch.bfloat16
            state["exp_avg"] = _filled(parameter, 0, dtype)
            state["exp_avg_sq"] = _filled(parameter, 0, dtype)
        self._complete(parameter, group, state)
        return state

    def _complete(self, parameter: nn.Parameter, group: dict[str, Any], state: dict[str, Any]) -> None:
        """What completes a BF16 parameter, where it is not in the state: from the parameter itself."""
        if parameter.dtype is not torch.bfloat16:
            return
        if group["master"] == "split":
            state["remainder"] = state.get("remainder", remainder_of(parameter))
            state.pop("master", None)
            _keep(parameter, state["remainder"])
        elif group["master"] == "fp32":
            state["master"] = state.get("master", full(parameter))
            state.pop("remainder", None)
            _keep(parameter, state["master"])
        else:
            state.setdefault("seed", len(self.state))
            _keep(parameter, None)

    def state_dict(self) -> dict[str, Any]:
        """As torch's, but 8-bit moments of sharded parameters are in FP32: their codes are a rank's own."""
        return sharded.portable(super().state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a state over in the formats it was saved in; torch would cast every tensor to its parameter's."""
        groups = self.param_groups  # another optimizer may share them, so they stay the objects they are
        formats = [{name: group[name] for name in FORMATS} for group in groups]
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        for group, loaded, own_formats in zip(groups, self.param_groups, formats, strict=True):
            group.update({"maximize": False} | loaded | own_formats)
        self.param_groups = groups
        ids = [index for group in state_dict["param_groups"] for index in group["params"]]
        parameters = [(p, group) for group in self.param_groups for p in group["params"]]
        for index, (parameter, group) in zip(ids, parameters, strict=True):
            saved = state_dict["state"].get(index)
            if saved is None:
                continue
            own = sharded.placed(saved, parameter)
            own["step"] = torch.as_tensor(own["step"], dtype=_STEP, device=parameter.device)
            sharded.reformat(own, group["moments"])
            self.state[parameter] = own
            if "remainder" in own or "master" in own:
                _keep(parameter, own.get("remainder", own.get("master")))
            self._complete(parameter, group, own)


def _check(group: dict[str, Any]) -> None:
    beta1, beta2 = group["betas"]
    for name, value, good in (
        ("lr", group["lr"], float(group["lr"]) >= 0),
        ("betas", group["betas"], 0 <= float(beta1) < 1 and 0 <= float(beta2) < 1),
        ("eps", group["eps"], group["eps"] >= 0),
        ("weight_decay", group["weight_decay"], group["weight_decay"] >= 0),
    ):
        if not good:
            raise UsageError(f"AdamW: {name}={value} is out of range")
    for name, allowed in FORMATS.items():
        if group[name] not in allowed:
            raise UsageError(f"AdamW: {name}={group[name]!r} is unknown; expected one of {', '.join(allowed)}")
    for parameter in group["params"]:
        if parameter.dtype not in (torch.float32, torch.bfloat16):
            raise UsageError(f"AdamW: a parameter is of {parameter.dtype}; it steps FP32 and BF16 parameters")


def _rates(group: dict[str, Any]) -> Rates:
    beta1, beta2 = group["betas"]
    return Rates(float(group["lr"]), float(beta1), float(beta2), group["eps"], group["weight_decay"], group["maximize"])


def narrow(parameter: nn.Parameter) -> nn.Parameter:
    """Turn an FP32 parameter into a BF16 one with its remainder, in place: no bit of the weight is lost.

    FSDP2 makes parameters of its own, without remainders, so narrow those: after ``fully_shard``, before the first
    forward.
    """
    if parameter.dtype is torch.float32:
        weight, remainder = split(local(parameter).detach())
        sharded.replace(parameter, weight)
        _keep(parameter, like(remainder, parameter))
    return parameter


def widen(parameter: nn.Parameter) -> None:
    """Turn a BF16 parameter that ``narrow`` has made into the FP32 one that it stands for."""
    if has_master(parameter):
        sharded.replace(parameter, local(full(parameter)))
        _keep(parameter, None)
        widen_gradient(parameter, "bf16")


def widen_gradient(parameter: nn.Parameter, gradients: str) -> None:
    """Let autograd keep a BF16 parameter's gradient in FP32, or in BF16 again."""
    wide = parameter.dtype is torch.bfloat16 and gradients == "fp32"
    if wide:
        sharded.check_gradients(parameter, gradients)
    if wide or gradient_dtype(parameter) is not parameter.dtype:
        parameter.grad_dtype = torch.float32 if wide else parameter.dtype


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """The format in which autograd keeps a parameter's gradient."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


def _filled(parameter: Tensor, value: int, dtype: torch.dtype) -> Tensor:
    """A tensor of one value with the parameter's shape, sharded as it is."""
    contiguous = torch.contiguous_format
    return torch.full_like(parameter, value, dtype=dtype, memory_format=contiguous, requires_grad=False)


def _keep(parameter: nn.Parameter, other: Tensor | None) -> None:
    """Keep at a BF16 parameter what makes it FP32: a remainder (int16) or a copy (FP32).

    At the parameter itself, so that whoever holds the model can join the two.
    """
    parameter.other_half = other  # type: ignore[attr-defined]


def _kept(parameter: Tensor) -> Tensor | None:
    other: Tensor | None = getattr(parameter, "other_half", None)
    return other


def remainder_of(parameter: nn.Parameter) -> Tensor:
    """The remainder of a BF16 parameter; one that never had any gets zeros."""
    remainder = _kept(parameter)
    if remainder is None or remainder.dtype is not torch.int16:
        remainder = _filled(parameter, 0, torch.int16)
        _keep(parameter, remainder)
    return remainder


def has_master(parameter: Tensor) -> bool:
    """Whether a BF16 parameter has something that completes it to FP32."""
    return _kept(parameter) is not None


def full(parameter: Tensor, device: torch.device | str | None = None) -> Tensor:
    """A parameter in FP32, with the bits that its remainder or its copy holds; ``device``: put together there."""
    other, weight = _kept(parameter), parameter.detach().to(device)
    if other is None:
        return weight.float()
    other = other.to(device)
    return like(join(local(weight), local(other)), weight) if other.dtype is torch.int16 else other.clone()


class Sample(NamedTuple):
    """Some values of a few parameters, equally many of each: a row for each name."""

    names: list[str]
    values: Tensor


@torch.no_grad()
def sample_full(parameters: Mapping[str, Tensor], most: int) -> list[Sample]:
    """Up to ``most`` values of each parameter in FP32, evenly spread over it: the same ones each time."""
    alike: dict[tuple[Any, ...], dict[str, tuple[Tensor, Tensor | None]]] = {}
    for name, parameter in parameters.items():
        weight, other = local(parameter).detach().reshape(-1), _kept(parameter)
        some = slice(None, None, max(1, -(-weight.numel() // most)))
        weight, rest = weight[some], None if other is None else local(other).reshape(-1)[some]
        if weight.numel():
            kind = (weight.numel(), weight.dtype, weight.device, None if rest is None else rest.dtype)
            alike.setdefault(kind, {})[name] = weight, rest
    return [Sample(list(group), _stacked_full(list(group.values()))) for group in alike.values()]


def _stacked_full(pairs: list[tuple[Tensor, Tensor | None]]) -> Tensor:
    rests = [rest for _, rest in pairs if rest is not None]
    if rests and rests[0].dtype is torch.float32:
        return torch.stack(rests)
    weights = torch.stack([weight for weight, _ in pairs])
    return join(weights, torch.stack(rests)) if rests else weights.float()


def full_precision(model: nn.Module, device: torch.device | str | None = None) -> dict[str, Tensor]:
    """The model's state dictionary with every BF16 weight as the FP32 number it stands for: what plain torch loads.

    ``device``: where those are put together, as on a GPU that the model fills they may not fit.
    """
    state, parameters = _named(model)
    return {
        name: full(parameters[name], device) if name in parameters and has_master(parameters[name]) else value
        for name, value in state.items()
    }


def load_full_precision(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Load an FP32 state dictionary into a model whose weights are split, losing nothing.

    Where weights are sharded, the state's may be sharded in the same way or whole, on every rank.
    """
    _, parameters = _named(model)
    state = {
        name: sharded.place(value, parameters[name]) if name in parameters else value for name, value in state.items()
    }
    model.load_state_dict(state)
    for name, value in state.items():
        kept = _kept(parameters[name]) if name in parameters else None
        if kept is not None:
            master = local(value).detach().to(kept.device, torch.float32)
            weight, remainder = split(master)
            with torch.no_grad():
                local(parameters[name]).copy_(weight)
                local(kept).copy_(remainder if kept.dtype is torch.int16 else master)


def _named(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, nn.Parameter]]:
    """A model's state and parameters; the state first, as FSDP2 then puts its shards back where it had left wholes."""
    state = model.state_dict()
    return state, dict(model.named_parameters(remove_duplicate=False))
