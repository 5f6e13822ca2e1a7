"""Data for supervised fine-tuning: from a file of conversations to numbered batches of packed rows.

    records -> examples -> text (chat template) -> tokens -> split -> cut at the context -> rows -> batches

A batch is a pure function of its number. Row ``n`` of the training split, counted over all epochs, is

    order(epoch)[n % rows]   with   epoch = n // rows   and a new order for each epoch

so a batch may end one epoch and start the next. A document is held out for evaluation by a hash of its content: every
copy of it is in the same split, the split is the same for every tokenizer and seed, and documents can be added without
moving others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from narrowgauge import files
from narrowgauge.data.chat_tokens import ChatEncoder
from narrowgauge.data.conversations import NAMES
from narrowgauge.data.model_tokenizer import load_model_tokenizer
from narrowgauge.data.pack_rows import PackedRows, RowArrays, fill_row, make_generator, pack_rows
from narrowgauge.data.tokenized_examples import EMPTY, NO_ASSISTANT, NO_TURN, TokenizedExamples, tokenize_examples
from narrowgauge.errors import UsageError

CUT = "cut_before_loss"
"""Why a document is skipped: its first ``context`` tokens carry no loss."""
REASONS = {
    EMPTY: "without text",
    NO_ASSISTANT: "without an assistant turn",
    NO_TURN: "whose assistant turns the chat template rewrites",
    CUT: "cut before the first token with loss",
}


@dataclass(frozen=True)
class Split:
    """The rows of one split."""

    examples: TokenizedExamples
    starts: NDArray[np.int64]
    """Where each document starts in the tokens of ``examples``."""
    lengths: NDArray[np.int64]
    """Tokens of each document, at most ``context``."""
    rows: PackedRows
    truncated: int
    """Documents that were cut at ``context``."""
    lost_tokens: int
    """Tokens that were cut off."""
    skipped: int
    """Documents that were cut before their first token with loss."""

    def fill(self, row: int, context: int, pad: int) -> RowArrays:
        """Lay the documents of a row out."""
        tokens, has_loss = self.examples.tokens, self.examples.has_loss
        places = [slice(start, start + length) for start, length in self._places(row)]
        return fill_row([(tokens[place], has_loss[place]) for place in places], context, pad)

    def _places(self, row: int) -> list[tuple[int, int]]:
        documents = self.rows[row]
        return list(zip(self.starts[documents].tolist(), self.lengths[documents].tolist(), strict=True))

    def count_loss(self) -> int:
        """Return the number of tokens that carry loss."""
        places = zip(self.starts.tolist(), self.lengths.tolist(), strict=True)
        return sum(int(np.count_nonzero(self.examples.has_loss[start : start + length])) for start, length in places)


class FinetuningData:
    """Numbered batches of packed rows for fine-tuning. Made by ``open_finetuning_data``.

    Attributes:
        facts: Facts for the run's record: counts of documents and tokens, and what was skipped or cut.
        context: Tokens in a row.
        batch_rows: Rows in a batch.
    """

    def __init__(
        self, splits: Mapping[str, Split], facts: dict[str, Any], context: int, batch_rows: int, seed: int, pad: int
    ) -> None:
        self.facts, self.context, self.batch_rows = facts, context, batch_rows
        self._splits, self._seed, self._pad = dict(splits), seed, pad
        self._order = functools.lru_cache(maxsize=4)(self._make_order)

    def batch(self, step: int, split: str) -> dict[str, Tensor]:
        """Return batch number ``step`` of a split. The same arguments give the same batch.

        Labels are those of transformers: the label of a token is the token itself, or -100 without loss, and the model
        shifts them. Evaluation batches go through the rows in a fixed order and start again at the end.

        Args:
            step: The number of the batch, from 0.
            split: "train" or "eval".

        Returns:
            ``input_ids``, ``labels`` and ``position_ids``, each of ``batch_rows`` rows and ``context`` columns. The
            position_ids start at 0 in each document, and in the unused end of a row.

        Raises:
            UsageError: There is no data for evaluation.
        """
        found = self._get_split(split)
        count = len(found.rows)
        if not count:
            raise UsageError("there is no data for evaluation; give an eval_share above 0 or a file for evaluation")
        rows = []
        for number in range(step * self.batch_rows, (step + 1) * self.batch_rows):
            row = number % count if split == "eval" else int(self._order(number // count)[number % count])
            rows.append(found.fill(row, self.context, self._pad))
        names = ("input_ids", "labels", "position_ids")
        return {name: torch.from_numpy(np.stack([getattr(row, name) for row in rows])) for name in names}

    def rows(self, split: str) -> int:
        """Return the number of rows of a split."""
        return len(self._get_split(split).rows)

    @property
    def steps_per_epoch(self) -> int:
        """Batches until every training row was used once. The last of them may hold rows of the next epoch."""
        return self.steps_for(1)

    @property
    def eval_batches(self) -> int:
        """Batches until every evaluation row was used once. The last of them may repeat the first rows."""
        return -(-self.rows("eval") // self.batch_rows)

    def steps_for(self, epochs: float) -> int:
        """Return the number of batches for a number of epochs, rounded up."""
        return max(1, int(np.ceil(epochs * self.rows("train") / self.batch_rows)))

    def describe(self) -> str:
        """Describe the data in a few lines for the user."""
        facts = self.facts
        total, held_out = facts["documents"], facts["eval_documents"]
        first = (
            f"{total:,} {NAMES[facts['form']]}: {total - held_out:,} for training, {held_out:,} for evaluation; "
            + (
                f"{facts['truncated']:,} were cut at {self.context:,} tokens ({facts['lost_tokens']:,} tokens lost); "
                if facts["truncated"]
                else ""
            )
            + f"{_percent(facts['tokens'], facts['tokens'] + facts['padding'])} of the packed tokens are data, "
            f"{_percent(facts['loss_tokens'], facts['tokens'])} of the data carries loss"
        )
        lines = [first]
        if skipped := {reason: count for reason, count in facts["skipped"].items() if count}:
            lines.append("skipped: " + ", ".join(f"{count:,} {REASONS[reason]}" for reason, count in skipped.items()))
        if facts["turns_without_loss"]:
            lines.append(
                f"{facts['turns_without_loss']:,} of {facts['turns']:,} assistant turns carry no loss: the chat "
                "template renders them differently once the conversation continues, or no message precedes them"
            )
        if facts["turns_without_end"]:
            lines.append(
                f"{facts['turns_without_end']:,} of {facts['turns']:,} assistant turns do not end with a special token "
                "in the chat template: the model may not learn where to stop"
            )
        return "\n".join(lines)

    def _get_split(self, split: str) -> Split:
        if split not in self._splits:
            raise UsageError(f"there is no split {split!r}; expected one of {', '.join(self._splits)}")
        return self._splits[split]

    def _make_order(self, epoch: int) -> NDArray[np.int64]:
        return make_generator("epoch", self._seed, epoch).permutation(len(self._splits["train"].rows))


def open_finetuning_data(
    path: str | Path,
    tokenizer_folder: str | Path,
    *,
    context: int = 2048,
    batch: int = 4,
    eval_share: float = 0.05,
    eval_path: str | Path | None = None,
    seed: int = 0,
    notify: Callable[[str], None] = print,
) -> FinetuningData:
    """Read, encode and pack data for fine-tuning. No weights are needed.

    Args:
        path: A .jsonl, .json or .parquet file of examples, or a folder of such files.
        tokenizer_folder: The folder of a Hugging Face model, with its tokenizer.
        context: Tokens in a row. Longer documents are cut.
        batch: Rows in a batch.
        eval_share: The share of the documents for evaluation. 0: none.
        eval_path: A file for evaluation. Then all documents of ``path`` are for training.
        seed: Decides the order of the training rows. The evaluation rows are the same for every seed.
        notify: Receives lines about the progress.

    Raises:
        UsageError: A file or an argument is wrong.
    """
    for name, value, least in (("context", context, 2), ("batch", batch, 1)):
        if value < least:
            raise UsageError(f"{name} {value}: expected at least {least}")
    if not 0 <= eval_share < 1:
        raise UsageError(f"eval_share {eval_share}: expected at least 0 and less than 1")
    tokenizer = load_model_tokenizer(files.expand_path(str(tokenizer_folder)))
    encoder = ChatEncoder(tokenizer)
    examples = tokenize_examples(files.expand_path(str(path)), encoder, notify)
    if eval_path is not None:
        held_out = np.zeros(len(examples), np.bool_)
        eval_examples = tokenize_examples(files.expand_path(str(eval_path)), encoder, notify)
        eval_split = _make_split(eval_examples, np.ones(len(eval_examples), np.bool_), context, 0)
    else:
        held_out = hold_out(examples.digests, eval_share)
        eval_split = _make_split(examples, held_out, context, 0)
    train_split = _make_split(examples, ~held_out, context, seed)
    for split, source in ((train_split, path), (eval_split, eval_path)):
        if source is not None and not len(split.rows):
            raise UsageError(
                f"{source}: none of the {split.skipped:,} documents has a token with loss in its first {context:,}; "
                "give a longer context"
            )
    splits = {"train": train_split, "eval": eval_split}
    sources = [examples] if eval_path is None else [examples, eval_split.examples]
    facts = _collect_facts(splits, sources, context)
    facts["tokenizer"] = str(tokenizer_folder)
    facts["largest_token"] = max(tokenizer.pad, *(int(one.tokens.max()) for one in sources))
    return FinetuningData(splits, facts, context, batch, seed, tokenizer.pad)


def hold_out(digests: NDArray[np.uint64], share: float) -> NDArray[np.bool_]:
    """Choose the documents for evaluation by their hashes.

    Args:
        digests: A hash of each document in 64 bits.
        share: The share of the documents. At least one is chosen if there are two different ones.

    Returns:
        Whether each document is for evaluation.
    """
    none = np.zeros(len(digests), np.bool_)
    if not share or not len(digests):
        return none
    chosen: NDArray[np.bool_] = digests < np.uint64(int(share * 2**64))
    if not chosen.any() or chosen.all():
        chosen = digests == digests.min()
    return none if chosen.all() else chosen


def _make_split(examples: TokenizedExamples, chosen: NDArray[np.bool_], context: int, seed: int) -> Split:
    starts = np.asarray(examples.starts, np.int64)[chosen]
    whole = np.asarray(examples.ends, np.int64)[chosen] - starts
    too_long = np.flatnonzero(whole > context)
    useless = [index for index in too_long if not examples.has_loss[starts[index] : starts[index] + context].any()]
    kept = np.ones(len(whole), np.bool_)
    kept[useless] = False
    starts, whole = starts[kept], whole[kept]
    lengths = np.minimum(whole, context)
    return Split(
        examples=examples,
        starts=starts,
        lengths=lengths,
        rows=pack_rows(lengths, context, seed),
        truncated=int((whole > context).sum()),
        lost_tokens=int((whole - lengths).sum()),
        skipped=len(useless),
    )


def _collect_facts(splits: Mapping[str, Split], sources: list[TokenizedExamples], context: int) -> dict[str, Any]:
    """Collect the counts of both splits. ``padding`` is the unused tokens of all rows."""
    both = list(splits.values())
    tokens = sum(int(split.lengths.sum()) for split in both)
    skipped = {
        reason: sum(one.facts["skipped"].get(reason, 0) for one in sources) for reason in (EMPTY, NO_ASSISTANT, NO_TURN)
    }
    skipped[CUT] = sum(split.skipped for split in both)
    return {
        "form": sources[0].facts["form"],
        "documents": sum(len(split.lengths) for split in both),
        "eval_documents": len(splits["eval"].lengths),
        "tokens": tokens,
        "train_tokens": int(splits["train"].lengths.sum()),
        "eval_tokens": int(splits["eval"].lengths.sum()),
        "loss_tokens": sum(split.count_loss() for split in both),
        "rows": len(splits["train"].rows),
        "eval_rows": len(splits["eval"].rows),
        "padding": sum(len(split.rows) for split in both) * context - tokens,
        "truncated": sum(split.truncated for split in both),
        "lost_tokens": sum(split.lost_tokens for split in both),
        "skipped": skipped,
        **{
            name: sum(one.facts[name] for one in sources)
            for name in ("turns", "turns_without_loss", "turns_without_end")
        },
    }


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / max(whole, 1):.1f}%"
