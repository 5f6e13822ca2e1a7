"""Correct scripts with narrowgauge's Engine, in different styles."""

ENGINE_RIGHT = {
    "a GAN and one engine, each step with its optimizer": """
generator, discriminator = nn.Linear(16, 16), nn.Linear(16, 1)
both = nn.ModuleList([generator, discriminator])
g_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-4)
d_optimizer = torch.optim.Adam(discriminator.parameters(), lr=1e-4)
engine = ng.Engine(both, [g_optimizer, d_optimizer], recipe="bf16")
for real in loader:
    with engine.forward():
        fake = generator(torch.randn(len(real), 16))
        d_loss = F.softplus(discriminator(fake.detach())).mean() + F.softplus(-discriminator(real)).mean()
    engine.backward(d_loss)
    engine.step(d_optimizer)
    with engine.forward():
        g_loss = F.softplus(-discriminator(generator(torch.randn(len(real), 16)))).mean()
    engine.backward(g_loss)
    engine.step(g_optimizer)
""",
    "functions": """
def train_epoch(engine, loader, schedule):
    for x, y in loader:
        with engine.forward():
            loss = F.cross_entropy(engine.model(x), y)
        engine.backward(loss)
        report = engine.step()
        schedule.step()
    return report

def evaluate(engine, loader):
    with engine.evaluating():
        return sum(F.cross_entropy(engine.model(x), y).item() for x, y in loader)

def main():
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    engine = ng.Engine(model, optimizer, recipe="bf16-lean", clip_norm=1.0, accumulate=4)
    for epoch in range(3):
        train_epoch(engine, loader, schedule)
        evaluate(engine, loader)
        torch.save(engine.state_dict(), "last.pt")
    engine.flush()
    torch.save(model.state_dict(), "weights.pt")

main()
""",
    "a class": """
class Trainer:
    def __init__(self, model, optimizer, recipe):
        self.model, self.optimizer = model, optimizer
        self.engine = ng.Engine(self.model, self.optimizer, recipe=recipe)

    def loss(self, batch):
        return F.mse_loss(self.model(batch[0]), batch[1])

    def step(self, batch):
        with self.engine.forward():
            loss = self.loss(batch)
        self.engine.backward(loss)
        return self.engine.step()

    def test(self, batch):
        with self.engine.evaluating():
            return self.loss(batch)

    def save(self, path):
        torch.save({"engine": self.engine.state_dict(), "lr": self.optimizer.param_groups[0]["lr"]}, path)

trainer = Trainer(nn.Linear(8, 8), torch.optim.SGD([], lr=1), "fp8")
trainer.step(batch)
trainer.test(batch)
""",
    "methods that nothing in the script calls": """
class Trainer:
    def __init__(self):
        self.model = nn.Linear(8, 8)
        self.engine = ng.Engine(self.model, torch.optim.Adam(self.model.parameters()))

    def compute_loss(self, batch):
        return self.model(batch).sum()

    def finish(self):
        return self.engine.step()

    def validate(self, batch):
        with torch.no_grad():
            return self.model(batch)

    def go(self, loss):
        self.engine.backward(loss)
""",
    "the engine passed to a library": """
from loops import run
model = nn.Linear(8, 8)
engine = ng.Engine(model, torch.optim.Adam(model.parameters()))
run(engine, loader)
engine.step()
""",
    "two engines for a GAN": """
generator, discriminator = nn.Linear(16, 16), nn.Linear(16, 1)
g_optimizer = torch.optim.Adam(generator.parameters())
d_optimizer = torch.optim.Adam(discriminator.parameters())
g_engine = ng.Engine(generator, g_optimizer, recipe="bf16")
d_engine = ng.Engine(discriminator, d_optimizer, recipe="bf16")
for real in loader:
    with d_engine.forward():
        fake = generator(torch.randn(len(real), 16))
        loss = F.softplus(discriminator(fake.detach())).mean() + F.softplus(-discriminator(real)).mean()
    d_engine.backward(loss)
    d_engine.step()
    with g_engine.forward():
        loss = F.softplus(-discriminator(generator(torch.randn(len(real), 16)))).mean()
    g_engine.backward(loss)
    g_engine.step()
    d_optimizer.zero_grad()
""",
    "two optimizers, one loss": """
model = nn.ModuleDict({"encoder": nn.Linear(8, 8), "head": nn.Linear(8, 2)})
slow = torch.optim.AdamW(model["encoder"].parameters(), lr=1e-5)
fast = torch.optim.AdamW(model["head"].parameters(), lr=1e-3)
engine = ng.Engine(model, [slow, fast], recipe="bf16")
for x, y in loader:
    with engine.forward():
        loss = F.cross_entropy(model["head"](model["encoder"](x)), y)
    engine.backward(loss)
    if engine.step().applied:
        print("updated")
""",
    "optimizers for matrices and for other parameters, alternating losses": """
model = build()
matrices = [p for p in model.parameters() if p.ndim > 1]
rest = [p for p in model.parameters() if p.ndim < 2]
engine = ng.Engine(model, [torch.optim.SGD(matrices, lr=0.1), torch.optim.AdamW(rest)], recipe="bf16")
for a, b in loader:
    with engine.forward():
        loss = model(a).mean()
    engine.backward(loss)
    engine.step()
    with engine.forward():
        loss = model(b).mean()
    engine.backward(loss)
    engine.step()
""",
    "a teacher": """
student, teacher = nn.Linear(8, 8), nn.Linear(8, 8)
engine = ng.Engine(student, torch.optim.AdamW(student.parameters()), recipe="bf16-lean")
for x in loader:
    with torch.no_grad():
        target = teacher(x)
    with engine.forward():
        loss = F.mse_loss(student(x), target)
    engine.backward(loss)
    engine.step()
teacher.load_state_dict(student.state_dict())
""",
    "contexts on a stack": """
import contextlib
model = nn.Linear(8, 8)
engine = ng.Engine(model, torch.optim.AdamW(model.parameters()), recipe="fp8")
for x, y in loader:
    with contextlib.ExitStack() as stack:
        stack.enter_context(engine.forward())
        loss = F.mse_loss(model(x), y)
    engine.backward(loss)
    engine.step()
""",
    "one of two contexts": """
model = nn.Linear(8, 8)
engine = ng.Engine(model, torch.optim.AdamW(model.parameters()), recipe="fp8")
def run(x, train):
    with engine.forward() if train else engine.evaluating():
        return model(x).mean()
engine.backward(run(1, True))
engine.step()
run(1, False)
""",
    "a context with a name": """
model = nn.Linear(8, 8)
engine = ng.Engine(model, torch.optim.AdamW(model.parameters()), recipe="fp8")
inside = engine.forward()
with inside:
    loss = model(1).mean()
engine.backward(loss)
engine.step()
""",
    "no gradients inside forward": """
model = nn.Linear(8, 8)
engine = ng.Engine(model, torch.optim.AdamW(model.parameters()), recipe="fp8")
model.eval()
with torch.no_grad(), engine.forward():
    print(model(1))
model.train()
""",
    "FP32 outside of forward": """
model = nn.Linear(8, 8)
engine = ng.Engine(model, torch.optim.AdamW(model.parameters()), recipe="fp32")
with torch.no_grad():
    print(model(1))
""",
    "a part in FP32": """
model = nn.Linear(8, 8)
engine = ng.Engine(model, torch.optim.AdamW(model.parameters()), recipe="bf16")
for x, y in loader:
    with engine.forward():
        out = model(x)
        with torch.autocast("cuda", enabled=False):
            loss = F.mse_loss(out.float(), y)
    engine.backward(loss)
    engine.step()
""",
    "the norm is only read": """
model = nn.Linear(8, 8)
engine = ng.Engine(model, torch.optim.AdamW(model.parameters()), recipe="bf16")
for x, y in loader:
    with engine.forward():
        loss = F.mse_loss(model(x), y)
    engine.backward(loss)
    norm = nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
    engine.step()
""",
    "clipping by value, which an engine does not offer": """
model = nn.Linear(8, 8)
engine = ng.Engine(model, torch.optim.AdamW(model.parameters()), recipe="bf16")
for x, y in loader:
    with engine.forward():
        loss = F.mse_loss(model(x), y)
    engine.backward(loss)
    nn.utils.clip_grad_value_(model.parameters(), 0.5)
    engine.step()
""",
    "divided by something else": """
def main(model, optimizer, args):
    engine = ng.Engine(model, optimizer, accumulate=args.accumulate)
    for x in loader:
        with engine.forward():
            loss = model(x).sum() / len(x)
        engine.backward(loss)
        engine.step()
""",
    "manual accumulation": """
model = nn.Linear(8, 8)
engine = ng.Engine(model, torch.optim.AdamW(model.parameters()), recipe="bf16", accumulate=4)
for i, (x, y) in enumerate(loader):
    with engine.forward():
        loss = F.mse_loss(model(x), y)
    engine.backward(loss)
    if (i + 1) % 4 == 0:
        engine.step()
""",
    "FP32 weights are saved without the engine": """
model = nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters())
engine = ng.Engine(model, optimizer, recipe="bf16")
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "last.pt")
""",
    "compiled by the engine": """
model = nn.Linear(8, 8)
engine = ng.Engine(model, torch.optim.AdamW(model.parameters()), recipe="bf16", compile=True)
other = torch.compile(nn.Linear(8, 8))
""",
    "watched": """
model = nn.Linear(8, 8)
engine = ng.Engine(model, torch.optim.AdamW(model.parameters()), recipe="bf16")
watch = ng.watch(engine)
for x, y in loader:
    with engine.forward():
        loss = F.mse_loss(model(x), y)
    engine.backward(loss)
    step = engine.step()
    if not step.applied:
        print(watch, loss.item())
""",
    "an update that is skipped on purpose": """
model = nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters())
engine = ng.Engine(model, optimizer, accumulate=4)
for x in loader:
    try:
        with engine.forward():
            loss = model(x).sum()
        engine.backward(loss)
    except torch.OutOfMemoryError:
        optimizer.zero_grad()
        continue
    if not torch.isfinite(loss):
        optimizer.zero_grad()
        continue
    engine.step()
""",
    "ranks that reduce gradients once per update": """
import contextlib
from torch.nn.parallel import DistributedDataParallel
def main(rank):
    model = DistributedDataParallel(nn.Linear(8, 8).to(rank), device_ids=[rank])
    engine = ng.Engine(model, torch.optim.AdamW(model.parameters()), "bf16", accumulate=4)
    for number, x in enumerate(loader):
        with model.no_sync() if (number + 1) % 4 else contextlib.nullcontext():
            with engine.forward():
                loss = model(x).sum()
            engine.backward(loss)
        engine.step()
main(0)
""",
    "a gradient penalty": """
critic, generator = nn.Linear(8, 1), nn.Linear(8, 8)
engine = ng.Engine(critic, torch.optim.AdamW(critic.parameters()), "bf16")
def penalty(real, fake):
    mix = (real + fake).requires_grad_()
    with engine.forward():
        score = critic(mix).sum()
    (slope,) = torch.autograd.grad(score, mix, create_graph=True)
    return ((slope.norm(2, dim=1) - 1) ** 2).mean()
for real in loader:
    with torch.no_grad():
        fake = generator(real)
    with engine.forward():
        loss = critic(fake).mean() - critic(real).mean()
    engine.backward(loss + 10 * penalty(real, fake))
    engine.step()
""",
    "an average of the weights": """
from torch.optim.swa_utils import AveragedModel
model = nn.Linear(8, 8)
engine = ng.Engine(model, torch.optim.AdamW(model.parameters()), "fp8")
average = AveragedModel(model)
for x in loader:
    with engine.forward():
        loss = model(x).sum()
    engine.backward(loss)
    engine.step()
    average.update_parameters(model)
with engine.evaluating():
    average(x)
""",
}
