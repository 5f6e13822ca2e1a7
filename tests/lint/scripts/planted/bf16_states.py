"""Pure BF16: the model is cast, and so are AdamW's states."""
# ruff: noqa

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, get_cosine_schedule_with_warmup

name = "gpt2"
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name, torch_dtype=torch.bfloat16).cuda()
model.gradient_checkpointing_enable()
no_decay = ("bias", "ln_")
groups = [
    {"params": [p for n, p in model.named_parameters() if not any(x in n for x in no_decay)], "weight_decay": 0.1},
    {"params": [p for n, p in model.named_parameters() if any(x in n for x in no_decay)], "weight_decay": 0.0},
]
optimizer = torch.optim.AdamW(groups, lr=1e-5)  # lint: states-16bit
schedule = get_cosine_schedule_with_warmup(optimizer, 100, 1000)


def step(batch):
    out = model(**batch, labels=batch["input_ids"])
    out.loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    return out.loss.detach()


with open("corpus.txt") as lines:
    for number, line in enumerate(lines):
        loss = step(tokenizer(line, return_tensors="pt").to("cuda"))
        if number % 100 == 0:
            print(number, loss.item())
