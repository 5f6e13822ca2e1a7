"""Short correct scripts that are similar to pitfalls; the linter must report nothing."""

RIGHT = {
    "Muon for blocks": """
from muon import Muon
import narrowgauge as ng
embedding = nn.Embedding(1024, 64)
inner = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
first = Muon(inner, lr=0.02, momentum=0.95)
second = Muon(model.transformer.h.parameters(), lr=0.02)
third = Muon([p for p in blocks.parameters() if p.ndim == 2], lr=3e-4)  # this class may match AdamW itself
hidden = {id(p) for p in model.blocks.parameters()}
fourth = torch.optim.Muon([p for p in model.parameters() if p.ndim == 2 and id(p) in hidden], lr=0.02)
fifth = torch.optim.Muon(model.blocks.parameters(), lr=args.lr)
sixth = torch.optim.Muon(model.blocks.parameters(), lr=3e-4, adjust_lr_fn=args.adjust)
seventh = ng.optim.Muon(ng.optim.split_for_muon(model), lr=6e-4, adjust_lr_fn="match_rms_adamw")
eighth = ng.optim.Muon(ng.optim.split_for_muon(model.bfloat16()), lr=0.02, adamw_lr=1e-3, master="split")
""",
    "Muon for a network without embeddings": """
net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
optimizer = torch.optim.Muon([p for p in net.parameters() if p.ndim == 2], lr=0.02)
""",
    "correlated": """
def train(model, opt, loader, use_amp):
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        with torch.autocast("cuda", torch.float16, enabled=use_amp):
            loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        if use_amp:
            scaler.scale(loss).backward()
        else:
            loss.backward()
        if use_amp:
            scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if use_amp:
            scaler.step(opt); scaler.update()
        else:
            opt.step()
""",
    "scaled threshold": """
def f(model, opt, scaler, loss):
    scaler.scale(loss).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0 * scaler.get_scale())
    scaler.step(opt); scaler.update()
""",
    "manual unscale": """
def f(model, opt, scaler, loss):
    scaler.scale(loss).backward()
    inv = 1.0 / scaler.get_scale()
    for p in model.parameters():
        p.grad.mul_(inv)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step(); scaler.update(1.0)
""",
    "helper from another file": """
from utils import unscale
def f(model, opt, scaler, loss):
    scaler.scale(loss).backward()
    unscale(scaler, opt)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(opt); scaler.update()
""",
    "inference half": """
model = nn.Sequential(nn.Linear(8,8), nn.LayerNorm(8)).half().cuda()
with torch.no_grad():
    print(F.softmax(model(torch.ones(1,8)), -1).log())
""",
    "teacher half": """
import copy
model = nn.Sequential(nn.Linear(8,8), nn.LayerNorm(8)).cuda()
teacher = copy.deepcopy(model).half()
ema = nn.Sequential(nn.Linear(8,8), nn.LayerNorm(8)).half()
opt = torch.optim.Adam(model.parameters())
for x in range(10):
    loss = F.mse_loss(model(x), teacher(x).float())
    opt.zero_grad(); loss.backward(); opt.step()
""",
    "norms back": """
model = nn.Sequential(nn.Linear(8,8), nn.LayerNorm(8)).cuda().half()
for m in model.modules():
    if isinstance(m, nn.LayerNorm):
        m.float()
master = [p.detach().clone().float().requires_grad_() for p in model.parameters()]
opt = torch.optim.Adam(master)
for x in range(10):
    loss = model(x).float().sum()
    loss.backward()
    for m, p in zip(master, model.parameters()):
        m.grad = p.grad.float()
    opt.step()
""",
    "fp16 for eval": """
model = nn.Linear(8,8)
opt = torch.optim.Adam(model.parameters())
for x, y in loader:
    loss = F.mse_loss(model(x), y)
    loss.backward(); opt.step(); opt.zero_grad()
    with torch.no_grad(), torch.autocast("cuda", torch.float16):
        check = F.mse_loss(model(x), y)
model.half()
torch.save(model.state_dict(), "x.pt")
""",
    "autocast off backward": """
def f(model, opt, x, y):
    with torch.autocast("cuda", torch.bfloat16):
        loss = F.mse_loss(model(x), y)
        with torch.autocast("cuda", enabled=False):
            loss.backward()
    opt.step()
""",
    "linear attention": """
class A(nn.Module):
    def forward(self, q, k, v):
        q = q.softmax(-1); k = k.softmax(-2)
        ctx = k.transpose(-2, -1) @ v
        return q @ ctx
""",
    "attention weights are returned": """
class A(nn.Module):
    def forward(self, q, k, v):
        attn = torch.softmax(q @ k.transpose(-2, -1) / 8, dim=-1)
        return attn @ v, attn
""",
    "classifier sim": """
def loss(a, b):
    p = torch.softmax(a @ b.t(), -1)
    return p @ b
""",
    "masked softmax": """
def f(x, mask):
    e = torch.exp(x - x.amax(-1, keepdim=True)) * mask
    return e / e.sum(-1, keepdim=True)
""",
    "np softmax": """
import numpy as np
def f(x):
    return np.exp(x) / np.exp(x).sum()
""",
    "mask float": """
class A(nn.Module):
    def forward(self, s, m):
        return s.float().masked_fill(m, -1e9)
with torch.autocast("cuda", torch.float16):
    A()(1, 2)
""",
    "mask bf16": """
class A(nn.Module):
    def forward(self, s, m):
        return s.masked_fill(m, -1e9)
with torch.autocast("cuda", torch.bfloat16):
    A()(1, 2)
""",
    "version guard": """
if hasattr(torch.amp, "GradScaler"):
    scaler = torch.amp.GradScaler("cuda")
else:
    scaler = torch.cuda.amp.GradScaler()
""",
    "accelerate": """
from accelerate import Accelerator
accelerator = Accelerator(mixed_precision="fp16", gradient_accumulation_steps=4)
model, opt, loader = accelerator.prepare(nn.Linear(8,8), torch.optim.AdamW([]), loader)
for x, y in loader:
    with accelerator.accumulate(model):
        with accelerator.autocast():
            loss = F.mse_loss(model(x), y)
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        opt.step(); opt.zero_grad()
""",
    "peft": """
from transformers import AutoModelForCausalLM
from peft import get_peft_model, LoraConfig
model = AutoModelForCausalLM.from_pretrained("x", torch_dtype=torch.bfloat16)
model = get_peft_model(model, LoraConfig())
opt = torch.optim.AdamW(model.parameters())
for b in loader:
    model(**b).loss.backward(); opt.step(); opt.zero_grad()
""",
    "lbfgs": """
opt = torch.optim.LBFGS(model.parameters())
def closure():
    opt.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    return loss
for _ in range(10):
    opt.step(closure)
""",
    "no master sgd float after": """
model = nn.Linear(8,8).half()
model = model.float()
opt = torch.optim.Adam(model.parameters())
""",
    "grad norm metric": """
def f(model, opt, scaler, loss, i, n):
    scaler.scale(loss).backward()
    if (i + 1) % n == 0:
        scaler.unscale_(opt)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if (i + 1) % n == 0 or i == 100:
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
""",
    "choose": """
dtype = torch.bfloat16 if args.bf16 else torch.float16
scaler = torch.amp.GradScaler(enabled=not args.bf16)
for x, y in loader:
    with torch.autocast("cuda", dtype=dtype):
        loss = F.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(opt); scaler.update(); opt.zero_grad()
""",
    "two modes": """
def train(args, model, opt, loader):
    if args.precision == "bf16":
        ctx = torch.autocast("cuda", torch.bfloat16); scaler = None
    elif args.precision == "fp16":
        ctx = torch.autocast("cuda", torch.float16); scaler = torch.amp.GradScaler("cuda")
    else:
        import contextlib
        ctx = contextlib.nullcontext(); scaler = None
    for x, y in loader:
        with ctx:
            loss = F.cross_entropy(model(x), y)
        if scaler is None:
            loss.backward()
            opt.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
        opt.zero_grad()
""",
    "oom retry": """
def step(model, opt, scaler, x, y):
    try:
        with torch.autocast("cuda", torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
    except RuntimeError:
        torch.cuda.empty_cache()
        opt.zero_grad()
        return
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(opt)
    scaler.update()
""",
    "skip nonfinite": """
for x, y in loader:
    with torch.autocast("cuda", torch.float16):
        loss = F.cross_entropy(model(x), y)
    if not torch.isfinite(loss):
        optimizer.zero_grad()
        continue
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if not torch.isfinite(norm):
        optimizer.zero_grad()
        scaler.update()
        continue
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
""",
    "timm native": """
class NativeScaler:
    def __init__(self):
        self._scaler = torch.amp.GradScaler("cuda")
    def __call__(self, loss, optimizer, clip_grad=None, parameters=None, need_update=True):
        self._scaler.scale(loss).backward()
        if need_update:
            if clip_grad is not None:
                self._scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(parameters, clip_grad)
            self._scaler.step(optimizer)
            self._scaler.update()
    def state_dict(self):
        return self._scaler.state_dict()
def train(model, optimizer, loader):
    loss_scaler = NativeScaler()
    for i, (x, y) in enumerate(loader):
        with torch.autocast("cuda"):
            loss = F.cross_entropy(model(x), y)
        loss_scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters(), need_update=(i+1) % 4 == 0)
""",
    "helper with an optional scaler": """
def backward(total_loss, scaler):
    if scaler is not None:
        scaler.scale(total_loss).backward()
    else:
        total_loss.backward()

def train(model, loader, optimizer, scaler, args):
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16, enabled=args.amp):
            total_loss = F.cross_entropy(model(x), y)
        backward(total_loss, scaler)
        if scaler is not None:
            if args.clip is not None:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            scaler.step(optimizer)
            scaler.update()
        else:
            if args.clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            optimizer.step()
""",
    "a scaler from another file": """
def train(args, model, optimizer, loss_scaler, loader):
    for x, y in loader:
        with torch.autocast("cuda", enabled=args.amp):
            loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        if loss_scaler is not None:
            loss_scaler(loss, optimizer, clip_grad=args.clip, parameters=model.parameters())
        else:
            loss.backward()
            optimizer.step()
""",
    "two optimizers, steps one after the other": """
for x in loader:
    a_loss(x).backward()
    b_loss(x).backward()
    nn.utils.clip_grad_norm_(a.parameters(), 1.0)
    a_opt.step()
    nn.utils.clip_grad_norm_(b.parameters(), 1.0)
    b_opt.step()
    a_opt.zero_grad()
    b_opt.zero_grad()
""",
    "a loss without gradients": """
@torch.inference_mode()
def evaluate(model, loader):
    for x, y in loader:
        with torch.autocast("cuda", torch.float16):
            out = model(x)
        print(F.mse_loss(out, y).item())

def check(model, x, y):
    with torch.no_grad():
        return F.cross_entropy(model(x).half(), y)
""",
    "steps in methods, with objects created late": """
class Trainer:
    def setup(self, model, lr):
        self.model = model.cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)
        self.scaler = torch.amp.GradScaler()
        self.model = nn.parallel.DistributedDataParallel(self.model)

    def loss(self, x, y):
        return torch.mean((self.model(x) - y) ** 2)

    def rate(self, step):
        for group in self.optimizer.param_groups:
            group["lr"] = 1e-3 * min(1, step / 100)

    def train(self, model, loader, every):
        self.setup(model, 1e-3)
        for i, (x, y) in enumerate(loader):
            with torch.amp.autocast("cuda"):
                loss = self.loss(x, y) / every
            self.scaler.scale(loss).backward()
            if (i + 1) % every == 0:
                self.scaler.unscale_(self.optimizer)
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.rate(i)
                self.scaler.step(self.optimizer)
                self.scaler.update()
                self.optimizer.zero_grad(set_to_none=True)
""",
    "a custom check for inf": """
def step(model, optimizer, scaler, loss):
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if torch.isfinite(norm):
        optimizer.step()
    scaler.update()
""",
    "an option to train in 16 bits": """
def main(args):
    model = nn.Linear(64, 64)
    if args.pure_bf16:
        model = model.bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in args.loader:
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
""",
    "an ignored line": """
from torch.cuda.amp import GradScaler
scaler = GradScaler()  # narrowgauge: ignore
other = GradScaler()  # narrowgauge: ignore[deprecated-amp]
""",
}  # fmt: skip
