"""ModelFacts: what a snapshot tells about units, parameters and optimizer states besides the statistics of tensors.

    dead_units     of a ReLU: the share of its units that are zero for every sample of the microbatch
    no_gradient    of a parameter: 1 if its optimizer steps, but it has no gradient at all (None)
    no_optimizer   of a parameter: 1 if it has a gradient, but is in no optimizer
    adam_root      of a parameter: the root of the mean second moment of Adam, divided by eps
    statistics     of a batch norm in training: how far its running statistics are from their initial 0 and 1

Each fact is one number, computed on the device and copied to the host with the other numbers of the snapshot.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.engine import Engine
from narrowgauge.optim.sharded import to_local

_MIN_UNITS, _MIN_SAMPLES = 16, 16
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class ModelFacts:
    """Collects the facts of one update, by name and place."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.values: dict[tuple[str, str], Tensor] = {}

    def read_units(self, path: str, module: nn.Module, output: Any) -> None:
        """Read the output of a module; only that of a ReLU matters."""
        if not isinstance(module, nn.ReLU) or not isinstance(output, Tensor) or output.dim() < 2:
            return
        units = output.detach().transpose(1, -1) if output.dim() >= 4 else output.detach()  # channels of images
        units = units.reshape(-1, units.shape[-1])
        if units.shape[0] >= _MIN_SAMPLES and units.shape[1] >= _MIN_UNITS:
            self.values["dead_units", path] = (units == 0).all(0).float().mean()

    def before_update(self) -> None:
        """Read which parameters have gradients. Without gradients that last until the update, nothing is known."""
        engine = self.engine
        if engine.release is not None:
            return
        names = {id(parameter): name for name, parameter in engine.named.items()}
        one = torch.ones((), device=engine.device)
        optimized: set[int] = set()
        for optimizer in engine.optimizers:
            own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            optimized |= {id(parameter) for parameter in own}
            if any(parameter.grad is not None for parameter in own):
                without = [names[id(p)] for p in own if p.grad is None and p.requires_grad and id(p) in names]
                self.values |= {("no_gradient", name): one for name in without}
        for name, parameter in engine.named.items():
            if parameter.grad is not None and id(parameter) not in optimized:
                self.values["no_optimizer", name] = one

    def after_update(self) -> None:
        """Read the second moments of Adam, and the running statistics of batch norms."""
        names = {id(parameter): name for name, parameter in self.engine.named.items()}
        for optimizer in self.engine.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"] if "eps" in group and "betas" in group else ():
                    root = _compute_root(optimizer.state.get(parameter, {}), group)
                    if root is not None and id(parameter) in names:
                        self.values["adam_root", names[id(parameter)]] = root.to(self.engine.device)
        for path, module in _training_batch_norms(self.engine.inner):
            assert module.running_mean is not None and module.running_var is not None
            mean, variance = module.running_mean, module.running_var
            self.values["statistics", path] = mean.abs().sum() + (variance - 1).abs().sum()

    def stack(self) -> Tensor:
        """Return all values as one tensor, in the order of their names."""
        return torch.stack([value.detach().float().reshape(()) for value in self.values.values()])


def _compute_root(state: Any, group: dict[str, Any]) -> Tensor | None:
    moment, step = state.get("exp_avg_sq"), state.get("step")
    if not isinstance(moment, Tensor) or not moment.is_floating_point() or step is None or float(group["eps"]) <= 0:
        return None
    correction = 1 - float(group["betas"][1]) ** torch.as_tensor(step, dtype=torch.float32).to(moment.device)
    return (to_local(moment).float().mean() / correction).sqrt() / float(group["eps"])


def _training_batch_norms(model: nn.Module) -> Iterator[tuple[str, nn.BatchNorm1d]]:
    for path, module in model.named_modules():
        if isinstance(module, _BATCH_NORMS) and module.training and module.running_mean is not None:
            yield path, module  # type: ignore[misc]
