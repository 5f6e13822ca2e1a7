"""Decoder blocks with cross-attention run fused: recognized, exact, and written code where that was not verified."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers as hf
from model_families import _ENCODER_DECODER, _T5, LANGUAGE, VOCAB, _hf, make_batch, without_dropout
from speech_model import speech
from torch import Tensor, nn

from narrowgauge import Engine
from narrowgauge.nn.blocks.examples import make_examples
from narrowgauge.nn.blocks.find import find_blocks
from narrowgauge.nn.fused import blocks
from narrowgauge.nn.fused.modules import FusedBlock, mark_parts
from narrowgauge.nn.fused.verify import find_difference, make_fp32_plan
from narrowgauge.nn.module_changes import apply_change

pytestmark = pytest.mark.filterwarnings("ignore:Version v4.12.0 introduces a better way:FutureWarning")
CPU = torch.device("cpu")
_DECODER = {"add_cross_attention": True, "is_decoder": True}


def join(decoder: Any) -> Any:
    """Return a builder of BERT's encoder with another decoder."""

    def build() -> nn.Module:
        model = hf.EncoderDecoderModel(encoder=_hf("BertModel", "BertConfig")(), decoder=decoder())
        model.config.decoder_start_token_id, model.config.pad_token_id = 1, 0
        return model

    return build


FAMILIES: dict[str, Any] = {
    "t5": LANGUAGE["t5"],
    "mt5-gated": _hf("MT5ForConditionalGeneration", "MT5Config", **_T5, feed_forward_proj="gated-gelu"),
    "whisper": _hf(
        "WhisperForConditionalGeneration", "WhisperConfig", **_ENCODER_DECODER, max_source_positions=16
    ),
    "bart": LANGUAGE["bart"],
    "bart-eager": _hf(
        "BartForConditionalGeneration", "BartConfig", **_ENCODER_DECODER, attn_implementation="eager",
        activation_dropout=0.1, attention_dropout=0.2,
    ),
    "mbart": _hf("MBartForConditionalGeneration", "MBartConfig", **_ENCODER_DECODER),
    "marian": _hf("MarianMTModel", "MarianConfig", **_ENCODER_DECODER, max_position_embeddings=64),
    "bert": join(_hf("BertLMHeadModel", "BertConfig", **_DECODER)),
    "gpt2": join(_hf("GPT2LMHeadModel", "GPT2Config", n_embd=64, n_layer=2, n_head=4, **_DECODER)),
    "speech": lambda: speech(VOCAB),
}  # fmt: skip
EXPECTED = {
    "t5": ("pre", "own"), "mt5-gated": ("pre", "own"), "whisper": ("pre", "plain"), "bart": ("post", "plain"),
    "bart-eager": ("post", "plain"), "mbart": ("pre", "plain"), "marian": ("post", "plain"),
    "bert": ("post", "plain"), "gpt2": ("pre", "plain"), "speech": ("pre", "plain"),
}  # fmt: skip


def make_inputs(family: str, seed: int = 0) -> dict[str, Tensor]:
    """Return a batch whose source has another length than its target, with padding."""
    labels = make_batch(seed, length=13)
    if family in ("whisper", "speech"):
        features = torch.randn(2, 80, 32, generator=torch.Generator().manual_seed(seed))
        return {"input_features": features, "labels": labels}
    mask = torch.ones(2, 19, dtype=torch.long)
    mask[0, 14:] = 0
    return {"input_ids": make_batch(seed + 7), "attention_mask": mask, "labels": labels}


def fuse(model: nn.Module, checkpoint: str = "none") -> nn.Module:
    """Fuse all blocks with FP32 products."""
    found = find_blocks(model, CPU, find_difference)
    assert len(found.specs) == 4 and not found.reasons, found.reasons
    for path, spec in found.specs.items():
        block = model.get_submodule(path)
        mark_parts(block, spec)
        apply_change(block, FusedBlock(replace(make_fp32_plan(block, spec), checkpoint=checkpoint)))
    return model


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """The calls that ran fused, also those that verified a block: whether each had cross-attention."""
    found: list[bool] = []
    run_forward = blocks.run_forward

    def run(given: Any) -> Any:
        found.append(given.plan.spec.cross is not None)
        return run_forward(given)

    monkeypatch.setattr(blocks, "run_forward", run)
    return found


def compute(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """Return the loss and all gradients, with the same random numbers each time."""
    torch.manual_seed(1)
    loss = model(**inputs).loss
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters() if p.grad is not None}}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    assert found.keys() == expected.keys()
    largest = max(float(value.abs().max()) for name, value in expected.items() if name != "loss")
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance * largest, msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_losses_and_gradients_are_the_librarys(family: str, calls: list[bool]) -> None:
    """With dropout, masks of the source, and the caches that models make in training."""
    model = FAMILIES[family]().train()
    expected = compute(copy.deepcopy(model), make_inputs(family))
    specs = [spec for spec in find_blocks(model, CPU, find_difference).specs.values() if spec.cross is not None]
    assert {(spec.order, spec.attention.kind) for spec in specs} == {EXPECTED[family]}
    fused = fuse(model)
    calls.clear()
    assert_same(compute(fused, make_inputs(family)), expected)
    assert calls == [False, False, True, True]


