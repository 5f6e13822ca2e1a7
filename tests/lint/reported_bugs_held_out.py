"""Reported bugs that were reconstructed after the rules were written, to measure what the linter finds unprepared."""

GITHUB = "https://github.com"
HELD_OUT_BUGS = {
    "two networks, two scalers, clip before unscale for one": (
        f"{GITHUB}/kekmodel/MPL-pytorch/issues/38",
        """
def train_loop(args, loader, teacher_model, student_model, t_optimizer, s_optimizer, t_scheduler):
    t_scaler = torch.amp.GradScaler("cuda", enabled=args.amp)
    s_scaler = torch.amp.GradScaler("cuda", enabled=args.amp)
    for images, targets in loader:
        with torch.autocast("cuda", enabled=args.amp):
            s_loss = F.cross_entropy(student_model(images), targets)
            t_loss = F.cross_entropy(teacher_model(images), targets)
        s_scaler.scale(s_loss).backward()
        if args.grad_clip > 0:
            nn.utils.clip_grad_norm_(student_model.parameters(), args.grad_clip)  # lint: clip-before-unscale
        s_scaler.step(s_optimizer)
        s_scaler.update()
        t_scaler.scale(t_loss).backward()
        if args.grad_clip > 0:
            t_scaler.unscale_(t_optimizer)
            nn.utils.clip_grad_norm_(teacher_model.parameters(), args.grad_clip)
        t_scaler.step(t_optimizer)
        t_scaler.update()
        t_scheduler.step()  # lint: scheduler-on-skipped-step
        teacher_model.zero_grad()
        student_model.zero_grad()
""",
    ),
    "noise is added to scaled gradients": (
        f"{GITHUB}/rwth-i6/returnn/pull/1595",
        """
def update(network, optimizer, scaler, loss, noise, limit):
    scaler.scale(loss).backward()
    if noise:
        for p in network.parameters():
            p.grad.add_(torch.randn_like(p.grad) * noise)
    if limit:
        nn.utils.clip_grad_norm_(network.parameters(), limit)  # lint: clip-before-unscale
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
""",
    ),
    "scheduler and scaler in a model class": (
        f"{GITHUB}/hkchengrex/STCN/issues/44",
        """
import torch.optim as optim

class STCNModel:
    def __init__(self, para, net):
        self.para, self.net = para, net
        self.optimizer = optim.Adam(filter(lambda p: p.requires_grad, net.parameters()), lr=para["lr"])
        self.scheduler = optim.lr_scheduler.MultiStepLR(self.optimizer, para["steps"], para["gamma"])
        if para["amp"]:
            self.scaler = torch.amp.GradScaler("cuda")

    def do_pass(self, data):
        with torch.autocast("cuda", enabled=self.para["amp"]):
            losses = self.net(data)
        self.optimizer.zero_grad(set_to_none=True)
        if self.para["amp"]:
            self.scaler.scale(losses["total_loss"]).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            losses["total_loss"].backward()
            self.optimizer.step()
        self.scheduler.step()  # lint: scheduler-on-skipped-step

def main(para, net, loader):
    model = STCNModel(para, net)
    for data in loader:
        model.do_pass(data)
""",
    ),
    "scaler for BF16 by default": (
        f"{GITHUB}/ecmwf/WeatherGenerator/issues/874",
        """
class Trainer:
    def run(self, cf, model, loader):
        self.mixed_precision_dtype = torch.bfloat16
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=cf.lr)
        self.grad_scaler = torch.amp.GradScaler("cuda")  # lint: scaler-with-bf16
        for batch in loader:
            with torch.autocast("cuda", dtype=self.mixed_precision_dtype, enabled=cf.with_mixed_precision):
                preds = model(batch)
                loss = self.loss_fct(preds, batch)
            self.optimizer.zero_grad()
            self.grad_scaler.scale(loss).backward()
            self.grad_scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=cf.grad_clip)
            self.grad_scaler.step(self.optimizer)
            self.grad_scaler.update()
""",
    ),
    "checkpoint of a training step without the scaler": (
        f"{GITHUB}/allenai/tango/issues/154",
        """
class TorchTrainingEngine:
    def __init__(self, model, optimizer, amp, amp_dtype):
        self.model, self.optimizer = model, optimizer
        self.amp_dtype = amp_dtype
        self.grad_scaler = torch.amp.GradScaler("cuda") if amp else None

    def backward(self, loss):
        if self.grad_scaler is not None:
            self.grad_scaler.scale(loss).backward()
        else:
            loss.backward()

    def step(self):
        if self.grad_scaler is not None:
            self.grad_scaler.step(self.optimizer)
            self.grad_scaler.update()
        else:
            self.optimizer.step()
        self.optimizer.zero_grad()

    def save_checkpoint(self, folder):
        torch.save(self.model.state_dict(), folder / "model.pt")
        torch.save(self.optimizer.state_dict(), folder / "optimizer.pt")  # lint: scaler-not-saved
""",
    ),
    "FP16 model and an Adam epsilon from the options": (
        f"{GITHUB}/jinxixiang/magic_animate_unofficial/issues/6",
        """
def main(unet, loader, learning_rate=1e-5, adam_epsilon=1e-08):
    unet = nn.Sequential(nn.Conv2d(4, 64, 3), nn.SiLU(), nn.Conv2d(64, 4, 3))
    unet.to("cuda", dtype=torch.float16)
    params, eps = unet.parameters(), adam_epsilon
    optimizer = torch.optim.AdamW(params, lr=learning_rate, eps=eps)  # lint: states-16bit, eps-below-format
    for latents, noise in loader:
        prediction = unet(latents.half())
        loss = F.mse_loss(prediction.float(), noise.float())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
""",
    ),
    "BCE of points in a mask head": (
        f"{GITHUB}/SysCV/transfiner/issues/43",
        """
def mask_loss(logits, uncertain, masks):
    detail = F.binary_cross_entropy(uncertain, masks, reduction="mean")  # lint: bce-autocast
    return F.binary_cross_entropy_with_logits(logits, masks) + detail

class MaskHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.predictor = nn.Conv2d(256, 1, 1)
        self.refine = nn.Sequential(nn.Conv2d(256, 1, 1), nn.Sigmoid())

    def forward(self, features, masks):
        return mask_loss(self.predictor(features), self.refine(features), masks)

def do_train(cfg, loader):
    model = MaskHead()
    optimizer = torch.optim.SGD(model.parameters(), lr=cfg.lr)
    grad_scaler = torch.amp.GradScaler("cuda")
    for features, masks in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss_dict = model(features, masks)
        optimizer.zero_grad()
        grad_scaler.scale(loss_dict).backward()
        grad_scaler.step(optimizer)
        grad_scaler.update()
""",
    ),
    "criterion from a table of loss functions": (
        f"{GITHUB}/microsoft/InnerEye-DeepLearning/issues/401",
        """
LOSSES = {"bce": nn.BCELoss(), "mse": nn.MSELoss()}

def train(config, model, loader, optimizer, scaler):
    criterion = LOSSES[config.loss]
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            posterior = torch.sigmoid(model(x))
            loss = criterion(posterior, y)  # lint: bce-autocast
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""",
    ),
    "varifocal loss with BCE, method of the criterion": (
        f"{GITHUB}/Nioolek/PPYOLOE_pytorch/issues/16",
        """
class Criterion(nn.Module):
    def varifocal(self, score, target, label, alpha=0.75, gamma=2.0):
        weight = alpha * score.pow(gamma) * (1 - label) + target * label
        return (F.binary_cross_entropy(score, target, reduction="none") * weight).sum()  # lint: bce-autocast

    def forward(self, outputs, target, label):
        return self.varifocal(outputs.sigmoid(), target, label)

class Trainer:
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer
        self.criterion = Criterion()
        self.scaler = torch.amp.GradScaler("cuda", enabled=True)

    def train_one_iter(self, inputs, target, label):
        with torch.autocast("cuda", dtype=torch.float16):
            outputs = self.model(inputs)
            loss = self.criterion(outputs, target, label)
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
""",
    ),
    "model in half, scaler with unscale_ and clip": (
        f"{GITHUB}/QwenAudio/FunMusic/issues/28",
        """
def main(args, loader):
    model = nn.TransformerEncoderLayer(512, 8)
    if args.dtype == "fp16":
        model = model.to(torch.float16)
    model.cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    scaler = torch.amp.GradScaler("cuda")
    for batch in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(batch).float().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        scaler.step(optimizer)  # lint: half-with-scaler
        scaler.update()
""",
    ),
    "zero_grad missing with mixed precision, in a helper": (
        f"{GITHUB}/zhuohan123/terapipe/pull/25",
        """
class Runner:
    def __init__(self, model, mixed_precision):
        self.model, self.mixed_precision = model, mixed_precision
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-10)
        self.scaler = torch.amp.GradScaler("cuda")

    def step(self, x):
        with torch.autocast("cuda", enabled=self.mixed_precision):
            loss = self.model(x).mean()
        if self.mixed_precision:
            self.scaler.scale(loss).backward()  # lint: missing-zero-grad
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()

    def run(self, loader):
        for x in loader:
            self.step(x)
""",
    ),
    "step without zero_grad in LoRA training": (
        f"{GITHUB}/tenstorrent/tt-blacksmith/pull/711",
        """
class Trainer:
    def __init__(self, config, model):
        self.config, self.model = config, model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate)
        self.loss_fn = nn.CrossEntropyLoss(ignore_index=-100)

    def train(self, loader):
        for step, batch in enumerate(loader):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                logits = self.model(batch["input_ids"])
                loss = self.loss_fn(logits.flatten(0, 1), batch["labels"].flatten())
            loss.backward()  # lint: missing-zero-grad
            self.optimizer.step()
            if step % self.config.log_steps == 0:
                print(step)
""",
    ),
    "accumulation in a notebook for students": (
        f"{GITHUB}/yandexdataschool/Practical_DL/pull/87",
        """
batch_accumulation = 4
net = nn.Linear(10, 10)
opt = torch.optim.SGD(net.parameters(), 0.1)
loss_function = nn.CrossEntropyLoss()
for index, (x, y) in enumerate([]):
    output = net(x)
    loss = loss_function(output, y)
    loss.backward()  # lint: accumulate-undivided
    if index % batch_accumulation == batch_accumulation - 1:
        opt.step()
        opt.zero_grad()
""",
    ),
    "RMSNorm after a projection, squares with pow outside of autocast": (
        f"{GITHUB}/xlite-dev/LeetCUDA/pull/335",
        """
def rms_norm(x, g, eps=1e-5):
    s = x.half()
    s_rms = torch.rsqrt(torch.mean(s**2, dim=1, keepdim=True) + eps)  # lint: half-variance
    return s * s_rms * g
""",
    ),
    "EMA class with shadow weights in half": (
        f"{GITHUB}/THUDM/SwissArmyTransformer/pull/159",
        """
class EMA:
    def __init__(self, model, decay):
        self.decay = decay
        self.shadow = {name: p.detach().clone().half() for name, p in model.named_parameters()}

    @torch.no_grad()
    def update(self, model):
        for name, p in model.named_parameters():
            self.shadow[name].mul_(self.decay).add_(p.half(), alpha=1 - self.decay)  # lint: ema-16bit

def train(model, loader, optimizer):
    ema = EMA(model, 0.9999)
    for x in loader:
        loss = model(x).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.update(model)
""",
    ),
    "scaled loss is shown with accumulation": (
        f"{GITHUB}/fastai/fastai/issues/3048",
        """
def fit(learn, loader, n_acc):
    scaler = torch.amp.GradScaler("cuda")
    running = 0.0
    for i, (x, y) in enumerate(loader):
        with torch.autocast("cuda", dtype=torch.float16):
            learn.loss = F.cross_entropy(learn.model(x), y) / n_acc
        learn.loss = scaler.scale(learn.loss)
        learn.loss.backward()
        running += learn.loss.item()  # lint: scaled-loss-read, sync-in-loop
        if (i + 1) % n_acc == 0:
            scaler.step(learn.opt)
            scaler.update()
            learn.opt.zero_grad()
    return running
""",
    ),
    "log-softmax by hand": (
        f"{GITHUB}/pytorch/pytorch/issues/1546",
        """
def probabilities(scores):
    shifted = scores - scores.max(1, keepdim=True).values
    weights = shifted.exp()
    return weights / weights.sum(1, keepdim=True)  # lint: manual-softmax

def train(model, loader, optimizer):
    for x, y in loader:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = -torch.log(probabilities(model(x)))[:, y].mean()  # lint: log-softmax
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
""",
    ),
    "second backward of SAM without unscale_ and step through the optimizer": (
        f"{GITHUB}/juntang-zhuang/GSAM/issues/2",
        """
def train(model, loader, optimizer, scaler):
    for x, y in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        optimizer.first_step(zero_grad=True)
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        optimizer.step()  # lint: step-past-scaler
        scaler.update()
        optimizer.zero_grad()
""",
    ),
    "scaler without scale: the loss is not scaled in one mode": (
        f"{GITHUB}/Lightning-AI/pytorch-lightning/issues/18510",
        """
def train(args, model, loader):
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        scaler.step(optimizer)  # lint: scaler-without-scale
        scaler.update()
""",
    ),
    "unscale_ by a helper for the norm, and again for clipping": (
        f"{GITHUB}/huggingface/transformers/issues/23905",
        """
def grad_norm(model, optimizer, scaler):
    scaler.unscale_(optimizer)
    return torch.stack([p.grad.norm() for p in model.parameters()]).norm()

def train(model, loader, optimizer, scaler, limit):
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        norm = grad_norm(model, optimizer, scaler)
        if norm > limit:
            scaler.unscale_(optimizer)  # lint: unscale-twice
            nn.utils.clip_grad_norm_(model.parameters(), limit)
        scaler.step(optimizer)
        scaler.update()
""",
    ),
}
