"""Rotary angles in every form in which code passes them: found, verified, and computed by the rotary kernel."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from model_families import make_batch
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.nn.blocks.angles import expand_angles, read_angles
from narrowgauge.nn.blocks.spec import AttentionSpec
from narrowgauge.nn.fused.modules import FusedBlock
from narrowgauge.nn.module_changes import find_change

WIDTH, HEADS, KEYS, SIZE = 64, 4, 2, 16


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate neighbours of x [B, T, H, S] by angles [T, S/2]."""
    one, two = x[..., ::2].float(), x[..., 1::2].float()
    cos, sin = cos[:, None], sin[:, None]
    return torch.stack([one * cos - two * sin, one * sin + two * cos], -1).flatten(-2).type_as(x)


def rotate_complex(x: Tensor, table: Tensor) -> Tensor:
    turned = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous()) * table[: x.shape[1], None]
    return torch.view_as_real(turned).flatten(-2).type_as(x)


def rotate_matrices(x: Tensor, table: Tensor) -> Tensor:
    assert table.shape[1:] == (x.shape[-1] // 2, 2, 2), "not this table"
    return (table[None, :, None] @ x.float().unflatten(-1, (-1, 2))[..., None])[..., 0].flatten(-2).type_as(x)


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return (x * cos[:, None] + torch.cat([-right, left], -1) * sin[:, None]).type_as(x)


def rotate_own_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Angles of all columns are given, of which the first half is used, each for two neighbours."""
    count = cos.shape[-1] // 2
    return rotate_pairs(x, cos[..., :count], sin[..., :count])


class Block(nn.Module):
    def __init__(self, rotate: Callable[..., Tensor]) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH, eps=1e-6), nn.RMSNorm(WIDTH, eps=1e-6)
        self.q, self.o = nn.Linear(WIDTH, HEADS * SIZE, bias=False), nn.Linear(HEADS * SIZE, WIDTH, bias=False)
        self.k, self.v = (nn.Linear(WIDTH, KEYS * SIZE, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(WIDTH, 96, bias=False) for _ in range(2))
        self.down = nn.Linear(96, WIDTH, bias=False)
        self.n_head, self.n_kv_head, self.size, self.rotate = HEADS, KEYS, SIZE, rotate

    def run(self, x: Tensor, *angles: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, length, _ = x.shape
        h = self.norm1(x)
        q = self.q(h).view(batch, length, self.n_head, self.size)
        k, v = (layer(h).view(batch, length, self.n_kv_head, self.size) for layer in (self.k, self.v))
        q, k = self.rotate(q, *angles), self.rotate(k, *angles)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=True)
        x = x + self.o(mixed.transpose(1, 2).reshape(batch, length, -1))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))  # type: ignore[no-any-return]


class WithTable(Block):
    """The arguments of Meta's Llama, without its cache."""

    def forward(self, x: Tensor, freqs_cis: Tensor, mask: Tensor | None) -> Tensor:
        return self.run(x, freqs_cis, mask=mask)


class WithStart(Block):
    """The arguments of Meta's Llama."""

    def forward(self, x: Tensor, start_pos: int, freqs_cis: Tensor, mask: Tensor | None) -> Tensor:
        assert start_pos == 0
        return self.run(x, freqs_cis, mask=mask)


class WithPair(Block):
    """llama2.c's arguments."""

    def forward(self, x: Tensor, freqs_cos: Tensor, freqs_sin: Tensor) -> Tensor:
        return self.run(x, freqs_cos, freqs_sin)


class WithTuple(Block):
    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        return self.run(x, *rope)


class WithPositions(Block):
    """minimind's arguments."""

    head_dim = SIZE

    def forward(self, x: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> Tensor:
        return self.run(x, *position_embeddings)


def rotate_stacked(x: Tensor, table: Tensor) -> Tensor:
    assert table.dim() == 3 and table.shape[-1] == 2
    return rotate_pairs(x, table[..., 0], table[..., 1])


Rotation = tuple[type[Block], Callable[..., Tensor], Callable[[Tensor], tuple[Any, ...]], AttentionSpec]


def rotary(use: str, pairs: bool) -> AttentionSpec:
    return AttentionSpec("rotary", HEADS, KEYS, True, use, pairs)


def twice(turns: Tensor) -> Tensor:
    return torch.cat([turns, turns], -1)


FORMS: dict[str, Rotation] = {
    "complex": (WithTable, rotate_complex, lambda t: (torch.polar(torch.ones_like(t), t), None), rotary("half", True)),
    "stacked": (
        WithTable, rotate_stacked, lambda t: (torch.stack([t.cos(), t.sin()], -1), None), rotary("half", True)
    ),
    "matrices": (
        WithTable, rotate_matrices,
        lambda t: (torch.stack([torch.stack([t.cos(), -t.sin()], -1), torch.stack([t.sin(), t.cos()], -1)], -2), None),
        rotary("half", True),
    ),
    "pair": (WithPair, rotate_pairs, lambda t: (t.cos(), t.sin()), rotary("half", True)),
    "pair of wholes": (WithPair, rotate_halves, lambda t: (twice(t).cos(), twice(t).sin()), rotary("all", False)),
    "half used": (WithPair, rotate_own_half, lambda t: (twice(t).cos(), twice(t).sin()), rotary("first half", True)),
    "tuple": (WithTuple, rotate_pairs, lambda t: ((t.cos(), t.sin()),), rotary("half", True)),
    "positions": (
        WithPositions, rotate_halves, lambda t: ((twice(t).cos(), twice(t).sin()),), rotary("all", False)
    ),
    "start": (WithStart, rotate_complex, lambda t: (0, torch.polar(torch.ones_like(t), t), None), AttentionSpec()),
}  # fmt: skip
"""The class of the block, its rotation, its arguments from angles [T, S/2], and the description that is expected."""


class Model(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        kind, rotate, self.make, _ = FORMS[form]
        self.blocks = nn.ModuleList(kind(rotate) for _ in range(2))

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, *self.make(turns))
        return x


def compute(model: nn.Module, engine: ng.Engine | None, x: Tensor, turns: Tensor) -> list[Tensor]:
    """Return the output and all gradients, also of the input."""
    x = x.clone().requires_grad_()
    if engine is None:
        output = model(x, turns)
        output.square().mean().backward()
    else:
        with engine.forward():
            output = model(x, turns)
            loss = output.float().square().mean()
        engine.backward(loss)
    grads = [
        output.detach().float(),
        x.grad,
        *(p.grad.float().clone() for p in model.parameters() if p.grad is not None),
    ]
    model.zero_grad()
    return grads  # type: ignore[return-value]


@pytest.mark.parametrize("recipe", ["bf16", "fp8[products=all]", "fp8-lean[products=all]"])
@pytest.mark.parametrize("form", FORMS)
def test_blocks_run_fused_with_the_angles_of_each_call(form: str, recipe: str) -> None:
    model = Model(form)
    written = copy.deepcopy(model)
    engine = ng.Engine(model, torch.optim.AdamW(model.parameters(), 1e-3), recipe, fused=True)
    assert len(engine.conversion.blocks) == 2
    changes = [find_change(block, FusedBlock) for block in model.blocks]
    specs = [replace(change.plan.spec.attention, mask=None) for change in changes if change is not None]
    assert specs == [FORMS[form][3]] * 2
    x = torch.randn(2, 12, WIDTH)
    outputs = []
    for factor in (1.0, 3.0):
        turns = torch.rand(12, SIZE // 2, generator=torch.Generator().manual_seed(1)) * factor
        for made, right in zip(compute(model, engine, x, turns), compute(written, None, x, turns), strict=True):
            assert float((made - right).norm() / right.norm()) < (0.15 if "fp8" in recipe else 0.02)
        outputs.append(made)
    assert not torch.allclose(*outputs, rtol=0.05) and not engine.conversion.as_written.reasons


def test_a_table_that_is_longer_than_the_sequence_is_left_to_the_models_code() -> None:
    model = Model("complex")
    written = copy.deepcopy(model)
    engine = ng.Engine(model, torch.optim.AdamW(model.parameters(), 1e-3), "bf16", fused=True)
    x, turns = torch.randn(2, 12, WIDTH), torch.rand(20, SIZE // 2)
    for made, right in zip(compute(model, engine, x, turns), compute(written, None, x, turns), strict=True):
        assert float((made - right).norm() / right.norm()) < 0.02


@pytest.mark.parametrize(
    ("name", "use"),
    [("Cohere", "all"), ("Cohere2", "all"), ("Glm", "first half"), ("Glm4", "first half"), ("Ernie4_5", "first half"),
     ("Helium", "first half")],
)  # fmt: skip
def test_models_of_transformers_that_rotate_neighbours(name: str, use: str) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.0")
    kind: Any = getattr(transformers, f"{name}ForCausalLM", None)
    if kind is None:
        pytest.skip(f"this transformers has no {name}")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = getattr(transformers, f"{name}Config")(
        **sizes, num_key_value_heads=2, head_dim=16, vocab_size=256, pad_token_id=0, bos_token_id=1, eos_token_id=2
    )
    torch.manual_seed(0)
    model = kind(config).train()
    written = copy.deepcopy(model)
    engine = ng.Engine(model, torch.optim.AdamW(model.parameters(), 1e-3), "bf16", fused=True)
    change = find_change(model.get_submodule(engine.conversion.blocks[0]), FusedBlock)
    assert change is not None
    spec = change.plan.spec.attention
    assert (spec.kind, spec.angles, spec.pairs) == ("rotary", use, True)
    ids = make_batch(0, rows=2, length=24)
    with engine.forward():
        loss = model(input_ids=ids, labels=ids).loss
    engine.backward(loss)
    wanted = written(input_ids=ids, labels=ids).loss
    wanted.backward()
    assert loss.item() == pytest.approx(wanted.item(), rel=2e-3)
    expected = dict(written.named_parameters())
    largest = max(float(p.grad.norm()) for p in expected.values() if p.grad is not None)
    for path, parameter in model.named_parameters():
        if parameter.grad is not None:
            right = expected[path].grad
            assert float((parameter.grad - right).norm()) < 0.05 * max(float(right.norm()), 0.02 * largest), path


def test_what_is_read_as_angles() -> None:
    turns = torch.rand(5, 4)
    cos, sin = turns.cos(), turns.sin()
    forms: list[dict[str, Any]] = [
        {"cos": cos, "sin": sin}, {"rope_cos": cos, "rope_sin": sin}, {"position_embeddings": (cos[None], sin[None])},
        {"freqs_cis": torch.complex(cos, sin)}, {"rope": torch.stack([cos, sin], -1)},
        {"freqs": (cos, sin), "cos": None, "sin": None},
        {"freq_cis": torch.stack([torch.stack([cos, -sin], -1), torch.stack([sin, cos], -1)], -2)},
    ]  # fmt: skip
    for form in forms:
        given = read_angles({**form, "mask": None, "other": turns})
        assert given is not None
        torch.testing.assert_close(given, (cos[None], sin[None]))
    for other in ({}, {"cos": cos}, {"freqs": turns}, {"rope": (cos, None)}, {"freqs_cis": None}, {"rope": "x"}):
        assert read_angles(other) is None
    whole = expand_angles((cos[None], sin[None]), "half", True)
    torch.testing.assert_close(whole[0][0, :, ::2], cos)
    torch.testing.assert_close(whole[0][0, :, 1::2], cos)
    torch.testing.assert_close(expand_angles((cos, sin), "half", False)[1], twice(sin))
    torch.testing.assert_close(
        expand_angles((twice(cos), twice(sin)), "first half", True)[1], sin.repeat_interleave(2, -1)
    )
