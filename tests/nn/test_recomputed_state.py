"""A forward that runs again in backward sees what the first run saw: states and counts that modules store."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.nn.side_effects import StateBefore

WIDTH, EXPERTS = 64, 4


class Stateful(nn.Module):
    """A factor depends on the number of calls, and on a result of the last call, as soon as this is turned on.

    Blocks that do so when they are compared with their fused form are not fused.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_on, self.calls, self.last = False, 0, None
        self.history: list[float] = []

    def get_factor(self, x: Tensor) -> Tensor | float:
        if not self.is_on:
            return 1.0
        self.calls += 1
        factor = 1 + 1 / self.calls + 0.1 * len(self.history)
        made: Tensor | float = factor if self.last is None else factor + 0.1 * self.last
        self.last = x.detach().float().mean().tanh()
        self.history.append(factor)
        return made


class Attention(Stateful):
    """Its scores are capped, so that it remains the model's own code in a fused block."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = (q @ k.mT / 4).tanh().softmax(-1) @ (v * self.get_factor(v))
        made: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return made


class Mixture(Stateful):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.up, self.down = nn.Linear(WIDTH, EXPERTS), nn.Linear(WIDTH, 96), nn.Linear(96, WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        scores = (self.router(x).float() * self.get_factor(x)).softmax(-1).to(x.dtype)
        mixed: Tensor = torch.stack([expert(x) for expert in self.experts], -1) @ scores[..., None]
        return mixed[..., 0] + self.down(F.gelu(self.up(x)))


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 96), nn.Linear(96, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.down(F.gelu(self.up(x)))
        return made


class Block(nn.Module):
    def __init__(self, mlp: type[nn.Module]) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2, self.mlp = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH), mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        made: Tensor = x + self.mlp(self.norm2(x))
        return made


def train(mlp: type[nn.Module], recipe: str, fused: bool) -> tuple[list[float], list[Tensor], list[object]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(96, WIDTH), nn.ModuleList(Block(mlp) for _ in range(2)), nn.Linear(WIDTH, 96))
    model.forward = lambda tokens: model[2](model[1][1](model[1][0](model[0](tokens))))  # type: ignore[method-assign]
    engine = ng.Engine(model, torch.optim.SGD(model.parameters(), lr=0.05), recipe, fused=fused)
    assert len(engine.conversion.blocks) == (2 if fused else 0), engine.conversion.explain_unfused()
    stateful = [part for part in model.modules() if isinstance(part, Stateful)]
    for part in stateful:
        part.is_on = True
    losses, generator = [], torch.Generator().manual_seed(1)
    for _ in range(4):
        tokens = torch.randint(0, 96, (2, 17), generator=generator)
        with engine.forward():
            loss = F.cross_entropy(engine.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        engine.backward(loss)
        assert engine.step().applied
        losses.append(loss.item())
    states = [(part.calls, part.last, part.history) for part in stateful]
    return losses, [parameter.detach() for parameter in model.parameters()], [*states]


@pytest.mark.parametrize("mlp", [Plain, Mixture])
@pytest.mark.parametrize("checkpoint", ["selective", "full"])
@pytest.mark.parametrize(
    ("recipe", "fused"),
    [
        ("fp32", False), ("bf16", False), ("bf16", True), ("fp8[products=all]", False),
        ("fp8[products=all,activations=bf16]", True),
    ],
)  # fmt: skip
def test_training_is_that_without_recomputation(
    mlp: type[nn.Module], checkpoint: str, recipe: str, fused: bool
) -> None:
    """To the bit, and the states are those of one run for each step."""
    expected = train(mlp, recipe, fused)
    found = train(mlp, str(ng.recipe(recipe).replace(checkpoint=checkpoint)), fused)
    assert found[0] == expected[0]
    assert all(map(torch.equal, found[1], expected[1]))
    assert found[2] == expected[2]
    assert all(calls == len(history) == 4 for calls, _, history in found[2])  # type: ignore[misc]


class Caches(nn.Module):
    """Registers a table in its first forward, and another one for longer sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(WIDTH, 96), nn.Linear(96, WIDTH), nn.BatchNorm1d(WIDTH)
        self.register_buffer("table", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None or len(self.table) < x.shape[1]:
            made = torch.outer(torch.arange(x.shape[1]), torch.linspace(0, 1, WIDTH)).cos()
            self.register_buffer("table", made, persistent=False)
        x = x * self.table[: x.shape[1]]
        result: Tensor = x + self.down(F.gelu(self.up(self.norm(x.mT).mT)))
        return result


@pytest.mark.parametrize("checkpoint", ["selective", "full"])
@pytest.mark.parametrize("recipe", ["fp32", "bf16", "fp8[products=all]"])
def test_buffers_that_a_forward_registers(recipe: str, checkpoint: str) -> None:
    """A recomputation makes them again, as the first forward did; running statistics are updated once."""
    results = []
    for mode in ("none", checkpoint):
        torch.manual_seed(0)
        model = nn.Sequential(*(Caches() for _ in range(2)))
        engine = ng.Engine(
            model, torch.optim.SGD(model.parameters(), lr=0.1), str(ng.recipe(recipe).replace(checkpoint=mode))
        )
        losses = []
        for length in (8, 8, 12, 10):
            x = torch.randn(2, length, WIDTH, generator=torch.Generator().manual_seed(length))
            with engine.forward():
                loss = engine.model(x).float().square().mean()
            engine.backward(loss)
            assert engine.step().applied
            losses.append(loss.item())
        assert all(len(part.table) == 12 for part in model)
        statistics = [part.norm.running_mean.clone() for part in model]
        results.append((losses, [int(part.norm.num_batches_tracked) for part in model], statistics))
    assert results[0][:2] == results[1][:2] and results[0][1] == [4, 4]
    assert all(map(torch.equal, results[0][2], results[1][2]))


def test_only_what_changed_is_kept() -> None:
    """What a module stores may be large: of the rest, nothing is held until backward."""
    module = nn.Sequential(Attention(), Plain())
    before = StateBefore(module)
    module[0].calls = 5
    module[0].history.append(1.0)
    before.forget_unchanged()
    assert len(before._contents) == 2
    with before.again():
        assert (module[0].calls, module[0].history) == (0, [])
        module[0].calls, module[0].extra = 7, 1
    assert (module[0].calls, module[0].history) == (5, [1.0]) and not hasattr(module[0], "extra")


def test_a_recurrent_model_of_transformers() -> None:
    """RecurrentGemma stores its states on its modules, and reads them in the next forward."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "lru_width": 64, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 64}
    results = []
    for checkpoint in ("none", "full"):
        torch.manual_seed(0)
        config = transformers.RecurrentGemmaConfig(num_hidden_layers=3, attention_window_size=16, **sizes)
        model = transformers.RecurrentGemmaForCausalLM(config).train()
        engine = ng.Engine(model, torch.optim.AdamW(model.parameters()), f"bf16[checkpoint={checkpoint}]")
        tokens, norms = torch.randint(0, 64, (2, 20), generator=torch.Generator().manual_seed(1)), []
        for _ in range(2):
            with engine.forward():
                loss = model(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            norms.append((loss.item(), engine.step().grad_norm))
        results.append(norms)
    assert results[0] == results[1]
