"""Bugs of training loops, reconstructed from public reports: accumulation, zero_grad, schedulers, backward, EMA."""

GITHUB = "https://github.com"
LOOP_BUGS = {
    "accumulation without division": (
        f"{GITHUB}/karpathy/nanoGPT/issues/206",
        """
def train(model, get_batch, optimizer, gradient_accumulation_steps, max_iters):
    scaler = torch.amp.GradScaler("cuda")
    x, y = get_batch("train")
    for iter_num in range(max_iters):
        for micro_step in range(gradient_accumulation_steps):
            with torch.autocast("cuda", dtype=torch.float16):
                logits = model(x)
                loss = F.cross_entropy(logits.view(-1, logits.size(-1)), y.view(-1))
            x, y = get_batch("train")
            scaler.scale(loss).backward()  # lint: accumulate-undivided
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
""",
    ),
    "accumulation counted with >=": (
        f"{GITHUB}/hirofumi0810/neural_sp/issues/168",
        """
def train(args, model, loader, optimizer):
    accumulated = 0
    for batch in loader:
        logits = model(batch["xs"])
        loss = F.cross_entropy(logits, batch["ys"])
        loss.backward()  # lint: accumulate-undivided
        accumulated += 1
        if accumulated >= args.accum_grad_n_steps:
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            accumulated = 0
""",
    ),
    "accumulation with the loss of a model of transformers": (
        f"{GITHUB}/huggingface/transformers/issues/37766",
        """
from transformers import AutoModelForCausalLM

def main(args, loader):
    model = AutoModelForCausalLM.from_pretrained(args.model).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    for step, batch in enumerate(loader):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()  # lint: accumulate-undivided
        if (step + 1) % args.accumulation_steps == 0:
            optimizer.step()
            optimizer.zero_grad()
""",
    ),
    "zero_grad for every microbatch": (
        f"{GITHUB}/bytetriper/RAE/issues/67",
        """
def train(args, model, loader, optimizer, schedule):
    for step in range(args.steps):
        total = 0.0
        for micro in range(args.accumulation):
            x, y = next(loader)
            optimizer.zero_grad(set_to_none=True)  # lint: zero-grad-order
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = F.mse_loss(model(x), y) / args.accumulation
            loss.backward()
            total += loss.detach()
        optimizer.step()
        schedule.step()
""",
    ),
    "zero_grad of the model at every batch, step at every n-th": (
        f"{GITHUB}/tatsu-lab/alpaca_farm/issues/57",
        """
def train(args, policy, loader):
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.lr)
    for step, batch in enumerate(loader, 1):
        loss = policy(batch).mean() / args.accumulation
        loss.backward()
        if step % args.accumulation == 0:
            nn.utils.clip_grad_norm_(policy.parameters(), args.max_norm)
            optimizer.step()
        policy.zero_grad()  # lint: zero-grad-order
""",
    ),
    "zero_grad in the wrong place in VAE training": (
        f"{GITHUB}/gaozhihan/PreDiff/pull/33",
        """
def training_step(model, opt, batches, accumulate):
    for index, batch in enumerate(batches):
        opt.zero_grad()  # lint: zero-grad-order
        reconstruction, posterior = model(batch)
        loss = F.l1_loss(reconstruction, batch) + 1e-6 * posterior.kl().mean()
        (loss / accumulate).backward()
        if (index + 1) % accumulate == 0:
            opt.step()
""",
    ),
    "zero_grad missing in the AMP branch": (
        f"{GITHUB}/facebookresearch/nwm/issues/16",
        """
def train_step(args, diffusion, model, x, y, opt, scaler):
    with torch.amp.autocast("cuda", enabled=args.bfloat_enable, dtype=torch.float16):
        loss = diffusion.training_losses(model, x, y)["loss"].mean()
    if not args.bfloat_enable:
        opt.zero_grad()
        loss.backward()
        opt.step()
    else:
        scaler.scale(loss).backward()  # lint: missing-zero-grad
        scaler.unscale_(opt)
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip_val)
        scaler.step(opt)
        scaler.update()
""",
    ),
    "zero_grad missing in the branch without AMP": (
        f"{GITHUB}/IDEA-Research/DINO/issues/20",
        """
def train_one_epoch(model, criterion, loader, optimizer, device, max_norm, args):
    scaler = torch.amp.GradScaler("cuda", enabled=args.amp)
    for samples, targets in loader:
        with torch.autocast("cuda", enabled=args.amp):
            outputs = model(samples.to(device))
            losses = criterion(outputs, targets)
        if args.amp:
            optimizer.zero_grad()
            scaler.scale(losses).backward()
            if max_norm > 0:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            scaler.step(optimizer)
            scaler.update()
        else:
            losses.backward()  # lint: missing-zero-grad
            if max_norm > 0:
                torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
""",
    ),
    "zero_grad missing everywhere": (
        f"{GITHUB}/pstage-ocr-team6/ocr-teamcode/pull/26",
        """
def run_epoch(loader, model, criterion, optimizer, scheduler, max_grad_norm, device):
    scaler = torch.amp.GradScaler("cuda")
    for images, expected in loader:
        images, expected = images.to(device), expected.to(device)
        with torch.autocast("cuda", dtype=torch.float16):
            output = model(images, expected)
            loss = criterion(output.transpose(1, 2), expected[:, 1:])
        scaler.scale(loss).backward()  # lint: missing-zero-grad
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        scaler.step(optimizer)
        scaler.update()
""",
    ),
    "zero_grad not reached when the step is skipped": (
        f"{GITHUB}/espnet/espnet/pull/3283",
        """
def train_one_epoch(model, loader, optimizer, scaler, accum_grad, grad_clip):
    for iiter, batch in enumerate(loader, 1):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(**batch)["loss"] / accum_grad
        scaler.scale(loss).backward()
        if iiter % accum_grad == 0:
            scaler.unscale_(optimizer)  # lint: unscale-twice
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
            if not torch.isfinite(norm):
                print("The step is skipped")
                continue
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
""",
    ),
    "scheduler between step and update": (
        f"{GITHUB}/pytorch/pytorch/issues/44511",
        """
def train(model, loader, steps):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    lr_scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=steps)
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        lr_scheduler.step()  # lint: scheduler-on-skipped-step
        scaler.update()
""",
    ),
    "scheduler steps for every batch, also for skipped ones": (
        f"{GITHUB}/pytorch/pytorch/issues/55585",
        """
from torch.optim.lr_scheduler import LambdaLR

class Trainer:
    def __init__(self, net, args):
        self.net, self.args = net, args
        self.optimizer = torch.optim.AdamW(net.parameters(), lr=args.lr)
        self.scheduler = LambdaLR(self.optimizer, lambda step: min(1.0, step / args.warmup))
        self.scaler = torch.amp.GradScaler("cuda")

    def step(self, x, y):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.mse_loss(self.net(x), y)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()  # lint: scheduler-on-skipped-step
        self.optimizer.zero_grad()

    def fit(self, loader):
        for x, y in loader:
            self.step(x, y)
""",
    ),
    "scheduler in optical flow training": (
        f"{GITHUB}/princeton-vl/RAFT/issues/104",
        """
import torch.optim as optim

def fetch_optimizer(args, model):
    optimizer = optim.AdamW(model.parameters(), lr=args.lr, weight_decay=args.wdecay, eps=args.epsilon)
    scheduler = optim.lr_scheduler.OneCycleLR(optimizer, args.lr, args.num_steps + 100, pct_start=0.05)
    return optimizer, scheduler

def train(args, model, loader):
    optimizer, scheduler = fetch_optimizer(args, model)
    scaler = torch.amp.GradScaler("cuda", enabled=args.mixed_precision)
    should_keep_training = True
    while should_keep_training:
        for image1, image2, flow in loader:
            optimizer.zero_grad()
            with torch.autocast("cuda", enabled=args.mixed_precision):
                loss = F.l1_loss(model(image1, image2), flow)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            scaler.step(optimizer)
            scheduler.step()  # lint: scheduler-on-skipped-step
            scaler.update()
        should_keep_training = False
""",
    ),
    "backward inside autocast": (
        f"{GITHUB}/pytorch/pytorch/issues/120376",
        """
class Experiment:
    def __init__(self, args, model):
        self.args, self.model = args, model
        self.ce = nn.CrossEntropyLoss()
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)

    def train(self, loader):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            for x, y in loader:
                logits = self.model(x)
                loss = self.ce(logits, y)
                self.optimizer.zero_grad()
                loss.backward()  # lint: autocast-backward
                self.optimizer.step()
""",
    ),
    "EMA of FP16 weights": (
        f"{GITHUB}/d8ahazard/sd_dreambooth_extension/pull/1415",
        """
import copy

def train(args, unet, loader):
    ema = copy.deepcopy(unet).half().requires_grad_(False)
    optimizer = torch.optim.AdamW(unet.parameters(), lr=args.lr)
    for latents, noise in loader:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = F.mse_loss(unet(latents), noise)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for slow, fast in zip(ema.parameters(), unet.parameters()):
                slow.mul_(0.9999).add_(fast, alpha=0.0001)  # lint: ema-16bit
""",
    ),
    "EMA model in BF16 with lerp": (
        f"{GITHUB}/NUS-HPC-AI-Lab/VideoSys/pull/6",
        """
from copy import deepcopy

@torch.no_grad()
def update_ema(ema_model, model, decay=0.9999):
    for ema_p, p in zip(ema_model.parameters(), model.parameters()):
        ema_p.lerp_(p.to(ema_p.dtype), 1 - decay)  # lint: ema-16bit

def main(args, loader):
    model = nn.Linear(64, 64).cuda()
    ema = deepcopy(model).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    for x in loader:
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        update_ema(ema, model)
""",
    ),
}
