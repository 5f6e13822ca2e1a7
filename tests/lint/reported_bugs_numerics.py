"""Bugs of computations in low precision, reconstructed from public reports: masks, epsilons, BCE, softmax by hand."""

GITHUB = "https://github.com"
TRAIN = """
def train(model, loader):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x, y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
"""
NUMERIC_BUGS = {
    "masked_fill in a forward": (
        f"{GITHUB}/NVIDIA/apex/issues/1052",
        f"""
class Scorer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)

    def forward(self, x, y):
        path_mask = x.abs().sum(-1) > 0
        scores = torch.matmul(self.query(x), self.key(x).transpose(-1, -2))
        scores = scores.masked_fill(~path_mask.unsqueeze(-1), -1e9)  # lint: nan-mask
        return F.cross_entropy(scores.flatten(0, 1), y.flatten())
{TRAIN}
train(Scorer(64), [])
""",
    ),
    "masked_fill with a constant of the module": (
        f"{GITHUB}/NVIDIA/apex/issues/1105",
        f"""
NEG = -1e10

class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.qkv, self.heads = nn.Linear(width, 3 * width), heads

    def forward(self, x, head_mask):
        q, k, v = self.qkv(x).chunk(3, -1)
        attn_scores_head = torch.einsum("bqd,bkd->bqk", q, k)
        attn_scores_head = attn_scores_head.masked_fill(head_mask == 0, NEG)  # lint: nan-mask
        return attn_scores_head.mean()
{TRAIN}
train(Attention(64, 8), [])
""",
    ),
    "index assignment with a number above the largest half": (
        f"{GITHUB}/QwenLM/Qwen/issues/32",
        """
class StopWords:
    def __init__(self, stops, eos):
        self.stops, self.eos = stops, eos

    def __call__(self, ids, scores):
        scores = scores.half()
        for index, row in enumerate(ids):
            if row[-1] in self.stops:
                scores[index, self.eos] = float(2**30)  # lint: nan-mask
        return scores

def generate(model, ids):
    stop = StopWords([1, 2], 0)
    with torch.no_grad(), torch.autocast("cuda", dtype=torch.float16):
        return stop(ids, model(ids).logits[:, -1])
""",
    ),
    "mask in model.py, autocast in train.py": (
        f"{GITHUB}/dotnet/TorchSharp/issues/1135",
        """
# file: model.py
import torch
from torch import nn

class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.q, self.k = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x, mask):
        scores = torch.matmul(self.q(x), self.k(x).transpose(-2, -1))
        scores = scores.masked_fill(mask == 0, -torch.finfo(torch.float32).max)  # lint: nan-mask
        return torch.softmax(scores, -1)
# file: train.py
import torch
from model import Attention

model = Attention(64)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
scaler = torch.amp.GradScaler("cuda")
for x, mask in []:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(x, mask).sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    ),
    "BCE in model.py, autocast in train.py": (
        f"{GITHUB}/VCasecnikovs/Yet-Another-YOLOv4-Pytorch/issues/6",
        """
# file: model.py
import torch
import torch.nn.functional as F
from torch import nn

class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(8, 1, 1)

    def forward(self, x, target):
        confidence = torch.sigmoid(self.conv(x))
        return F.binary_cross_entropy(confidence, target)  # lint: bce-autocast
# file: train.py
import torch
from model import Head

model = Head().cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
scaler = torch.amp.GradScaler("cuda")
for x, target in []:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(x, target)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    ),
    "BCE of the script under autocast": (
        f"{GITHUB}/pytorch/pytorch/issues/61098",
        """
def train(net, loader, lr):
    criterion = nn.BCELoss()
    optimizer = torch.optim.Adam(net.parameters(), lr=lr)
    scaler = torch.amp.GradScaler("cuda")
    for inputs, labels in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            outputs = torch.sigmoid(net(inputs))
            loss = criterion(outputs, labels)  # lint: bce-autocast
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""",
    ),
    "BCE in a loss module among others": (
        f"{GITHUB}/bcmi/SLBR-Visible-Watermark-Removal/issues/10",
        """
class Losses(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.pixel, self.mask_loss, self.weight = nn.L1Loss(), nn.BCELoss(), weight

    def forward(self, image, mask, target, target_mask):
        return self.pixel(image, target) + self.weight * self.mask_loss(mask, target_mask)  # lint: bce-autocast

class Model:
    def __init__(self, net):
        self.net, self.loss = net, Losses(0.25)
        self.optimizer = torch.optim.Adam(net.parameters())
        self.scaler = torch.amp.GradScaler("cuda")

    def train(self, loader):
        for image, target, target_mask in loader:
            self.optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                result, mask = self.net(image)
                loss = self.loss(result, mask, target, target_mask)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
""",
    ),
    "BCE in the head of a detector, reached through the model": (
        f"{GITHUB}/Megvii-BaseDetection/YOLOX/issues/336",
        f"""
class Head(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.predict = nn.Conv2d(64, classes, 1)

    def assign(self, predictions, truth):
        joint = predictions.float().sigmoid_()
        return F.binary_cross_entropy(joint.sqrt_(), truth, reduction="none").sum(-1)  # lint: bce-autocast

    def forward(self, x, truth):
        return self.assign(self.predict(x), truth).mean()

class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone, self.head = nn.Conv2d(3, 64, 3), Head(80)

    def forward(self, x, y):
        return self.head(self.backbone(x), y)
{TRAIN}
train(Detector(), [])
""",
    ),
    "BCE in a forward that autocast decorates": (
        f"{GITHUB}/lbin/DCNv2/issues/2",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1), nn.Sigmoid())

    @torch.autocast("cuda")
    def forward(self, x, y=None):
        p = self.layers(x)
        if y is not None:
            return F.binary_cross_entropy(p, y)  # lint: bce-autocast
        return p

