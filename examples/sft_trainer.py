"""TRL's SFTTrainer under a recipe: ``adapt(SFTTrainer(...), recipe)``, for all weights or for low-rank adapters.

python examples/sft_trainer.py --recipe fp8-lean
python examples/sft_trainer.py --recipe fp8-lean --lora

A folder with a small Llama and its tokenizer is made in place of a download. It is fine-tuned on conversations, with
loss on the assistant's words. Halfway a new SFTTrainer resumes, and continues bit for bit. The result loads as usual.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, disable_progress_bars
from peft import AutoPeftModelForCausalLM, LoraConfig
from tiny import compare
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.trainer_callback import PrinterCallback
from transformers.utils.logging import disable_progress_bar
from trl import SFTConfig, SFTTrainer

from narrowgauge.integrations.transformers import adapt, gauges_of

STEPS = 6
TEMPLATE = """{% for message in messages %}{{ '<|' + message.role + '|>' }}
{%- if message.role == 'assistant' %}{% generation %}{{ message.content + eos_token }}{% endgeneration %}
{%- else %}{{ message.content }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""


def make_conversation(number: int) -> dict[str, list[dict[str, str]]]:
    question, answer = f"What comes after {number}?", f"{number + 1} comes after {number}."
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def make_model_folder(folder: Path) -> Path:
    """Write a small Llama in BF16 and its tokenizer, as they would be downloaded."""
    texts = [message["content"] for number in range(64) for message in make_conversation(number)["messages"]]
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts, 320, special_tokens=["</s>", "<|user|>", "<|assistant|>"], show_progress=False)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer._tokenizer, eos_token="</s>", pad_token="</s>", chat_template=TEMPLATE
    )
    wrapped.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128,
    )  # fmt: skip
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    return folder


class LossRecordingTrainer(SFTTrainer):  # type: ignore[misc]
    """An SFTTrainer that records the loss of each step."""

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(*args, **kwargs)
        self.losses = [*getattr(self, "losses", []), loss.item()]
        return loss


def make_trainer(model: Path, out: Path, recipe: str, lora: bool) -> LossRecordingTrainer:
    arguments = SFTConfig(
        output_dir=str(out), max_steps=STEPS, per_device_train_batch_size=4, learning_rate=1e-3, packing=True,
        max_length=64, assistant_only_loss=True, save_steps=STEPS // 2, logging_steps=STEPS // 2, report_to="none",
        disable_tqdm=True, use_cpu=True, dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = LossRecordingTrainer(
        str(model),
        arguments,
        train_dataset=Dataset.from_list([make_conversation(number) for number in range(64)]),
        peft_config=LoraConfig(r=8, target_modules="all-linear") if lora else None,
    )
    trainer.remove_callback(PrinterCallback)
    return adapt(trainer, recipe)  # type: ignore[no-any-return]  # the one line


def main() -> None:
    parser = argparse.ArgumentParser(description="Fine-tune a small Llama with TRL's SFTTrainer.")
    parser.add_argument("--recipe", default="fp8-lean", help="fp32, bf16, bf16-lean, fp8 or fp8-lean (default)")
    parser.add_argument("--lora", action="store_true", help="train low-rank adapters instead of all weights")
    args = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    disable_progress_bar()
    disable_progress_bars()
    with tempfile.TemporaryDirectory() as name:
        model, out = make_model_folder(Path(name) / "model"), Path(name) / "run"
        whole = make_trainer(model, out, args.recipe, args.lora)
        whole.train()
        print(gauges_of(whole).engine.conversion.summary())
        resumed = make_trainer(model, out, args.recipe, args.lora)
        resumed.train(resume_from_checkpoint=f"{out}/checkpoint-{STEPS // 2}")
        compare("resumed SFTTrainer", resumed.losses, whole.losses[STEPS // 2 :], "the uninterrupted run")
        whole.save_model(f"{name}/result")
        load = AutoPeftModelForCausalLM if args.lora else AutoModelForCausalLM
        print(
            f"loss {whole.losses[0]:.4f} to {whole.losses[-1]:.4f}; saved:",
            type(load.from_pretrained(f"{name}/result")),
        )


if __name__ == "__main__":
    main()
