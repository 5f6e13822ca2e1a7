"""Language tasks: a GPT, Llama or mixture of experts that learns to predict the next byte or token.

Data is read and encoded when the first batch or sample is made, not when the task is made. So a benchmark on
``synthetic`` batches needs no data. The ``facts`` that depend on the data (``unigram_entropy``, the loss of the unigram
baseline, and the sizes of the data) are added then: read the facts after the first batch.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge import files
from narrowgauge.data import corpus, sources
from narrowgauge.data.sources import BYTES, Source
from narrowgauge.data.tokenizer import Tokenizer, open_tokenizer
from narrowgauge.errors import UsageError
from narrowgauge.models.gpt import GPT, GPTConfig
from narrowgauge.models.llama import Llama, LlamaConfig
from narrowgauge.models.moe import MoE, MoEConfig
from narrowgauge.task import Task

GPT2_VOCAB = 50257
LLAMA_VOCAB = 32000
OLMOE_VOCAB = 50304
SAMPLE_TOKENS = 200
EVAL_BATCHES = 8
TEMPERATURE = 0.8
Config = GPTConfig | LlamaConfig | MoEConfig
MODELS: dict[type[Config], Callable[..., nn.Module]] = {GPTConfig: GPT, LlamaConfig: Llama, MoEConfig: MoE}


@dataclass(frozen=True, kw_only=True)
class Size:
    """The dimensions of a model, and the defaults for training it."""

    layers: int
    width: int
    heads: int
    batch: int
    context: int
    learning_rate: float
    """Peak rate: from the GPT-3, Llama or OLMoE paper for the width; for gpt-tiny the one that learned fastest."""
    vocab: int = GPT2_VOCAB
    steps: int = 300
    kv_heads: int | None = None
    """Key-value heads of a Llama or a mixture. None: a GPT."""
    hidden: int | None = None
    """Width of the MLP of a Llama, or of each expert of a mixture. None: a GPT."""
    rope_base: float = 10_000.0
    experts: int = 0
    """Experts of a mixture. 0: no mixture."""
    chosen: int = 0
    """Experts per token."""
    shared: int = 0
    """Experts that compute for every token."""

    def make_config(self, context: int, vocab: int) -> Config:
        """Make the configuration of the model."""
        sizes: dict[str, Any] = {
            "layers": self.layers, "width": self.width, "heads": self.heads, "context": context, "vocab": vocab,
        }  # fmt: skip
        if self.kv_heads is None or self.hidden is None:
            return GPTConfig(**sizes)
        sizes |= {"kv_heads": self.kv_heads, "hidden": self.hidden, "rope_base": self.rope_base}
        if not self.experts:
            return LlamaConfig(**sizes)
        return MoEConfig(**sizes, experts=self.experts, chosen=self.chosen, shared=self.shared)


def make_gpt_size(layers: int, width: int) -> Size:
    """Make a GPT of any size, with the defaults of the named one of the same width, or the next wider."""
    head_size = 64 if width <= 1024 else 128
    if layers < 1 or width < head_size or width % head_size:
        raise UsageError(
            f"gpt:{layers}x{width}: expected at least 1 layer, and a width that is a multiple of {head_size} (the size "
            f"of a head); try gpt:{max(layers, 1)}x{max(head_size, round(width / head_size) * head_size)}"
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


def make_moe_size(layers: int, width: int, experts: int, shared: int) -> Size:
    """Make a mixture of any size, with the defaults of the GPT of that width; two experts per token, each 2D wide."""
    if experts < 2:
        raise UsageError(f"moe:{layers}x{width}x{experts}: expected at least 2 experts, of which each token gets 2")
    try:
        base = make_gpt_size(layers, width)
    except UsageError as error:
        raise UsageError(str(error).replace("gpt:", "moe:").replace(f"x{width}:", f"x{width}x{experts}:", 1)) from None
    return replace(base, kv_heads=base.heads, hidden=2 * width, experts=experts, chosen=2, shared=shared)


def find_size(spec: str) -> Size:
    """Find the size for a task's name."""
    if spec in LLAMAS:
        return LLAMAS[spec]
    if spec in MIXTURES:
        return MIXTURES[spec]
    if spec.startswith("moe:"):
        match = re.fullmatch(r"moe:(\d{1,6})x(\d{1,6})x(\d{1,6})(?:\+(\d{1,4}))?", spec)
        if not match:
            raise UsageError(
                f"task {spec!r}: a mixture of any size is moe:LAYERSxWIDTHxEXPERTS, such as moe:8x1024x16, or "
                "moe:8x1024x16+1 with a shared expert"
            )
        return make_moe_size(*(int(number or 0) for number in match.groups()))
    shape = GPTS.get(spec, spec.removeprefix("gpt:"))
    if not (match := re.fullmatch(r"(\d{1,6})x(\d{1,6})", shape)):
        raise UsageError(f"task {spec!r}: a GPT of any size is gpt:LAYERSxWIDTH, such as gpt:8x4096")
    return make_gpt_size(int(match[1]), int(match[2]))


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
    "llama-70b": Size(
        layers=80, width=8192, heads=64, kv_heads=8, hidden=28672, rope_base=500_000.0, vocab=128256,
        batch=1, context=8192, learning_rate=1.5e-4,
    ),
    "llama-405b": Size(
        layers=126, width=16384, heads=128, kv_heads=8, hidden=53248, rope_base=500_000.0, vocab=128256,
        batch=1, context=8192, learning_rate=8e-5,
    ),
}  # fmt: skip
MIXTURES = {
    "moe-tiny": Size(
        layers=4, width=128, heads=2, kv_heads=2, hidden=256, experts=8, chosen=2, vocab=BYTES,
        batch=8, context=128, learning_rate=3e-3, steps=80,
    ),
    "olmoe-1b-7b": Size(
        layers=16, width=2048, heads=16, kv_heads=16, hidden=1024, experts=64, chosen=8, vocab=OLMOE_VOCAB,
        batch=8, context=2048, learning_rate=4e-4,
    ),
}  # fmt: skip


