"""Engine: one training step under a recipe.

    forward():    enter autocast, TF32 mode, attention backends, FP32 functions; restore all of them on exit
    backward(l):  (l * scale / accumulate).backward()
    step():       until ``accumulate`` microbatches are in: return
                  norms  <- the norm of each gradient                         one pass over the gradients
                  found  <- any norm, or any amax of a cast, is inf or NaN    checked under every recipe
                  factor <- scale * max(1, |g| / clip_norm)                   clipping always sees unscaled gradients
                  optimizers step with gradients / factor unless found        a skip changes no weight and no state
                  update the scales and the skip counters; drop the gradients

With fused optimizers a step never waits for the device: they take ``factor`` and ``found`` as tensors and decide there.
Other optimizers wait once per step, as under torch.amp.GradScaler. The norm is the check: a gradient whose norm exceeds
FP32 counts as an overflow. A cast to FP8 saturates, so the norm cannot show an inf from before the cast; the amax of
the cast shows it (scaling/tensor.py).

Subclasses extend ``run_backward``, ``_begin_microbatch``, ``_measure_gradients``, ``_compute_factor`` and ``_update``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from narrowgauge.engine.base import EngineBase
from narrowgauge.engine.checks import check_apart, check_loss, check_own_optimizer, find_trained
from narrowgauge.engine.updates import Update, check_norms, list_parameters
from narrowgauge.errors import UsageError
from narrowgauge.nn.keep_fp32 import HALVES
from narrowgauge.nn.module_changes import allow_double_backward
from narrowgauge.nn.products.bf16_for_now import for_evaluation
from narrowgauge.optim.norms import compute_grad_norms
from narrowgauge.step_report import StepReport

_LOSS_NODES = ("NllLoss", "MseLoss", "BinaryCrossEntropy", "SmoothL1Loss", "HuberLoss", "KlDiv", "SoftMarginLoss")
"""Beginnings of the names of autograd's nodes for loss functions that autocast runs in FP32."""


