"""Logits that are computed when they are read: the loss needs none, and every other use has the right values."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from model_families import LANGUAGE, VOCAB, make_batch, without_dropout
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from narrowgauge import Engine
from narrowgauge.kernels.cross_entropy import PLAIN, LossForm
from narrowgauge.nn.fused import head
from narrowgauge.nn.fused.lazy_logits import LazyLogits
from narrowgauge.nn.fused.logit_steps import Step, combine_steps


class Small(nn.Module):
    """A model that returns logits, as users write them: the loss is in their loop."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        whole = LANGUAGE["llama"]()
        self.body = whole.model
        self.lm_head = nn.Linear(64, VOCAB, bias=bias)
        self.lm_head.weight = self.body.embed_tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(self.body(tokens).last_hidden_state)
        return logits


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count how often the fused loss runs."""
    calls: list[int] = []
    own = head.compute_head_loss

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(1)
        return own(*args, **kwargs)

    monkeypatch.setattr(head, "compute_head_loss", counted)
    return calls


def pair(recipe: str = "bf16", bias: bool = False) -> tuple[nn.Module, Engine, nn.Module]:
    torch.manual_seed(0)
    model = Small(bias).train()
    twin = copy.deepcopy(model)
    return model, Engine(model, torch.optim.AdamW(model.parameters()), recipe, fused=True), twin


TOKENS = make_batch()
TARGETS = torch.roll(TOKENS, -1, 1)
TEACHER = torch.randn(2, 19, VOCAB, generator=torch.Generator().manual_seed(3)).log_softmax(-1)
LOSSES = {
    "view": lambda logits: F.cross_entropy(logits.view(-1, VOCAB), TARGETS.view(-1)),
    "flatten": lambda logits: F.cross_entropy(logits.flatten(0, 1), TARGETS.flatten()),
    "float": lambda logits: F.cross_entropy(logits.float().reshape(-1, logits.size(-1)), TARGETS.reshape(-1)),
    "shifted": lambda logits: F.cross_entropy(
        logits[..., :-1, :].contiguous().view(-1, VOCAB), TOKENS[..., 1:].contiguous().view(-1)
    ),
    "ignored": lambda logits: F.cross_entropy(
        logits.view(-1, VOCAB), TARGETS.masked_fill(TARGETS % 3 == 0, -1).view(-1), ignore_index=-1
    ),
    "sum": lambda logits: F.cross_entropy(logits.view(-1, VOCAB), TARGETS.view(-1), reduction="sum") / 7,
    "module": lambda logits: nn.CrossEntropyLoss()(logits.view(-1, VOCAB), TARGETS.view(-1)),
    "smoothing": lambda logits: nn.CrossEntropyLoss(label_smoothing=0.1)(logits.view(-1, VOCAB), TARGETS.view(-1)),
    "multiplied": lambda logits: F.cross_entropy((logits * 0.5).view(-1, VOCAB), TARGETS.view(-1)),
    "divided": lambda logits: F.cross_entropy(logits.view(-1, VOCAB).float() / 3, TARGETS.view(-1)),
    "capped": lambda logits: F.cross_entropy(
        2 * torch.tanh(logits / 2)[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten(), label_smoothing=0.2
    ),
    "capped by a sigmoid": lambda logits: F.cross_entropy(
        (4 * logits.view(-1, VOCAB).div(1.5).sigmoid()).float(), TARGETS.view(-1), reduction="sum"
    ),
}
READ = {
    "another function": lambda logits: F.cross_entropy(F.softsign(logits).view(-1, VOCAB), TARGETS.view(-1)),
    "capped twice": lambda logits: F.cross_entropy(logits.tanh().tanh().view(-1, VOCAB), TARGETS.view(-1)),
    "a tensor as factor": lambda logits: F.cross_entropy(
        (logits * torch.tensor(0.5)).view(-1, VOCAB), TARGETS.view(-1)
    ),
    "distillation": lambda logits: (
        F.cross_entropy(logits.view(-1, VOCAB), TARGETS.view(-1))
        + F.kl_div(logits.float().log_softmax(-1), TEACHER, log_target=True, reduction="batchmean")
    ),
    "weights": lambda logits: F.cross_entropy(
        logits.view(-1, VOCAB).float(), TARGETS.view(-1), weight=torch.linspace(0.5, 1.5, VOCAB)
    ),
    "none": lambda logits: F.cross_entropy(logits.view(-1, VOCAB), TARGETS.view(-1), reduction="none").mean(),
    "classes second": lambda logits: F.cross_entropy(logits.transpose(1, 2), TARGETS),
    "logsumexp": lambda logits: logits.float().logsumexp(-1).mean(),
    "one token": lambda logits: logits[:, -1].float().square().mean(),
    "part of the classes": lambda logits: logits[..., :10].float().square().mean(),
}


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("name", [*LOSSES, *READ])
def test_losses_and_gradients_match(name: str, bias: bool, made: list[int]) -> None:
    model, engine, twin = pair(bias=bias)
    compute = (LOSSES | READ)[name]
    with engine.forward():
        loss = compute(model(TOKENS))
    engine.backward(loss)
    expected = compute(twin(TOKENS))
    expected.backward()
    assert bool(made) == (name in LOSSES or name == "distillation")
    assert loss.item() == pytest.approx(expected.item(), rel=1e-2)
    for (path, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None, path
        error = (ours.grad - theirs.grad).norm() / theirs.grad.norm().clamp(min=1e-6)
        assert error < 0.05, (path, error)


def test_a_loss_outside_of_the_forward_context(made: list[int]) -> None:
    model, engine, twin = pair()
    with engine.forward():
        logits = model(TOKENS)
    loss = LOSSES["view"](logits)
    engine.backward(loss)
    assert made and loss.item() == pytest.approx(LOSSES["view"](twin(TOKENS)).item(), rel=1e-2)


@pytest.mark.parametrize("recipe", ["bf16", "fp8", "bf16-lean", "fp8-lean", "fp8[granularity=row]"])
def test_logits_are_there_when_they_are_read(recipe: str) -> None:
    model, engine, twin = pair(recipe)
    with engine.forward():
        logits = model(TOKENS)
    assert isinstance(logits, LazyLogits) and isinstance(logits, Tensor)
    assert logits.shape == (2, 19, VOCAB) and logits.dtype is torch.bfloat16 and logits.requires_grad
    assert logits.value is None and len(logits) == 2 and logits.device.type == "cpu"
    expected = twin(TOKENS)
    tolerance = 0.02 if "bf16" in recipe else 0.15
    assert (logits.detach().float() - expected).norm() / expected.norm() < tolerance
    assert logits.argmax(-1).shape == (2, 19)
    assert logits.tolist() == logits.compute().tolist() and "tensor" in repr(logits)
    stream = io.BytesIO()
    torch.save(logits, stream)
    stream.seek(0)
    assert torch.equal(torch.load(stream), logits.detach())
    assert type(copy.deepcopy(logits)) is Tensor


class OwnLoss(torch.autograd.Function):
    """A loss as users write it with a backward of their own."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.save_for_backward(logits.float().softmax(-1))
        return logits.float().logsumexp(-1).mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (share,) = ctx.saved_tensors
        return grad * share / share[..., 0].numel()


