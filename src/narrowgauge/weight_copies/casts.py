"""The weight of a layer as its products read it: cast to FP8 or BF16 at each forward, from its current values.

    forward    fp8()              with the site's scale, in both layouts if backward reads the second
    backward   fp8_transposed()   the second layout, saved by forward; or recomputed if a copy of all weights takes too
                                  much memory: in lean recipes, and for FSDP shards, which are gathered temporarily

Frozen weights may be stored in FP8 (stored.py): then they are read as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from narrowgauge import events
from narrowgauge.kernels import cast_weights as kernel
from narrowgauge.kernels import cast_weights_in_graph as in_graph
from narrowgauge.parameters import gradient_dtype, is_sharded
from narrowgauge.scaling.fine_scales import cast_finely
from narrowgauge.scaling.operand import WIDE, Operand
from narrowgauge.scaling.tensor import ScaleTables, ScalingRule, Site, TensorScales
from narrowgauge.weight_copies.adjacent import store_contiguously, view_as_one
from narrowgauge.weight_copies.stored import E4M3, read_stored, widen_bytes


@dataclass(frozen=True)
class WeightCastPlan:
    """How to cast a layer's weight, or several weights stacked along the outputs."""

    site: Site | None = None
    scales: TensorScales | ScalingRule | None = None
    transposed_weight: bool = False
    """The layer stores its weight as [inputs, outputs] (GPT-2's Conv1D in transformers)."""
    keep_for_backward: bool = True
    """Whether backward reuses the copies made in forward."""
    gradient_dtype: torch.dtype | None = None
    """The dtype of the gradient; None for that of the weight, as gathered by FSDP."""
    path: str = ""
    """The layer's path in the model, for listeners."""
    stored_scale: Tensor | None = None
    """What weights that are stored as bytes of FP8 are multiplied by; None for weights in other formats."""

    @staticmethod
    def of(
        *weights: nn.Parameter,
        site: Site | None = None,
        scales: TensorScales | None = None,
        transposed_weight: bool = False,
        lean: bool = False,
        path: str = "",
        stored_scale: Tensor | None = None,
    ) -> WeightCastPlan:
        """Make a plan for weights; reads the gradient's dtype here, as torch.compile cannot."""
        sharded = any(is_sharded(weight) for weight in weights)
        if not sharded:
            store_contiguously(weights)
        dtype = None if sharded else gradient_dtype(weights[0])
        keep = not lean and not sharded and stored_scale is None
        return WeightCastPlan(site, scales, transposed_weight, keep, dtype, path, stored_scale)

    def use(
        self,
        *weights: Tensor,
        record: bool = True,
        seen: bool = False,
        backward: bool = True,
        tables: ScaleTables | None = None,
    ) -> BoundWeight:
        """Bind weights for one forward and its backward.

        Args:
            weights: The current weights.
            record: Record their amax at the site; False in evaluation.
            seen: The site has recorded them already, as in recomputation.
            backward: Whether backward will compute grad_input.
            tables: The inputs of a compiled graph with the scales.
        """
        return BoundWeight(self, weights, record, seen, backward, tables)


class CastableWeight(Protocol):
    """The interface of a weight that products use."""

    def fp8(self) -> Operand: ...

    def fp8_transposed(self) -> Operand: ...

    def wide(self, format: str) -> Tensor: ...

    @property
    def path(self) -> str: ...


