"""Correct counterparts of reported bugs: code that differs from them in one point only."""

STEP = """
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
"""
RIGHT_TWINS = {
    "update on every path, step on one": f"""
for x, y in loader:{STEP}
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if torch.isfinite(norm):
        scaler.step(optimizer)
    scaler.update()
""",
    "update in both branches": f"""
for x, y in loader:{STEP}
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if norm > limit:
        scaler.update()
        continue
    scaler.step(optimizer)
    scaler.update()
""",
    "unscale_ and update under conditions with other words": """
for i, (x, y) in enumerate(loader):
    last = (i + 1) % n == 0
    with torch.autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(x), y) / n
    scaler.scale(loss).backward()
    if last and clip:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    if last:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
""",
    "a skipped batch ends the training": f"""
for x, y in loader:{STEP}
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if not torch.isfinite(norm):
        raise ValueError("diverged")
    scaler.step(optimizer)
    scaler.update()
""",
    "norms of unscaled gradients": f"""
for x, y in loader:{STEP}
    scaler.unscale_(optimizer)
    print(max(p.grad.norm() for p in model.parameters()))
    scaler.step(optimizer)
    scaler.update()
""",
    "norm divided by the scale": f"""
for x, y in loader:{STEP}
    print(max(p.grad.norm() / scaler.get_scale() for p in model.parameters()))
    scaler.step(optimizer)
    scaler.update()
""",
    "norm of a weight": f"""
for x, y in loader:{STEP}
    print(max(p.data.norm() for p in model.parameters()))
    scaler.step(optimizer)
    scaler.update()
""",
    "gradients averaged by hand": f"""
for x, y in loader:{STEP}
    for p in model.parameters():
        p.grad.div_(world_size)
    scaler.step(optimizer)
    scaler.update()
""",
    "scheduler that steps once per epoch": f"""
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 30)
for epoch in range(90):
    for x, y in loader:
{STEP.replace(chr(10) + "    ", chr(10) + "        ")}
        scaler.step(optimizer)
        scaler.update()
    scheduler.step()
""",
    "scheduler that looks at the scale": f"""
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 30)
for x, y in loader:{STEP}
    before = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    if scaler.get_scale() >= before:
        scheduler.step()
""",
    "schedules of other numbers": f"""
for x, y in loader:{STEP}
    scaler.step(optimizer)
    scaler.update()
    weight_scheduler.step()
    noise_scheduler.step(x, 1, y)
""",
    "scheduler without a scaler": """
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
for x, y in loader:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad(); loss.backward(); optimizer.step(); scheduler.step()
""",
    "zero_grad before both branches": """
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", enabled=amp):
        loss = F.cross_entropy(model(x), y)
    if amp:
        scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()
    else:
        loss.backward(); optimizer.step()
""",
    "gradients cleared by hand": """
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for x, y in loader:
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    for p in model.parameters():
        p.grad = None
""",
    "gradients cleared by a helper": """
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for x, y in loader:
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    clear_grads(model)
""",
    "one step, in no loop": """
optimizer = torch.optim.SGD(model.parameters(), 0.1)
F.cross_entropy(model(x), y).backward()
optimizer.step()
""",
    "EMA in FP32 of a model in BF16": """
import copy
ema = copy.deepcopy(model).float()
for slow, fast in zip(ema.parameters(), model.parameters()):
    slow.mul_(0.999).add_(fast.float(), alpha=0.001)
""",
    "EMA cast for inference after training": """
import copy
model = nn.Linear(8, 8)
ema = copy.deepcopy(model)
for x in loader:
    for slow, fast in zip(ema.parameters(), model.parameters()):
        slow.lerp_(fast, 0.001)
export = copy.deepcopy(ema).half()
""",
    "weights of a model in half are decayed by hand": """
model = nn.Linear(8, 8).half()
for p in model.parameters():
    p.mul_(1 - lr * wd)
""",
    "RMSNorm that casts to FP32": """
class RMSNorm(nn.Module):
    def forward(self, x):
        h = x.float()
        return (h * torch.rsqrt((h * h).mean(-1, keepdim=True) + 1e-6)).type_as(x)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(8, 8), RMSNorm()
    def forward(self, x):
        return self.norm(self.first(x))
model = Net()
with torch.autocast("cuda", dtype=torch.float16):
    model(x)
""",
    "pow under autocast runs in FP32": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
    def forward(self, x):
        h = self.first(x)
        a = h.pow(2).mean(-1, keepdim=True) + (h ** 2).mean(-1, keepdim=True)
        return h.norm(dim=-1) + 1e-12 + a.sum()
model = Net()
with torch.autocast("cuda", dtype=torch.float16):
    model(x)
""",
    "mean of squares in BF16": """
h = model(x).bfloat16()
ms = (h * h).mean(-1)
""",
    "FP32 parameters promote the product": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.scale = nn.Linear(8, 8), nn.Parameter(torch.ones(8))
    def forward(self, x):
        return (self.first(x) * self.scale) / (self.first(x).float().abs() + 1e-8)
model = Net()
with torch.autocast("cuda", dtype=torch.float16):
    model(x)
""",
    "eps above the smallest FP16 number": """
x = model(x).half()
y = x / (x.abs() + 1e-4) + x.clamp(min=1e-4)
""",
    "accumulation over microbatches, divided": """
for step in range(steps):
    for micro in range(accumulation_steps):
        loss = F.cross_entropy(model(x), y) / accumulation_steps
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    "losses of several tasks are added": """
for x, y in loader:
    optimizer.zero_grad()
    for head in heads:
        F.cross_entropy(head(model(x)), y).backward()
    optimizer.step()
""",
    "a counter that is no accumulation": """
count = 0
for x, y in loader:
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad(); loss.backward()
    count += 1
    if count >= warmup:
        optimizer.step()
""",
    "attack in an inner loop": """
for x, y in loader:
    for k in range(7):
        optimizer.zero_grad()
        F.cross_entropy(model(x + delta), y).backward()
        delta = (delta + 0.01 * x.grad.sign()).detach()
    optimizer.zero_grad()
    F.cross_entropy(model(x + delta), y).backward()
    optimizer.step()
""",
    "scaler created when it is first needed": f"""
optimizer = torch.optim.SGD(model.parameters(), 0.1)
scaler = None
for x, y in loader:
    if scaler is None:
        scaler = torch.amp.GradScaler("cuda")
{STEP}
    scaler.step(optimizer); scaler.update()
""",
    "half by an option that also disables the scaler": """
def main(args, loader):
    model = nn.Linear(8, 8)
    if args.inference:
        model.half()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cuda", enabled=not args.inference)
    for x in loader:
        optimizer.zero_grad()
        scaler.scale(model(x).sum()).backward()
        scaler.step(optimizer); scaler.update()
""",
    "scaled loss in one branch": """
for x, y in loader:
    loss = F.cross_entropy(model(x), y)
    scaled = scaler.scale(loss) if scaler is not None else loss
    optimizer.zero_grad()
    scaled.backward()
    if scaler is not None:
        scaler.step(optimizer); scaler.update()
    else:
        optimizer.step()
""",
    "BCE in a Lightning module in FP32": """
import lightning as L
class Net(L.LightningModule):
    def training_step(self, batch, index):
        return F.binary_cross_entropy(torch.sigmoid(self.net(batch)), batch)
L.Trainer(precision="32-true").fit(Net())
""",
}
SHARED = {
    "loss module that train.py calls outside of autocast": {
        "losses.py": "import torch\nimport torch.nn.functional as F\nclass Loss(torch.nn.Module):\n"
        "    def forward(self, p, y):\n        return F.binary_cross_entropy(p, y)\n",
        "train.py": "import torch\nfrom losses import Loss\nloss_fn = Loss()\ndef step(model, x, y):\n"
        "    with torch.autocast('cuda', dtype=torch.float16):\n        p = model(x)\n"
        "    return loss_fn(p.float(), y)\n",
    },
    "model under BF16": {
        "model.py": "import torch\nclass Net(torch.nn.Module):\n    def forward(self, s, mask):\n"
        "        return s.masked_fill(mask, -1e9)\n",
        "train.py": "import torch\nfrom model import Net\nnet = Net()\ndef step(x, mask):\n"
        "    with torch.autocast('cuda', dtype=torch.bfloat16):\n        return net(x, mask)\n",
    },
    "another class of the same name": {
        "a/model.py": "import torch\nclass Net(torch.nn.Module):\n    def forward(self, s, mask):\n"
        "        return s.masked_fill(mask, -1e9)\n",
        "train.py": "import torch\nfrom b.model import Net\nnet = Net()\ndef step(x, mask):\n"
        "    with torch.autocast('cuda', dtype=torch.float16):\n        return net(x, mask)\n",
    },
}
