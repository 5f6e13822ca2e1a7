"""The Trainer is set to mixed precision, and the model is loaded in BF16."""
# ruff: noqa

import torch
from datasets import load_dataset
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
)


def main():
    tokenizer = AutoTokenizer.from_pretrained("roberta-base")
    data = load_dataset("glue", "sst2").map(lambda row: tokenizer(row["sentence"], truncation=True), batched=True)
    model = AutoModelForSequenceClassification.from_pretrained(  # lint: bf16-true
        "roberta-base", torch_dtype=torch.bfloat16, num_labels=2
    )
    args = TrainingArguments(
        output_dir="out", per_device_train_batch_size=32, learning_rate=2e-5, num_train_epochs=3, bf16=True
    )
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=data["train"],
        eval_dataset=data["validation"],
        data_collator=DataCollatorWithPadding(tokenizer),
    )
    trainer.train()


if __name__ == "__main__":
    main()
