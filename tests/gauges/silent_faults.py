"""Faults that leave the loss finite, in other models than those of the unit tests.

Each function returns the arguments of ``train``. The value beside each is the rule that notices it, or None if no rule
can tell it.
"""

import torch
import torch.nn.functional as F
from healthy_models import Call, classify, draw, images, mlp, next_token, run, sequences, vectors
from torch import nn

FAULTS = {}


def fault(rule, steps=40):
    def add(function):
        FAULTS[function.__name__] = (function, rule, steps)
        return function

    return add


@fault("no-gradient")
def encoder_under_no_grad():
    def forward(m, x):
        with torch.no_grad():
            hidden = F.relu(m.encode(x)).flatten(1)
        return m.head(hidden)

    return run(Call(forward, encode=nn.Conv2d(1, 16, 3), head=nn.Linear(576, 2)), classify, images)


@fault("no-gradient")
def branch_through_data():
    parts = {"embed": nn.Embedding(32, 16), "mix": nn.GRU(16, 16, batch_first=True), "out": nn.Linear(16, 32)}
    return run(Call(lambda m, x: m.out(m.mix(m.embed(x).data)[0]), **parts), next_token, sequences)


@fault("not-in-optimizer")
def head_added_after_the_optimizer():
    model = mlp(16, 32, 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.append(nn.Linear(16, 16))
    return run(model, optimizer=optimizer)


@fault("dead-units")
def units_killed_by_a_bias():
    model = nn.Sequential(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(1152, 2))
    nn.init.constant_(model[0].bias[:31], -25.0)
    return run(model, classify, images)


@fault("dead-units")
def functional_units_killed_by_the_data():
    first = nn.Linear(16, 64)
    nn.init.uniform_(first.weight[1:], -1, -0.5)
    model = Call(lambda m, x: m.last(F.gelu(m.first(x))), first=first, last=nn.Linear(64, 16))
    return run(model, batch=lambda step: (draw(step, 32, 16).abs() + 5, draw(step, 32, 16)))


@fault("batchnorm-not-updated")
def image_statistics_that_never_move():
    layers = nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16, momentum=0.0), nn.SiLU(), nn.Flatten(), nn.Linear(576, 2)
    return run(nn.Sequential(*layers), classify, images)


@fault("batchnorm-far-from-batch", steps=90)
def one_batch_norm_for_two_domains():
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 16))

    def batch(step):
        x, y = vectors(step)
        return (x * 0.1 + 6, y) if step % 2 else (x * 0.1 - 6, y)

    return run(model, batch=batch)


@fault("adam-eps-too-large")
def epsilon_of_another_optimizer():
    model = mlp(16, 64, 16)
    return run(model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3, eps=0.5))


@fault("update-out-of-proportion")
def head_with_the_rate_of_sgd():
    model = mlp(16, 32, 32, 32, 16)
    groups = [{"params": [*model[:6].parameters()], "lr": 1e-5}, {"params": [*model[6:].parameters()], "lr": 0.3}]
    return run(model, optimizer=torch.optim.AdamW(groups))


@fault("vanishing-gradients")
def deep_sigmoid_network():
    return run(mlp(*[16] * 15, activation=nn.Sigmoid))


@fault("always-clipped", steps=60)
def clipping_a_summed_loss():
    return run(mlp(16, 64, 16), lambda m, x, y: ((m(x).float() - 20 * y) ** 2).sum(), clip_norm=1e-3)


@fault("attention-logits")
def attention_without_its_scale():
    def forward(m, tokens):
        x = m.embed(tokens)
        q, k, v = m.qkv(x).chunk(3, -1)
        return m.out(x + F.scaled_dot_product_attention(30 * q, 30 * k, v, scale=8.0))

    parts = {"embed": nn.Embedding(32, 32), "qkv": nn.Linear(32, 96), "out": nn.Linear(32, 32)}
    return run(Call(forward, **parts), next_token, sequences)


@fault("positions-in-16-bits")
def rotary_angles_in_bf16():
    def forward(m, x):
        angles = torch.outer(torch.arange(3000, 3032).bfloat16(), torch.logspace(0, -2, 8).bfloat16())
        return m.inner(x + torch.cat([angles.cos(), angles.sin()], 1))

    return run(Call(forward, inner=nn.Linear(16, 16)))


@fault("loss-in-16-bits")
def regression_loss_in_bf16():
    return run(mlp(16, 32, 16), lambda m, x, y: F.mse_loss(m(x).bfloat16(), y.bfloat16()))


@fault("decay-on-norm")
def strong_decay_on_every_parameter():
    model = nn.Sequential(nn.Linear(16, 32), nn.GroupNorm(4, 32), nn.SiLU(), nn.Linear(32, 16))
    return run(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5, weight_decay=0.1))


@fault("underflow")
def gradients_below_fp16():
    def loss(m, x, y):
        return F.mse_loss(m(x).float(), y) * 1e-7

    return run(mlp(16, 64, 64, 16), loss, recipe="fp16[loss_scale=none]")


@fault("dead-layer")
def gate_that_is_always_closed():
    def forward(m, x):
        return m.out(x + m.gate(torch.clamp(m.inner(x) - 1e3, min=0)))

    return run(Call(forward, inner=nn.Linear(16, 16), gate=nn.Linear(16, 16, bias=False), out=nn.Linear(16, 16)))


@fault(None)
def average_in_bf16():
    model = mlp(16, 32, 16)
    average = [parameter.detach().bfloat16() for parameter in model.parameters()]

    def loss(model, x, y):
        for old, new in zip(average, model.parameters(), strict=True):
            old.lerp_(new.detach().bfloat16(), 1e-4)
        return F.mse_loss(model(x).float(), y)

    return run(model, loss)


@fault(None)
def labels_of_another_sample():
    return run(mlp(16, 32, 16), batch=lambda step: (vectors(step)[0], vectors(step)[1].roll(1, 0)))
