"""Healthy training runs of many kinds, each tiny: a function that returns the arguments of ``train``."""

import itertools

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrizations

CASES = {}


def healthy(function):
    CASES[function.__name__] = function
    return function


def draw(step, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(step))


def pick(step, high, *shape):
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(step))


def vectors(step, count=32):
    x = draw(step, count, 16)
    return x, x.roll(1, 1).tanh()


def images(step, count=8, size=8):
    x = draw(step, count, 1, size, size)
    return x, (x.mean((1, 2, 3)) > 0).long()


def sequences(step, vocabulary=32, count=4, length=12):
    tokens = pick(step, vocabulary, count, length + 1) % 7
    return tokens[:, :-1], tokens[:, 1:]


def mean_square(model, x, y):
    return F.mse_loss(model(x).float(), y)


def classify(model, x, y):
    return F.cross_entropy(model(x).float(), y)


def next_token(model, x, y):
    return F.cross_entropy(model(x).float().flatten(0, 1), y.flatten())


def run(model, loss=mean_square, batch=vectors, **options):
    return {"model": model, "loss": loss, "batch": batch, **options}


def mlp(*sizes, activation=nn.GELU):
    layers = []
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), activation()]
    return nn.Sequential(*layers[:-1])


class Residual(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return x + self.inner(x)


class Call(nn.Module):
    """Parts by name, and a forward given as a function of the module and its input."""

    def __init__(self, forward, **parts):
        super().__init__()
        self.function = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs):
        return self.function(self, *inputs)


@healthy
def cnn_batch_norm():
    layers = nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(144, 2)
    return run(nn.Sequential(*layers), classify, images)


@healthy
def resnet_zero_gamma():
    def block():
        last = nn.BatchNorm2d(16)
        nn.init.zeros_(last.weight)
        conv = nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.Conv2d(16, 16, 3, padding=1, bias=False)
        return Residual(nn.Sequential(conv[0], nn.BatchNorm2d(16), nn.ReLU(inplace=True), conv[1], last))

    body = nn.Conv2d(1, 16, 1), block(), nn.ReLU(), block(), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    return run(nn.Sequential(*body, nn.Linear(16, 2)), classify, images)


@healthy
def lora():
    base, down, up = nn.Linear(16, 16), nn.Linear(16, 4, bias=False), nn.Linear(4, 16, bias=False)
    base.requires_grad_(False)
    nn.init.zeros_(up.weight)
    return run(Call(lambda m, x: m.base(x) + 2 * m.up(m.down(x)), base=base, down=down, up=up))


@healthy
def adaptive_norm_zero():
    change = nn.Linear(16, 48)
    nn.init.zeros_(change.weight)
    nn.init.zeros_(change.bias)

    def forward(m, x):
        shift, scale, gate = m.change(F.silu(m.condition(x))).chunk(3, -1)
        return m.out(x + gate * m.inner(m.norm(x) * (1 + scale) + shift))

    norm = nn.LayerNorm(16, elementwise_affine=False)
    parts = {"condition": nn.Linear(16, 16), "inner": mlp(16, 32, 16), "out": nn.Linear(16, 16)}
    return run(Call(forward, change=change, norm=norm, **parts))


@healthy
def u_net():
    def forward(m, x):
        first = F.relu(m.norm(m.down(x)))
        middle = F.relu(m.middle(F.max_pool2d(first, 2)))
        return m.out(torch.cat([first, F.interpolate(middle, scale_factor=2)], 1))

    parts = {"down": nn.Conv2d(1, 16, 3, padding=1), "norm": nn.GroupNorm(4, 16), "out": nn.Conv2d(32, 1, 1)}
    model = Call(forward, middle=nn.Conv2d(16, 16, 3, padding=1), **parts)
    return run(model, lambda m, x, y: F.mse_loss(m(x).float(), x.flip(-1)), images)