def make(
    spec: str,
    *,
    batch: int | None = None,
    context: int | None = None,
    data: str | None = None,
    seed: int = 0,
    vocab: int | None = None,
    packages: bool = False,
    tokenizer: str | None = None,
    field: str | None = None,
    max_tokens: int | None = None,
) -> Task:
    """Make a language task from its name. None means: the default of the model's size.

    Args:
        spec: The name of a built-in task, ``gpt:LAYERSxWIDTH`` or ``moe:LAYERSxWIDTHxEXPERTS``.
        batch: Sequences per batch.
        context: Tokens in a sequence.
        data: A text, documents (``.jsonl``, ``.parquet``, a saved dataset, ``hf:NAME``), a ``.bin`` of tokens or a
            folder. None: the source code of Python's standard library.
        seed: Decides the positions of training windows. Evaluation windows are the same for every seed.
        vocab: 256 means bytes; more, a byte-pair encoding of that size.
        packages: Whether to add the source code of the installed packages.
        tokenizer: A ``tokenizer.json`` to use instead.
        field: The field that holds the text of a document.
        max_tokens: How much of the documents to read.

    Raises:
        UsageError: An option is out of range, or two options contradict each other.
    """
    size = find_size(spec)
    batch = size.batch if batch is None else batch
    context = size.context if context is None else context
    coder = None if tokenizer is None else open_tokenizer(files.expand_path(tokenizer))
    vocab = _choose_vocab(size.vocab, vocab, coder)
    for name, value in (("batch", batch), ("context", context), ("vocab", vocab), ("max-tokens", max_tokens)):
        if value is not None and value < 1:
            raise UsageError(f"task {spec!r}: --{name} {value}: expected at least 1")
    if data is not None and packages:
        raise UsageError("--packages extends the built-in corpus; give either --packages or --data")
    if sources.kind_of(data) != "tokens" and coder is None and vocab < BYTES:
        raise UsageError(f"task {spec!r}: --vocab {vocab}: text takes {BYTES} (bytes) or more")
    config = size.make_config(context, vocab)
    facts: dict[str, Any] = {
        "parameters": config.parameters(),
        "layers": config.layers,
        "width": config.width,
        "heads": config.heads,
        "batch": batch,
        "context": context,
        "vocab": vocab,
        "padded_vocab": config.padded_vocab,
        "data": "Python source" if data is None else data,
    }
    if isinstance(config, MoEConfig):
        chosen = {"experts": config.experts, "experts_per_token": config.chosen, "shared_experts": config.shared}
        facts |= {"active_parameters": config.active_parameters(), **chosen}
    if coder is not None:
        facts["tokenizer"] = tokenizer

    @functools.cache
    def open_data() -> Source:
        opened = sources.open_source(
            data,
            vocab=vocab,
            context=context,
            packages=packages,
            coder=coder,
            field=field,
            max_tokens=max_tokens,
        )
        facts.update(opened.facts)
        facts["unigram_entropy"] = corpus.unigram_entropy(opened.data.shards["train"][0])
        facts["train_tokens"], facts["eval_tokens"] = opened.data.size("train"), opened.data.size("eval")
        return opened

    def make_batch(step: int, split: str) -> tuple[Tensor, Tensor]:
        return open_data().data.sample(step, split, batch, context, seed if split == "train" else 0)

    def make_synthetic_batch(step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(step)
        window = torch.randint(0, vocab, (batch, context + 1), generator=generator)
        return window[:, :-1].contiguous(), window[:, 1:].contiguous()

    return Task(
        reads_ahead=True,
        recordable=True,
        name=spec,
        model=lambda: MODELS[type(config)](config),
        batch=make_batch,
        loss=loss,
        metrics=measure_routing if isinstance(config, MoEConfig) else None,
        sample=lambda model: continue_text(model, open_data(), context),
        synthetic=make_synthetic_batch,
        items_per_batch=batch * context,
        eval_batches=EVAL_BATCHES,
        unit="token",
        flops_per_item=config.flops_per_token(),
        learning_rate=size.learning_rate,
        steps=size.steps,
        facts=facts,
    )


def _choose_vocab(usual: int, given: int | None, coder: Tokenizer | None) -> int:
    """Choose the vocabulary size: the given one, else the tokenizer's, else the default of the model's size."""
    if coder is None:
        return usual if given is None else given
    if given is not None and given < coder.vocab:
        raise UsageError(f"--vocab {given}: the tokenizer has {coder.vocab} tokens; leave --vocab out")
    return coder.vocab if given is None else given


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean cross-entropy of a batch, in nats per token."""
    inputs, targets = batch
    mean: Tensor = model(inputs, targets)
    return mean


def measure_routing(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """Return the load-balancing loss (1 if all experts get equally many tokens) and the z-loss of a mixture."""
    balance, z = model(batch[0], routing=True).unbind()
    return {"balance_loss": balance, "z_loss": z}


@torch.no_grad()
def continue_text(model: nn.Module, source: Source, context: int) -> str:
    """Sample text after the prompt, under the caller's autocast. The model's training mode is restored."""
    ids = list(source.prompt)
    # All inputs have one shape, padded at the end, which causal attention ignores. With a new length for each token,
    # cuDNN plans its attention again: 27 s for 200 tokens on an H200. A quarter of the context shows what was learned.
    length = max(context // 4, min(context, 64))
    window = torch.zeros(1, length, dtype=torch.long)
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)  # a separate one: a sample must not change later training
    was_training, ending = model.training, ""
    model.eval()
    try:
        for _ in range(SAMPLE_TOKENS):
            seen = ids[-length:]
            window[0, : len(seen)] = torch.tensor(seen)
            logits = model(window.to(device))[0, len(seen) - 1, : source.data.vocab].float().cpu()
            if not logits.isfinite().all():
                ending = " [the model's output is no longer finite here]"
                break
            ids.append(int(torch.multinomial((logits / TEMPERATURE).softmax(0), 1, generator=generator)))
    finally:
        model.train(was_training)
    return (source.decode(ids) if source.decode else " ".join(map(str, ids))) + ending
