"""Language tasks: a GPT or Llama that learns to predict the next byte or token.

Nothing is read or encoded when the task is made, only when the first batch is drawn (or a sample asked for), so that a
benchmark on ``synthetic`` batches needs no data. What is known only then (``unigram_entropy`` and the sizes of the
data) joins ``facts`` at that moment: read the facts after the first batch.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.data import bpe, corpus, tokens
from narrowgauge.data.tokens import TokenData
from narrowgauge.errors import UsageError
from narrowgauge.models.gpt import GPT, GPTConfig
from narrowgauge.models.llama import Llama, LlamaConfig
from narrowgauge.task import Task

BYTES = 256
GPT2_VOCAB = 50257
LLAMA_VOCAB = 32000
PROMPT = "def __init__(self"
SAMPLE_TOKENS = 200
TEMPERATURE = 0.8


@dataclass(frozen=True, kw_only=True)
class Size:
    """A model and how it is trained unless options say otherwise."""

    layers: int
    width: int
    heads: int
    batch: int
    context: int
    learning_rate: float
    """Peak rate: that of the GPT-3 or Llama paper for the width; for gpt-tiny what learned fastest (docs/tasks.md)."""
    vocab: int = GPT2_VOCAB
    steps: int = 300
    kv_heads: int | None = None
    """Grouped key-value heads: given for a Llama only."""
    hidden: int | None = None
    rope_base: float = 10_000.0

    def config(self, context: int, vocab: int) -> GPTConfig | LlamaConfig:
        if self.kv_heads is None or self.hidden is None:
            return GPTConfig(layers=self.layers, width=self.width, heads=self.heads, context=context, vocab=vocab)
        return LlamaConfig(
            layers=self.layers,
            width=self.width,
            heads=self.heads,
            kv_heads=self.kv_heads,
            hidden=self.hidden,
            context=context,
            vocab=vocab,
            rope_base=self.rope_base,
        )


def gpt_size(layers: int, width: int) -> Size:
    """A GPT of any size, with the defaults of the named one that is as wide or the next wider."""
    head_size = 64 if width <= 1024 else 128
    if layers < 1 or width < head_size or width % head_size:
        raise UsageError(
            f"gpt:{layers}x{width}: there must be at least 1 layer, and the width be a multiple of {head_size} (a "
            f"head); try gpt:{max(layers, 1)}x{max(head_size, round(width / head_size) * head_size)}"
        )
    heads = width // head_size
    if width <= 384:
        return Size(
            layers=layers, width=width, heads=heads, batch=8, context=128, learning_rate=1e-3, vocab=BYTES, steps=80
        )
    for widest, batch, context, rate in ((768, 64, 1024, 6e-4), (1024, 32, 1024, 3e-4), (2048, 16, 2048, 2e-4)):
        if width <= widest:
            return Size(layers=layers, width=width, heads=heads, batch=batch, context=context, learning_rate=rate)
    return Size(layers=layers, width=width, heads=heads, batch=8, context=2048, learning_rate=1.2e-4)


def size_of(spec: str) -> Size:
    """The size a task's name stands for."""
    if spec in LLAMAS:
        return LLAMAS[spec]
    shape = GPTS.get(spec, spec.removeprefix("gpt:"))
    if not (match := re.fullmatch(r"(\d{1,6})x(\d{1,6})", shape)):
        raise UsageError(f"task {spec!r}: a GPT of any size is gpt:LAYERSxWIDTH, such as gpt:8x4096")
    return gpt_size(int(match[1]), int(match[2]))


