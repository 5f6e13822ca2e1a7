"""Scripts that misuse narrowgauge's Engine, in different styles. ``# lint: rule`` marks the lines."""

ENGINE_HEAD = "import torch\nfrom torch import nn\nimport torch.nn.functional as F\nimport narrowgauge as ng\n"

ENGINE_WRONG = {
    "an old loop with an engine added": """
model = nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters())
engine = ng.Engine(model, optimizer, recipe="bf16", clip_norm=1.0)
for x, y in loader:
    optimizer.zero_grad()  # lint: engine-zero-grad
    with engine.forward():
        loss = F.cross_entropy(model(x), y)
    loss.backward()  # lint: engine-backward
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # lint: engine-clip
    optimizer.step()  # lint: engine-optimizer
""",
    "backward of a sum, a mean, a part of an output": """
def main(model, optimizer, loader):
    engine = ng.Engine(model, optimizer)
    for batch in loader:
        with engine.forward():
            out = model(**batch)
            extra = (engine.model(batch["other"]) - 1) ** 2
        (out.loss + 0.1 * extra.mean()).backward()  # lint: engine-backward
        engine.step()
""",
    "a criterion from another file": """
from losses import build
criterion = build("focal")
def train(model, optimizer, loader):
    engine = ng.Engine(model, optimizer, "fp8")
    for x, y in loader:
        with engine.forward():
            loss = criterion(engine.model(x), y)
        torch.autograd.backward(loss)  # lint: engine-backward
        engine.step()
""",
    "losses in a dictionary": """
engine = ng.Engine(detector, optimizer, recipe="bf16")
for images, targets in loader:
    with engine.forward():
        found = detector(images, targets)
        losses = sum(loss for loss in found.values())
    losses.backward()  # lint: engine-backward
    engine.step()
""",
    "a trainer's methods": """
from narrowgauge import Engine

class Trainer:
    def __init__(self, model, optimizer, accumulate):
        self.model, self.optimizer = model, optimizer
        self.engine = Engine(model, optimizer, recipe="fp16", accumulate=accumulate)

    def loss(self, batch):
        with self.engine.forward():
            return F.mse_loss(self.model(batch[0]), batch[1])

    def train_step(self, batch):
        self.optimizer.zero_grad(set_to_none=True)  # lint: engine-zero-grad
        loss = self.loss(batch)
        self.engine.backward(loss)
        torch.nn.utils.clip_grad_value_(self.model.parameters(), 1.0)  # lint: engine-clip
        self.engine.step()
        self.optimizer.step()  # lint: engine-optimizer
""",
    "a trainer whose methods are called": """
class Trainer:
    def __init__(self, width):
        self.net = nn.Sequential(nn.Linear(width, width), nn.GELU())
        self.opt = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.engine = ng.Engine(self.net, self.opt, recipe="auto")

    def fit(self, loader):
        for x, y in loader:
            loss = F.mse_loss(self.net(x), y)  # lint: engine-outside
            self.engine.backward(loss)
            self.engine.step()

    @torch.no_grad()
    def test(self, loader):
        self.net.eval()
        return sum(F.mse_loss(self.net(x), y).item() for x, y in loader)  # lint: engine-evaluation

if __name__ == "__main__":
    trainer = Trainer(64)
    trainer.fit(loader)
    trainer.test(loader)
""",
    "a GradScaler of torch": """
scaler = torch.amp.GradScaler("cuda")
model = nn.Linear(8, 8).cuda()
optimizer = torch.optim.Adam(model.parameters())
engine = ng.Engine(model, optimizer, recipe="fp16")
for x, y in loader:
    with engine.forward():
        loss = F.mse_loss(model(x), y)
    engine.backward(scaler.scale(loss))  # lint: engine-scaler
    scaler.unscale_(optimizer)  # lint: engine-scaler
    engine.step()
    scaler.update()
""",
    "a scaler that does everything": """
model = nn.Linear(8, 8).cuda()
optimizer = torch.optim.Adam(model.parameters())
engine = ng.Engine(model, optimizer, recipe="fp16")
scaler = ng.LossScaler("cuda")
for x, y in loader:
    with engine.forward():
        loss = F.mse_loss(model(x), y)
    scaler.scale(loss).backward()  # lint: engine-scaler
    scaler.step(optimizer)  # lint: engine-scaler
    scaler.update()
""",
    "autocast around, inside, and around backward": """
model = nn.Linear(8, 8).cuda()
engine = ng.Engine(model, torch.optim.Adam(model.parameters()), recipe="bf16")
for x, y in loader:
    with torch.autocast("cuda", dtype=torch.bfloat16), engine.forward():  # lint: engine-autocast
        loss = F.mse_loss(model(x), y)
    with engine.forward():
        with torch.autocast("cuda", dtype=torch.float16):  # lint: engine-autocast
            other = F.mse_loss(model(x), y)
        engine.backward(loss + other)  # lint: autocast-backward
    engine.step()
""",
    "evaluation with no_grad, lean": """
def evaluate(model, loader):
    model.eval()
    with torch.inference_mode():
        for x, y in loader:
            print(F.cross_entropy(model(x), y))  # lint: engine-evaluation
    model.train()

model = nn.Linear(8, 8).cuda()
optimizer = torch.optim.AdamW(model.parameters())
engine = ng.Engine(model, optimizer, ng.recipe("bf16-lean"))
for epoch in range(3):
    for x, y in loader:
        with engine.forward():
            loss = F.mse_loss(model(x), y)
        engine.backward(loss)
        engine.step()
    evaluate(model, loader)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}  # lint: engine-lean-save
    torch.save(state, "last.pt")
torch.save(model.state_dict(), "weights.pt")  # lint: engine-lean-save
""",
    "text generation": """
def main():
    model = build()
    engine = ng.Engine(model, torch.optim.AdamW(model.parameters()), recipe="fp8")
    for batch in loader:
        with engine.forward():
            loss = model(**batch).loss
        engine.backward(loss)
        engine.step()
    print(model.generate(prompt))  # lint: engine-outside
""",
    "steps without backward": """
model = build()
engine = ng.Engine(model, make_optimizer(model))
for batch in loader:
    with engine.forward():
        loss = compute(batch)
    loss.backward()
    engine.step()  # lint: engine-no-backward
""",
    "two steps for one backward": """
def main(model, optimizer):
    engine = ng.Engine(model, optimizer)
    for x in loader:
        with engine.forward():
            loss = model(x).sum()
        engine.backward(loss)
        engine.step()
        if engine.skipped:
            print("skipped")
        engine.step()  # lint: engine-no-backward
""",
    "gradients dropped between backward and step": """
def main(model, optimizer):
    engine = ng.Engine(model, optimizer)
    for x in loader:
        with engine.forward():
            loss = model(x).sum()
        engine.backward(loss)
        model.zero_grad()  # lint: engine-zero-grad
        engine.step()
""",
    "loss divided twice": """
def main(model, optimizer, args):
    engine = ng.Engine(model, optimizer, accumulate=args.accumulation)
    for x in loader:
        with engine.forward():
            loss = model(x).sum()
        loss = loss / args.accumulation
        engine.backward(loss)  # lint: engine-divided
        engine.step()

STEPS = 4
def other(model, optimizer):
    engine = ng.Engine(model, optimizer, accumulate=STEPS)
    for x in loader:
        with engine.forward():
            loss = model(x).sum()
        engine.backward(loss / STEPS)  # lint: engine-divided
        engine.step()
""",
    "a GAN and one engine": """
generator, discriminator = nn.Linear(16, 16), nn.Linear(16, 1)
both = nn.ModuleList([generator, discriminator])
g_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-4)
d_optimizer = torch.optim.Adam(discriminator.parameters(), lr=1e-4)
engine = ng.Engine(both, [g_optimizer, d_optimizer], recipe="bf16")  # lint: engine-two-networks
for real in loader:
    with engine.forward():
        fake = generator(torch.randn(len(real), 16))
        d_loss = F.softplus(discriminator(fake.detach())).mean() + F.softplus(-discriminator(real)).mean()
    engine.backward(d_loss)
    engine.step()
    with engine.forward():
        g_loss = F.softplus(-discriminator(generator(torch.randn(len(real), 16)))).mean()
    engine.backward(g_loss)
    engine.step()
""",
    "a GAN of a ModuleDict": """
m = nn.ModuleDict({"g": nn.Linear(16, 16), "d": nn.Linear(16, 1)})
optimizers = [torch.optim.SGD(m["g"].parameters(), lr=1.0), torch.optim.SGD(m["d"].parameters(), lr=1.0)]
engine = ng.Engine(m, optimizers, recipe="bf16")  # lint: engine-two-networks
def turn(loss):
    engine.backward(loss)
for real in loader:
    with engine.forward():
        loss = m["d"](real).mean()
    turn(loss)
    engine.step()
    with engine.forward():
        loss = -m["d"](m["g"](real)).mean()
    engine.backward(loss)
    engine.step()
""",
    "an engine from a function that is called twice": """
model = nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters())
engine = ng.Engine(model, optimizer, recipe="bf16", accumulate=2)
for x in loader:
    if engine and engine.skipped > 10:
        break
    optimizer.zero_grad()  # lint: engine-zero-grad
    with engine.forward():
        loss = model(x).sum()
    engine.backward(loss)
    engine.step()
    optimizer.step()  # lint: engine-optimizer
""",
    "compiled before the engine": """
model = torch.compile(nn.Linear(8, 8), mode="max-autotune")
engine = ng.Engine(model, torch.optim.Adam(model.parameters()))  # lint: engine-compiled
""",
    "one optimizer from engine.optimizers": """
model = nn.Linear(8, 8)
engine = ng.Engine(model, [ng.optim.AdamW(model.parameters())], recipe="bf16")
for x in loader:
    with engine.forward():
        loss = model(x).sum()
    engine.backward(loss)
    engine.step()
    engine.optimizers[0].zero_grad()  # lint: engine-zero-grad
    engine.optimizers[0].step()  # lint: engine-optimizer
""",
    "methods under other names": """
model = nn.Linear(8, 8)
engine = ng.Engine(model=model, optimizer=torch.optim.Adam(model.parameters()), recipe="bf16")
step, go = engine.step, engine.forward
for x in loader:
    with go():
        loss = model(x).sum()
    loss.backward()  # lint: engine-backward
    step()
    model(x)  # lint: engine-outside
""",
    "a star import, and an engine from a function": """
from narrowgauge import *
def setup(args):
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    return model, optimizer, Engine(model, optimizer, args.recipe)
model, optimizer, engine = setup(args)
for x in loader:
    with engine.forward():
        loss = model(x).sum()
    loss.backward()  # lint: engine-backward
    optimizer.step()  # lint: engine-optimizer
""",
    "nested functions": """
def main():
    model = nn.Linear(8, 8)
    engine = ng.Engine(model, torch.optim.AdamW(model.parameters()), "fp8")

    def train(x):
        with engine.forward():
            loss = model(x).sum()
        engine.backward(loss)
        return engine.step()

    @torch.no_grad()
    def test(x):
        model.eval()
        out = model(x)  # lint: engine-evaluation
        model.train()
        return out

    for x in loader:
        train(x)
    test(x)
main()
""",
}
