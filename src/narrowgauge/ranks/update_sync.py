"""Synchronizes what an update needs from all ranks, so that every rank makes the same update.

gradients   FSDP reduces those of shards, DDP those of its copies, both only in the backward of the last microbatch (in
            every one for a large model: until they are reduced, a rank holds all of them, whole and in FP32). Those of
            parameters that are copied besides shards (norms, modules kept in FP32) are averaged here, in one buffer
            per format.
norms       The squares of every rank's part are summed over ranks in FP64, in one collective with one number per
            parameter tensor. It also carries an inf or a NaN of any rank to all: either all ranks skip, or none.
FP8         All scales are computed from the largest |x| of any rank.
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
from narrowgauge.parameters import is_sharded
from narrowgauge.ranks.distribute import reduces_every_microbatch, refuse_fsdp1
from narrowgauge.scaling.tensor import TensorScales


class UpdateSync:
    """Synchronizes the updates of one engine over the ranks that its model is distributed over."""

    def __init__(self, model: nn.Module, named: Mapping[str, nn.Parameter], lean: bool) -> None:
        refuse_fsdp1(model)
        self.model = model
        self.copied = isinstance(model, DistributedDataParallel)
        sharded = [parameter for parameter in named.values() if is_sharded(parameter)]
        self.group = find_group(model, named)
        self.sharded = bool(sharded)
        if self.copied and lean and any(p.dim() > 1 and p.dtype is torch.float32 for p in named.values()):
            raise UsageError(
                "Engine: a lean recipe converts weights to BF16, but DDP was set up with FP32 weights; wrap the model "
                "with narrowgauge.ranks.replicate(model, recipe)"
            )
        self.size = dist.get_world_size(self.group) if self.group is not None else 1
        fsdp = (m for m in model.modules() if hasattr(m, "set_requires_gradient_sync")) if sharded else ()
        self._outermost: Any = next(iter(fsdp), None)
        self.reduces_every_microbatch = bool(sharded) and _cannot_wait(sharded)
        self._weights: tuple[list[int], Tensor] | None = None
        self._syncs_gradients = True

    @property
    def is_first(self) -> bool:
        """Whether this is the first of the ranks, which warns for all."""
        return self.group is None or dist.get_rank(self.group) == 0

    def set_gradient_sync(self, last: bool) -> None:
        """Set, before a microbatch, whether its backward reduces gradients over ranks.

        Args:
            last: Whether it is the last microbatch of the update.
        """
        if self.copied:
            model: Any = self.model
            if self._syncs_gradients and not model.require_backward_grad_sync:
                return  # the user's own ``with model.no_sync()``
            model.require_backward_grad_sync = self._syncs_gradients = last
        elif self._outermost is not None:  # FSDP also sets the modules inside it
            self._outermost.set_requires_gradient_sync(last or self.reduces_every_microbatch)

    @torch.no_grad()
    def average_copied_gradients(self, named: Mapping[str, nn.Parameter]) -> None:
        """Average over ranks the gradients that neither FSDP nor DDP reduces."""
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for parameter in (p for p in named.values() if self.sharded and not is_sharded(p)):
            if parameter.grad is None:  # this rank may not have used it
                parameter.grad = torch.zeros_like(parameter)
            grad = view_real(parameter.grad)
            by_dtype.setdefault(grad.dtype, []).append(grad)
        for grads in by_dtype.values():
            flat = torch.cat([grad.reshape(-1).float() for grad in grads])
            dist.all_reduce(flat, group=self.group)
            flat /= self.size
            for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
                grad.copy_(part.view_as(grad))

    def combine_norms(self, norms: Tensor, named: Mapping[str, nn.Parameter]) -> Tensor:
        """Compute the norms of whole gradients from the norms of this rank's shards. With DDP they are whole already.

        Args:
            norms: One norm per parameter, of this rank's part of its gradient.
            named: The parameters, in the same order.
        """
        if not self.sharded:
            return norms
        own = [id(parameter) for parameter in named.values()]
        if self._weights is None or self._weights[0] != own:
            weights = [1 / self._count_holders(parameter) for parameter in named.values()]
            self._weights = own, torch.tensor(weights, dtype=torch.float64, device=norms.device)
        squares = norms.double().square() * self._weights[1]
        dist.all_reduce(squares, group=self.group)
        return squares.sqrt().float()

    def _count_holders(self, parameter: Any) -> int:
        """Count the ranks that hold the same part of a parameter."""
        if not is_sharded(parameter):
            return self.size
        sizes = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
        holders = 1
        for placement, size in sizes:
            holders *= size if placement.is_replicate() else 1
        return holders

    @torch.no_grad()
    def sync_amax(self, scales: TensorScales) -> None:
        """Take the maximum of the FP8 amax values over all ranks, so that all compute the same scales."""
        if self.group is None:
            return
        seen = torch.cat([scales.amax, scales.siteless_amax.reshape(1)])
        seen = torch.where(torch.isnan(seen), torch.inf, seen)
        dist.all_reduce(seen, dist.ReduceOp.MAX, group=self.group)
        scales.amax.copy_(seen[:-1])
        scales.siteless_amax.copy_(seen[-1])

    @torch.no_grad()
    def sum(self, table: Tensor) -> Tensor:
        """Return the sum of a tensor over all ranks."""
        if self.group is not None:
            dist.all_reduce(table, group=self.group)
        return table

    @torch.no_grad()
    def maximum(self, numbers: list[float]) -> list[float]:
        """Return the largest of each number over all ranks. It waits for the device."""
        if self.group is None:
            return numbers
        place = torch.device("cuda") if dist.get_backend(self.group) == "nccl" else torch.device("cpu")
        found = torch.tensor(numbers, dtype=torch.float64, device=place)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.group)
        largest: list[float] = found.tolist()
        return largest

    @torch.no_grad()
    def average(self, number: Tensor) -> Tensor:
        """Return the mean of a number over all ranks."""
        if self.group is None:
            return number
        mean = number.detach().float().clone()
        dist.all_reduce(mean, group=self.group)
        return mean / self.size


def find_group(model: nn.Module, named: Mapping[str, nn.Parameter]) -> dist.ProcessGroup | None:
    """Return the ranks that a model is distributed over by DDP or FSDP2; None if it is on one.

    Args:
        model: The model, with DDP's wrapper.
        named: Its trainable parameters, by name.

    Raises:
        UsageError: It is sharded over several meshes.
    """
    if isinstance(model, DistributedDataParallel):
        copies: dist.ProcessGroup = model.process_group
        return copies
    sharded: list[Any] = [parameter for parameter in named.values() if is_sharded(parameter)]
    if not sharded:
        return None
    mesh = sharded[0].device_mesh
    if any(parameter.device_mesh != mesh for parameter in sharded):
        raise UsageError("Engine: the model is sharded over several meshes; shard it over one")
    shards: dist.ProcessGroup = mesh.get_group() if mesh.ndim == 1 else mesh._flatten().get_group()
    return shards


def _cannot_wait(sharded: list[Any]) -> bool:
    """Whether a GPU cannot keep the gradients of sharded parameters whole until the last microbatch."""
    device = sharded[0].device
    if device.type != "cuda":
        return False
    memory = torch.cuda.get_device_properties(device).total_memory
    return reduces_every_microbatch(sum(parameter.numel() for parameter in sharded), memory)