@healthy
def diffusion():
    out = nn.Linear(32, 16)
    nn.init.zeros_(out.weight)
    nn.init.zeros_(out.bias)

    def forward(m, x, time):
        angles = time[:, None] * torch.logspace(0, 3, 8)
        return m.out(F.silu(m.inner(torch.cat([x, angles.sin(), angles.cos()], 1))))

    def loss(model, x, y):
        time = torch.linspace(0, 1, len(x))
        noise = x.flip(0)
        return F.mse_loss(model(x * (1 - time[:, None]) + noise * time[:, None], time).float(), noise)

    return run(Call(forward, inner=nn.Linear(32, 32), out=out), loss)


@healthy
def gan():
    model = nn.ModuleDict({"make": mlp(16, 32, 16), "judge": mlp(16, 32, 1, activation=lambda: nn.LeakyReLU(0.2))})
    both = [torch.optim.Adam(model[name].parameters(), lr=1e-3, betas=(0.5, 0.9)) for name in ("make", "judge")]

    def loss(model, x, y):
        made = model["make"](x)
        if int(x[0, 0] * 1e4) % 2:
            fixed = {name: parameter.detach() for name, parameter in model["judge"].named_parameters()}
            return F.softplus(-functional_call(model["judge"], fixed, made).float()).mean()
        return (F.softplus(-model["judge"](y).float()) + F.softplus(model["judge"](made.detach()).float())).mean() / 2

    return run(model, loss, optimizer=both)


@healthy
def wasserstein():
    model = mlp(16, 32, 1, activation=lambda: nn.LeakyReLU(0.2))
    return run(model, lambda m, x, y: m(x).mean() - m(x * 2 + 1).mean() + 0.1 * m(x).square().mean())


@healthy
def q_learning():
    model = nn.ModuleDict({"online": mlp(16, 32, 4), "target": mlp(16, 32, 4)})
    model["target"].requires_grad_(False)

    def loss(model, x, y):
        with torch.no_grad():
            for old, new in zip(model["target"].parameters(), model["online"].parameters(), strict=True):
                old.lerp_(new.detach().float(), 0.05)
            goal = x[:, 0] + 0.9 * model["target"](x.roll(1, 0)).float().amax(1)
        action = (x[:, :4].argmax(1))[:, None]
        return F.smooth_l1_loss(model["online"](x).float().gather(1, action)[:, 0], goal)

    return run(model, loss)


@healthy
def variational():
    def forward(m, x):
        mean, log_variance = m.encode(x).float().chunk(2, -1)
        return m.decode(mean + (0.5 * log_variance).exp() * 0.1), mean, log_variance

    def loss(model, x, y):
        out, mean, log_variance = model(x)
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).mean()
        return F.mse_loss(out.float(), x) + 0.1 * divergence

    return run(Call(forward, encode=mlp(16, 32, 16), decode=mlp(8, 32, 16)), loss)


@healthy
def hinge():
    def loss(model, x, y):
        return F.relu(1 - model(x).float()[:, 0] * torch.where(x[:, 0] > 0, 1.0, -1.0)).mean()

    return run(mlp(16, 32, 1), loss)


@healthy
def contrastive():
    def loss(model, x, y):
        one, two = F.normalize(model(x).float(), dim=-1), F.normalize(model(x + 0.1 * x.flip(0)).float(), dim=-1)
        return F.cross_entropy(one @ two.t() / 0.1, torch.arange(len(x)))

    return run(mlp(16, 32, 16), loss)


@healthy
def triplets():
    def loss(model, x, y):
        anchor, near, far = (F.normalize(model(one).float(), dim=-1) for one in (x, x + 0.05 * x.flip(0), x.roll(3, 0)))
        return F.relu((anchor - near).square().sum(1) - (anchor - far).square().sum(1) + 0.2).mean()

    return run(mlp(16, 32, 16), loss)


@healthy
def lstm():
    parts = {"embed": nn.Embedding(32, 16), "rnn": nn.LSTM(16, 16, batch_first=True), "out": nn.Linear(16, 32)}
    return run(Call(lambda m, x: m.out(m.rnn(m.embed(x))[0]), **parts), next_token, sequences)


