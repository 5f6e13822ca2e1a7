"""Fine-tunes a model from a Hugging Face folder: ``narrowgauge train --model PATH --data FILE``.

Data and folder are checked when the task is made, before any weight is read. Rows are packed with whole documents, and
positions start again with each, so that no token attends to another document. The loss of an update is the mean over
all its tokens that carry loss, whichever batches they are in: a mean of the batches' means would give tokens of short
answers more weight.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrowgauge.data.finetuning import FinetuningData, open_finetuning_data
from narrowgauge.errors import UsageError
from narrowgauge.pretrained import PretrainedModel, adapters
from narrowgauge.pretrained.hub import get_short_name
from narrowgauge.pretrained.lora_options import parse_lora
from narrowgauge.pretrained.transformers_model import find_model
from narrowgauge.task import Batch, Task

NAME = "finetune"
CONTEXT, BATCH, EVAL_SHARE, EPOCHS = 2048, 4, 0.05, 1.0
LEARNING_RATE, LORA_LEARNING_RATE = 1e-5, 2e-4
IGNORED = -100
"""The label of a token without loss."""
MOST_EVAL_BATCHES = 64


def make(
    model: str,
    data: str,
    *,
    context: int | None = None,
    batch: int = BATCH,
    epochs: float = EPOCHS,
    eval_data: str | None = None,
    eval_share: float = EVAL_SHARE,
    lora: str | None = None,
    accumulate: int = 1,
    seed: int = 0,
    notify: Callable[[str], None] | None = None,
) -> Task:
    """Make the task of fine-tuning a model.

    Args:
        model: A folder with config.json, .safetensors files and a tokenizer, or a name on the Hub.
        data: A file of conversations, of prompts and completions, or of texts.
        context: Tokens per row; by default 2,048, or what the model supports if that is less.
        batch: Rows per batch.
        epochs: How often the data is seen; decides the default number of steps.
        eval_data: A file for evaluation, instead of a part of ``data``.
        eval_share: The part of ``data`` that is held out for evaluation.
        lora: Train adapters only: their options, or the folder of an adapter (``pretrained/lora_options.py``).
        accumulate: Batches per update, over which the loss is averaged.
        seed: Seed of the order of rows.
        notify: Prints a line for the user.
    """
    if not 0 < epochs < math.inf:
        raise UsageError(f"--epochs {epochs:g}: give a number above 0")
    found = find_model(model, {}, f"--model {model}", quantized=True)
    if found.weights is None:
        raise UsageError(f"--model {model}: fine-tuning needs weights, but the folder has no .safetensors files")
    factory = PretrainedModel(found, parse_lora(lora) if lora is not None else None)
    match = factory.match()  # damaged files, or weights of another model: known before the data is read
    limit = getattr(found.config, "max_position_embeddings", None)
    if context is not None and limit is not None and context > limit:
        raise UsageError(f"--context {context:,}: the model supports at most {limit:,} tokens (see its config.json)")
    context = context or min(CONTEXT, limit or CONTEXT)
    notify = notify or (lambda line: None)
    facts = {"model": str(found.weights), "epochs": epochs}
    if factory.lora is not None:
        notify(adapters.describe(match.model, factory.lora))
        facts |= {"lora": adapters.read_config(match.model), "sources": factory.list_sources(match.folder)}
    read = open_finetuning_data(
        data, found.weights, context=context, batch=batch, eval_share=eval_share, eval_path=eval_data, seed=seed,
        notify=notify,
    )  # fmt: skip
    vocabulary = found.config.get_text_config().vocab_size
    if read.facts["largest_token"] >= vocabulary:
        raise UsageError(
            f"--model {model}: its tokenizer has token {read.facts['largest_token']:,}, but the model's vocabulary has "
            f"{vocabulary:,}; the tokenizer is that of another model"
        )
    batches = NumberedBatches(read, accumulate)
    for line in read.describe().splitlines():
        notify(line)
    return Task(
        name=get_short_name(model),
        model=factory,
        loss=compute_loss,
        batch=batches.batch,
        items_per_batch=batch * context,
        unit="token",
        learning_rate=LEARNING_RATE if lora is None else LORA_LEARNING_RATE,
        weight_decay=0.0,
        steps=max(1, math.ceil(read.steps_for(epochs) / accumulate)),
        eval_batches=batches.eval_batches,
        reads_ahead=True,
        synthetic=functools.partial(make_random_batch, batch, context, vocabulary),
        facts={**facts, **read.facts},
    )


class NumberedBatches:
    """The batches of the data, each with the number of tokens that its loss is divided by."""

    def __init__(self, data: FinetuningData, accumulate: int) -> None:
        self.data, self.accumulate = data, accumulate
        self.held_out = "eval" if data.rows("eval") else "train"
        """The split for evaluation: without held out documents, the training rows."""
        self.eval_batches = min(MOST_EVAL_BATCHES, max(1, -(-data.rows(self.held_out) // data.batch_rows)))
        self._count = functools.lru_cache(maxsize=2)(self._count_group)

    def batch(self, step: int, split: str) -> Batch:
        """Return batch number ``step``, with ``loss_tokens``: for each row, its share of what the loss is divided by.

        That is the mean number of tokens of the batches that are averaged with it. Ranks that take some rows of a batch
        take as much of it.
        """
        name = self.held_out if split == "eval" else split
        group = -1 if split == "eval" else step // self.accumulate
        batch = self.data.batch(step, name)
        rows = len(batch["input_ids"])
        return {**batch, "loss_tokens": torch.full((rows,), self._count(group) / rows)}

    def _count_group(self, group: int) -> float:
        if group < 0:
            numbers, split = range(self.eval_batches), self.held_out
        else:
            numbers, split = range(group * self.accumulate, (group + 1) * self.accumulate), "train"
        labels = (self.data.batch(number, split)["labels"] for number in numbers)
        return max(1.0, sum(int((one != IGNORED).sum()) for one in labels) / len(numbers))


def compute_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the sum of the losses of a batch's tokens, divided by the number that the batch gives."""
    logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
    targets = F.pad(batch["labels"], (0, 1), value=IGNORED)[:, 1:]  # each token predicts the next
    total = F.cross_entropy(
        logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )  # fmt: skip
    loss: Tensor = total / batch["loss_tokens"].sum()
    return loss


def make_random_batch(rows: int, context: int, vocabulary: int, seed: int) -> Batch:
    """Return one random document per row, for benchmarks and forecasts."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocabulary, (rows, context), generator=generator)
    positions = torch.arange(context).expand(rows, context).contiguous()
    labels = tokens.clone()
    labels[:, 0] = IGNORED
    count = torch.full((rows,), float(context - 1))
    return {"input_ids": tokens, "labels": labels, "position_ids": positions, "loss_tokens": count}
