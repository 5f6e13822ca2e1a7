"""An optimizer whose BF16 parameters have FP32 masters: everything that does not depend on its rule.

A subclass is one file. It names its moments (``moment_names``), checks its options (``check_options``), and changes
FP32 values (``update``) or steps many parameters at once by a kernel (``step_parameters``). From this class it has
formats of masters, moments and gradients per parameter group, states that load into each other, sharded parameters
(DTensor), gradients that are released during backward, and updates that are skipped on the device:

    master     fp32    the parameter itself if it is FP32; an FP32 copy of a BF16 parameter
               split   a BF16 parameter and a 16-bit remainder: together the exact FP32 master (split_fp32.py)
               none    only a BF16 parameter, rounded stochastically
    moments    fp32, bf16, or 8bit with a scale for every 128 values (moments.py)
    gradients  of BF16 parameters: bf16, or fp32, in which autograd then accumulates them

Everything else works as in torch: groups, schedulers, learning rates as tensors, maximize. ``grad_scale`` and
``found_inf`` work as in torch's fused optimizers, so unscaling, clipping and skipping need no separate pass. Parameters
may have any strides; states are in row-major order.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from narrowgauge.errors import UsageError
from narrowgauge.optim import moments as eight_bit
from narrowgauge.optim import sharded
from narrowgauge.optim.master_access import read_master, write_master
from narrowgauge.optim.masters import get_or_make_remainder, join_fp32, set_other_half, split_master
from narrowgauge.optim.moments import load_moment, store_moment
from narrowgauge.optim.parameter_state import drop_other_moments, is_complete, make_moment
from narrowgauge.optim.sharded import shard_like, to_local
from narrowgauge.optim.state_dict_format import make_portable, restore_state
from narrowgauge.optim.weight_checksums import compute_checksums, join_master
from narrowgauge.parameters import gradient_dtype

MASTERS = ("fp32", "split", "none")
GRADIENTS = ("bf16", "fp32")
FORMATS = {"master": MASTERS, "moments": eight_bit.FORMATS, "gradients": GRADIENTS}
_STEP = torch.float32
_NUMBERS = ("lr", "weight_decay", "momentum", "eps")


class MasteredOptimizer(Optimizer):
    """The base of narrowgauge's optimizers. An engine asks what an optimizer can do by ``can``."""

    abilities: ClassVar[frozenset[str]] = frozenset({"masters", "release", "shards", "any state"})
    """masters: it has FP32 masters of BF16 parameters. release: it steps single parameters during backward. shards: it
    takes ``grad_scale`` for DTensors. any state: it loads states in every format, of any recipe."""
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.bfloat16)
    other_states: ClassVar[tuple[str, ...]] = ()
    """Names of what ``make_other_states`` makes."""
    missing_options: ClassVar[dict[str, Any]] = {"maximize": False}
    """Options of groups that states and optimizers of torch may lack."""
    dithers = True
    """Weights without masters are rounded stochastically."""
    _step_supports_amp_scaling = True
    grad_scale: Tensor | None
    found_inf: Tensor | None
    # Both exist during a scaler's step only: torch.amp.GradScaler multiplies a grad_scale that it finds by its own.

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "defaults" not in state:  # from load_state_dict
            return
        for group in self.param_groups:  # of a copy: torch copies neither masters nor formats of gradients
            for parameter in group["params"]:
                set_grad_dtype(parameter, group["gradients"])
                own = self.state.get(parameter)
                if own and not is_complete(parameter, group, own):
                    self._complete_state(parameter, group, own)

    def get_moment_names(self, parameter: Tensor, group: dict[str, Any]) -> tuple[str, ...]:
        """Return the names of the moments of a parameter; a subclass defines this.

        Args:
            parameter: The parameter.
            group: Its parameter group.

        Returns:
            Names in ``moments.SIGNED``.
        """
        raise NotImplementedError

    @staticmethod
    def check_options(group: dict[str, Any]) -> Iterable[tuple[str, Any, bool]]:
        """Yield each option of a group, its value, and whether it is in range; a subclass defines this.

        Args:
            group: The parameter group.
        """
        raise NotImplementedError

    def make_other_states(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """Return further states of a parameter at its first step, which are always FP32.

        Args:
            parameter: The parameter.
            group: Its parameter group.

        Returns:
            The states by name.
        """
        return {}

    def update(
        self, master: Tensor, grad: Tensor, moments: dict[str, Tensor], group: dict[str, Any], step: int
    ) -> None:
        """Change an FP32 value, its moments and other states in place.

        A subclass defines this, or ``step_parameters``.

        Args:
            master: The value.
            grad: The gradient, divided by the loss scale.
            moments: The moments, in FP32, and other states by name.
            group: The parameter group.
            step: The number of the step, from 1.
        """
        raise NotImplementedError

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as ``torch.optim.Optimizer.add_param_group`` does.

        Args:
            param_group: The parameters, and the options in which the group differs from the defaults.

        Raises:
            UsageError: An option is out of range; the group is then not added.
        """
        super().add_param_group(param_group)
        try:
            self.check_group(self.param_groups[-1])
            for parameter in self.param_groups[-1]["params"]:
                set_grad_dtype(parameter, self.param_groups[-1]["gradients"])
        except Exception:
            self.param_groups.pop()
            raise
        release: Any = self.__dict__.get("release")
        if release is not None:
            release.add(self, self.param_groups[-1])

    @classmethod
    def check_group(cls, group: dict[str, Any]) -> None:
        """Raise UsageError for options or parameters that cannot be stepped.

        Args:
            group: The parameter group.
        """
        own = next(kind for kind in cls.__mro__ if kind.__module__.startswith("narrowgauge.optim")).__name__
        for name in _NUMBERS:
            if isinstance(group.get(name), str):  # YAML reads 1e-3 as text
                raise UsageError(f"{own}: {name}={group[name]!r} is text; expected a number")
        try:
            checked = list(cls.check_options(group))
        except UsageError:
            raise
        except (TypeError, ValueError) as error:  # None, a number instead of a pair, a tensor of several numbers
            other = ("params", "param_names", *FORMATS)
            given = ", ".join(f"{name}={value}" for name, value in group.items() if name not in other)
            raise UsageError(f"{own}: an option has a wrong type ({error}); given {given}") from error
        for name, value, good in checked:
            if not good:
                raise UsageError(f"{own}: {name}={value} is out of range")
        for name, allowed in FORMATS.items():
            if group[name] not in allowed:
                raise UsageError(f"{own}: {name}={group[name]!r} is unknown; expected one of {', '.join(allowed)}")
        names = {torch.float32: "FP32", torch.bfloat16: "BF16", torch.complex64: "complex64"}
        for parameter in group["params"]:
            if parameter.dtype not in cls.dtypes:
                *most, last = [names[dtype] for dtype in cls.dtypes]
                raise UsageError(
                    f"{own}: a parameter has dtype {parameter.dtype}; supported are {', '.join(most)} and {last}"
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient.

        Args:
            closure: A function that computes the loss again, as for other torch optimizers.

        Returns:
            The loss of the closure, or None.
        """
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
                    raise UsageError(
                        f"{type(self).__name__}: a gradient is sparse; train sparse embeddings with "
                        "torch.optim.SparseAdam"
                    )
                alike.setdefault((parameter.device, parameter.dtype, grad.dtype), []).append(parameter)
            for parameters in alike.values():
                self.step_parameters(parameters, group, factor, found)
        self._opt_called = True
        return loss

    # Schedulers wrap an optimizer's step to see whether it runs before theirs. This one sets the flag itself.
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    def step_parameters(
        self, parameters: list[nn.Parameter], group: dict[str, Any], factor: Tensor | None, found: Tensor | None
    ) -> None:
        """Step parameters of one group that share a device and formats, one after another in plain torch.

        Args:
            parameters: The parameters; each has a gradient.
            group: Their parameter group.
            factor: What the gradients are divided by, as a tensor on the device; None for 1.
            found: Whether a gradient is not finite, as a tensor; the step then changes nothing. None: not checked.
        """
        states = [self.prepare(parameter, group) for parameter in parameters]
        if found is not None and bool(found.item()):
            return
        for parameter, state in zip(parameters, states, strict=True):
            target, grad, shard = sharded.get_shards(parameter, state)
            shard["step"] += 1
            if target.numel():
                weight = target.detach().contiguous()
                self.get_foreign_count(weight.device).add_(self._step_one(weight, grad, shard, group, factor))
                if weight is not target:  # other strides than row-major
                    target.copy_(weight)
            state["step"] = shard["step"]

    def _step_one(
        self, weight: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any], factor: Tensor | None
    ) -> int:
        """Step one weight; return the number of its groups that something else had written."""
        step = int(state["step"].item())
        grad = grad.float()
        if factor is not None:
            grad = grad / factor
        master, foreign = read_master(weight, state)
        moments = {name: load_moment(state, name).view(weight.shape) for name in eight_bit.list_moments(state)}
        value, others = master.view(weight.shape), {name: state[name] for name in self.other_states if name in state}
        self.update(value, -grad if group.get("maximize") else grad, {**others, **moments}, group, step)
        for name, moment in moments.items():
            store_moment(state, name, moment.view(-1), step)
        write_master(weight, master, state, step)
        return foreign

    @property
    def foreign_writes(self) -> Tensor:
        """The number of groups of 128 weights that something other than the optimizer wrote, as a tensor on the device.

        If it rises with every update, weights are rewritten every step (by a mask or a clamp). Split masters then have
        only BF16 precision for them; with master="fp32" only the changed values lose precision.
        """
        counts = list(self.__dict__.get("_foreign", {}).values())
        if not counts:
            return torch.zeros((), dtype=torch.int64)
        return torch.stack([count.to(counts[0].device, non_blocking=True) for count in counts]).sum()

    @property
    def has_split_masters(self) -> bool:
        """Whether a group stores FP32 masters as BF16 weights plus 16 bits."""
        return any(group["master"] == "split" for group in self.param_groups)

    def get_foreign_count(self, device: torch.device) -> Tensor:
        """Return the count of a device that is part of ``foreign_writes``, to be raised in place.

        Args:
            device: The device.

        Returns:
            One int64 number.
        """
        counts: dict[torch.device, Tensor] = self.__dict__.setdefault("_foreign", {})
        if device not in counts:
            counts[device] = torch.zeros((), dtype=torch.int64, device=device)
        return counts[device]

    @torch.no_grad()
    def make_states(self) -> None:
        """Create the states that the first step would create, so that a checkpoint can be loaded into them."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad:
                    self.prepare(parameter, group)

    def prepare(self, parameter: nn.Parameter, group: dict[str, Any]) -> dict[str, Any]:
        """Return the parameter's state; create it if missing, and update it if the parameter's format has changed.

        If a moment is missing, because the group had none before (SGD whose momentum was 0) or another rule, moments
        and the count of steps start again. Masters stay.

        Args:
            parameter: A parameter of this optimizer.
            group: Its parameter group.

        Returns:
            The state, as in ``optimizer.state[parameter]``.
        """
        state: dict[str, Any] = self.state[parameter]
        names = self.get_moment_names(parameter, group)
        is_new = not state
        if is_new or not all(name in state for name in names):
            drop_other_moments(state, names)
            state["step"] = torch.zeros((), dtype=_STEP, device=parameter.device)
            for name in names:
                state |= make_moment(parameter, name, group["moments"])
            state |= self.make_other_states(parameter, group)
        if is_new or not is_complete(parameter, group, state):
            self._complete_state(parameter, group, state)
        return state

    def _complete_state(self, parameter: nn.Parameter, group: dict[str, Any], state: dict[str, Any]) -> None:
        """Give the state the master of a BF16 parameter: from its other entries, else from the parameter."""
        remainder, words, master = (state.pop(name, None) for name in ("remainder", "check", "master"))
        if parameter.dtype is not torch.bfloat16:
            if hasattr(parameter, "other_half"):
                set_other_half(parameter, None)  # it was BF16 once
            return
        weight = to_local(parameter).detach()
        if remainder is not None and words is None:
            words = compute_checksums(weight)
        if group["master"] == "split":
            if remainder is None:
                remainder, words = get_or_make_remainder(parameter) if master is None else split_master(master)
            state["remainder"], state["check"] = remainder, words
            set_other_half(parameter, remainder, words)
        elif group["master"] == "fp32":
            if master is None and remainder is not None:
                master = shard_like(join_master(weight, to_local(remainder), words), parameter)
            state["master"] = join_fp32(parameter) if master is None else master
            set_other_half(parameter, state["master"])
        else:
            state.setdefault("seed", len(self.state))
            set_other_half(parameter, None)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as torch does, in a portable form (state_dict_format.py)."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        return make_portable(super().state_dict(), parameters)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; torch would cast every tensor to its parameter's dtype.

        Accepts states of this class, of any format, and of its counterpart in torch. Options of groups are loaded,
        except ``master``, ``moments`` and ``gradients``, which keep their current values.
        """
        before, after = self._optimizer_load_state_dict_pre_hooks, self._optimizer_load_state_dict_post_hooks
        state_dict = state_dict.copy()
        for hook in before.values():
            state_dict = hook(self, state_dict) or state_dict
        groups = self.param_groups  # schedulers refer to these objects
        formats = [{name: group[name] for name in FORMATS} for group in groups]
        try:  # hooks see the whole state, but torch loads only the groups
            self._optimizer_load_state_dict_pre_hooks, self._optimizer_load_state_dict_post_hooks = (
                OrderedDict(),
                OrderedDict(),
            )
            super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        finally:
            self._optimizer_load_state_dict_pre_hooks, self._optimizer_load_state_dict_post_hooks = before, after
        for group, loaded, own_formats in zip(groups, self.param_groups, formats, strict=True):
            group.update(self.missing_options | group | loaded | own_formats)
        self.param_groups = groups
        ids = [index for group in state_dict["param_groups"] for index in group["params"]]
        parameters = [(p, group) for group in self.param_groups for p in group["params"]]
        for index, (parameter, group) in zip(ids, parameters, strict=True):
            saved = state_dict["state"].get(index)
            if saved:
                own = restore_state(saved, parameter, group["moments"])
                done = own.get("step", 1.0 if eight_bit.list_moments(own) else 0.0)  # torch's SGD does not count steps
                own["step"] = torch.as_tensor(done, dtype=_STEP, device=parameter.device)
                self.state[parameter] = own
                self._complete_state(parameter, group, own)
        for post_hook in after.values():
            post_hook(self)


def can(optimizer: Optimizer, ability: str) -> bool:
    """Return whether an optimizer says that it has one of ``MasteredOptimizer.abilities``."""
    return ability in getattr(optimizer, "abilities", ())


def set_grad_dtype(parameter: nn.Parameter, gradients: str) -> None:
    """Make autograd store a BF16 parameter's gradient in FP32, or in BF16 again."""
    wide = parameter.dtype is torch.bfloat16 and gradients == "fp32"
    if wide:
        sharded.check_gradients(parameter, gradients)
    if wide or gradient_dtype(parameter) is not parameter.dtype:
        parameter.grad_dtype = torch.float32 if wide else parameter.dtype
