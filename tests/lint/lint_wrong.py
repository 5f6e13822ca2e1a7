"""Short scripts with variants of pitfalls: aliases, methods, helpers, branches. ``# lint: rule`` marks the lines."""

HEAD = "import torch\nfrom torch import nn\nimport torch.nn.functional as F\n"

WRONG = {
    "Muon for every matrix": """
from muon import Muon
class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(1024, 64)
model = GPT()
matrices = [p for n, p in model.named_parameters() if p.requires_grad and p.dim() >= 2]
optimizer = Muon(matrices, lr=0.02, momentum=0.95)  # lint: muon-embedding
class Trainer:
    def __init__(self, model):
        self.model = model
        self.optimizer = Muon(list(self.model.parameters()), lr=0.02)  # lint: muon-embedding
""",
    "Muon at the rate of another rule": """
from torch.optim import Muon
small = Muon(blocks.parameters(), 3e-4)  # lint: muon-learning-rate
original = Muon(blocks.parameters(), lr=1e-3, adjust_lr_fn="original")  # lint: muon-learning-rate
large = Muon(blocks.parameters(), lr=0.02, adjust_lr_fn="match_rms_adamw")  # lint: muon-learning-rate
""",
    "the old module under an alias": """
import torch.cuda.amp as amp
scaler = amp.GradScaler()  # lint: deprecated-amp
for x, y in loader:
    with amp.autocast():  # lint: deprecated-amp
        loss = F.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    nn.utils.clip_grad_value_(model.parameters(), 0.5)  # lint: clip-before-unscale
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
""",
    "three methods of a class": """
class Trainer:
    def __init__(self, model, lr):
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        self.scaler = torch.amp.GradScaler("cuda")

    def backward(self, loss):
        self.scaler.scale(loss).backward()

    def clip(self):
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)  # lint: clip-before-unscale

    def step(self):
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def fit(self, loader):
        for x, y in loader:
            with torch.autocast("cuda", dtype=torch.half):
                loss = F.mse_loss(self.model(x), y)
            self.backward(loss)
            self.clip()
            self.step()
""",
    "a function with a scaler as argument": """
def train_one_epoch(model, optimizer, loader, scaler=None, max_norm=0):
    for samples, targets in loader:
        with torch.autocast("cuda", torch.float16, enabled=scaler is not None):
            loss = F.cross_entropy(model(samples), targets)
        optimizer.zero_grad()
        if scaler is not None:
            scaler.scale(loss).backward()
            if max_norm > 0:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)  # lint: clip-before-unscale
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            optimizer.step()
""",
    "a closure, and a loop that calls next() for its batches": """
def main(batches, steps):
    model = nn.Linear(64, 64).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda")

    def unscale():
        scaler.unscale_(optimizer)  # lint: unscale-twice

    step = 0
    while step < steps:
        x, y = next(batches)
        with torch.autocast("cuda", torch.float16):
            loss = F.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        unscale()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        step += 1
""",
    "a model from another file, cast when it is created": """
from zoo import build
model = build("resnet").cuda().half()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)  # lint: states-16bit
for x, y in loader:
    loss = F.cross_entropy(model(x.half()).float(), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    "set_default_dtype": """
torch.set_default_dtype(torch.bfloat16)
model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)  # lint: states-16bit
""",
    "attention with functions instead of operators": """
class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.softmax = nn.Softmax(dim=-1)
        self.q, self.k, self.v = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x, mask):
        q, k, v = self.q(x), self.k(x), self.v(x)
        scores = torch.bmm(q, k.transpose(1, 2)) / x.shape[-1] ** 0.5
        scores = scores.masked_fill(mask, -1e30)  # lint: nan-mask
        weights = self.softmax(scores)
        return torch.bmm(weights, v)  # lint: manual-attention

with torch.autocast("cuda", dtype=torch.float16):
    print(Attention(64)(torch.ones(1, 8, 64), torch.ones(8, 8).bool()))
""",
    "softmax with functions instead of operators": """
def attend(x):
    return x.exp() / x.exp().sum(-1, keepdim=True)  # lint: manual-softmax

