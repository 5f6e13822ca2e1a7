"""ModelFacts: what a snapshot tells about parameters, optimizers and batch norms besides the statistics of tensors.

    no_gradient    of a parameter: 1 if its optimizer steps, but it has no gradient at all (None)
    no_optimizer   of a parameter: 1 if it has a gradient, but is in no optimizer
    no_rate        of a parameter: 1 if its learning rate is 0, as in the first step of many warm-ups
    adam_root      of a parameter: the root of the mean second moment of Adam, divided by eps
    statistics     of a batch norm in training: how far its running statistics are from their initial 0 and 1
    offset, spread of a batch norm in training: the distance of its running mean and deviation from those of the batch
    norm_decay     of the weight of a norm: learning rate times weight decay
    muon_square, muon_decay, muon_eps
                   of a matrix that Muon steps: the mean square of an update whose singular values are all 1, learning
                   rate times weight decay, and eps
    loss_format    1 if one of torch's loss functions has computed the loss in 16 bits

Each fact is one number, computed on the device and copied to the host with the other numbers of the snapshot.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.engine import Engine
from narrowgauge.optim.newton_schulz import adjust_rate
from narrowgauge.optim.sharded import to_local

_MIN_SAMPLES = 16
_TRACKED = 50
"""Batches that running statistics must have averaged to be compared with those of a batch."""
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class ModelFacts:
    """Collects the facts of one update, by name and place."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.values: dict[tuple[str, str], Tensor] = {}

    def read_batch_norm(self, path: str, module: nn.Module, inputs: Any) -> None:
        """Compare the running statistics of a batch norm in training mode with those of the batch that it got.

        Evaluation normalizes with the former, training with the latter. The median over channels is compared, as single
        channels may have outliers. Averages of few batches say nothing: they are reported as 0.
        """
        x = inputs[0] if inputs else None
        if not isinstance(x, Tensor) or not isinstance(module, _BATCH_NORMS) or not module.training:
            return
        if module.running_mean is None or module.running_var is None or module.momentum is None:
            return
        x = x.detach().transpose(0, 1).flatten(1).float()
        if x.shape[1] < _MIN_SAMPLES or not float(module.momentum) or module.num_batches_tracked is None:
            return
        deviation = (module.running_var.float() + module.eps).sqrt()
        known = module.num_batches_tracked >= max(_TRACKED, 3 / float(module.momentum))
        offset = ((x.mean(1) - module.running_mean.float()) / deviation).abs().median()
        spread = ((x.var(1) + module.eps).sqrt() / deviation).log2().abs().median()
        self.values["offset", path], self.values["spread", path] = offset * known, spread * known

    def before_update(self) -> None:
        """Read which parameters have gradients. Without gradients that last until the update, nothing is known."""
        engine = self.engine
        if engine.loss_in_16_bits:
            self.values["loss_format", "loss"] = torch.ones((), device=engine.device)
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
        """Read rates of 0, second moments of Adam, the decay of norms, and running statistics of batch norms."""
        names = {id(parameter): name for name, parameter in self.engine.named.items()}
        for optimizer in self.engine.optimizers:
            for group in optimizer.param_groups:
                rate, device = group.get("lr"), self.engine.device
                if isinstance(rate, Tensor) or rate == 0:
                    tensor = isinstance(rate, Tensor)
                    no_rate = (
                        rate.eq(0).float().to(device, non_blocking=True) if tensor else torch.ones((), device=device)
                    )
                    own = [names[id(parameter)] for parameter in group["params"] if id(parameter) in names]
                    self.values |= {("no_rate", name): no_rate for name in own}
                for parameter in group["params"] if "eps" in group and "betas" in group else ():
                    root = _compute_root(optimizer.state.get(parameter, {}), group)
                    if root is not None and id(parameter) in names:
                        self.values["adam_root", names[id(parameter)]] = root.to(self.engine.device)
                if group.get("rule", "muon") == "muon" and "ns_steps" in group and "adjust_lr_fn" in group:
                    for parameter in group["params"]:
                        if id(parameter) in names:
                            self._read_muon(names[id(parameter)], parameter, group)
        for optimizer in self.engine.optimizers:
            decays = {id(p): float(g["lr"]) * float(g.get("weight_decay") or 0)
                      for g in optimizer.param_groups for p in g["params"]}  # fmt: skip
            for path, module in self.engine.inner.named_modules():
                weight = module._parameters.get("weight") if "Norm" in type(module).__name__ else None
                if weight is not None and decays.get(id(weight)):
                    decay = torch.full((), decays[id(weight)], device=self.engine.device)
                    self.values["norm_decay", f"{path}.weight"] = decay
        for path, module in _training_batch_norms(self.engine.inner):
            assert module.running_mean is not None and module.running_var is not None
            mean, variance = module.running_mean, module.running_var
            self.values["statistics", path] = mean.abs().sum() + (variance - 1).abs().sum()

    def _read_muon(self, name: str, parameter: Tensor, group: dict[str, Any]) -> None:
        device, rate = self.engine.device, group["lr"]
        tensor = isinstance(rate, Tensor)
        lr = rate.to(device, torch.float32, non_blocking=True) if tensor else torch.full((), rate, device=device)
        ratio = adjust_rate(1.0, group["adjust_lr_fn"], parameter.shape)
        self.values["muon_square", name] = lr.square() * (ratio**2 / max(parameter.shape))
        self.values["muon_decay", name] = lr * float(group["weight_decay"])
        self.values["muon_eps", name] = torch.full((), float(group["eps"]), device=device)

    def stack(self) -> Tensor:
        """Return all values as one tensor, in the order of their names."""
        return torch.stack([v.detach().float().reshape(()).to(self.engine.device) for v in self.values.values()])


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