model = Net()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
scaler = torch.amp.GradScaler("cuda")
for x, y in []:
    optimizer.zero_grad()
    loss = model(x, y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    ),
    "BCE in a Lightning module with 16-mixed": (
        f"{GITHUB}/gc-os-ai/pyaptamer/issues/230",
        """
import lightning as L

class Classifier(L.LightningModule):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def training_step(self, batch, index):
        x, y = batch
        p = torch.sigmoid(self.net(x))
        loss = F.binary_cross_entropy(p, y)  # lint: bce-autocast
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())

trainer = L.Trainer(max_epochs=10, precision="16-mixed")
trainer.fit(Classifier(nn.Linear(8, 1)))
""",
    ),
    "small eps under autocast in a forward": (
        f"{GITHUB}/pyg-team/pytorch_geometric/pull/2106",
        f"""
EPS = 1e-15

class Pool(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.lin = nn.Linear(width, width)

    def forward(self, x, y):
        out = self.lin(x)
        degree = torch.relu(self.lin(x)) + EPS  # lint: eps-below-format
        out = out / degree
        return F.mse_loss(out, y)
{TRAIN}
train(Pool(16), [])
""",
    ),
    "normalization by hand with eps 1e-12": (
        f"{GITHUB}/pytorch/pytorch/issues/32137",
        """
def normalize(x, eps=1e-12):
    return x / (x.abs().amax(-1, keepdim=True) + eps)  # lint: eps-below-format

def embed(model, batch):
    features = model(batch).half()
    return normalize(features)
""",
    ),
    "clamp with an eps that is zero in half": (
        f"{GITHUB}/kornia/kornia/issues/3966",
        """
def log_quaternion(q, eps=1e-8):
    q = q.to(torch.float16)
    vector = q[..., 1:]
    length = vector.abs().sum(-1, keepdim=True).clamp(min=eps)  # lint: eps-below-format
    return vector / length

def predict(model, x):
    return log_quaternion(model(x))
""",
    ),
    "log of eps in a gated recurrence": (
        f"{GITHUB}/lucidrains/gateloop-transformer/pull/4",
        f"""
class Gate(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.proj = nn.Linear(width, width)

    def forward(self, x, y):
        gate = self.proj(x).sigmoid()
        log_gate = torch.log(gate + 1e-8)  # lint: eps-below-format, log-softmax
        return F.mse_loss(torch.exp(log_gate.cumsum(1)), y)
{TRAIN}
train(Gate(16), [])
""",
    ),
    "softmax by hand": (
        f"{GITHUB}/bowang-lab/Transformer-GCN-QA/pull/22",
        f"""
class Answer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.score = nn.Linear(width, 1)

    def masked_softmax(self, scores):
        weights = torch.exp(scores)
        return weights / weights.sum(1, keepdim=True)  # lint: manual-softmax

    def forward(self, x, y):
        probabilities = self.masked_softmax(self.score(x).squeeze(-1))
        return F.nll_loss(probabilities, y)
{TRAIN}
train(Answer(64), [])
""",
    ),
    "log of a softmax": (
        f"{GITHUB}/torch/nn/issues/804",
        """
class Distill(nn.Module):
    def __init__(self, temperature):
        super().__init__()
        self.t = temperature

    def forward(self, student, teacher):
        p = F.softmax(teacher / self.t, dim=1)
        log_q = torch.log(F.softmax(student / self.t, dim=1))  # lint: log-softmax
        return -(p * log_q).sum(1).mean()

def train(student, teacher, loader, optimizer):
    criterion = Distill(4.0)
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = criterion(student(x), teacher(x))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""",
    ),
    "log-probabilities of a model in half": (
        f"{GITHUB}/meta-pytorch/torchforge/pull/237",
        """
def policy_loss(model, ids, targets, advantages):
    logits = model(ids).to(torch.float16)
    log_probs = F.log_softmax(logits, dim=-1)
    return F.nll_loss(log_probs.flatten(0, 1), targets.flatten()) * advantages.mean()  # lint: half-loss

def step(model, optimizer, batch):
    loss = policy_loss(model, batch["ids"], batch["targets"], batch["advantages"])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    ),
}