class Engine(EngineBase):
    """Trains any ``nn.Module`` with any torch optimizer under a recipe.

    The engine scales the loss, checks, unscales and clips the gradients, steps the optimizers and drops the gradients.
    An update whose gradients are not finite is skipped: weights and optimizer state stay as they were.

    Args:
        model: A module with FP32 parameters. It may be wrapped by DDP or sharded by FSDP2.
        optimizer: A torch optimizer over the model's parameters, or a list of them. Recipes with ``master=split``,
            ``master=none``, ``moments=bf16``, ``moments=8bit`` or ``gradients=released`` need AdamW, Muon, SGD,
            Adafactor or Lion.
        recipe: A recipe or its text, such as ``"bf16"`` or ``"fp8[keep=head]"``. ``"auto"`` takes what is fastest for
            the model on its device: FP8 where that is predicted to pay.
        clip_norm: Clip the norm of all unscaled gradients to this value. None: no clipping.
        accumulate: Number of microbatches per update. ``backward`` divides each loss by it.
        compile: Compile the model: False, True or a mode of ``torch.compile``. Fused blocks, sharded models and models
            that emulate a block format (``nvfp4``) are not compiled: see the attribute ``compiled``.
        blocks: Paths of the modules to recompute if the recipe checkpoints activations. Default: the members of the
            model's ``ModuleList`` of one class.
        fused: Replace blocks and head by narrowgauge's fused functions if the model has the parts they need. Default:
            under FP8, and under BF16 on a GPU, where they are faster.
        cuda_graphs: Run fused blocks as CUDA graphs, which takes the launching of kernels off the host. Their memory
            stays allocated between steps. Default: after a few steps, if the GPU was found to wait for the host.
        max_consecutive_skips: Number of consecutive skipped updates after which ``step`` raises ``TrainingStalled``.
        memory_budget: The most GPU memory that a step may take: a size (``"80GB"``, ``"75 GiB"``), a share of the GPU's
            memory (``"0.9"``), bytes, or a ``MemoryPlan``. The engine chooses what each block keeps for backward so
            that the step fits at the least time: see ``memory_plan``. Default: what the recipe says, for all blocks.

    Attributes:
        model: The model that was passed in.
        inner: The model without its DDP wrapper.
        optimizers: The optimizers, as a list.
        recipe: The parsed ``Recipe``.
        recipe_reason: Why ``auto`` chose it; None if the recipe was named.
        device: The torch device of the model.
        hardware: What is known about that device, as ``narrowgauge.hardware.Device``.
        clip_norm: The argument.
        accumulate: The argument.
        scaler: The ``LossScaler``, or None if the recipe does not scale the loss.
        guard: Counts skipped updates and names the parameters that caused them.
        conversion: What runs in which format: print it, or call ``conversion.summary()``.
        kept: Paths of the modules that compute in FP32.
        compiled: Whether the model is compiled.
        speed_advice: One line if FP8 is not expected to make the model faster on its GPU: why, and what to do. Else
            None. The engine warns with it.
        watchers: Objects that are called around each forward, backward and update (``Watcher``).

    Raises:
        UsageError: The model, an optimizer or an option does not fit the recipe or the device.

    Example:
        >>> engine = ng.Engine(model, optimizer, recipe="bf16", clip_norm=1.0)
        >>> for inputs, targets in loader:
        ...     with engine.forward():
        ...         loss = F.cross_entropy(engine.model(inputs), targets)
        ...     engine.backward(loss)
        ...     report = engine.step()
    """

    @contextlib.contextmanager
    def forward(self, double_backward: bool = False) -> Iterator[None]:
        """Run the forward pass and the loss in this context: it sets autocast and all else that the recipe needs.

        Args:
            double_backward: Set it for outputs that are differentiated twice, such as a gradient penalty. Layers that
                FP8 or recomputation has changed then compute as they were written, in autocast's 16 bits.

        Raises:
            UsageError: The model cannot compute under the recipe; the message names the module and the fix.
        """
        if torch.is_grad_enabled():
            self._begin_microbatch()
        first, self._is_first_forward = self._is_first_forward and not self.compiled, False
        notice = self.step_context.notice_plain_attention() if first else contextlib.nullcontext()
        observe = self._memory.observe(False) if self._memory and torch.is_grad_enabled() else contextlib.nullcontext()
        with self._explain_errors(), self._notify_watchers("forward"), self.step_context.forward(), notice, observe:
            try:
                with allow_double_backward() if double_backward else contextlib.nullcontext():
                    yield
            finally:
                self.conversion.shared_input.clear()

    def _begin_microbatch(self) -> None:
        """Prepare for a forward pass with gradients: tell DDP or FSDP whether its backward sums over the ranks."""
        self.update_sync.set_gradient_sync(self._syncs and self._microbatches + 1 >= self.accumulate)
        if self.release is not None:
            self.release.attach()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep the gradients of the microbatches in this context on their rank, as ``no_sync`` of DDP does.

        The first backward outside of it sums them over the ranks. You need this only if you count microbatches
        yourself: ``accumulate`` does it for you.
        """
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluate in this context: ``forward`` without gradients, in evaluation mode. Restores each module's mode.

        With FP8, layers multiply in BF16 here: an evaluation is about the weights, as they are exported.
        """
        training = {module: module.training for module in self.model.modules()}
        self.model.eval()
        try:
            with torch.no_grad(), self.forward(), for_evaluation(self.recipe):
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
        """Run backward for the loss of one microbatch, divided by ``accumulate`` and scaled as the recipe demands.

        Args:
            loss: A scalar loss. Do not divide it by ``accumulate``.
            inputs: Compute gradients only for these parameters, as in ``Tensor.backward``.
            retain_graph: As in ``Tensor.backward``.
            create_graph: As in ``Tensor.backward``.

        Raises:
            UsageError: The loss is not a scalar or has no graph.
        """
        some = None if inputs is None else list(inputs)
        self.run_backward(
            loss, lambda scaled: scaled.backward(retain_graph=retain_graph, create_graph=create_graph, inputs=some)
        )

    def run_backward(self, loss: Tensor, run: Callable[[Tensor], Any]) -> None:
        """Run backward through a function of your own, for libraries that have one.

        Args:
            loss: A scalar loss, as for ``backward``.
            run: Called with the scaled loss, in the recipe's context.
        """
        scaled = self.scaled(loss)
        self.loss_in_16_bits = loss.dtype in HALVES and type(loss.grad_fn).__name__.startswith(_LOSS_NODES)
        observe = self._memory.observe(True) if self._memory else contextlib.nullcontext()
        read = self._formats.observe() if self._formats else contextlib.nullcontext()
        with (
            self._explain_errors(),
            self._notify_watchers("backward"),
            self.step_context.backward(),
            self._disable_autocast(),
            observe,
            read,
        ):
            run(scaled)
        torch.clear_autocast_cache()  # inside of forward(): now weights may be written
        self._microbatches += 1

    def _disable_autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Disable autocast for a backward inside of ``forward``: FP32 layers would multiply gradients in 16 bits."""
        kind = self.device.type
        return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else contextlib.nullcontext()

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss divided by ``accumulate`` and multiplied by the loss scale: what backward starts from.

        Args:
            loss: A scalar loss with a graph.
        """
        check_loss(loss)
        loss = loss.reshape(())
        if self.accumulate > 1:
            loss = loss / self.accumulate
        return loss if self.scaler is None else loss.float() * self.scaler.get_scale_tensor(self.device)

    def step(self, *optimizers: Optimizer) -> StepReport:
        """Update the weights if ``accumulate`` microbatches are in; drop the gradients.

        Args:
            *optimizers: The optimizers to step. Default: all that have gradients. Gradients of the others are dropped:
                in a GAN, the generator's loss leaves gradients in the discriminator as well.

        Returns:
            What the step did. ``complete`` is False if microbatches are still missing. Reading any other field waits
            for the device.

        Raises:
            TrainingStalled: The last ``max_consecutive_skips`` updates were all skipped. Weights and optimizer state
                are as before the first of them.
            UsageError: There was no backward, or an optimizer is not this engine's.
        """
        for optimizer in optimizers:
            check_own_optimizer(optimizer, self.optimizers)
        if self._microbatches == 0:
            raise UsageError("engine.step before engine.backward: there is no gradient to step with")
        if self._microbatches < self.accumulate:
            return StepReport(self.updates + 1, False, {"loss_scale": self._current_scale()})
        return self._update(optimizers)

    def flush(self) -> StepReport | None:
        """Update with the microbatches that are in, at the end of an epoch.

        The update uses their mean: each was divided by ``accumulate``, and the norm and the update correct for it.

        Returns:
            What the update did, or None if no microbatch was in.

        Raises:
            UsageError: Several ranks train, and the gradients have not been summed over them yet.
        """
        waits = self.update_sync.size > 1 and not self.update_sync.reduces_every_microbatch
        if 0 < self._microbatches < self.accumulate and waits:
            raise UsageError(
                f"engine.flush: only {self._microbatches} of {self.accumulate} microbatches are in, and the ranks sum "
                "gradients in the backward of the last one; use epochs of whole updates"
            )
        return self._update() if self._microbatches else None

    def _update(self, chosen: Sequence[Optimizer] = ()) -> StepReport:
        """Make one update, drop the gradients, and call the watchers."""
        try:
            report = self._note_update(self._run_update(chosen))
        finally:  # also when training has stalled: the caller may catch the error and continue
            self._drop_gradients()
        if self._memory is not None:
            self._memory.end_step()
        return self._tell_watchers(report)

    def _tell_watchers(self, report: StepReport) -> StepReport:
        for watcher in self.watchers:
            watcher.after(report)
        return report

    def _drop_gradients(self) -> None:
        """Drop all gradients, also of an accumulation in progress."""
        for parameter in self.inner.parameters():
            parameter.grad = None
        self._microbatches = 0

    @torch.no_grad()
    def _run_update(self, chosen: Sequence[Optimizer] = ()) -> Update:
        """Make one update on the device, without counting it: a part of ``step``, for steps that are recorded."""
        parameters = self.named = find_trained(self.inner)
        released = self.release.take() if self.release is not None else {}
        if not released and all(parameter.grad is None for parameter in parameters.values()):
            raise UsageError("engine.step: backward left no gradient on any trainable parameter of the model")
        stepped = self._stepper.select(self.optimizers, chosen, bool(released))
        check_apart(stepped, parameters)
        if chosen:
            own = {id(parameter) for parameter in list_parameters(chosen)}
            parameters = {name: parameter for name, parameter in parameters.items() if id(parameter) in own}
        self.update_sync.average_copied_gradients(parameters)
        norms = self._measure_gradients(parameters, released)
        check = check_norms(norms, parameters, self.conversion.scales, self.update_sync)
        found, self.guard.names = check.found, check.names
        scale = self._current_scale()
        share = min(1.0, self._microbatches / self.accumulate)
        grad_norm = check.norm / (scale * share) if self.scaler or share != 1 else check.norm
        factor = self._compute_factor(grad_norm, scale, share, found)
        if self.conversion.scales is not None:
            self.conversion.scales.update(found)
        with self._notify_watchers("update"):
            self._stepper.step(stepped, factor, found, self.update_sync.sharded)
        return Update(check, grad_norm, scale, stepped)

    @torch.no_grad()
    def _note_update(self, update: Update) -> StepReport:
        """Count an update, adjust the loss scale, and report it."""
        found = update.check.found
        self._stepper.count_rewrites(update.stepped)
        if self.scaler is not None:
            self.scaler.record_update(found.float(), update.check.bad)
        else:
            self.guard.record(found, None, update.check.bad)
        if self._formats is not None:
            self._formats.end_update(found)
        return self._report(found, update.grad_norm, update.scale)

    def _note_recorded_update(
        self, found: Tensor, grad_norm: Tensor, scale: Tensor, counted: Mapping[str, Tensor], stepped: list[Optimizer]
    ) -> StepReport:
        """Count an update that a CUDA graph has made on the device, and call the watchers."""
        if self.conversion.scales is not None:
            self.conversion.scales.note_update()
        self._stepper.count_rewrites(stepped)
        self.guard.send(counted)
        return self._tell_watchers(self._report(found, grad_norm, scale))

    def _report(self, found: Tensor, grad_norm: Tensor, scale: Tensor) -> StepReport:
        return StepReport(self.updates, True, {"applied": ~found, "grad_norm": grad_norm, "loss_scale": scale})

    def _current_scale(self) -> Tensor:
        return self._one if self.scaler is None else self.scaler.get_scale_tensor(self.device).clone()

    def _measure_gradients(
        self, parameters: Mapping[str, nn.Parameter], released: Mapping[nn.Parameter, Tensor]
    ) -> Tensor:
        """Return the norm of each gradient on this rank. An update is skipped if one is inf or NaN on any rank."""
        return compute_grad_norms(parameters.values(), released, self.device)

    def _compute_factor(self, grad_norm: Tensor, scale: Tensor, share: float, found: Tensor) -> Tensor | None:
        """Return what gradients are divided by: loss scale, missing microbatches and clipping in one. None means 1."""
        if self.clip_norm is None and self.scaler is None and share == 1:
            return None
        factor = scale * share if share != 1 else scale
        if self.clip_norm is not None:
            factor = factor * ((grad_norm + 1e-6) / self.clip_norm).clamp(min=1.0)
        return torch.where(found, self._one, factor)
