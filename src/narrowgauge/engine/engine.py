"""Engine: one training step under a recipe.

    forward():    autocast, keepers, attention backend, TF32 mode; put back on the way out
    backward(l):  (l * scale / accumulate).backward()
    step():       in the middle of an accumulation: nothing
                  norms  <- the norm of each gradient                         one pass over the gradients
                  found  <- any norm is inf or NaN, or any amax of a cast     also guards recipes that scale nothing
                  factor <- scale * max(1, |g| / clip_norm)                   clipping always sees unscaled gradients
                  optimizers step with gradients / factor unless found        weights and states untouched by a skip
                  scales and skip counters move; gradients are dropped

With fused optimizers nothing in a step waits for the device: they take ``factor`` and ``found`` as tensors and decide
there. Other optimizers cost one wait a step, as they do under torch.amp.GradScaler. The norm is the check: a gradient
whose norm exceeds FP32 counts as an overflow. A cast to FP8 saturates, so the norm cannot see what was inf before it:
there the amax is the check (scaling/tensor.py).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from narrowgauge import hardware
from narrowgauge.engine.checks import check_runs, checked, trainable, trained_now
from narrowgauge.engine.updates import Stepper, check_gradients, check_steps_once, parameters_of
from narrowgauge.errors import UsageError
from narrowgauge.kernels import HAVE_TRITON
from narrowgauge.nn.compile_forward import compile_forward
from narrowgauge.nn.convert import Conversion, convert
from narrowgauge.nn.keep_fp32 import find_computed_parameters, keep_modules, keep_recurrent
from narrowgauge.nn.matrix_inventory import list_matrices
from narrowgauge.nn.module_changes import allow_double_backward, apply_change, remove_changes
from narrowgauge.nn.recompute import checkpoint_blocks
from narrowgauge.nn.step_context import OpensStepContext, StepContext, explain_error
from narrowgauge.optim import AdamW, convert_optimizer, full_precision, load_full_precision, plain_state, widen
from narrowgauge.optim.convert_optimizer import can_convert, drop_masters
from narrowgauge.optim.gradient_release import GradientRelease, check_released, keep_gradient
from narrowgauge.optim.sharded import is_sharded
from narrowgauge.ranks.distribute import inside
from narrowgauge.ranks.update_sync import UpdateSync
from narrowgauge.recipe import Recipe, parse
from narrowgauge.scaling.guard import SkipGuard
from narrowgauge.scaling.loss import LossScaler
from narrowgauge.step_report import StepReport, Watcher


class Engine:
    """Trains any module with any torch optimizer under a recipe.

    ``accumulate`` microbatches make one update; ``compile`` is False, True or a torch.compile mode; ``blocks`` names
    the modules to recompute where the recipe checkpoints and they are not the members of a ModuleList. ``fused`` swaps
    the blocks and the head of models that have the parts for narrowgauge's own functions: by default under FP8, and
    under BF16 on a GPU, where it is the faster way. The model may be spread over ranks by FSDP2 or DDP (docs/ranks.md).
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        recipe: str | Recipe = "auto",
        *,
        clip_norm: float | None = None,
        accumulate: int = 1,
        compile: bool | str = False,
        blocks: Sequence[str] | None = None,
        fused: bool | None = None,
        max_consecutive_skips: int = 50,
    ) -> None:
        self.model = model
        given = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        self.inner = inside(model)
        self.named = trainable(self.inner, given)
        check_steps_once(given)
        self.device = next(iter(self.named.values())).device
        self.hardware = hardware.detect(str(self.device))
        self.recipe = parse(recipe, self.hardware)
        check_runs(self.recipe, self.hardware, self.named)
        self.clip_norm = checked("clip_norm", clip_norm, math.inf)
        self.accumulate = int(checked("accumulate", accumulate, 1_000_000, whole=True) or 1)
        self.released = self.recipe.gradients == "released"
        if self.released:
            check_released(clip_norm, self.accumulate)
        emulated = self.device.type == "cpu" and self.recipe.compute not in ("fp32", *self.hardware.native)
        self.step_context = StepContext(self.recipe, self.device, emulated)
        remove_changes(model)  # of an engine that had the model before
        self.kept = keep_modules(self.inner, self.recipe.keep)
        if emulated:
            self.kept += keep_recurrent(self.inner)
        self.lean = self.released or (self.recipe.master, self.recipe.moments) != ("fp32", "fp32")
        self.update_sync = UpdateSync(model, self.named, lean=self.recipe.master != "fp32")
        self.optimizers = [self._narrow(optimizer) for optimizer in given]
        self.conversion = self._convert(fused, bool(compile))
        self.release = self._make_release()
        self.checkpointed = self.conversion.blocks if self.recipe.checkpoint != "none" else []
        if not self.conversion.blocks:
            recomputation = self.step_context.recomputation()
            mode, lean = self.recipe.checkpoint, self.recipe.master != "fp32"
            self.checkpointed = checkpoint_blocks(self.inner, mode, blocks, recomputation, optional=lean)
        if self.recipe.master != "fp32":
            apply_change(self.inner, OpensStepContext(self.step_context))
        self.scaler = self._make_scaler(max_consecutive_skips)
        self.guard = self.scaler.guard if self.scaler else SkipGuard(max_consecutive_skips)
        self.watchers: list[Watcher] = []
        self._microbatches = 0
        self._stepper = Stepper()
        self._syncs = True
        self._one = torch.ones((), device=self.device)
        # With blocks swapped, little is left to compile; and FSDP's hooks are no work for a compiler.
        self.compiled = bool(compile) and not self.conversion.blocks and not self.update_sync.sharded
        if self.compiled:
            if emulated:
                raise UsageError(
                    f"compile: {self.recipe.compute} is emulated on {self.hardware.name}, which torch.compile "
                    "cannot see; leave compile off, or take recipe fp32"
                )
            compile_forward(model, self.step_context, compile if isinstance(compile, str) else None)

    def __repr__(self) -> str:
        size = sum(parameter.numel() for parameter in self.named.values())
        names = ", ".join(type(optimizer).__name__ for optimizer in self.optimizers)
        return (
            f"Engine({type(self.inner).__name__}, {names}, recipe={str(self.recipe)!r}, device={str(self.device)!r}, "
            f"trained_parameters={size:,}, updates={self.updates}, skipped={self.skipped})"
        )

    def _narrow(self, optimizer: Optimizer) -> Optimizer:
        """The user's AdamW with narrow states; weights become BF16, but for vectors (norms, biases) and keepers.

        FSDP wants one format for all that it shards together, so that everything sharded becomes BF16. An AdamW over
        shards is taken over in any recipe: torch's fused ones take no factor for DTensors.
        """
        if not self.lean and not (self.update_sync.sharded and can_convert(optimizer)):
            return optimizer
        kept = {p for path in self.kept for p in self.inner.get_submodule(path).parameters()}
        kept |= set(find_computed_parameters(self.inner))
        matrices = [
            p for p in self.named.values() if is_sharded(p) or (p.dim() > 1 and p not in kept and not p.is_complex())
        ]
        narrowed = matrices if self.recipe.master != "fp32" else []
        wide = "fp32" if self.recipe.gradients == "fp32" else "bf16"
        return convert_optimizer(optimizer, self.recipe.master, self.recipe.moments, narrowed, wide)

    def _make_release(self) -> GradientRelease | None:
        for parameter in self.inner.parameters():
            keep_gradient(parameter)  # an engine that had the model before may have released its gradients
        if not self.released:
            return None
        own = (optimizer for optimizer in self.optimizers if isinstance(optimizer, AdamW))
        return GradientRelease(own, self.conversion.scales)

    def _convert(self, fused: bool | None, compile: bool) -> Conversion:
        if fused is None:
            on_gpu = self.device.type == "cuda" and HAVE_TRITON
            fused = self.recipe.compute == "fp8" or (self.recipe.compute == "bf16" and on_gpu)
        if fused:
            return convert(self.inner, self.recipe, self.hardware, compile=compile)
        return Conversion(compute=self.recipe.compute, matrices=list_matrices(self.inner, self.recipe))

    def _make_scaler(self, max_consecutive_skips: int) -> LossScaler | None:
        scale = self.recipe.loss_scale
        if scale == "none":
            return None
        options: dict[str, Any] = {} if scale == "dynamic" else {"init_scale": float(scale), "dynamic": False}
        return LossScaler(self.device.type, max_consecutive_skips=max_consecutive_skips, **options)

    @property
    def skipped(self) -> int:
        """Updates skipped in all, as far as the host has heard: reading it waits for nothing."""
        return self.guard.skipped

    @property
    def updates(self) -> int:
        """Updates attempted, skipped ones included."""
        return self.guard.updates

    @contextlib.contextmanager
    def forward(self, double_backward: bool = False) -> Iterator[None]:
        """The surroundings of the forward pass and the loss.

        ``double_backward``: for what is differentiated twice (a gradient penalty): layers that FP8 or recomputation
        has changed compute in the 16 bits of autocast, as they were written.
        """
        if torch.is_grad_enabled():
            self.update_sync.announce(self._syncs and self._microbatches + 1 >= self.accumulate)
            if self.release is not None:
                self.release.attach()
        with self._explained(), self._watched("forward"), self.step_context.forward():
            try:
                with allow_double_backward() if double_backward else contextlib.nullcontext():
                    yield
            finally:
                self.conversion.shared_input.clear()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Microbatches whose gradients stay on their rank, to be summed with those of the first one outside.

        ``accumulate`` does this by itself; this is for loops that count for themselves.
        """
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """The same surroundings without gradients and in evaluation mode; training mode is put back afterwards."""
        training = {module: module.training for module in self.model.modules()}
        self.model.eval()
        try:
            with torch.no_grad(), self.forward():
                yield
        finally:
            for module, mode in training.items():
                module.training = mode

    def backward(
        self,
        loss: Tensor,
        *,
        inputs: Sequence[Tensor] | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
    ) -> None:
        """Backward of one microbatch's loss, which is divided by ``accumulate`` and scaled as the recipe says.

        The options are those of ``Tensor.backward``; ``inputs`` are the parameters to have gradients, where not all.
        """
        loss = self.scaled(loss)
        some = None if inputs is None else list(inputs)
        with self._explained(), self._watched("backward"), self.step_context.backward():
            loss.backward(retain_graph=retain_graph, create_graph=create_graph, inputs=some)
        self._microbatches += 1

    def scaled(self, loss: Tensor) -> Tensor:
        """What backward starts from: the loss divided by ``accumulate`` and multiplied by the loss scale."""
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(type(loss).__name__)
            raise UsageError(f"engine.backward needs a scalar loss, got {got}; take its mean or sum first")
        if not loss.requires_grad:
            raise UsageError(
                "engine.backward: the loss has no graph; compute it from engine.model's output with gradients on"
            )
        loss = loss.reshape(())
        if self.accumulate > 1:
            loss = loss / self.accumulate
        return loss if self.scaler is None else loss.float() * self.scaler.tensor(self.device)

    def step(self, *optimizers: Optimizer) -> StepReport:
        """Update the weights once ``accumulate`` microbatches are in; before that, report an incomplete step.

        Of several optimizers those are stepped that have gradients; or the ones named, and the gradients of the others
        are dropped: in a GAN, the generator's loss leaves gradients in the discriminator too.
        """
        named = [self._find(optimizer) for optimizer in optimizers]
        if self._microbatches == 0:
            raise UsageError("engine.step before engine.backward: there is no gradient to step with")
        if self._microbatches < self.accumulate:
            scale = self._one if self.scaler is None else self.scaler.tensor(self.device).clone()
            return StepReport(self.updates + 1, False, {"loss_scale": scale})
        return self._update(named)

    def _find(self, optimizer: Any) -> Any:
        if callable(optimizer) and not isinstance(optimizer, Optimizer):
            raise UsageError(
                "engine.step takes no closure: call engine.forward and engine.backward yourself, then step"
            )
        if not any(optimizer is one for one in self.optimizers):
            raise UsageError("engine.step: the optimizer is not one of this engine's")
        return optimizer

    def flush(self) -> StepReport | None:
        """Update with the microbatches that are in, at the end of an epoch; None where there are none.

        Their mean is stepped: each was divided by ``accumulate``, and the norm and the update make up for it.
        """
        if 0 < self._microbatches < self.accumulate and self.update_sync.size > 1 and not self.update_sync.sums_each:
            raise UsageError(
                f"engine.flush: {self._microbatches} of {self.accumulate} microbatches are in, and their gradients "
                "have not been summed over the ranks, which the last one's backward does; take epochs of whole updates"
            )
        return self._update() if self._microbatches else None

    def _update(self, named: Sequence[Optimizer] = ()) -> StepReport:
        try:
            report = self._take_update(named)
        finally:  # also where training has stalled: whoever catches that may go on
            for parameter in self.inner.parameters():
                parameter.grad = None
            self._microbatches = 0
        for watcher in self.watchers:
            watcher.after(report)
        return report

    @torch.no_grad()
    def _take_update(self, named: Sequence[Optimizer]) -> StepReport:
        self.named = trained_now(self.inner)
        released = self.release.take() if self.release is not None else {}
        if not released and all(parameter.grad is None for parameter in self.named.values()):
            raise UsageError("engine.step: backward left no gradient on any trainable parameter of the model")
        stepped = self._stepper.choose(self.optimizers, named, bool(released))
        parameters = self.named
        if named:
            own = {id(parameter) for parameter in parameters_of(named)}
            parameters = {name: parameter for name, parameter in self.named.items() if id(parameter) in own}
        scales = self.conversion.scales
        check = check_gradients(self.update_sync, parameters, released, scales, self.device)
        found, self.guard.names = check.found, check.names
        scale = self._one if self.scaler is None else self.scaler.tensor(self.device).clone()
        share = min(1.0, self._microbatches / self.accumulate)
        grad_norm = check.norm / (scale * share) if self.scaler or share != 1 else check.norm
        factor = self._factor(grad_norm, scale, share, found)
        if scales is not None:
            scales.update(found)
        with self._watched("update"):
            self._stepper.step(stepped, factor, found, self.update_sync.sharded)
        if self.scaler is not None:
            self.scaler.settle(found.float(), check.bad)
        else:
            self.guard.record(found, None, check.bad)
        return StepReport(self.updates, True, {"applied": ~found, "grad_norm": grad_norm, "loss_scale": scale})

    def _factor(self, grad_norm: Tensor, scale: Tensor, share: float, found: Tensor) -> Tensor | None:
        """What gradients are divided by: loss scale, missing microbatches and clipping in one; None where it is 1."""
        if self.clip_norm is None and self.scaler is None and share == 1:
            return None
        factor = scale * share if share != 1 else scale
        if self.clip_norm is not None:
            factor = factor * ((grad_norm + 1e-6) / self.clip_norm).clamp(min=1.0)
        return torch.where(found, self._one, factor)

    def state_dict(self) -> dict[str, Any]:
        """Everything a run needs to go on: model, optimizers, loss scale, counters. Only between complete updates."""
        if self._microbatches:
            raise UsageError(
                f"engine.state_dict in the middle of an accumulation ({self._microbatches} of {self.accumulate} "
                "microbatches): take it after a complete step, or call engine.flush() first"
            )
        place = None if self.update_sync.sharded else "cpu"  # a shard stays where it is: others wait for it there
        return {
            "recipe": str(self.recipe),
            "model": full_precision(self.inner, place) if self.lean else self.inner.state_dict(),
            "optimizers": [drop_masters(optimizer.state_dict()) for optimizer in self.optimizers],
            "scaler": self.scaler.state_dict() if self.scaler else None,
            "guard": self.guard.state_dict(),
            "tensor_scales": self.conversion.scales.state_dict() if self.conversion.scales else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state. A state of another recipe loads too; what only one of them has starts afresh."""
        if len(state["optimizers"]) != len(self.optimizers):
            raise UsageError(
                f"engine.load_state_dict: the state has {len(state['optimizers'])} optimizers, "
                f"the engine has {len(self.optimizers)}"
            )
        load_full_precision(self.inner, state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved if isinstance(optimizer, AdamW) else plain_state(saved))
        if self.scaler is not None and state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        if self.conversion.scales is not None and state.get("tensor_scales"):
            self.conversion.scales.load_state_dict(state["tensor_scales"])
        self.guard.load_state_dict(state["guard"])
        self._microbatches = 0

    @contextlib.contextmanager
    def _watched(self, phase: str) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for watcher in self.watchers:
                stack.enter_context(watcher.around(phase))
            yield

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            explained = explain_error(error, self.recipe, self.inner)
            if explained is None:
                raise
            raise explained from error

    def detach(self) -> nn.Module:
        """Give the model back as it was made: FP32 parameters with every bit, modules of their own classes.

        The engine is over after this.
        """
        remove_changes(self.model)
        for parameter in self.inner.parameters():
            keep_gradient(parameter)
            widen(parameter)
        self.watchers.clear()
        return self.model