GPTS = {"gpt-tiny": "6x384", "gpt2-124m": "12x768", "gpt2-350m": "24x1024", "gpt-1.3b": "24x2048"}
LLAMAS = {
    "llama-1b": Size(
        layers=16, width=2048, heads=32, kv_heads=8, hidden=8192, rope_base=500_000.0, vocab=LLAMA_VOCAB,
        batch=16, context=2048, learning_rate=3e-4,
    ),
    "llama-7b": Size(
        layers=32, width=4096, heads=32, kv_heads=32, hidden=11008, vocab=LLAMA_VOCAB,
        batch=8, context=2048, learning_rate=3e-4,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Source:
    """Tokens with the way from text to them and back; where the way is not known, tokens stay numbers."""

    data: TokenData
    encode: Callable[[str], list[int]] | None
    decode: Callable[[Sequence[int]], str] | None


def make(
    spec: str,
    *,
    batch: int | None = None,
    context: int | None = None,
    data: str | None = None,
    seed: int = 0,
    vocab: int | None = None,
    packages: bool = False,
) -> Task:
    """A language task by name.

    ``data`` is a text, a ``.bin`` of tokens or a folder; without it the corpus is Python's own source, and with
    ``packages`` that of the installed packages too. ``vocab`` 256 means bytes, more a byte-pair encoding of that size.
    ``seed`` decides where training windows lie; evaluation sees the same windows under every seed.
    """
    size = size_of(spec)
    batch = size.batch if batch is None else batch
    context = size.context if context is None else context
    vocab = size.vocab if vocab is None else vocab
    for name, value in (("batch", batch), ("context", context), ("vocab", vocab)):
        if value < 1:
            raise UsageError(f"task {spec!r}: --{name} {value} was given; it must be at least 1")
    path = None if data is None else Path(data).expanduser()
    if path is not None and packages:
        raise UsageError("packages belong to the built-in corpus; give either --packages or --data")
    is_text = path is None or not tokens.holds_tokens(path)
    if is_text and vocab < BYTES:
        raise UsageError(f"task {spec!r}: --vocab {vocab} was given, but text takes {BYTES} (bytes) or more")
    config = size.config(context, vocab)
    facts: dict[str, Any] = {
        "parameters": config.parameters(),
        "layers": config.layers,
        "width": config.width,
        "heads": config.heads,
        "batch": batch,
        "context": context,
        "vocab": vocab,
        "padded_vocab": config.padded_vocab,
        "data": "Python source" if path is None else str(path),
    }

    @functools.cache
    def source() -> Source:
        opened = open_source(path, vocab, context, packages)
        facts["unigram_entropy"] = corpus.unigram_entropy(opened.data.shards["train"][0])
        facts["train_tokens"], facts["eval_tokens"] = opened.data.size("train"), opened.data.size("eval")
        return opened

    def draw(step: int, split: str) -> tuple[Tensor, Tensor]:
        return source().data.sample(step, split, batch, context, seed if split == "train" else 0)

    def synthetic(step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(step)
        window = torch.randint(0, vocab, (batch, context + 1), generator=generator)
        return window[:, :-1].contiguous(), window[:, 1:].contiguous()

    return Task(
        name=spec,
        model=lambda: GPT(config) if isinstance(config, GPTConfig) else Llama(config),
        batch=draw,
        loss=loss,
        sample=lambda model: continue_text(model, source(), context),
        synthetic=synthetic,
        items_per_batch=batch * context,
        unit="token",
        flops_per_item=config.flops_per_token(),
        learning_rate=size.learning_rate,
        steps=size.steps,
        facts=facts,
    )


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    mean: Tensor = model(inputs, targets)
    return mean


def open_source(path: Path | None, vocab: int, context: int, packages: bool) -> Source:
    """Open the data of a task, encoding text where the vocabulary is more than bytes."""
    if path is not None and tokens.holds_tokens(path):
        source = Source(tokens.open_tokens(path, vocab, context), None, None)
    else:
        text = corpus.load(packages) if path is None else tokens.open_text(path, context)
        name = "the corpus" if path is None else str(path)
        if vocab == BYTES:
            data = TokenData([text.train], [text.eval], vocab, name)
            source = Source(data, lambda prompt: list(prompt.encode()), lambda ids: bytes(ids).decode(errors="replace"))
        else:
            encoded = bpe.encode(text, vocab)
            data = TokenData([encoded.train], [encoded.eval], vocab, name)
            source = Source(data, encoded.encode, encoded.decode)
    for split in tokens.SPLITS:
        source.data.windows(split, context)  # refuses data that is too short before a model is trained on half of it
    return source


@torch.no_grad()
def continue_text(model: nn.Module, source: Source, context: int) -> str:
    """What the model writes after a prompt, under whatever autocast the caller has opened; its mode is restored."""
    ids = source.encode(PROMPT) if source.encode else source.data.shards["eval"][0][:8].tolist()
    # One shape throughout, padded on the causal side: a new length each time makes cuDNN plan its attention anew, which
    # took 27 s for 200 tokens on an H200. A quarter of the context is enough to see what was learned.
    length = max(context // 4, min(context, 64))
    window = torch.zeros(1, length, dtype=torch.long)
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)  # of its own: a sample must not change the training that follows it
    was_training, ending = model.training, ""
    model.eval()
    try:
        for _ in range(SAMPLE_TOKENS):
            seen = ids[-length:]
            window[0, : len(seen)] = torch.tensor(seen)
            logits = model(window.to(device))[0, len(seen) - 1, : source.data.vocab].float().cpu()
            if not logits.isfinite().all():
                ending = " [here the model's output is no longer finite]"
                break
            ids.append(int(torch.multinomial((logits / TEMPERATURE).softmax(0), 1, generator=generator)))
    finally:
        model.train(was_training)
    return (source.decode(ids) if source.decode else " ".join(map(str, ids))) + ending
