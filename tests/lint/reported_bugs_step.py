"""Bugs of the training step, reconstructed from public reports: the order of scale, unscale_, clip, step, update."""

GITHUB = "https://github.com"
STEP_BUGS = {
    "clip before unscale in a trainer class": (
        f"{GITHUB}/pytorch/examples/issues/1196",
        """
class Trainer:
    def __init__(self, config, model, optimizer, train_set):
        self.config, self.model, self.optimizer = config, model, optimizer
        self.loader = torch.utils.data.DataLoader(train_set, batch_size=config.batch_size)
        if config.use_amp:
            self.scaler = torch.amp.GradScaler("cuda")

    def run_batch(self, source, targets, train=True):
        amp = self.config.use_amp
        with torch.set_grad_enabled(train), torch.amp.autocast("cuda", dtype=torch.float16, enabled=amp):
            _, loss = self.model(source, targets)
        if train:
            self.optimizer.zero_grad(set_to_none=True)
            if self.config.use_amp:
                self.scaler.scale(loss).backward()
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)  # lint: clip-before-unscale
                self.scaler.step(self.optimizer)
                self.scaler.update()
            else:
                loss.backward()
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
                self.optimizer.step()
        return loss

    def run_epoch(self, epoch):
        for source, targets in self.loader:
            self.run_batch(source.cuda(), targets.cuda())
""",
    ),
    "clip before unscale in a segmentation script": (
        f"{GITHUB}/milesial/Pytorch-UNet/issues/468",
        """
def train_model(model, device, train_loader, epochs=5, lr=1e-5, amp=False, gradient_clipping=1.0):
    optimizer = torch.optim.RMSprop(model.parameters(), lr=lr, momentum=0.99)
    grad_scaler = torch.amp.GradScaler("cuda", enabled=amp)
    criterion = nn.CrossEntropyLoss() if model.n_classes > 1 else nn.BCEWithLogitsLoss()
    for epoch in range(1, epochs + 1):
        model.train()
        for batch in train_loader:
            images, masks = batch["image"].to(device), batch["mask"].to(device)
            with torch.autocast(device.type if device.type != "mps" else "cpu", enabled=amp):
                predicted = model(images)
                loss = criterion(predicted, masks)
            optimizer.zero_grad(set_to_none=True)
            grad_scaler.scale(loss).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), gradient_clipping)  # lint: clip-before-unscale
            grad_scaler.step(optimizer)
            grad_scaler.update()
""",
    ),
    "unscale_ only commented out": (
        f"{GITHUB}/k2-fsa/icefall/pull/2081",
        """
def train_one_epoch(params, model, optimizer, scheduler, train_dl, scaler):
    for batch_idx, batch in enumerate(train_dl):
        params.batch_idx_train += 1
        with torch.amp.autocast("cuda", enabled=params.use_fp16):
            loss, info = compute_loss(params=params, model=model, batch=batch)
        scaler.scale(loss).backward()
        # scaler.unscale_(optimizer)
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)  # lint: clip-before-unscale
        scheduler.step_batch(params.batch_idx_train)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
""",
    ),
    "clip function in the configuration, before the engine's step": (
        f"{GITHUB}/catalyst-team/catalyst/issues/1319",
        """
from functools import partial

class OptimizerCallback:
    def __init__(self, clip_value, accumulation_steps=1):
        self.clip = partial(torch.nn.utils.clip_grad_norm_, max_norm=clip_value)
        self.accumulation_steps, self.count = accumulation_steps, 0
        self.scaler = torch.amp.GradScaler("cuda")

    def on_batch_end(self, model, optimizer, loss):
        self.count += 1
        self.scaler.scale(loss).backward()
        self.clip(model.parameters())  # lint: clip-before-unscale
        if self.count % self.accumulation_steps == 0:
            self.scaler.step(optimizer)
            self.scaler.update()
            optimizer.zero_grad()
""",
    ),
    "clip and noise in an updater that has the scaler as an attribute": (
        f"{GITHUB}/rwth-i6/returnn/issues/1590",
        """
class Updater:
    def __init__(self, config, network, optimizer):
        self.config, self.network, self.optimizer = config, network, optimizer
        self.gradient_clip = config.get("gradient_clip", 0.0)
        self.grad_scaler = None
        if config.get("grad_scaler", True):
            self.grad_scaler = torch.amp.GradScaler("cuda")

    def backward(self, loss):
        if self.grad_scaler is not None:
            self.grad_scaler.scale(loss).backward()
        else:
            loss.backward()

    def step(self):
        if self.gradient_clip:
            torch.nn.utils.clip_grad_value_(self.network.parameters(), self.gradient_clip)  # lint: clip-before-unscale
        if self.grad_scaler is not None:
            self.grad_scaler.step(self.optimizer)
            self.grad_scaler.update()
        else:
            self.optimizer.step()

    def train(self, batches):
        for batch in batches:
            self.optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = self.network(batch).mean()
            self.backward(loss)
            self.step()
""",
    ),
    "clip with AMP in one branch of semi-supervised training": (
        f"{GITHUB}/TorchSSL/TorchSSL/pull/59",
        """
from contextlib import nullcontext

def train(self, args):
    scaler = torch.amp.GradScaler("cuda")
    amp_cm = torch.autocast("cuda") if args.amp else nullcontext()
    for x_lb, y_lb, x_ulb in zip(self.labeled, self.labels, self.unlabeled):
        with amp_cm:
            logits = self.model(torch.cat((x_lb, x_ulb)))
            sup_loss = F.cross_entropy(logits[: x_lb.shape[0]], y_lb)
            unsup_loss = self.consistency(logits[x_lb.shape[0] :])
            total_loss = sup_loss + args.ulb_loss_ratio * unsup_loss
        if args.amp:
            scaler.scale(total_loss).backward()
            if args.clip > 0:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), args.clip)  # lint: clip-before-unscale
            scaler.step(self.optimizer)
            scaler.update()
        else:
            total_loss.backward()
            if args.clip > 0:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), args.clip)
            self.optimizer.step()
        self.model.zero_grad()
""",
    ),
    "clipping by hand: the norm is computed over scaled gradients": (
        f"{GITHUB}/Lightning-AI/pytorch-lightning/issues/9330",
        """
def clip(parameters, limit):
    total = torch.sqrt(sum(p.grad.detach().pow(2).sum() for p in parameters))
    factor = limit / (total + 1e-6)
    if factor < 1:
        for p in parameters:
            p.grad.mul_(factor)  # lint: clip-before-unscale
    return total

def fit(model, loader, lr, limit):
    optimizer = torch.optim.SGD(model.parameters(), lr)
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        clip(list(model.parameters()), limit)
        scaler.step(optimizer)
        scaler.update()
""",
    ),
    "gradients clamped by hand in a recurrent model": (
        f"{GITHUB}/Lightning-AI/pytorch-lightning/issues/9694",
        """
def train(args, model, loader):
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    scaler = torch.amp.GradScaler("cuda", enabled=args.fp16)
    for step, (tokens, labels) in enumerate(loader):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16, enabled=args.fp16):
            loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
        scaler.scale(loss).backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                parameter.grad.clamp_(-args.clip, args.clip)  # lint: clip-before-unscale
        scaler.step(optimizer)
        scaler.update()
""",
    ),
    "clip inside on_before_step of a helper with getattr": (
        f"{GITHUB}/Lightning-AI/pytorch-lightning/issues/9599",
        """
def optimize(trainer, loss):
    scaler = getattr(trainer, "scaler", None)
    if scaler is None:
        loss.backward()
    else:
        scaler.scale(loss).backward()
        if trainer.clip:
            nn.utils.clip_grad_norm_(trainer.model.parameters(), trainer.clip)  # lint: clip-before-unscale
    if scaler is None:
        trainer.optimizer.step()
    else:
        scaler.step(trainer.optimizer)
        scaler.update()
    trainer.optimizer.zero_grad()
""",
    ),
    "unscale_ at every batch of an accumulation": (
        f"{GITHUB}/hiyouga/LlamaFactory/issues/77",
        """
def train(args, model, loader, optimizer):
    scaler = torch.amp.GradScaler("cuda", enabled=args.fp16)
    optimizer.zero_grad()
    for step, batch in enumerate(loader):
        with torch.autocast("cuda", dtype=torch.float16, enabled=args.fp16):
            loss = model(**batch).loss / args.gradient_accumulation_steps
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)  # lint: unscale-twice
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        if (step + 1) % args.gradient_accumulation_steps == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
""",
    ),
    "update skipped when the gradient norm is not finite": (
        f"{GITHUB}/espnet/espnet/pull/2362",
        """
import logging

def train_one_epoch(model, loader, optimizer, scaler, options):
    for batch in loader:
        with torch.autocast("cuda", enabled=scaler is not None):
            loss = model(**batch)["loss"]
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)  # lint: unscale-twice
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), options.grad_clip)
        if not torch.isfinite(norm):
            logging.warning("The norm is not finite. The update is skipped.")
        else:
            scaler.step(optimizer)
            scaler.update()
""",
    ),
    "update skipped when the norm is too large": (
        f"{GITHUB}/Haian-Jin/LVSM/pull/19",
        """
def main(config, model, loader, optimizer):
    scaler = torch.amp.GradScaler("cuda", enabled=config.training.use_amp)
    skipped = 0
    for step, batch in enumerate(loader):
        with torch.autocast("cuda", dtype=torch.float16):
            result = model(batch)
        scaler.scale(result.loss_metrics.loss).backward()
        skip = False
        scaler.unscale_(optimizer)  # lint: unscale-twice
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=config.training.grad_clip_norm).item()
        if norm > config.training.allowed_norm * 5:
            skip = True
            skipped += 1
        if not skip:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad(set_to_none=True)
""",
    ),
    "update forgotten in an example": (
        f"{GITHUB}/Azure/MS-AMP/pull/45",
        """
import argparse

def train(args, model, device, train_loader, optimizer, epoch):
    model.train()
    scaler = torch.amp.GradScaler("cuda")
    for batch_idx, (data, target) in enumerate(train_loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            output = model(data)
            loss = F.nll_loss(output, target)
        scaler.scale(loss).backward()
        scaler.step(optimizer)  # lint: scaler-without-update
        if batch_idx % args.log_interval == 0:
            print(f"Epoch {epoch} [{batch_idx * len(data)}] loss {loss.item():.6f}")

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--log-interval", type=int, default=10)
    args = parser.parse_args()
    net = nn.Linear(784, 10).cuda()
    train(args, net, "cuda", [], torch.optim.Adam(net.parameters()), 1)
""",
    ),
    "update without a step": (
        f"{GITHUB}/huggingface/accelerate/issues/357",
        """
def train(model, loader, optimizer):
    scaler = torch.amp.GradScaler("cuda", enabled=True)
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.update()  # lint: update-before-step
        scaler.step(optimizer)
""",
    ),
    "two updates per iteration of a GAN": (
        f"{GITHUB}/neosr-project/neosr/pull/9",
        """
class Model:
    def __init__(self, opt, net_g, net_d):
        self.net_g, self.net_d = net_g, net_d
        self.optimizer_g = torch.optim.Adam(net_g.parameters(), lr=opt.lr)
        self.optimizer_d = torch.optim.Adam(net_d.parameters(), lr=opt.lr)
        self.scaler = torch.amp.GradScaler("cuda")

    def optimize(self, lq, gt):
        with torch.autocast("cuda", dtype=torch.float16):
            output = self.net_g(lq)
            loss_g = F.l1_loss(output, gt)
        self.scaler.scale(loss_g).backward()
        self.scaler.update()  # lint: update-before-step
        self.scaler.step(self.optimizer_g)
        with torch.autocast("cuda", dtype=torch.float16):
            loss_d = self.net_d(output.detach()).mean() - self.net_d(gt).mean()
        self.scaler.scale(loss_d).backward()
        self.scaler.step(self.optimizer_d)
        self.scaler.update()
        self.optimizer_g.zero_grad()
        self.optimizer_d.zero_grad()
""",
    ),
    "optimizer.step() next to the scaler in a GAN": (
        f"{GITHUB}/IAHispano/Applio/pull/860",
        """
def train_and_evaluate(hps, nets, optims, scaler, loader):
    net_g, net_d = nets
    optim_g, optim_d = optims
    for wave, spec in loader:
        with torch.autocast("cuda", enabled=hps.fp16_run, dtype=torch.float16):
            fake = net_g(spec)
            loss_disc = F.mse_loss(net_d(wave), torch.ones(1)) + F.mse_loss(net_d(fake.detach()), torch.zeros(1))
        optim_d.zero_grad()
        scaler.scale(loss_disc).backward()
        scaler.unscale_(optim_d)
        scaler.step(optim_d)
        with torch.autocast("cuda", enabled=hps.fp16_run, dtype=torch.float16):
            loss_gen = F.l1_loss(net_g(spec), wave)
        optim_g.zero_grad()
        scaler.scale(loss_gen).backward()
        scaler.unscale_(optim_g)
        optim_g.step()  # lint: step-past-scaler
        scaler.update()
""",
    ),
}
