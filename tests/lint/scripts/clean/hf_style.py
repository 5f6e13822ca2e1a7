"""A Hugging Face model fine-tuned in a custom loop, in FP16 with a scaler and accumulation."""
# ruff: noqa

import argparse
import logging

import torch
from datasets import load_dataset
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    get_scheduler,
    set_seed,
)

logger = logging.getLogger(__name__)


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="bert-base-uncased")
    parser.add_argument("--fp16", action="store_true")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--accumulate", type=int, default=4)
    parser.add_argument("--max_grad_norm", type=float, default=1.0)
    return parser.parse_args()


def evaluate(model, loader, device):
    model.eval()
    right = torch.zeros((), device=device)
    count = 0
    for batch in loader:
        batch = {k: v.to(device) for k, v in batch.items()}
        with torch.no_grad():
            outputs = model(**batch)
        right += (outputs.logits.argmax(-1) == batch["labels"]).sum()
        count += len(batch["labels"])
    return right.item() / count


def main():
    args = parse_args()
    set_seed(0)
    device = torch.device("cuda")
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    data = load_dataset("glue", "mrpc").map(
        lambda rows: tokenizer(rows["sentence1"], rows["sentence2"], truncation=True), batched=True
    )
    collate = DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8)
    train = DataLoader(data["train"], shuffle=True, batch_size=args.batch, collate_fn=collate)
    valid = DataLoader(data["validation"], batch_size=args.batch, collate_fn=collate)
    model = AutoModelForSequenceClassification.from_pretrained(args.model, num_labels=2).to(device)
    no_decay = ["bias", "LayerNorm.weight"]
    groups = [
        {"params": [p for n, p in model.named_parameters() if not any(d in n for d in no_decay)], "weight_decay": 0.01},
        {"params": [p for n, p in model.named_parameters() if any(d in n for d in no_decay)], "weight_decay": 0.0},
    ]
    optimizer = AdamW(groups, lr=2e-5, eps=1e-8)
    scheduler = get_scheduler("linear", optimizer, 100, args.epochs * len(train) // args.accumulate)
    scaler = torch.amp.GradScaler("cuda", enabled=args.fp16)
    for epoch in range(args.epochs):
        model.train()
        for step, batch in enumerate(train):
            batch = {k: v.to(device) for k, v in batch.items()}
            with torch.autocast("cuda", dtype=torch.float16, enabled=args.fp16):
                outputs = model(**batch)
                loss = outputs.loss / args.accumulate
            scaler.scale(loss).backward()
            if (step + 1) % args.accumulate == 0 or step == len(train) - 1:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
                scale = scaler.get_scale()
                scaler.step(optimizer)
                scaler.update()
                if scaler.get_scale() >= scale:
                    scheduler.step()
                optimizer.zero_grad()
            if step % 50 == 0:
                logger.info("epoch %d step %d loss %.4f", epoch, step, loss.item() * args.accumulate)
        logger.info("accuracy %.3f", evaluate(model, valid, device))
    model.save_pretrained("out")


if __name__ == "__main__":
    main()
