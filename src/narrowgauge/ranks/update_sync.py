"""What an update needs of all ranks, so that each does the same.

gradients   of shards are summed by FSDP, of DDP's copies by DDP, both during the last microbatch's backward alone
            (of a large model in every one: until they are summed, a rank holds all of them, whole and in FP32);
            of other copies beside shards (norms, keepers) here, all in one buffer for each format
the norm    the squares of every rank's part, summed over ranks in FP64: one collective of as many numbers as there
            are parameters, which also carries an inf or a NaN of any rank to all: all skip, or none
FP8         the largest |x| of any rank is what all scales are made from
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from narrowgauge.errors import UsageError
from narrowgauge.optim.norms import view_real
from narrowgauge.optim.sharded import is_sharded
from narrowgauge.ranks.distribute import are_summed_each, refuse_fsdp1
from narrowgauge.scaling.tensor import TensorScales


class UpdateSync:
    """The ranks that a model is spread over, as its engine sees them."""

    def __init__(self, model: nn.Module, named: Mapping[str, nn.Parameter], lean: bool) -> None:
        refuse_fsdp1(model)
        self.model = model
        self.copied = isinstance(model, DistributedDataParallel)
        sharded = [parameter for parameter in named.values() if is_sharded(parameter)]
        self.group: dist.ProcessGroup | None = None
        if self.copied:
            self.group = model.process_group  # type: ignore[assignment]
        elif sharded:
            mesh = sharded[0].device_mesh
            if any(parameter.device_mesh != mesh for parameter in sharded):
                raise UsageError("Engine: the model is sharded over several meshes; shard it over one")
            self.group = mesh.get_group() if mesh.ndim == 1 else mesh._flatten().get_group()
        self.sharded = bool(sharded)
        if self.copied and lean and any(p.dim() > 1 and p.dtype is torch.float32 for p in named.values()):
            raise UsageError(
                "Engine: a lean recipe makes weights BF16, but DDP has taken note of them in FP32; wrap the model with "
                "narrowgauge.ranks.replicate(model, recipe)"
            )
        self.size = dist.get_world_size(self.group) if self.group is not None else 1
        fsdp = (m for m in model.modules() if hasattr(m, "set_requires_gradient_sync")) if sharded else ()
        self._outermost: Any = next(iter(fsdp), None)
        self.sums_each = bool(sharded) and _are_too_large(sharded)
        self._shares: tuple[list[int], Tensor] | None = None
        self._announced = True

    def announce(self, last: bool) -> None:
        """Before a microbatch: whether gradients are to be summed over ranks in its backward."""
        if self.copied:
            model: Any = self.model
            if self._announced and not model.require_backward_grad_sync:
                return  # the user's own ``with model.no_sync()``
            model.require_backward_grad_sync = self._announced = last
        elif self._outermost is not None:
            self._outermost.set_requires_gradient_sync(last or self.sums_each)  # and it tells those inside it

    @torch.no_grad()
    def settle_gradients(self, named: Mapping[str, nn.Parameter]) -> None:
        """Average the gradients that neither FSDP nor DDP has."""
        alike: dict[torch.dtype, list[Tensor]] = {}
        for parameter in (p for p in named.values() if self.sharded and not is_sharded(p)):
            if parameter.grad is None:  # a rank may have had no use for it
                parameter.grad = torch.zeros_like(parameter)
            grad = view_real(parameter.grad)
            alike.setdefault(grad.dtype, []).append(grad)
        for grads in alike.values():
            flat = torch.cat([grad.reshape(-1).float() for grad in grads])
            dist.all_reduce(flat, group=self.group)
            flat /= self.size
            for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
                grad.copy_(part.view_as(grad))

    def combine(self, norms: Tensor, named: Mapping[str, nn.Parameter]) -> Tensor:
        """The norms of whole gradients from those of this rank's parts; DDP's are whole already."""
        if not self.sharded:
            return norms
        own = [id(parameter) for parameter in named.values()]
        if self._shares is None or self._shares[0] != own:
            shares = [1 / self._holders(parameter) for parameter in named.values()]
            self._shares = own, torch.tensor(shares, dtype=torch.float64, device=norms.device)
        squares = norms.double().square() * self._shares[1]
        dist.all_reduce(squares, group=self.group)
        return squares.sqrt().float()

    def _holders(self, parameter: Any) -> int:
        """How many ranks hold the same part of a parameter."""
        if not is_sharded(parameter):
            return self.size
        sizes = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
        holders = 1
        for placement, size in sizes:
            holders *= size if placement.is_replicate() else 1
        return holders

    @torch.no_grad()
    def agree(self, scales: TensorScales) -> None:
        """Let every rank move its FP8 scales by what the ranks have seen together."""
        if self.group is None:
            return
        seen = torch.cat([scales.amax, scales.seen_beside.reshape(1)])
        seen = torch.where(torch.isnan(seen), torch.inf, seen)
        dist.all_reduce(seen, dist.ReduceOp.MAX, group=self.group)
        scales.amax.copy_(seen[:-1])
        scales.seen_beside.copy_(seen[-1])

    @torch.no_grad()
    def average(self, number: Tensor) -> Tensor:
        """The mean of the ranks' numbers."""
        if self.group is None:
            return number
        mean = number.detach().float().clone()
        dist.all_reduce(mean, group=self.group)
        return mean / self.size


def _are_too_large(sharded: list[Any]) -> bool:
    """Whether the gradients of sharded parameters are summed in every microbatch, as a GPU cannot keep them whole."""
    device = sharded[0].device
    if device.type != "cuda":
        return False
    memory = torch.cuda.get_device_properties(device).total_memory
    return are_summed_each(sum(parameter.numel() for parameter in sharded), memory)