@pytest.mark.parametrize("formats", [("fp32",), ("fp32", "bf16")])
def test_logits_are_multiplied_as_the_engine_multiplies(
    formats: tuple[str, ...], set_cpu_formats: Callable[..., None]
) -> None:
    """In BF16 where the CPU has it, otherwise in FP32 with one rounding; the values are the same but for sums."""
    set_cpu_formats(*formats)
    seen = set()

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.mm.default:
                seen.add(args[0].dtype)
            return func(*args, **(kwargs or {}))

    _, engine, twin = pair()
    with engine.forward():
        logits = engine.model(TOKENS)
    with Recorder():
        values = logits.detach().float()
    assert seen == {torch.bfloat16 if "bf16" in formats else torch.float32}
    assert (values - twin(TOKENS)).norm() < 0.02 * values.norm()


def test_an_autograd_function_of_the_user_gets_logits_and_passes_gradients() -> None:
    model, engine, twin = pair(bias=True)
    with engine.forward():
        loss = OwnLoss.apply(model(TOKENS))  # type: ignore[no-untyped-call]
    engine.backward(loss)
    expected = OwnLoss.apply(twin(TOKENS))  # type: ignore[no-untyped-call]
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-2)
    for (path, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None, path
        assert (ours.grad - theirs.grad).norm() / theirs.grad.norm().clamp(min=1e-6) < 0.05, path


def test_a_hook_on_the_logits_is_called() -> None:
    model, engine, _ = pair()
    seen = []
    with engine.forward():
        logits = model(TOKENS)
        logits.register_hook(lambda gradient: seen.append(gradient.shape))
        loss = LOSSES["view"](logits)
    engine.backward(loss)
    assert seen == [(2, 19, VOCAB)]


def test_a_changed_input_is_an_error() -> None:
    model, engine, _ = pair()
    kept = []
    model.lm_head.register_forward_pre_hook(lambda module, args: kept.append(args[0]))  # type: ignore[union-attr]
    with engine.forward():
        logits = model(TOKENS)
    assert type(logits) is Tensor, "a hook must see what the head computes"
    model, engine, _ = pair()
    body = model.body  # type: ignore[union-attr]
    body.register_forward_hook(lambda module, args, output: kept.append(output.last_hidden_state))  # type: ignore[union-attr]
    with engine.forward():
        logits = model(TOKENS)
    with torch.no_grad():
        kept[-1].mul_(2)
    with pytest.raises(RuntimeError, match="changed in place"):
        logits.sum()


def test_evaluation_has_ordinary_logits() -> None:
    model, engine, _ = pair()
    with engine.evaluating():
        assert type(model(TOKENS)) is Tensor


def make_logits() -> tuple[Engine, Tensor]:
    model, engine, _ = pair()
    with engine.forward():
        logits: Tensor = model(TOKENS)
    assert isinstance(logits, LazyLogits)
    return engine, logits


def test_recorded_calls_run_as_they_were_written() -> None:
    _, logits = make_logits()
    capped = (torch.tanh(logits[:, :-1].contiguous() / 2) * 2).float().view(-1, VOCAB)
    part, turned = logits[0], logits.half()
    assert all(isinstance(one, LazyLogits) for one in (capped, part, turned))
    expected = (torch.tanh(logits.detach()[:, :-1].contiguous() / 2) * 2).float().view(-1, VOCAB)
    assert torch.equal(capped, expected) and capped.dtype is torch.float32
    assert torch.equal(turned, logits.detach().half()) and turned.dtype is torch.float16
    assert part.data_ptr() == logits.data_ptr(), "a view, as of any tensor"


def test_gradients_are_off_where_the_user_turned_them_off(made: list[int]) -> None:
    _, logits = make_logits()
    with torch.no_grad():
        frozen, rows = logits.float(), logits.view(-1, VOCAB) * 2
        alone = F.cross_entropy(rows, TARGETS.view(-1))
    for one in (frozen * 2, F.cross_entropy(rows, TARGETS.view(-1)), alone, frozen.logsumexp(-1)):
        assert not one.requires_grad
    assert logits.requires_grad and (logits * 2).requires_grad and len(made) == 2


def test_weights_that_changed_before_the_logits_were_read() -> None:
    engine, logits = make_logits()
    engine.backward(LOSSES["view"](logits))
    read = logits.float()
    kept = read.argmax(-1)
    _, unread = make_logits()
    engine.step()
    assert torch.equal(read.argmax(-1), kept)
    model, engine, _ = pair()
    with engine.forward():
        unread = model(TOKENS)
    engine.backward(LOSSES["view"](unread))
    engine.step()
    with pytest.warns(UserWarning, match=r"read after optimizer.step.*From now on logits are computed"):
        unread.argmax(-1)
    for _ in range(2):  # the loop is known now: the same values before and after the step, and no warning
        with engine.forward():
            logits = model(TOKENS)
        assert type(logits) is torch.Tensor
        expected = logits.detach().clone()
        engine.backward(LOSSES["view"](logits))
        engine.step()
        assert torch.equal(logits, expected)


def test_logits_that_changed_in_place() -> None:
    _, logits = make_logits()
    doubled, rows = logits * 2, logits.view(-1, VOCAB)
    with torch.no_grad():
        logits.mul_(3)
    assert torch.equal(rows, logits.view(-1, VOCAB))
    with pytest.raises(RuntimeError, match="changed in place after mul"):
        doubled.sum()


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo reads the loss after the graph break
def test_compiled_code_of_the_user() -> None:
    """torch.compile does not trace these tensors, and must not trace the code behind them."""
    torch._dynamo.reset()
    _, logits = make_logits()
    loss = torch.compile(LOSSES["capped"], backend="eager")(logits)
    assert loss.item() == pytest.approx(LOSSES["capped"](logits.detach().float()).item(), rel=1e-4)


@pytest.mark.parametrize(
    ("steps", "form"),
    [
        ((), PLAIN),
        ((("multiply", 0.0625),), LossForm(0.0625)),
        ((("divide", 8), ("multiply", 2)), LossForm(0.25)),
        ((("divide", 30), ("tanh",), ("multiply", 30)), LossForm(None, 30)),
        ((("multiply", 0.5), ("divide", 4), ("tanh",), ("multiply", 3), ("multiply", 2)), LossForm(0.75, 6)),
        ((("divide", 7.5), ("sigmoid",), ("multiply", 30)), LossForm(1, 15)),
        ((("divide", 7.5), ("sigmoid",), ("multiply", 15)), LossForm(0.5, 7.5)),
        ((("tanh",), ("sigmoid",)), None),
        ((("divide", 0),), None),
        ((("multiply", 0),), None),
        ((("multiply", float("inf")),), None),
    ],
)
def test_steps_as_the_form_of_a_loss(steps: tuple[Any, ...], form: LossForm | None) -> None:
    found = combine_steps(tuple(Step(*step) for step in steps))
    if form is None or found is None:
        assert found is form
    else:
        plain = LossForm(None if form.multiplier == 1 else form.multiplier, form.cap)
        assert [one and pytest.approx(one) for one in found] == list(plain)


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "nano", "gemma2", "cohere"])
def test_models_with_labels_use_the_fused_loss(family: str, made: list[int]) -> None:
    model = without_dropout(LANGUAGE[family]()).train()
    twin = copy.deepcopy(model)
    engine = Engine(model, torch.optim.AdamW(model.parameters()), "bf16", fused=True)
    labels = TOKENS.masked_fill(TOKENS % 4 == 0, -1 if family == "nano" else -100)
    with engine.forward():
        answer = model(input_ids=TOKENS, labels=labels)
    engine.backward(answer.loss)
    expected = twin(input_ids=TOKENS, labels=labels)
    assert made and answer.loss.item() == pytest.approx(expected.loss.item(), rel=1e-2)
    assert (answer.logits.float() - expected.logits).norm() / expected.logits.norm() < 0.02