@healthy
def recurrent_by_hand():
    def forward(m, x):
        state = torch.zeros(len(x), 16)
        for part in x.view(len(x), 4, 4).unbind(1):
            state = torch.tanh(m.inner(part) + m.again(state))
        return m.out(state)

    return run(Call(forward, inner=nn.Linear(4, 16), again=nn.Linear(16, 16), out=nn.Linear(16, 16)))


@healthy
def transformer():
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True, norm_first=True)
    parts = {"embed": nn.Embedding(32, 32), "layer": layer, "out": nn.Linear(32, 32)}
    return run(Call(lambda m, x: m.out(m.layer(m.embed(x))), **parts), next_token, sequences)


@healthy
def tied_decoder():
    embed, qkv, up, out = nn.Embedding(32, 32), nn.Linear(32, 96), mlp(32, 64, 32), nn.Linear(32, 32, bias=False)
    out.weight = embed.weight
    nn.init.normal_(embed.weight, std=0.02)

    def forward(m, tokens):
        x = m.embed(tokens)
        q, k, v = m.qkv(F.layer_norm(x, (32,))).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return m.out(F.layer_norm(x + m.up(F.layer_norm(x, (32,))), (32,)))

    return run(Call(forward, embed=embed, qkv=qkv, up=up, out=out), next_token, sequences, clip_norm=1.0)


@healthy
def experts():
    def forward(m, x):
        weight, chosen = m.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(m.experts):
            rows = chosen == index
            if rows.any():
                out[rows] = (expert(x[rows]) * weight[rows, None]).to(out.dtype)
        return m.out(x + out)

    parts = {"experts": nn.ModuleList(mlp(16, 32, 16) for _ in range(4)), "out": nn.Linear(16, 16)}
    return run(Call(forward, router=nn.Linear(16, 4), **parts))


@healthy
def rare_rows():
    model = nn.Sequential(nn.Embedding(2000, 16), nn.Flatten(), nn.Linear(64, 16))
    return run(model, batch=lambda step: (pick(step, 2000, 32, 4), draw(step, 32, 16)))


@healthy
def embedding_bag():
    model = nn.Sequential(nn.EmbeddingBag(500, 16), nn.ReLU(), nn.Linear(16, 16))
    return run(model, batch=lambda step: (pick(step, 500, 32, 4), draw(step, 32, 16)))


@healthy
def absent_modality():
    def forward(m, x):
        hidden = m.left(x[:, :8])
        if int(x[0, 0] * 1e4) % 3:
            hidden = hidden + m.right(x[:, 8:])
        return m.out(F.gelu(hidden))

    return run(Call(forward, left=nn.Linear(8, 16), right=nn.Linear(8, 16), out=nn.Linear(16, 16)))


@healthy
def several_tasks():
    def loss(model, x, y):
        hidden = F.relu(model.body(x))
        return 1e-3 * F.mse_loss(model.one(hidden).float(), y) + F.cross_entropy(model.two(hidden).float(), x.argmax(1))

    return run(Call(lambda m, x: x, body=nn.Linear(16, 32), one=nn.Linear(32, 16), two=nn.Linear(32, 16)), loss)


@healthy
def frozen_backbone():
    body = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU()).requires_grad_(False)
    body.eval()
    return run(Call(lambda m, x: m.head(m.body(x)), body=body, head=nn.Linear(32, 16)))


@healthy
def average_in_fp32():
    model = nn.ModuleDict({"student": mlp(16, 32, 16), "teacher": mlp(16, 32, 16)})
    model["teacher"].requires_grad_(False)

    def loss(model, x, y):
        with torch.no_grad():
            for old, new in zip(model["teacher"].parameters(), model["student"].parameters(), strict=True):
                old.lerp_(new.float(), 0.01)
            goal = model["teacher"](x).float()
        return F.mse_loss(model["student"](x).float(), y) + 0.1 * F.mse_loss(model["student"](x * 1.1).float(), goal)

    return run(model, loss)