@pytest.mark.parametrize("family", ["whisper", "gpt2", "speech"])
def test_bf16_and_fp8_losses_agree_with_layers_one_by_one(family: str) -> None:
    model, curves = without_dropout(FAMILIES[family]()).train(), {}
    for recipe, fused in (("bf16", False), ("bf16", True), ("fp8", True)):
        one = copy.deepcopy(model)
        engine = Engine(one, torch.optim.AdamW(one.parameters(), lr=1e-3), recipe, fused=fused)
        assert len(engine.conversion.blocks) == (4 if fused else 0) and not engine.conversion.explain_unfused()
        curve = curves[recipe, fused] = []
        for step in range(4):
            with engine.forward():
                loss = one(**make_inputs(family, step % 2)).loss
            engine.backward(loss)
            assert engine.step().applied
            curve.append(loss.item())
    plain = curves["bf16", False]
    assert curves["bf16", True] == pytest.approx(plain, rel=1e-2)
    assert curves["fp8", True] == pytest.approx(plain, rel=2e-2)
    assert plain[2] < plain[0] and curves["fp8", True][2] < curves["fp8", True][0]  # of the same batch


@pytest.mark.parametrize(
    ("family", "mode"), [("t5", "selective"), ("whisper", "full"), ("bart", "selective"), ("speech", "full")]
)
def test_recomputation_with_dropout(family: str, mode: str) -> None:
    model = FAMILIES[family]().train()
    expected = compute(copy.deepcopy(model), make_inputs(family))
    assert_same(compute(fuse(model, mode), make_inputs(family)), expected)


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_checkpointing_of_the_library(family: str, calls: list[bool]) -> None:
    model: Any = FAMILIES[family]().train()  # with dropout, like the blocks that other tests have verified
    expected = compute(copy.deepcopy(model), make_inputs(family))
    fused: Any = fuse(model)
    fused.gradient_checkpointing_enable()
    calls.clear()
    assert_same(compute(fused, make_inputs(family)), expected)
    assert calls.count(True) in (
        2,
        3,
    )  # blocks recompute by themselves; T5 also its position bias


@pytest.mark.parametrize("family", ["t5", "whisper", "bart", "bert"])
def test_generation_fills_and_reads_the_caches(family: str, calls: list[bool]) -> None:
    model: Any = FAMILIES[family]().eval()
    inputs = {name: value for name, value in make_inputs(family).items() if name != "labels"}
    options = {"max_new_tokens": 5, "do_sample": False, "decoder_start_token_id": 1, "pad_token_id": 0}
    expected = copy.deepcopy(model).generate(**inputs, **options)
    fused: Any = fuse(model)
    calls.clear()
    assert torch.equal(fused.generate(**inputs, **options), expected)
    assert calls.count(True) == 2  # only the first token


def make_pair(family: str) -> tuple[nn.Module, nn.Module, Tensor, dict[str, Any]]:
    """Return a decoder's block and its fused form, a hidden state, and the other arguments."""
    model = FAMILIES[family]().train()
    found = find_blocks(model, CPU, find_difference)
    path, spec = next((path, spec) for path, spec in found.specs.items() if spec.cross is not None)
    block, fused = (copy.deepcopy(model.get_submodule(path)) for _ in range(2))
    mark_parts(fused, spec)
    apply_change(fused, FusedBlock(make_fp32_plan(fused, spec)))
    example = next(one for one in make_examples(block, CPU) if all(name in one.kwargs for name in spec.given))
    return block, fused, example.args[0], {name: example.kwargs[name] for name in spec.given if name != "position_ids"}


def get_output(made: Any) -> Tensor:
    found: Tensor = made[0] if isinstance(made, tuple) else made
    return found


@pytest.mark.parametrize("family", ["t5", "whisper", "bart", "speech"])
@pytest.mark.parametrize("frozen", [False, True])
def test_the_encoders_output_gets_its_gradient(family: str, frozen: bool, calls: list[bool]) -> None:
    block, fused, x, others = make_pair(family)
    calls.clear()
    found = []
    for one in (block, fused):
        torch.manual_seed(2)
        leaf = x.clone().requires_grad_()
        named = {name: value.clone().requires_grad_(not frozen) for name, value in others.items()}
        output = get_output(one(leaf, **named))
        (output * torch.linspace(-1, 1, x.shape[-1])).sum().backward()
        found.append([leaf.grad, *(value.grad for value in named.values())])
    assert calls == [True]
    for expected, got in zip(*found, strict=True):
        assert (expected is None) == (got is None)
        if expected is not None:
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["t5", "whisper", "bart", "speech"])
def test_a_call_without_an_encoders_output_runs_as_written(family: str, calls: list[bool]) -> None:
    block, fused, x, _ = make_pair(family)
    calls.clear()
    torch.testing.assert_close(get_output(fused.eval()(x)), get_output(block.eval()(x)))
    assert not calls


