"""Correct scripts with an engine and another training loop: before, after, or instead of the engine's."""

ENGINE_AND_OTHER_LOOPS = {
    "a baseline without an engine, from the same factory": """
def make():
    model = nn.Linear(8, 8)
    return model, torch.optim.AdamW(model.parameters())

def by_hand():
    model, optimizer = make()
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

def by_engine():
    model, optimizer = make()
    engine = ng.Engine(model, optimizer, recipe="bf16", clip_norm=1.0)
    for x, y in loader:
        with engine.forward():
            loss = F.mse_loss(model(x), y)
        engine.backward(loss)
        engine.step()

by_engine()
by_hand()
by_engine()
""",
    "two models of one factory at the same time": """
def make():
    return nn.Linear(8, 8)
mine, plain = make(), make()
optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
engine = ng.Engine(mine, torch.optim.SGD(mine.parameters(), lr=0.1), recipe="fp16")
for x, y in loader:
    with engine.forward():
        loss = F.mse_loss(mine(x), y)
    engine.backward(loss)
    engine.step()
    loss = F.mse_loss(plain(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    "an optional engine": """
def train(args, loader):
    model = build(args)
    optimizer = torch.optim.AdamW(model.parameters())
    engine = ng.Engine(model, optimizer, recipe=args.recipe) if args.recipe else None
    for x, y in loader:
        with engine.forward() if engine else contextlib.nullcontext():
            loss = F.mse_loss(model(x), y)
        if engine is not None:
            engine.backward(loss)
            engine.step()
        else:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
""",
    "an optional engine, selected by a branch": """
def train(args, loader):
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    engine = None
    if args.recipe:
        engine = ng.Engine(model, optimizer, recipe=args.recipe)
    for x, y in loader:
        if engine is None:
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            with engine.forward():
                loss = F.mse_loss(model(x), y)
            engine.backward(loss)
            engine.step()
""",
    "one recipe after the other": """
for recipe in ("none", "bf16", "fp8"):
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    if recipe == "none":
        for x, y in loader:
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        continue
    engine = ng.Engine(model, optimizer, recipe=recipe)
    for x, y in loader:
        with engine.forward():
            loss = F.mse_loss(model(x), y)
        engine.backward(loss)
        engine.step()
""",
    "one recipe after the other, with models from another file": """
from zoo import build
def run(model, optimizer, recipe):
    if recipe is None:
        for x, y in loader:
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return
    engine = ng.Engine(model, optimizer, recipe=recipe)
    for x, y in loader:
        with engine.forward():
            loss = F.mse_loss(model(x), y)
        engine.backward(loss)
        engine.step()

for recipe in ("bf16", None):
    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    run(model, optimizer, recipe)
run(build(), None, None)
""",
    "a discriminator without an engine": """
generator, critic = nn.Linear(16, 16), nn.Linear(16, 1)
optimizer = torch.optim.Adam(critic.parameters())
engine = ng.Engine(generator, torch.optim.Adam(generator.parameters()), recipe="bf16")
for real in loader:
    with torch.no_grad(), engine.forward():
        fake = generator(torch.randn(len(real), 16))
    loss = critic(fake).mean() - critic(real).mean()
    loss.backward()
    nn.utils.clip_grad_norm_(critic.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    with engine.forward():
        loss = -critic(generator(torch.randn(len(real), 16))).mean()
    engine.backward(loss)
    engine.step()
    optimizer.zero_grad()
""",
    "a student of the trained model": """
teacher, student = nn.Linear(8, 8), nn.Linear(8, 8)
engine = ng.Engine(teacher, torch.optim.AdamW(teacher.parameters()), recipe="bf16")
for x, y in loader:
    with engine.forward():
        loss = F.mse_loss(teacher(x), y)
    engine.backward(loss)
    engine.step()
optimizer = torch.optim.AdamW(student.parameters())
for x, y in loader:
    with engine.evaluating():
        target = teacher(x)
    loss = F.mse_loss(student(x), target)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    "before the engine": """
model = nn.LazyLinear(8)
model(torch.ones(1, 8))
loss = model(torch.ones(1, 8)).sum()
loss.backward()
model.zero_grad()
engine = ng.Engine(model, torch.optim.AdamW(model.parameters()), recipe="bf16")
""",
    "gradients from before the engine was created": """
def prepare(model, optimizer):
    engine = ng.Engine(model, optimizer, recipe="bf16", accumulate=4)
    model.zero_grad(set_to_none=True)
    return engine
engine = prepare(nn.Linear(8, 8), torch.optim.SGD([], lr=1))
""",
    "a choice that creates no engine": """
model = nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters())
engine = args.recipe and ng.Engine(model, optimizer, recipe=args.recipe)
if not engine:
    loss = model(torch.ones(1, 8)).sum()
    loss.backward()
    optimizer.step()
""",
    "a loop without the engine afterwards, with a new optimizer": """
model = nn.Linear(8, 8)
engine = ng.Engine(model, torch.optim.AdamW(model.parameters()), recipe="bf16")
for x in loader:
    with engine.forward():
        loss = model(x).sum()
    engine.backward(loss)
    engine.step()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x in loader:
    loss = model(x).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    "after the engine was detached": """
model = nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters())
engine = ng.Engine(model, optimizer, recipe="bf16")
engine.detach()
loss = model(torch.ones(1, 8)).sum()
loss.backward()
optimizer.step()
""",
    "adversarial examples": """
model = nn.Linear(8, 8)
engine = ng.Engine(model, torch.optim.AdamW(model.parameters()), recipe="bf16")
def attack(x, y):
    x = x.clone().requires_grad_()
    with engine.forward():
        loss = F.mse_loss(model(x), y)
    loss.backward()
    return x + 0.1 * x.grad.sign()
for x, y in loader:
    x = attack(x, y)
    with engine.forward():
        loss = F.mse_loss(model(x), y)
    engine.backward(loss)
    engine.step()
""",
    "an engine of another library": """
from deepspeed import Engine
model = nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters())
engine = Engine(model, optimizer)
for x, y in loader:
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    "an optional engine in a class": """
class Trainer:
    def __init__(self, use, criterion):
        self.model = nn.Linear(8, 8)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.use, self.criterion = use, criterion
        if use:
            self.engine = ng.Engine(self.model, self.optimizer)

    def step(self, x, y):
        if self.use:
            with self.engine.forward():
                loss = self.criterion(self.model(x), y)
            self.engine.backward(loss)
            self.engine.step()
        else:
            loss = self.criterion(self.model(x), y)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

trainer = Trainer(args.use, build())
trainer.step(x, y)
""",
    "a class of the same name": """
class Engine:
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def run(self, x):
        loss = self.model(x).sum()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

Engine(nn.Linear(8, 8), torch.optim.SGD([], lr=1)).run(x)
""",
}