def test_tokens_of_the_whole_batch_divide_the_loss(made: list[int]) -> None:
    """As transformers' Trainer passes it with gradient accumulation."""
    model = without_dropout(LANGUAGE["qwen3"]()).train()
    twin = copy.deepcopy(model)
    engine = Engine(model, torch.optim.AdamW(model.parameters()), "bf16", fused=True)
    with engine.forward():
        loss = model(input_ids=TOKENS, labels=TOKENS, num_items_in_batch=torch.tensor(50)).loss
    engine.backward(loss)
    expected = twin(input_ids=TOKENS, labels=TOKENS, num_items_in_batch=torch.tensor(50)).loss
    assert made and loss.item() == pytest.approx(expected.item(), rel=1e-2)


def test_a_classifier_of_sequences_is_no_head_over_tokens() -> None:
    import transformers as hf

    config = hf.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=VOCAB,
        num_key_value_heads=2, pad_token_id=0, num_labels=3,
    )  # fmt: skip
    model = hf.LlamaForSequenceClassification(config).train()
    twin = copy.deepcopy(model)
    engine = Engine(model, torch.optim.AdamW(model.parameters()), "bf16", fused=True)
    with engine.forward():
        answer = model(input_ids=TOKENS, labels=torch.tensor([2, 0]))
    engine.backward(answer.loss)
    assert type(answer.logits) is Tensor, "three logits of a sequence are cheaper than a fused loss"
    assert answer.loss.item() == pytest.approx(
        twin(input_ids=TOKENS, labels=torch.tensor([2, 0])).loss.item(), rel=1e-2
    )