def test_a_block_without_cross_attention_still_takes_no_encoders_output(calls: list[bool]) -> None:
    encoder = _hf("BertModel", "BertConfig")().eval()
    found = find_blocks(encoder, CPU, find_difference)
    block: Any = encoder.get_submodule("encoder.layer.0")
    spec = found.specs["encoder.layer.0"]
    assert spec.cross is None
    mark_parts(block, spec)
    apply_change(block, FusedBlock(make_fp32_plan(block, spec)))
    x = torch.randn(2, 5, 64)
    calls.clear()
    block(x)
    assert calls == [False]
    block(x, encoder_hidden_states=torch.randn(2, 7, 64))
    assert calls == [False]


@pytest.mark.parametrize("change", ["hook", "forward", "adapter", "dropout"])
def test_changes_inside_cross_attention_are_respected(change: str, calls: list[bool]) -> None:
    block, fused, x, others = make_pair("bart")
    calls.clear()
    outputs = []
    for one in (block, fused):
        attention: Any = one.encoder_attn
        part = attention.v_proj
        if change == "hook":
            part.register_forward_hook(lambda module, args, output: output * 2)
        elif change == "forward":
            part.forward = lambda x, part=part: nn.functional.linear(x, 2 * part.weight)
        elif change == "adapter":
            attention.v_proj = nn.Sequential(part, nn.Identity())
        else:
            attention.dropout = 0.5
        torch.manual_seed(4)
        outputs.append(get_output(one(x, **others)))
    assert not calls  # an engine would verify the block again with another dropout
    torch.testing.assert_close(outputs[1], outputs[0])


class Block(nn.Module):
    """A decoder's block with self-attention in a module; subclasses change one thing."""

    def __init__(self, width: int = 64, source: int = 64) -> None:
        super().__init__()
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width) for _ in range(3))
        self.own = Own(width)
        self.query, self.key_value = nn.Linear(width, width), nn.Linear(source, 2 * width)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 96), nn.Linear(96, width)
        self.factor = 1.0

    def forward(self, x: Tensor, encoder_hidden_states: Tensor | None = None) -> Tensor:
        x = x + self.attend(self.norm1(x))
        if encoder_hidden_states is not None:
            k, v = self.key_value(encoder_hidden_states).chunk(2, -1)
            x = x + self.factor * self.out(mix(self.query(self.norm2(x)), k, v))
        mlp: Tensor = self.down(nn.functional.gelu(self.up(self.norm3(x))))
        return x + mlp

    def attend(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.own(x)
        return mixed


class Own(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.out(mix(*self.qkv(x).chunk(3, -1)))
        return mixed


def mix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in (q, k, v))
    return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def test_ones_own_block_with_an_encoder_of_another_width() -> None:
    found = find_blocks(nn.ModuleList([Block(source=48), Block(source=48)]), CPU, find_difference)
    assert not found.reasons
    cross = found.specs["0"].cross
    assert cross is not None and (cross.query, cross.inputs, cross.before) == ("query", ("key_value",), "own")


class Scaled(Block):
    def forward(self, x: Tensor, encoder_hidden_states: Tensor | None = None) -> Tensor:
        self.factor = 0.5
        return super().forward(x, encoder_hidden_states)


class Normed(Block):
    """The encoder's output is changed before it is read."""

    def forward(self, x: Tensor, encoder_hidden_states: Tensor | None = None) -> Tensor:
        return super().forward(x, None if encoder_hidden_states is None else encoder_hidden_states.tanh())


class Inline(Block):
    """Self-attention that is not a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = self.own.qkv, self.own.out
        del self.own

    def attend(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.proj(mix(*self.qkv(x).chunk(3, -1)))
        return mixed


class Adapted(Block):
    """What is added to the query projection is low-rank, but has a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.query = Adapter(self.query)


class Adapter(nn.Module):
    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(64, 4, bias=False), nn.Linear(4, 64)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.base(x) + self.up(self.down(x))
        return added


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Adapted, "not a low-rank adapter"),
        (Scaled, "no norm reads the sum with the branch of cross-attention"),
        (Normed, "no projection reads|its MLP|runs only"),
        (Inline, "self-attention is not a module of its own"),
    ],
)
def test_other_cross_attention_is_refused_with_a_reason(kind: type[Block], reason: str) -> None:
    found = find_blocks(nn.ModuleList([kind(), kind()]), CPU, find_difference)
    assert not found.specs and all(re.search(reason, one) for one in found.reasons.values()), found.reasons
