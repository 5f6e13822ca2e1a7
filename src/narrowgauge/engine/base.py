"""The parts of an engine: its checked arguments, the converted model and optimizers, the scaler; saving and loading."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from narrowgauge import hardware
from narrowgauge.engine import setup, state
from narrowgauge.engine.checks import (
    check_accumulate,
    check_clip_norm,
    check_no_closure,
    check_recipe,
    find_trainable,
    list_optimizers,
)
from narrowgauge.engine.choose_recipe import choose_recipe
from narrowgauge.engine.fit_memory import Budget, MemoryFitter
from narrowgauge.engine.updates import Stepper
from narrowgauge.errors import UsageError
from narrowgauge.nn.block_memory import find_block_memory
from narrowgauge.nn.compile_forward import compile_forward
from narrowgauge.nn.convert import Conversion
from narrowgauge.nn.fused.modules import set_recomputation
from narrowgauge.nn.memory_plan import MemoryPlan
from narrowgauge.nn.module_changes import remove_changes
from narrowgauge.nn.products.stored_fp8 import restore_stored
from narrowgauge.nn.recompute import checkpoint_blocks
from narrowgauge.nn.speed_advice import explain_slow, warn_about_speed
from narrowgauge.nn.step_context import StepContext, explain_error, open_step_context
from narrowgauge.optim import widen
from narrowgauge.optim.gradient_release import check_released, keep_gradient
from narrowgauge.ranks.distribute import unwrap_ddp
from narrowgauge.ranks.update_sync import UpdateSync
from narrowgauge.recipe import Recipe
from narrowgauge.scaling.gradient_formats import GradientFormats
from narrowgauge.scaling.guard import SkipGuard
from narrowgauge.step_report import Watcher


class EngineBase:
    """What an engine consists of, without its training step: see ``Engine`` for the arguments and attributes."""

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
        cuda_graphs: bool | None = None,
        max_consecutive_skips: int = 50,
        memory_budget: Budget | None = None,
    ) -> None:
        self.model = model
        given = list_optimizers(optimizer)
        self.inner = unwrap_ddp(model)
        self.named = find_trainable(self.inner, given)
        check_no_closure(given)
        self.device = next(iter(self.named.values())).device
        self.hardware = hardware.detect(str(self.device))
        chosen, why = choose_recipe(recipe, model, self.named, self.hardware, compile=bool(compile), fused=fused)
        self.recipe = chosen
        self.recipe_reason = why
        check_recipe(self.recipe, self.hardware, self.named)
        self.clip_norm = check_clip_norm(clip_norm)
        self.accumulate = check_accumulate(accumulate)
        self.released = self.recipe.gradients == "released"
        if self.released:
            check_released(clip_norm, self.accumulate)
        emulated = setup.is_emulated(self.recipe, self.hardware)
        bf16_weights = self.recipe.master != "fp32"
        self.step_context = StepContext(self.recipe, self.device, emulated)
        remove_changes(model)  # made by an earlier engine of this model
        self.kept = setup.keep_in_fp32(self.inner, self.recipe, self.hardware)
        setup.store_frozen(self.inner, self.recipe, self.kept)
        self.lean = setup.is_lean(self.recipe)
        self.update_sync = UpdateSync(model, self.named, lean=bf16_weights)
        sharded = self.update_sync.sharded
        self.optimizers = setup.convert_optimizers(given, self.inner, self.named, self.recipe, self.kept, sharded)
        blocks_to_compile = setup.find_blocks_to_compile(self.inner, self.recipe, compile)
        self._one_graph = bool(compile) and not blocks_to_compile
        planned = memory_budget is not None
        if planned and cuda_graphs:
            raise UsageError("memory_budget: blocks recorded as CUDA graphs free nothing; leave out cuda_graphs")
        cuda_graphs = self._cuda_graphs = False if planned else cuda_graphs
        self.conversion = self._convert_model(fused, cuda_graphs)
        self._formats = setup.make_gradient_formats(self.conversion, self.update_sync)
        self.release = setup.make_release(self.inner, self.recipe, self.optimizers, self.conversion)
        setup.warn_of_unused_offload(self.recipe, self.conversion, self.hardware)
        self._checkpointed = self.conversion.blocks if self.recipe.checkpoint != "none" else []
        recomputation = self.step_context.recomputation()
        set_recomputation(self.inner, recomputation)
        if not self.conversion.blocks:
            mode = "full" if planned else self.recipe.checkpoint
            optional = bf16_weights or planned
            self._checkpointed = checkpoint_blocks(
                self.inner, mode, blocks, recomputation, optional, self.conversion.scales
            )
        if bf16_weights or self.recipe.frozen != "keep" or self.conversion.returns_bf16:
            open_step_context(self.inner, self.step_context)
        self.scaler = setup.make_scaler(self.recipe, self.device, max_consecutive_skips)
        self.guard = self.scaler.guard if self.scaler else SkipGuard(max_consecutive_skips)
        self.watchers: list[Watcher] = []
        self.loss_in_16_bits = False
        """Whether one of torch's loss functions has computed the latest loss in 16 bits."""
        self._microbatches = 0
        self._stepper = Stepper()
        self._syncs = True
        self._is_first_forward = True
        self._one = torch.ones((), device=self.device)
        # Fused blocks leave little to compile, FSDP's hooks cannot be compiled, and layers that emulate a block format
        # would cut the model into pieces.
        can_compile = not self.conversion.blocks and not sharded and self.recipe.emulate == "none"
        self.compiled = bool(compile) and can_compile
        if self.compiled:
            if emulated:
                raise UsageError(
                    f"compile: {self.recipe.compute} is emulated on {self.hardware.name}, and torch.compile does not "
                    "see the emulation; use compile=False or recipe fp32"
                )
            compile_mode = compile if isinstance(compile, str) else None
            compile_forward(model, self.step_context, compile_mode, self.conversion.scales, blocks_to_compile)
        self._memory = self._fit_memory(memory_budget) if memory_budget is not None else None
        self.speed_advice = explain_slow(self.conversion, compiled=self.compiled, can_compile=can_compile)
        if self.update_sync.is_first:
            warn_about_speed(self.speed_advice, stacklevel=3)

    def _convert_model(self, fused: bool | None, cuda_graphs: bool | None) -> Conversion:
        """Convert the layers that the recipe computes differently. Subclasses may extend this."""
        return setup.convert_model(self.inner, self.recipe, self.hardware, fused, cuda_graphs, self._one_graph)

    def _fit_memory(self, budget: Budget) -> MemoryFitter:
        """Return what fits the steps into a memory budget."""
        if self.compiled and find_block_memory(self.inner, self.recipe):
            raise UsageError(
                "memory_budget: torch.compile plans the memory of this model's blocks itself; use compile=False "
                "(--no-compile)"
            )
        return MemoryFitter(
            find_block_memory(self.inner, self.recipe), budget, device=self.device, hardware=self.hardware,
            compute=self.recipe.compute, update_sync=self.update_sync,
        )  # fmt: skip

    @property
    def memory_plan(self) -> MemoryPlan | None:
        """What each block keeps for backward under ``memory_budget``: None until it is chosen, after a few steps.

        ``print`` it, or read its fields: ``blocks``, ``counts``, ``peak``, ``cost_ms``, ``fits``.
        """
        return self._memory.plan if self._memory is not None else None

    @property
    def gradient_formats(self) -> GradientFormats | None:
        """The FP8 format of each gradient under ``gradients_format=auto``: ``formats``, and ``changes`` as a list.

        None for other recipes.
        """
        return self._formats

    @property
    def checkpointed(self) -> list[str]:
        """Paths of the modules whose activations are recomputed."""
        plan = self.memory_plan
        if plan is None:
            return self._checkpointed
        return [path for path, option in plan.blocks.items() if option in ("selective", "full", "offload")]

    @property
    def memory_settled(self) -> bool:
        """Whether the memory plan is final, or there is no budget."""
        return self._memory is None or self._memory.is_settled

    def __repr__(self) -> str:
        size = sum(parameter.numel() for parameter in self.named.values())
        names = ", ".join(type(optimizer).__name__ for optimizer in self.optimizers)
        return (
            f"{type(self).__name__}({type(self.inner).__name__}, {names}, recipe={str(self.recipe)!r}, "
            f"device={str(self.device)!r}, trained_parameters={size:,}, updates={self.updates}, "
            f"skipped={self.skipped})"
        )

    @property
    def skipped(self) -> int:
        """Number of skipped updates that the host knows of. Reading it never waits for the device."""
        return self.guard.skipped

    @property
    def updates(self) -> int:
        """Number of updates so far, including skipped ones."""
        return self.guard.updates

    def state_dict(self, trained_only: bool = False) -> dict[str, Any]:
        """Return the complete state: FP32 weights, optimizers, loss scale, skip counters and FP8 scales.

        Args:
            trained_only: Leave out parameters that are not trained, and buffers. ``load_state_dict`` then leaves those
                of the model as they are.

        Raises:
            UsageError: An accumulation is in progress.
        """
        if self._microbatches:
            raise UsageError(
                f"engine.state_dict during an accumulation ({self._microbatches} of {self.accumulate} microbatches): "
                "call it after a complete step, or call engine.flush() first"
            )
        on_cpu = not self.update_sync.sharded
        saved = state.save_training(self.inner, self.optimizers, self.lean, on_cpu)
        if trained_only:
            own = state.list_trained(self.inner)
            saved["model"] = {name: value for name, value in saved["model"].items() if name in own}
        return {**saved, **self.precision_state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` returned. It may come from another recipe: missing parts keep their current state.

        Args:
            state_dict: The state.
        """
        state.load_training(self.inner, self.optimizers, state_dict)
        self.load_precision_state_dict(state_dict)

    def precision_state_dict(self) -> dict[str, Any]:
        """Return the state without model and optimizers, for libraries that save these themselves."""
        saved = state.save_precision(self.recipe, self.scaler, self.guard, self.conversion.scales)
        return saved if self.memory_plan is None else {**saved, "memory_plan": self.memory_plan.describe()}

    def load_precision_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what ``precision_state_dict`` returned, or that part of a complete state.

        Args:
            state_dict: The state.

        Raises:
            UsageError: The state was not saved by an engine.
        """
        if self.recipe_reason is not None:
            state.warn_of_other_recipe(state_dict.get("recipe"), self.recipe)
        state.load_precision(state_dict, self.scaler, self.guard, self.conversion.scales)
        if self._memory is not None:
            self._memory.load(state_dict.get("memory_plan"))
        self._microbatches = 0

    def detach(self) -> nn.Module:
        """Return the model to plain torch: FP32 parameters with every bit, modules of their own classes.

        Weights that ``frozen=fp8`` stored in FP8 become FP32; the bits that they lost are not restored. Weights that
        shared a buffer get memory of their own.
        Do not use the engine after this.

        Returns:
            The model.
        """
        remove_changes(self.model)
        restore_stored(self.inner)
        for parameter in self.inner.parameters():
            keep_gradient(parameter)
            widen(parameter)
        self.watchers.clear()
        return self.model

    @contextlib.contextmanager
    def _notify_watchers(self, phase: str) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for watcher in self.watchers:
                stack.enter_context(watcher.around(phase))
            yield

    @contextlib.contextmanager
    def _explain_errors(self) -> Iterator[None]:
        """Turn torch's errors about dtypes and attention kernels into a UsageError that names the module."""
        try:
            yield
        except RuntimeError as error:
            explained = explain_error(error, self.recipe, self.inner)
            if explained is None:
                raise
            raise explained from error
