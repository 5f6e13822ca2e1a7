"""Bugs of kinds that were once missed, because a name or an import looked as if it made the code right."""

from lint_false_alarms import FP16_HEAD

LOOP = """
for x in loader:
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(x).sum()
    opt.zero_grad()
    loss.backward()  # lint: fp16-without-scaler
    opt.step()
"""
HIDDEN_BUGS = {
    "StandardScaler is no loss scaler": f"""
from sklearn.preprocessing import StandardScaler
scaler = StandardScaler()
x = scaler.fit_transform(x)
{FP16_HEAD}{LOOP}
""",
    "image_upscaler is no loss scaler": f"""
image_upscaler = nn.Upsample(scale_factor=2)
big = image_upscaler(x)
{FP16_HEAD}{LOOP}
""",
    "a scaler that is imported and not used": f"""
from torch.amp import GradScaler
{FP16_HEAD}{LOOP}
""",
    "a scaler that is created and not used": f"""
scaler = torch.amp.GradScaler("cuda")
{FP16_HEAD}{LOOP}
""",
    "accelerate is imported for something else": f"""
from accelerate.utils import set_seed
import deepspeed
{FP16_HEAD}{LOOP}
""",
    "autocast that an option enables, without any scaler": f"""
{FP16_HEAD}{LOOP.replace("dtype=torch.float16", "enabled=args.amp")}
""",
    "autocast without a format on a device of the options": f"""
{FP16_HEAD}{LOOP.replace('"cuda", dtype=torch.float16', "device_type=str(device)")}
""",
    "softmax of logits": """
w = torch.exp(-x)
p = w / w.sum(-1, keepdim=True)  # lint: manual-softmax
q = torch.exp(x ** 2) / torch.exp(x ** 2).sum()  # lint: manual-softmax
""",
    "loss in half after training output": """
for x, y in loader:
    loss = F.nll_loss(F.log_softmax(model(x).half(), -1), y)  # lint: half-loss
    loss.backward(); opt.step(); opt.zero_grad()
""",
}
IN_FORWARD = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.bce = nn.BCELoss()
    {decorator}
    def forward(self, x, y):
        p = torch.sigmoid(self.first(x))
        return self.bce(p, y)  # lint: bce-autocast
model = Net()
opt = torch.optim.SGD(model.parameters(), 0.1)
scaler = torch.amp.GradScaler("cuda")
for x, y in loader:
    opt.zero_grad()
    {block}:
        loss = model(x, y)
    scaler.scale(loss).backward()
    scaler.step(opt); scaler.update()
"""
HIDDEN_BUGS |= {
    "BCE in a forward that is called under autocast": IN_FORWARD.format(
        decorator="", block='with torch.autocast("cuda", dtype=torch.float16)'
    ),
    "BCE in a forward that autocast decorates": IN_FORWARD.format(decorator='@torch.autocast("cuda")', block="if True"),
    "autocast on a device chosen at run time": IN_FORWARD.format(
        decorator="", block="with torch.autocast(device_type=device.type)"
    ),
    "forward under a decorator, without a scaler": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
    @torch.autocast("cuda", dtype=torch.float16)
    def forward(self, x):
        return self.first(x)
model = Net()
opt = torch.optim.SGD(model.parameters(), 0.1)
for x, y in loader:
    loss = model(x).sum()
    loss.backward()  # lint: fp16-without-scaler
    opt.step(); opt.zero_grad()
""",
    "gradients clamped by hand while scaled": """
def step(model, opt, scaler, loss):
    scaler.scale(loss).backward()
    for p in model.parameters():
        p.grad.data.clamp_(-1, 1)  # lint: clip-before-unscale
    scaler.step(opt); scaler.update()
""",
    "zero_grad at every batch, step at every fourth": """
model = nn.Linear(8, 8)
opt = torch.optim.SGD(model.parameters(), 0.1)
for i, (x, y) in enumerate(loader):
    opt.zero_grad()  # lint: zero-grad-order
    loss = F.mse_loss(model(x), y) / 4
    loss.backward()
    if (i + 1) % 4 == 0:
        opt.step()
""",
    "masks by other means": """
class Attention(nn.Module):
    def forward(self, q, k, v, mask):
        with torch.autocast("cuda", dtype=torch.float16):
            scores = q @ k.transpose(-2, -1)
            scores = torch.where(mask, scores, -1e9)  # lint: nan-mask
            scores[mask] = -1e9  # lint: nan-mask
            other = scores.masked_fill(mask, float(-1e9))  # lint: nan-mask
            return scores.softmax(-1), other
""",
    "FP16 weights and fp16=True": """
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
model = AutoModelForCausalLM.from_pretrained("x", torch_dtype=torch.float16)  # lint: half-with-scaler
Trainer(model=model, args=TrainingArguments("out", fp16=True)).train()
""",
    "loss read per batch in an epoch": """
model = nn.Linear(8, 8)
opt = torch.optim.Adam(model.parameters())
for epoch in range(epochs):
    for x in tqdm(loader, desc=f"epoch {epoch}"):
        loss = F.mse_loss(model(x), y)
        opt.zero_grad(); loss.backward(); opt.step()
        total += loss.item()  # lint: sync-in-loop
""",
    "state saved and copied": """
model = nn.Linear(8, 8)
opt, other = torch.optim.Adam(model.parameters()), torch.optim.Adam(model.parameters())
scaler = torch.amp.GradScaler("cuda")
for x in loader:
    with torch.autocast("cuda", dtype=torch.float16): loss = model(x).sum()
    opt.zero_grad(); scaler.scale(loss).backward(); scaler.step(opt); scaler.update()
other.load_state_dict(opt.state_dict())
torch.save({"optimizer": opt.state_dict()}, "last.pt")  # lint: scaler-not-saved
""",
    "settings of a scaler that are loaded in resumed runs only": """
from project.checkpoints import load_checkpoint
scaler = torch.amp.GradScaler("cuda", init_scale=1.0)  # lint: scale-settings
if args.resume:
    load_checkpoint("last.pt", model, scaler=scaler)
""",
    "true precision with training": """
from lightning import Fabric, Trainer
def pretrain():
    fabric = Fabric(devices=2, precision="bf16-true")  # lint: bf16-true
    fabric.launch(main)
def tune():
    trainer = Trainer(precision="16-true")  # lint: bf16-true
    trainer.fit(model, loader)
def build():
    return Trainer(precision="bf16-true")  # lint: bf16-true
""",
    "accelerate without shards": """
from accelerate import Accelerator
from transformers import AutoModelForCausalLM
accelerator = Accelerator(mixed_precision="bf16")
model = AutoModelForCausalLM.from_pretrained("small", torch_dtype=torch.bfloat16)
opt = torch.optim.AdamW(model.parameters())  # lint: states-16bit
model, opt = accelerator.prepare(model, opt)
""",
    "logits may be large": """
def probabilities(logits):
    return logits.exp() / logits.exp().sum()  # lint: manual-softmax
""",
    "16-bit weights beside a test": """
def testing_is_later():
    layer = nn.Linear(8, 8).bfloat16()
    opt = torch.optim.AdamW(layer.parameters())  # lint: states-16bit
    for x in loader:
        opt.zero_grad(); layer(x).sum().backward(); opt.step()
""",
}
