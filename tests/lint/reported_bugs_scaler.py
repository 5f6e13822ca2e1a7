"""Bugs about loss scaling, reconstructed from public reports: missing, superfluous, recreated, not saved, read."""

GITHUB = "https://github.com"
SCALER_BUGS = {
    "autocast of the device's default format, no scaler": (
        f"{GITHUB}/engichang1467/Open-Rig3R/issues/35",
        """
from torch.amp import autocast

def train_epoch(model, loader, criterion, optimizer, device):
    model.train()
    total = 0.0
    for batch in loader:
        images, metadata = batch["images"].to(device), batch["metadata"]
        optimizer.zero_grad()
        with autocast(device_type=str(device)):
            outputs = model(images, metadata)
            losses = criterion(outputs, batch)
        loss = losses["total"]
        loss.backward()  # lint: fp16-without-scaler
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        total += loss.detach()
    return total / len(loader)
""",
    ),
    "option for AMP, plain backward": (
        f"{GITHUB}/EvolvingLMMs-Lab/Otter/pull/195",
        """
def train_one_epoch(args, model, loader, optimizer, lr_scheduler, device):
    for step, batch in enumerate(loader):
        images, ids = batch["images"].to(device), batch["ids"].to(device)
        with torch.autocast("cuda", enabled=args.amp):
            loss = model(images, ids, labels=ids)[0]
        loss.backward()  # lint: fp16-without-scaler
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()

def main(args):
    model = nn.Transformer().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    train_one_epoch(args, model, [], optimizer, scheduler, "cuda")
""",
    ),
    "the format option is not passed to autocast": (
        f"{GITHUB}/datawhalechina/happy-llm/pull/215",
        """
import argparse
from contextlib import nullcontext

parser = argparse.ArgumentParser()
parser.add_argument("--dtype", default="bfloat16")
parser.add_argument("--device", default="cuda")
args = parser.parse_args()
ctx = nullcontext() if args.device == "cpu" else torch.autocast("cuda")
model = nn.Linear(512, 512).to(args.device)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-4)

def train_epoch(loader):
    for step, (x, y) in enumerate(loader):
        with ctx:
            loss = F.cross_entropy(model(x), y)
        loss.backward()  # lint: fp16-without-scaler
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

train_epoch([])
""",
    ),
    "scaler under BF16 in a trainer": (
        f"{GITHUB}/decoderesearch/SAELens/pull/723",
        """
class SAETrainer:
    def __init__(self, cfg, sae, loader):
        self.cfg, self.sae, self.loader = cfg, sae, loader
        self.optimizer = torch.optim.Adam(sae.parameters(), lr=cfg.lr)
        self.grad_scaler = torch.amp.GradScaler("cuda")  # lint: scaler-with-bf16

    def train_step(self, acts):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            output = self.sae(acts)
            loss = F.mse_loss(output, acts)
        self.grad_scaler.scale(loss).backward()
        self.grad_scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.sae.parameters(), 1.0)
        self.grad_scaler.step(self.optimizer)
        self.grad_scaler.update()
        self.optimizer.zero_grad()

    def fit(self):
        for acts in self.loader:
            self.train_step(acts)
""",
    ),
    "scaler enabled with any mixed precision, format from a class": (
        f"{GITHUB}/huggingface/transformers/pull/21428",
        """
class Trainer:
    def __init__(self, args, model):
        self.args, self.model = args, model
        self.optimizer = torch.optim.AdamW(model.parameters())
        self.amp_dtype = torch.bfloat16
        self.scaler = torch.amp.GradScaler("cuda")  # lint: scaler-with-bf16

    def compute_loss(self, inputs):
        with torch.autocast("cuda", dtype=self.amp_dtype):
            return self.model(**inputs)["loss"]

    def training_step(self, inputs):
        loss = self.compute_loss(inputs)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
""",
    ),
    "scaler and BF16 with FSDP": (
        f"{GITHUB}/facebookresearch/multimodal/pull/433",
        """
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

def train(config, model, loader):
    model = FSDP(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr)
    scaler = ShardedGradScaler()  # lint: scaler-with-bf16
    for batch in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(batch["image"], batch["text"]).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""",
    ),
    "scaler created in the function for one epoch": (
        f"{GITHUB}/conservationtechlab/animl-py/issues/298",
        """
def train_helper(loader, model, optimizer, device, mixed_precision=True):
    model.train()
    criterion = nn.CrossEntropyLoss()
    if mixed_precision:
        scaler = torch.amp.GradScaler("cuda")  # lint: scaler-recreated
    for data, labels in loader:
        data, labels = data.to(device), labels.to(device)
        optimizer.zero_grad()
        if mixed_precision:
            with torch.autocast("cuda", dtype=torch.float16):
                loss = criterion(model(data), labels)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss = criterion(model(data), labels)
            loss.backward()
            optimizer.step()

def train_classifier(cfg, model, loader):
    optimizer = torch.optim.SGD(model.parameters(), lr=cfg["lr"])
    for epoch in range(cfg["epochs"]):
        train_helper(loader, model, optimizer, cfg["device"], cfg["mixed_precision"])
""",
    ),
    "scaler created in the loop over epochs": (
        f"{GITHUB}/conservationtechlab/animl-py/pull/304",
        """
def main(args, model, loader):
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    for epoch in range(args.epochs):
        scaler = torch.amp.GradScaler("cuda", enabled=args.amp)  # lint: scaler-recreated
        for x, y in loader:
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16, enabled=args.amp):
                loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        scheduler.step()
""",
    ),
    "fit() of a trainer replaces the scaler": (
        f"{GITHUB}/mosaicml/composer/pull/1376",
        """
class Trainer:
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer
        self.scaler = torch.amp.GradScaler("cuda")

    def fit(self, loader):
        self.scaler = torch.amp.GradScaler("cuda")  # lint: scaler-recreated
        for x, y in loader:
            self.optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = F.cross_entropy(self.model(x), y)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()

def main(model, loaders, optimizer):
    trainer = Trainer(model, optimizer)
    for loader in loaders:
        trainer.fit(loader)
""",
    ),
    "checkpoint without the scaler": (
        f"{GITHUB}/pytorch/vision/pull/4923",
        """
def main(args, model, loader):
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    scaler = torch.amp.GradScaler("cuda") if args.amp else None
    for epoch in range(args.epochs):
        for image, target in loader:
            with torch.autocast("cuda", enabled=scaler is not None):
                loss = F.cross_entropy(model(image), target)
            optimizer.zero_grad()
            if scaler is not None:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            else:
                loss.backward()
                optimizer.step()
        checkpoint = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),  # lint: scaler-not-saved
            "epoch": epoch,
        }
        torch.save(checkpoint, f"model_{epoch}.pth")
""",
    ),
    "save method of a trainer without the scaler": (
        f"{GITHUB}/ultralytics/ultralytics/pull/22189",
        """
class BaseTrainer:
    def __init__(self, model, amp=True):
        self.model, self.amp = model, amp
        self.optimizer = torch.optim.SGD(model.parameters(), 0.01)
        self.scaler = torch.amp.GradScaler("cuda", enabled=self.amp)

    def optimizer_step(self):
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm=10.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def train(self, loader):
        for batch in loader:
            with torch.autocast("cuda", enabled=self.amp):
                loss, self.items = self.model(batch)
            self.scaler.scale(loss).backward()
            self.optimizer_step()
            self.save_model()

    def save_model(self):
        state = self.optimizer.state_dict()  # lint: scaler-not-saved
        torch.save({"model": self.model.state_dict(), "optimizer": state}, "last.pt")
""",
    ),
    "loss of the next line is the scaled one": (
        f"{GITHUB}/facebookresearch/fairchem/pull/617",
        """
class Trainer:
    def __init__(self, model, optimizer, amp):
        self.model, self.optimizer = model, optimizer
        self.scaler = torch.amp.GradScaler("cuda") if amp else None

    def train(self, loader, metrics):
        for batch in loader:
            with torch.autocast("cuda", enabled=self.scaler is not None):
                loss = F.l1_loss(self.model(batch), batch.y)
            loss = self.scaler.scale(loss) if self.scaler else loss
            self.optimizer.zero_grad()
            loss.backward()
            metrics.update("loss", loss.item())  # lint: scaled-loss-read, sync-in-loop
            self.scaler.step(self.optimizer)
            self.scaler.update()
""",
    ),
    "the scaled loss is returned and logged": (
        f"{GITHUB}/meta-pytorch/tnt/pull/354",
        """
class AutoUnit:
    def __init__(self, module, precision):
        self.module = module
        self.optimizer = torch.optim.AdamW(module.parameters())
        self.grad_scaler = torch.amp.GradScaler("cuda")

    def train_step(self, data):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(self.module(data[0]), data[1])
        loss = self.grad_scaler.scale(loss)
        loss.backward()
        self.grad_scaler.step(self.optimizer)
        self.grad_scaler.update()
        self.optimizer.zero_grad()
        return loss

def main(unit_config, module, loader, logger):
    unit = AutoUnit(module, unit_config.precision)
    for step, data in enumerate(loader):
        loss = unit.train_step(data)
        if step % 100 == 0:
            logger.log("loss", loss.item(), step)  # lint: scaled-loss-read
""",
    ),
    "gradient norm logged while scaled": (
        f"{GITHUB}/languini-kitchen/languini-kitchen/pull/7",
        """
def train(config, model, loader, optimizer, logger):
    scaler = torch.amp.GradScaler("cuda", enabled=config.device == "cuda")
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        scaler.scale(loss).backward()
        if step % config.log_every == 0:
            norms = [p.grad.norm() for p in model.parameters() if p.grad is not None]  # lint: scaled-norm-read
            logger.log("grad_norm", torch.stack(norms).norm(), step)
        scaler.step(optimizer)
        scaler.update()
""",
    ),
    "histogram of scaled gradients": (
        f"{GITHUB}/wandb/wandb/issues/9092",
        """
import wandb

def train(model, loader, lr):
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        total = 0.0
        for p in model.parameters():
            total += p.grad.data.norm(2).item() ** 2  # lint: scaled-norm-read
        wandb.log({"gradient": total**0.5})
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
""",
    ),
    "penalty on scaled gradients": (
        f"{GITHUB}/pytorch/pytorch/pull/44667",
        """
def train(model, loader, optimizer, scaler):
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaled = scaler.scale(loss)
        grads = torch.autograd.grad(scaled, model.parameters(), create_graph=True)  # lint: scaled-penalty
        with torch.autocast("cuda", dtype=torch.float16):
            penalty = sum(g.pow(2).sum() for g in grads).sqrt()
            loss = loss + penalty
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""",
    ),
    "penalty of the discriminator on a scaled output": (
        "https://discuss.pytorch.org/t/what-is-the-correct-way-of-computing-a-grad-penalty-using-amp/95827/3",
        """
def r1_penalty(discriminator, real, scaler):
    real.requires_grad_(True)
    with torch.autocast("cuda", dtype=torch.float16):
        out = discriminator(real).sum()
    (grad,) = torch.autograd.grad(scaler.scale(out), real, create_graph=True)  # lint: scaled-penalty
    return grad.pow(2).flatten(1).sum(1).mean()

def step(discriminator, generator, real, noise, optimizer, scaler, gamma):
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = F.softplus(discriminator(generator(noise).detach())).mean()
    loss = loss + gamma * r1_penalty(discriminator, real, scaler)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    ),
}