@healthy
def warm_up():
    model = mlp(16, 64, 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    rates = iter(range(1, 1000))

    def loss(model, x, y):
        optimizer.param_groups[0]["lr"] = 3e-3 * min(next(rates) / 15, 1)
        return mean_square(model, x, y)

    return run(model, loss, optimizer=optimizer)


@healthy
def momentum_with_decay():
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16))
    return run(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4))


@healthy
def differential_equation():
    def loss(model, x, y):
        points = x[:, :1].clone().requires_grad_()
        value = model(points).float()
        (slope,) = torch.autograd.grad(value.sum(), points, create_graph=True)
        return (slope + value).square().mean() + (model(torch.zeros(16, 1)).float() - 1).square().mean()

    return run(mlp(1, 32, 32, 1, activation=nn.Tanh), loss)


@healthy
def large_targets():
    return run(mlp(16, 64, 1), lambda m, x, y: F.l1_loss(m(x).float()[:, 0] * 1000, 5000 + 1000 * x[:, 0]))


@healthy
def sines():
    def forward(m, x):
        return m.out(torch.sin(m.second(torch.sin(5 * m.first(x)))))

    return run(Call(forward, first=nn.Linear(16, 32), second=nn.Linear(32, 32), out=nn.Linear(32, 16)))


@healthy
def spectral_norm():
    return run(nn.Sequential(parametrizations.spectral_norm(nn.Linear(16, 32)), nn.ReLU(), nn.Linear(32, 16)))


@healthy
def dropout_half():
    return run(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 16)))


@healthy
def depthwise():
    layers = nn.Conv2d(1, 16, 1), nn.Conv2d(16, 16, 3, groups=16), nn.BatchNorm2d(16), nn.Hardswish(), nn.Flatten()
    return run(nn.Sequential(*layers, nn.Linear(576, 2)), classify, images)


@healthy
def audio():
    layers = nn.Conv1d(1, 16, 5, stride=2), nn.InstanceNorm1d(16), nn.SiLU(), nn.Conv1d(16, 8, 3), nn.Flatten()
    batch = lambda step: (draw(step, 16, 1, 32), pick(step, 3, 16))  # noqa: E731
    return run(nn.Sequential(*layers, nn.Linear(96, 3)), classify, batch)


@healthy
def graph():
    def forward(m, x):
        near = (x @ x.t() > 0).float()
        near = near / near.sum(-1, keepdim=True)
        return m.out(F.relu(near @ m.inner(x)))

    return run(Call(forward, inner=nn.Linear(16, 32), out=nn.Linear(32, 16)))


@healthy
def quantized_codes():
    def forward(m, x):
        hidden = m.encode(x)
        nearest = torch.cdist(hidden.float(), m.codes.weight).argmin(1)
        code = m.codes(nearest)
        return m.decode(hidden + (code - hidden).detach()), (hidden.float() - code).square().mean()

    def loss(model, x, y):
        out, distance = model(x)
        return F.mse_loss(out.float(), x) + distance

    return run(Call(forward, encode=nn.Linear(16, 8), codes=nn.Embedding(24, 8), decode=nn.Linear(8, 16)), loss)


@healthy
def policy():
    def loss(model, x, y):
        chances = model(x).float().log_softmax(-1)
        action = x[:, :4].argmax(1)
        return (
            -(chances.gather(1, action[:, None])[:, 0] * (x[:, 0] - 0.1)).mean()
            + 0.01 * (chances.exp() * chances).sum(1).mean()
        )

    return run(mlp(16, 32, 4, activation=nn.Tanh), loss)


@healthy
def sparse_autoencoder():
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
    return run(model, lambda m, x, y: F.mse_loss(m(x).float(), x) + 1e-3 * m[:2](x).float().abs().mean())