class BoundWeight:
    """A weight bound for one forward and its backward."""

    def __init__(
        self,
        plan: WeightCastPlan,
        weights: tuple[Tensor, ...],
        record: bool,
        seen: bool,
        backward: bool,
        tables: ScaleTables | None,
    ) -> None:
        self.plan, self.weights, self.tables = plan, weights, tables
        self._record, self._seen, self._backward = record, seen, backward
        self._lp = Operand()
        self._hp: Tensor | None = None

    @property
    def gradient_dtype(self) -> torch.dtype:
        return self.plan.gradient_dtype or self.weights[0].dtype

    @property
    def path(self) -> str:
        return self.plan.path

    def fp8(self) -> Operand:
        """Return the weight in E4M3, with the second layout if it is kept for backward."""
        if self._lp.lp is None:
            self._lp = self._cast(self._backward and self.plan.keep_for_backward)
            if events.is_listening():
                events.report_copy(self.weights, (self._lp.lp, self._lp.lp_t))
        return self._lp

    def fp8_transposed(self) -> Operand:
        """Return the weight with the second layout."""
        if self._lp.lp_t is None:
            again = self._lp.lp is None or self._lp.has_fine_scales  # whose transposed copy has other scales
            self._lp = self._cast(True) if again else self._lp.transposed()
            if events.is_listening():
                events.report_copy(self.weights, (self._lp.lp, self._lp.lp_t))
        return self._lp

    def wide(self, format: str) -> Tensor:
        """Return the weight in BF16 or FP32."""
        if self._hp is None:
            self._hp = self._stack(WIDE[format])
            if events.is_listening():
                events.report_copy(self.weights, (self._hp,))
        return self._hp

    def release(self) -> None:
        """Free the copies: no product reads this weight any more."""
        self._lp, self._hp = Operand(), None

    def get_saved(self, wide: bool = True) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return what to save for backward: second layout, inverse scale, BF16 copy; None for what does not exist.

        Without ``wide``, backward does not read the BF16 copy.
        """
        if not self.plan.keep_for_backward:
            return None, None, None
        inverse = self._lp.transposed_inv_scale if self._lp.lp_t is not None else None
        return self._lp.lp_t, inverse, self._hp if wide else None

    def restore_saved(self, kept: tuple[Tensor | None, Tensor | None, Tensor | None]) -> BoundWeight:
        """Restore in backward what forward saved."""
        lp_t, inv_scale, hp = kept
        self._lp, self._hp = Operand(None, None, lp_t, inv_scale), hp
        return self

    def _cast(self, transposed: bool) -> Operand:
        if self.plan.stored_scale is not None:
            return read_stored(self.weights, self.plan.stored_scale, transposed)
        plan, transposed_weight = self.plan, self.plan.transposed_weight
        site, scales = plan.site, plan.scales
        layouts = transposed or transposed_weight
        weights = [weight.detach() for weight in self.weights]
        if len(weights) > 1 and (joint := view_as_one(weights)) is not None:
            weights = [joint]
        tables = self.tables
        if site is not None and scales is not None and site.granularity != "tensor":
            return self._cast_finely(weights, site, scales, layouts, transposed)
        if site is None or scales is None or not self._record or scales.mode != "delayed" or not scales.delayed:
            margin = 0 if scales is None or scales.mode != "delayed" else scales.margin
            lp, lp_t, inverse, seen = kernel.cast_weight(weights, E4M3, layouts, margin)
            if site is not None and self._record and not self._seen:
                if tables is None:
                    site.amax.copy_(torch.maximum(site.amax, seen))
                else:
                    amax, _, rows = tables.locate(site)
                    in_graph.raise_amax_by_rows(amax, rows, seen)
        elif tables is not None:
            amax, counts, rows = tables.locate(site)
            form = (E4M3, layouts, scales.margin)
            if self._seen:
                lp, lp_t, inverse = in_graph.recast_weight_by_rows(weights, site.scale, amax, rows, *form)
            else:
                lp, lp_t, inverse = in_graph.cast_weight_by_rows(
                    weights, site.scale, amax, counts, tables.pending, rows, *form
                )
        elif self._seen:
            lp, lp_t, inverse = kernel.recast_weight(weights, site.scale, site.amax, E4M3, layouts, scales.margin)
        else:
            lp, lp_t, inverse = kernel.cast_weight_delayed(
                weights, site.scale, site.amax, site.counts, site.pending, E4M3, layouts, scales.margin
            )
        self._seen = True
        if transposed_weight:
            assert lp_t is not None
            return Operand(None, lp_t, lp if transposed else None, inverse)
        return Operand(None, lp, lp_t, inverse)

    def _cast_finely(
        self, weights: list[Tensor], site: Site, scales: TensorScales | ScalingRule, layouts: bool, transposed: bool
    ) -> Operand:
        whole = weights[0] if len(weights) == 1 else torch.cat(weights)
        record, self._seen = self._record and not self._seen, True
        made = cast_finely(whole, site, scales, layouts, record=record, tables=self.tables, square=True)
        if not self.plan.transposed_weight:
            return made
        turned = Operand(None, made.lp_t, None, made.inv_scale_t)
        return turned._replace(lp_t=made.lp, inv_scale_t=made.inv_scale) if transposed else turned

    def _stack(self, dtype: torch.dtype) -> Tensor:
        if self.plan.stored_scale is not None:
            lp = read_stored(self.weights, self.plan.stored_scale).lp
            assert lp is not None
            return widen_bytes(lp, self.plan.stored_scale, dtype)
        plain = [weight.detach() for weight in self.weights]
        if len(plain) == 1:
            return (plain[0].t() if self.plan.transposed_weight else plain[0]).to(dtype)
        joint = view_as_one(plain)
        return torch.cat([part.to(dtype) for part in plain]) if joint is None else joint.to(dtype)


class PaddedWeight:
    """A weight with rows of zeros below it: products with an odd number of logits take several times as long."""

    def __init__(self, weight: BoundWeight, missing: int) -> None:
        self._weight, self.missing = weight, missing
        self._hp: Tensor | None = None

    @property
    def path(self) -> str:
        return self._weight.path

    def wide(self, format: str) -> Tensor:
        """Return the padded weight in BF16 or FP32."""
        if self._hp is None:
            (weight,) = self._weight.weights
            rows, columns = weight.shape
            self._hp = weight.new_zeros(rows + self.missing, columns, dtype=WIDE[format])
            self._hp[:rows] = weight
            events.report_copy(self._weight.weights, (self._hp,))
        return self._hp

    def release(self) -> None:
        """Free the copy."""
        self._hp = None

    def fp8(self) -> Operand:
        raise NotImplementedError("FP8 products need a vocabulary that is a multiple of 16")

    fp8_transposed = fp8
