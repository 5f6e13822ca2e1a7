"""The Hugging Face Trainer under a recipe: ``adapt(trainer, recipe=...)``, with gauges, findings and captures.

python examples/hf_trainer.py --recipe fp16

A small GPT-2 trains on Python's own source. Halfway a new model and Trainer resume with ``resume_from_checkpoint``. The
losses equal those of a plain ``ng.Engine`` loop, bit for bit.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
from tiny import compare, parse_recipe
from torch import Tensor
from torch.utils.data import IterableDataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from transformers.utils.logging import disable_progress_bar

import narrowgauge as ng
from narrowgauge.data import corpus
from narrowgauge.integrations.transformers import adapt, gauges_of

STEPS, BATCH, CONTEXT = 12, 4, 32


class Snippets(IterableDataset[dict[str, Tensor]]):
    """Chunks of source code as bytes, always in the same order."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        text = torch.from_numpy(corpus.load().train[: STEPS * BATCH * CONTEXT].copy()).long()
        for tokens in text.view(-1, CONTEXT):
            yield {"input_ids": tokens, "labels": tokens}


class LossRecordingTrainer(Trainer):
    """A Trainer that records the loss of each step. Any subclass can be adapted."""

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss: Tensor = super().training_step(*args, **kwargs)
        self.losses = [*getattr(self, "losses", []), loss.item()]
        return loss


def make_model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256, n_positions=CONTEXT, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # without it transformers 5.22 divides by one token per row too many
    return model


def make_trainer(recipe: str, folder: str) -> LossRecordingTrainer:
    arguments = TrainingArguments(
        output_dir=folder, max_steps=STEPS, per_device_train_batch_size=BATCH, learning_rate=1e-3, weight_decay=0.0,
        lr_scheduler_type="constant", max_grad_norm=0.0, save_steps=STEPS // 2, logging_steps=STEPS // 2,
        report_to="none", disable_tqdm=True, use_cpu=True, optim="adamw_torch", dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = LossRecordingTrainer(make_model(), arguments, train_dataset=Snippets())
    for printer in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(printer)
    return adapt(trainer, recipe, watch=5)  # type: ignore[no-any-return]


def engine_losses(recipe: str) -> list[float]:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    engine = ng.Engine(model, optimizer, recipe)
    rows = [row["input_ids"] for row in Snippets()]
    losses = []
    for step in range(STEPS):
        tokens = torch.stack(rows[step * BATCH : (step + 1) * BATCH])
        with engine.forward():  # the Trainer divides by the number of tokens itself
            loss = model(input_ids=tokens, labels=tokens, num_items_in_batch=tokens[:, 1:].ne(-100).sum()).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    recipe = parse_recipe("Train a small GPT-2 with the Hugging Face Trainer.")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        whole = make_trainer(recipe, folder)
        whole.train()
        resumed = make_trainer(recipe, folder)
        resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-{STEPS // 2}")
    expected = engine_losses(recipe)
    compare("Trainer", whole.losses, expected)
    compare("resumed Trainer", resumed.losses, expected[STEPS // 2 :])
    print("logged:", {name: value for name, value in whole.state.log_history[0].items() if name != "epoch"})
    for finding in gauges_of(whole).findings:
        print(f"{finding.severity}: {finding.rule} at {finding.where}: {finding.detail}")


if __name__ == "__main__":
    main()
