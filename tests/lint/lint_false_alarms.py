"""Correct code that resembles a pitfall, of kinds that were once reported by mistake in public scripts."""

STEP = """
    opt.zero_grad(); loss.backward(); opt.step()
"""
FP16_HEAD = """
model = nn.Linear(8, 8)
opt = torch.optim.SGD(model.parameters(), 0.1)
"""
FALSE_ALARMS = {
    "accelerate runs backward": f"""
from accelerate import Accelerator
accelerator = Accelerator()
{FP16_HEAD}
for x in loader:
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(x).sum()
    if accelerated: accelerator.backward(loss)
    else: loss.backward()
    opt.step()
    opt.zero_grad()
""",
    "deepspeed engine": f"""
import deepspeed
{FP16_HEAD}
engine, *_ = deepspeed.initialize(model=model, optimizer=opt)
for x in loader:
    with torch.autocast("cuda", dtype=torch.float16):
        loss = engine(x).sum()
    loss.backward(); opt.step()
""",
    "scaler of timm": f"""
from timm.utils import NativeScaler
loss_scaler = NativeScaler()
{FP16_HEAD}
for x in loader:
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(x).sum()
    if loss_scaler is not None: loss_scaler(loss, opt, parameters=model.parameters())
    else: loss.backward(); opt.step()
    opt.zero_grad()
""",
    "scaler as an attribute of unknown type": f"""
{FP16_HEAD}
def run(self, loader):
    for x in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x).sum()
        if self.amp:
            self.grad_scaler.scale(loss).backward(); self.grad_scaler.step(opt); self.grad_scaler.update()
        else:
            loss.backward(); opt.step()
        opt.zero_grad()
""",
    "scale set by hand": """
scaler = torch.amp.GradScaler("cuda", init_scale=1.0)
for step, loss in enumerate(losses):
    scaler.scale(loss).backward(); scaler.step(opt)
    if step == 100: scaler.update(1024.0)
    else: scaler.update()
    opt.zero_grad()
""",
    "gaussian kernel": """
def kernel(x, sigma):
    k = torch.exp(-x ** 2 / (2 * sigma ** 2))
    return k / k.sum()
def kernel_pow(x, mean, sigma):
    g = torch.exp(-(x - mean).pow(2) / (2 * sigma * sigma))
    return g / torch.sum(g)
def kernel_half(x, sigma):
    pdf = torch.exp(-0.5 * (x / sigma).pow(2))
    return pdf / pdf.sum()
""",
    "weights from distances": """
def soft_assign(a, b, temperature):
    dist = torch.cdist(a, b)
    w = torch.exp(-dist / temperature)
    return w / w.sum(-1, keepdim=True)
def laplace(x, width):
    w = (-x.abs() / width).exp()
    return w / w.sum()
def squares(x, y):
    d = ((x - y) ** 2).sum(-1)
    e = torch.exp(-d)
    return e / e.sum()
""",
    "log_softmax under autocast, NLL outside": """
for x, y in loader:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        logp = F.log_softmax(model(x), dim=-1)
    loss = F.nll_loss(logp, y)
    loss.backward(); opt.step(); opt.zero_grad()
""",
    "model that ends with log_softmax": """
criterion = nn.NLLLoss()
for x, y in loader:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        logp = model(x)
    loss = criterion(logp, y)
    loss.backward(); opt.step(); opt.zero_grad()
""",
    "loss as a metric": """
def validate(model, loader):
    for x, y in loader:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = model(x)
        print(F.mse_loss(out, y))
def show(model, x, y):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = model(x)
    print(F.mse_loss(out, y).item(), float(F.l1_loss(out, y)))
""",
    "bf16 weights under DeepSpeed": """
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
model = AutoModelForCausalLM.from_pretrained("x", torch_dtype=torch.bfloat16)
Trainer(model=model, args=TrainingArguments("out", bf16=True, deepspeed="zero3.json")).train()
""",
    "bf16 weights, evaluation only": """
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
model = AutoModelForCausalLM.from_pretrained("x", torch_dtype=torch.bfloat16)
print(Trainer(model=model, args=TrainingArguments("out", bf16=True)).evaluate())
""",
    "lightning: deepspeed and inference": """
import lightning as L
L.Trainer(precision="bf16-true", strategy="deepspeed_stage_3").fit(module)
""",
    "fabric for inference": """
import lightning as L
fabric = L.Fabric(precision="bf16-true")
model = fabric.setup(module)
print(model(x))
""",
    "channel attention": """
class Channels(nn.Module):
    def forward(self, x):
        B, C, H, W = x.size()
        q = x.view(B, C, -1)
        k = x.view(B, C, -1).permute(0, 2, 1)
        weights = torch.softmax(torch.bmm(q, k), dim=-1)
        return torch.bmm(weights, x.view(B, C, -1))
class Heads(nn.Module):
    def forward(self, q, k, v):
        q, k, v = (t.reshape(b, heads, c, h * w) for t in (q, k, v))
        q = q.reshape(b, heads, c, h * w)
        k = k.reshape(b, heads, c, h * w)
        return (q @ k.transpose(-2, -1)).softmax(-1) @ v
""",
    "clip in the else of if amp, loops with break": """
def train(model, opt, loader, args, scaler):
    step = 0
    while True:
        for i, (x, y) in enumerate(loader):
            if args.amp:
                with torch.autocast('cuda', dtype=torch.float16):
                    loss = model(x)
                scaler.scale(loss).backward()
            else:
                loss = model(x)
                loss.backward()
            if (i + 1) % args.n != 0:
                continue
            if args.clip:
                if args.amp:
                    scaler.unscale_(opt)
                    nn.utils.clip_grad_norm_(model.parameters(), 1.)
                else:
                    nn.utils.clip_grad_norm_(model.parameters(), 1.)
            if args.amp:
                scaler.step(opt)
                scaler.update()
            else:
                opt.step()
            opt.zero_grad()
            step += 1
            if step % args.log == 0:
                print(1)
            if step % args.val == 0:
                r = validate(model)
                if r > best:
                    best = r
                    torch.save(model)
            if step > args.total:
                break
        if step > args.total:
            break
""",
}
FALSE_ALARMS |= {
    "forward that returns FP32": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
    def forward(self, x):
        return self.first(x).float()
model = Net()
opt = torch.optim.SGD(model.parameters(), 0.1)
for x, y in loader:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = model(x)
    loss = F.cross_entropy(out, y)
    loss.backward(); opt.step(); opt.zero_grad()
""",
    "BCE in FP32 inside forward": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
    def forward(self, x, y):
        p = torch.sigmoid(self.first(x))
        with torch.autocast("cuda", enabled=False):
            return F.binary_cross_entropy(p.float(), y)
model = Net()
with torch.autocast("cuda", dtype=torch.bfloat16):
    loss = model(x, y)
""",
    "a scaler for each fold, with its model": """
for fold in folds:
    model = nn.Linear(8, 8)
    opt = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        opt.zero_grad()
        scaler.scale(model(x).sum()).backward()
        scaler.step(opt); scaler.update()
""",
    "penalty after unscaling": """
def penalty(model, scaler, loss):
    grads = torch.autograd.grad(scaler.scale(loss), model.parameters(), create_graph=True)
    inv_scale = 1.0 / scaler.get_scale()
    return sum((g * inv_scale).pow(2).sum() for g in grads).sqrt()
""",
    "zero_grad at every fourth batch": """
model = nn.Linear(8, 8)
opt = torch.optim.SGD(model.parameters(), 0.1)
for i, (x, y) in enumerate(loader):
    if i % 4 == 0:
        opt.zero_grad()
    loss = F.mse_loss(model(x), y) / 4
    loss.backward()
    if (i + 1) % 4 == 0:
        opt.step()
""",
    "masks in BF16 and infinite ones": """
def mask_scores(q, k, mask):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        scores = q @ k.transpose(-2, -1)
        scores[mask] = -1e9
        scores = torch.where(mask, scores, float("-inf"))
    with torch.autocast("cuda", dtype=torch.float16):
        scores = q @ k.transpose(-2, -1)
        scores[mask] = float("-inf")
        return torch.where(mask, scores, -1e4)
""",
    "clamped after unscaling": """
def step(model, opt, scaler, loss):
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    for p in model.parameters():
        p.grad.clamp_(-1, 1)
    scaler.step(opt); scaler.update()
""",
}
FALSE_ALARMS |= {
    "gaussian kernel from a grid, a name that another function uses": """
def grid_of(n):
    grid = make(n)
    return grid
def kernel_2d(x, y, sigma):
    grid = (x**2 + y**2) / (2 * sigma**2)
    k = torch.exp(-grid)
    k = k / k.sum()
    return k
""",
    "channel attention with einops": """
from einops import rearrange
class Channels(nn.Module):
    def forward(self, q, k, v, temperature):
        q = rearrange(q, 'b (head c) h w -> b head c (h w)', head=4)
        k = rearrange(k, 'b (head c) h w -> b head c (h w)', head=4)
        v = rearrange(v, 'b (head c) h w -> b head c (h w)', head=4)
        q = F.normalize(q, dim=-1)
        k = F.normalize(k, dim=-1)
        attn = (q @ k.transpose(-2, -1)) * temperature
        return attn.softmax(dim=-1) @ v
""",
    "loss read once per epoch": """
model = nn.Linear(8, 8)
opt = torch.optim.Adam(model.parameters())
def fit_all():
    opt.zero_grad(); loss = F.mse_loss(model(graph), y)
    loss.backward(); opt.step()
    return float(loss)
for epoch in range(1, 201):
    print(epoch, fit_all())
for step in tqdm(range(args.num_epochs), desc="training"):
    loss = F.mse_loss(model(graph), y)
    opt.zero_grad(); loss.backward(); opt.step()
    print(step, loss.item())
""",
    "gradients compared without training": """
for size in (3, 5):
    x = torch.randn(size, requires_grad=True)
    loss = F.mse_loss(layer(x), y)
    loss.backward()
    assert abs(loss.item() - expected) < 1e-3
""",
    "state copied to another optimizer": """
model = nn.Linear(8, 8)
opt, other = torch.optim.Adam(model.parameters()), torch.optim.Adam(model.parameters())
scaler = torch.amp.GradScaler("cuda")
for x in loader:
    with torch.autocast("cuda", dtype=torch.float16): loss = model(x).sum()
    opt.zero_grad(); scaler.scale(loss).backward(); scaler.step(opt); scaler.update()
other.load_state_dict(opt.state_dict())
""",
    "settings of a scaler that are loaded": """
from project.checkpoints import load_checkpoint
scaler = torch.amp.GradScaler("cuda", init_scale=1.0)
load_checkpoint("last.pt", model, scaler=scaler)
second = torch.amp.GradScaler("cuda", growth_interval=1)
second.load_state_dict(torch.load("last.pt")["scaler"])
""",
    "true precision without training": """
from lightning import Fabric, Trainer
def check_shards():
    fabric = Fabric(devices=2, precision="16-true")
    fabric.launch()
    sharded = fabric.setup(model)
    assert sharded(x).shape == (2, 8)
def score():
    trainer = Trainer(precision="bf16-true")
    trainer.test(model, loader)
def train():
    trainer = Trainer(precision="bf16-mixed")
    trainer.fit(model, loader)
""",
    "accelerate shards FP32 copies": """
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from transformers import AutoModelForCausalLM
accelerator = Accelerator(mixed_precision="bf16", fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
model = AutoModelForCausalLM.from_pretrained("small", torch_dtype=torch.bfloat16)
opt = torch.optim.AdamW(model.parameters())
model, opt = accelerator.prepare(model, opt)
""",
    "logarithms of probabilities are not positive": """
def divergence(log_probs, old_log_probs):
    p, q = log_probs.exp() / log_probs.exp().sum(), old_log_probs.exp()
    return p - q / q.sum()
""",
    "16-bit weights in a test": """
from lightning import Trainer
def test_one_epoch_of_training():
    trainer = Trainer(precision="bf16-true", max_epochs=1, overfit_batches=2)
    trainer.fit(model, loader)
def test_optimizer_takes_bf16():
    layer = nn.Linear(8, 8).bfloat16()
    opt = torch.optim.AdamW(layer.parameters())
    layer(x).sum().backward(); opt.step()
""",
}
