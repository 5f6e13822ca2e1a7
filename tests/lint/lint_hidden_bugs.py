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
