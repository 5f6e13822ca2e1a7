"""Bugs about formats, reconstructed from public reports: FP16 weights with a scaler, Adam's eps, pure BF16, norms."""

GITHUB = "https://github.com"
FORMAT_BUGS = {
    "Adam on a model in half": (
        f"{GITHUB}/pytorch/pytorch/issues/8860",
        """
class HappyNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.ReLU())
        self.classifier = nn.Linear(64, 8)

    def forward(self, x):
        return self.classifier(self.features(x).mean((2, 3)))

def train(loader, epochs):
    model = HappyNet().cuda().half()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)  # lint: states-16bit, eps-below-format
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = criterion(model(x.half()).float(), y)
            loss.backward()
            optimizer.step()
""",
    ),
    "AdamW after convert to fp16 by an option": (
        f"{GITHUB}/afiaka87/glide-finetune/pull/6",
        """
def main(args, loader):
    model = nn.Transformer(512).to(args.device)
    model = model.half()  # lint: half-norms
    optimizer = torch.optim.AdamW(  # lint: states-16bit, eps-below-format
        [p for p in model.parameters() if p.requires_grad], lr=args.learning_rate, weight_decay=0.01
    )
    for tokens, images in loader:
        loss = F.mse_loss(model(tokens, images).float(), images.float())
        loss.backward()
        optimizer.step()
        model.zero_grad()
""",
    ),
    "soft prompt in the format of an FP16 model": (
        f"{GITHUB}/matanbt/TROPT/pull/8",
        """
from transformers import AutoModel

def optimize(name, ids, target, steps):
    model = AutoModel.from_pretrained(name, torch_dtype=torch.float16).cuda().eval()
    prompt = model.get_input_embeddings()(ids).detach().half().requires_grad_(True)
    optimizer = torch.optim.Adam([prompt], lr=0.01)  # lint: eps-below-format
    for step in range(steps):
        optimizer.zero_grad()
        out = model(inputs_embeds=prompt).last_hidden_state.mean(1)
        loss = 1 - F.cosine_similarity(out.float(), target).mean()
        loss.backward()
        optimizer.step()
""",
    ),
    "scaler on a model in half": (
        f"{GITHUB}/pytorch/pytorch/issues/74739",
        """
def main(args, loader):
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 2)).cuda()
    if args.fp16:
        model.half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)  # lint: half-with-scaler
        scaler.update()
""",
    ),
    "one layer in FP16, scaler": (
        f"{GITHUB}/mk-minchul/AdaFace/issues/127",
        """
class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 3)
        self.act = nn.PReLU(64).to(torch.float16)
        self.head = nn.Linear(64, 512)

    def forward(self, x):
        return self.head(self.act(self.stem(x)).mean((2, 3)))

def main(loader):
    model = Backbone().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)  # lint: half-with-scaler
        scaler.update()
        optimizer.zero_grad()
""",
    ),
    "fp16=True for a model loaded in FP16": (
        f"{GITHUB}/bitsandbytes-foundation/bitsandbytes/issues/945",
        """
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

def run_sft(name, dataset):
    model = AutoModelForCausalLM.from_pretrained(name, torch_dtype=torch.float16)  # lint: half-with-scaler
    args = TrainingArguments(output_dir="out", per_device_train_batch_size=4, fp16=True, num_train_epochs=3)
    trainer = Trainer(model=model, args=args, train_dataset=dataset)
    trainer.train()

run_sft("some/model", [])
""",
    ),
    "fp16=True and half() afterwards": (
        f"{GITHUB}/mark1879/Baichuan-13B-Finetuning/issues/21",
        """
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

model = AutoModelForCausalLM.from_pretrained("some/model", trust_remote_code=True)
model = model.half()  # lint: half-with-scaler
training_args = TrainingArguments("out", learning_rate=5e-5, fp16=True)
trainer = Trainer(model, training_args, train_dataset=[])
trainer.train()
""",
    ),
    "bf16=True for a model loaded in BF16": (
        f"{GITHUB}/NVIDIA-NeMo/Automodel/pull/2248",
        """
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

def main(config):
    model = AutoModelForCausalLM.from_pretrained(config.name, torch_dtype=torch.bfloat16)  # lint: bf16-true
    arguments = TrainingArguments(config.output, bf16=True, learning_rate=1e-5, optim="adamw_torch")
    trainer = Trainer(model=model, args=arguments, train_dataset=config.dataset)
    trainer.train()
""",
    ),
    "pure BF16 with AdamW": (
        f"{GITHUB}/workofart/ml-by-hand/pull/85",
        """
class GPT(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(width, width) for _ in range(depth)])

    def forward(self, x):
        for block in self.blocks:
            x = x + F.gelu(block(x))
        return x

def train(config, loader):
    model = GPT(config.width, config.depth).to(config.device, torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4)  # lint: states-16bit
    for x, y in loader:
        loss = F.mse_loss(model(x.bfloat16()).float(), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
""",
    ),
    "all parameters of a default type of BF16": (
        f"{GITHUB}/zyushun/Adam-mini/issues/26",
        """
def main(args, loader):
    torch.set_default_dtype(torch.bfloat16)
    model = nn.Sequential(nn.Embedding(1000, 256), nn.Linear(256, 1000))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)  # lint: states-16bit
    for x, y in loader:
        logits = model(x).float()
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
""",
    ),
    "custom function without custom_fwd": (
        f"{GITHUB}/pytorch/pytorch/issues/87979",
        """
class Gram(torch.autograd.Function):  # lint: custom-op
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.transpose(0, 1) @ x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return x @ (grad + grad.transpose(0, 1))

def train(model, loader, optimizer):
    for x in loader:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = Gram.apply(model(x)).diagonal().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
""",
    ),
    "norm by hand overflows in FP16": (
        f"{GITHUB}/pytorch/pytorch/pull/133085",
        """
class RMSNorm(nn.Module):
    def __init__(self, width, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x):
        variance = (x * x).mean(-1, keepdim=True)  # lint: half-variance
        return self.weight * x * torch.rsqrt(variance + self.eps)

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.norm = nn.Linear(width, width), RMSNorm(width)

    def forward(self, x):
        return self.norm(self.first(x))

def train(model: Block, loader):
    model = Block(64)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x).float().sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
""",
    ),
    "variance of a group norm by hand": (
        f"{GITHUB}/neuroneural/brainchop-cli/pull/56",
        """
def group_norm(x, groups, eps=1e-5):
    shape = x.shape
    x = x.half().view(shape[0], groups, -1)
    mean = x.mean(-1, keepdim=True)
    variance = ((x - mean) ** 2).mean(-1, keepdim=True)  # lint: half-variance
    return ((x - mean) / torch.sqrt(variance + eps)).view(shape)

def predict(layers, x):
    for layer in layers:
        x = F.gelu(group_norm(layer(x), 8))
    return x
""",
    ),
    "LayerNorm of squares in half": (
        f"{GITHUB}/pytorch/pytorch/pull/134106",
        """
class LlamaNorm(nn.Module):
    def __init__(self, size, eps=1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, hidden):
        hidden = hidden.to(torch.float16)
        scale = torch.rsqrt(torch.mean(torch.square(hidden), dim=-1, keepdim=True) + self.eps)  # lint: half-variance
        return self.weight * (hidden * scale)
""",
    ),
}
