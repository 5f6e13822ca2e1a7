"""The weight of a layer as its products read it: cast to FP8 or BF16 at each forward, from what it holds then.

No copy outlives the backward of the forward that made it. Copies kept from one forward to the next would have to know
of every way in which a weight can change, and there is none that tells: a write through ``.data``, a raw pointer or a
fused optimizer leaves no trace. A cast costs 6 bytes for each FP32 weight, below 1% of a step (docs/results.md).

    forward    fp8()              by the site's scale, in both layouts where backward reads the second
    backward   fp8_transposed()   the second layout, kept since forward; or made again where a copy of all weights is
                                  too much to hold: in lean recipes, and of shards, which are whole only for a while
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from narrowgauge import events
from narrowgauge.kernels import cast_weights as kernel
from narrowgauge.nn.products.gemm import BF16, E4M3, Operand
from narrowgauge.optim.adamw import gradient_dtype
from narrowgauge.optim.sharded import is_sharded
from narrowgauge.scaling.tensor import Site, TensorScales


@dataclass(frozen=True)
class WeightPlan:
    """How a layer's weight, or several that are stacked along the outputs, becomes an operand."""

    site: Site | None = None
    scales: TensorScales | None = None
    turned: bool = False
    """The layer keeps its weight as [inputs, outputs] (GPT-2's Conv1D in transformers)."""
    held: bool = True
    """Whether what forward has made for backward is held until then."""
    gradient_dtype: torch.dtype | None = None
    """The format of the gradient; None: that of the weight, as FSDP has gathered it."""
    path: str = ""
    """The layer's path in the model, for listeners."""

    @staticmethod
    def of(
        *weights: nn.Parameter,
        site: Site | None = None,
        scales: TensorScales | None = None,
        turned: bool = False,
        lean: bool = False,
        path: str = "",
    ) -> WeightPlan:
        """For the weights as they are now; the gradient's format is asked for here, as torch.compile cannot ask."""
        sharded = any(is_sharded(weight) for weight in weights)
        if not sharded:
            put_together(weights)
        dtype = None if sharded else gradient_dtype(weights[0])
        return WeightPlan(site, scales, turned, not (lean or sharded), dtype, path)

    def use(self, *weights: Tensor, record: bool = True, seen: bool = False, backward: bool = True) -> Weight:
        """One use of the weights.

        ``record``: let the site see them, which evaluation does not. ``seen``: it has done so, as in recomputation.
        ``backward``: whether grad_input will be asked for.
        """
        return Weight(self, weights, record, seen, backward)


class Weight:
    """One use of a weight, from a forward to its backward."""

    def __init__(self, plan: WeightPlan, weights: tuple[Tensor, ...], record: bool, seen: bool, backward: bool) -> None:
        self.plan, self.weights = plan, weights
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
        """In E4M3, with the second layout where that is held for backward."""
        if self._lp.lp is None:
            self._lp = self._cast(self._backward and self.plan.held)
            if events.is_listening():
                events.report_copy(self.weights, (self._lp.lp, self._lp.lp_t))
        return self._lp

    def fp8_transposed(self) -> Operand:
        """The second layout."""
        if self._lp.lp_t is None:
            self._lp = self._lp.transposed() if self._lp.lp is not None else self._cast(True)
            if events.is_listening():
                events.report_copy(self.weights, (self._lp.lp, self._lp.lp_t))
        return self._lp

    def bf16(self) -> Tensor:
        if self._hp is None:
            self._hp = self._stacked_bf16()
            if events.is_listening():
                events.report_copy(self.weights, (self._hp,))
        return self._hp

    def for_backward(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """What is kept: the second layout, the inverse scale, the BF16 copy; each where it was made and is held."""
        if not self.plan.held:
            return None, None, None
        return self._lp.lp_t, self._lp.inv_scale if self._lp.lp_t is not None else None, self._hp

    def in_backward(self, kept: tuple[Tensor | None, Tensor | None, Tensor | None]) -> Weight:
        """The use in backward of what was kept in forward."""
        lp_t, inv_scale, hp = kept
        self._lp, self._hp = Operand(None, None, lp_t, inv_scale), hp
        return self

    def _cast(self, transposed: bool) -> Operand:
        plan, turned = self.plan, self.plan.turned
        site, scales = plan.site, plan.scales
        layouts = transposed or turned
        weights = [weight.detach() for weight in self.weights]
        if site is None or scales is None or not self._record or scales.mode != "delayed" or not scales.delayed:
            margin = 0 if scales is None or scales.mode != "delayed" else scales.margin
            amax = site.amax if site is not None and self._record and not self._seen else None
            lp, lp_t, inverse = kernel.cast_weight(weights, E4M3, layouts, margin, amax)
        elif self._seen:
            lp, lp_t, inverse = kernel.cast_weight_again(weights, site.scale, site.amax, E4M3, layouts, scales.margin)
        else:
            lp, lp_t, inverse = kernel.cast_weight_delayed(
                weights, site.scale, site.amax, site.counts, site.pending, E4M3, layouts, scales.margin
            )
        self._seen = True
        if turned:
            assert lp_t is not None
            return Operand(None, lp_t, lp if transposed else None, inverse)
        return Operand(None, lp, lp_t, inverse)

    def _stacked_bf16(self) -> Tensor:
        plain = [weight.detach() for weight in self.weights]
        if len(plain) == 1:
            return (plain[0].t() if self.plan.turned else plain[0]).to(BF16)
        joint = as_one(plain)
        return torch.cat([part.to(BF16) for part in plain]) if joint is None else joint.to(BF16)


def put_together(weights: tuple[nn.Parameter, ...]) -> None:
    """Move BF16 parameters that are used as one into one piece of memory, so that no stacked copy need be made."""
    if len(weights) > 1 and all(weight.dtype is BF16 for weight in weights) and as_one(list(weights)) is None:
        joint = torch.cat([weight.detach() for weight in weights])
        for weight, part in zip(weights, joint.split([len(weight) for weight in weights]), strict=True):
            weight.data = part


def as_one(parts: list[Tensor]) -> Tensor | None:
    """Tensors that lie one behind the other in memory as one tensor; None where they do not."""
    first = parts[0].detach()
    end = first.storage_offset()
    for part in parts:
        same = part.untyped_storage()._cdata == first.untyped_storage()._cdata and part.dtype is first.dtype
        if not same or not part.is_contiguous() or part.storage_offset() != end:
            return None
        end += part.numel()
    return first.as_strided((sum(len(part) for part in parts), *first.shape[1:]), first.stride())