def stable(x):
    top = x.max(dim=-1, keepdim=True).values
    e = torch.exp(x - top)
    return e.div(torch.sum(e, dim=-1, keepdim=True))  # lint: manual-softmax
""",
    "True passed as the scale": """
from torch.cuda.amp import GradScaler
scaler = GradScaler(True)  # lint: autocast-argument, deprecated-amp
""",
    "two optimizers, one clipped too early": """
for real in loader:
    scaler.scale(d_loss(real)).backward()
    scaler.unscale_(d_opt)
    nn.utils.clip_grad_norm_(critic.parameters(), 1.0)
    scaler.step(d_opt)
    scaler.scale(g_loss(real)).backward()
    nn.utils.clip_grad_norm_(generator.parameters(), 1.0)  # lint: clip-before-unscale
    scaler.unscale_(g_opt)
    scaler.step(g_opt)
    scaler.update()
""",
    "a context stored in a variable": """
context = torch.autocast("cuda", dtype=torch.bfloat16)
def step(model, optimizer, x, y):
    optimizer.zero_grad()
    with context:
        loss = F.mse_loss(model(x), y)
        torch.autograd.backward(loss)  # lint: autocast-backward
    optimizer.step()
""",
    "only custom_fwd": """
from torch.amp import custom_fwd
class Product(torch.autograd.Function):  # lint: custom-op
    @staticmethod
    @custom_fwd(device_type="cuda")
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return torch.matmul(a, b)

    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        return torch.matmul(grad, b.mT), torch.matmul(a.mT, grad)

with torch.autocast("cuda", dtype=torch.float16):
    Product.apply(torch.ones(8, 8), torch.ones(8, 8))
""",
    "an accumulation with its condition in a variable": """
for i, (x, y) in enumerate(loader):
    last = (i + 1) % 8 == 0
    with torch.autocast("cuda", torch.float16):
        loss = F.mse_loss(model(x), y) / 8
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)  # lint: unscale-twice
    if last:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
""",
    "a scale that grows at every step": """
scaler = torch.amp.GradScaler("cuda", growth_interval=1)  # lint: scale-settings
""",
    "the loss after the autocast block": """
model = nn.Linear(64, 8)
for x, y in loader:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        logits = model(x)
    loss = F.cross_entropy(logits, y)  # lint: half-loss
    loss.backward()
""",
    "a loss that is cast": """
model = nn.Linear(64, 8)
loss = F.cross_entropy(model(x), y)
loss.half().backward()  # lint: half-loss
""",
    "fabric": """
from lightning.fabric import Fabric
fabric = Fabric(accelerator="cuda", precision="16-true")  # lint: bf16-true
fabric.launch()
model, optimizer = fabric.setup(model, optimizer)
for batch in loader:
    fabric.backward(model(batch).sum())
    optimizer.step()
    optimizer.zero_grad()
""",
    "an optimizer and a loss from another file": """
from sooner import Lion, extra_loss
def train(model, loader, args):
    if args.amp:
        scaler = torch.amp.GradScaler("cuda")
    opt = Lion(dict(params=model.blocks.parameters(), lr=0.01))
    for number, batch in enumerate(loader):
        opt.zero_grad()
        if args.amp:
            with torch.amp.autocast("cuda"):
                out, extra = model(batch)
                loss = F.cross_entropy(out.flatten(0, 1), batch.targets)
                loss += 0.01 * extra_loss(extra)
            scaler.scale(loss).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # lint: clip-before-unscale
            opt.step()  # lint: step-past-scaler
        else:
            loss = F.cross_entropy(model(batch)[0].flatten(0, 1), batch.targets)
            loss.backward()
            opt.step()
        if number % 100 == 0:
            print(loss.item())
""",
    "apex": """
from apex import amp
model, optimizer = amp.initialize(model, optimizer, opt_level="O1")  # lint: deprecated-amp
for x, y in loader:
    loss = F.mse_loss(model(x), y)
    with amp.scale_loss(loss, optimizer) as scaled:  # lint: deprecated-amp
        scaled.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
}  # fmt: skip
