"""Two loops: one bypasses its engine's backward, the other calls the model outside of it and never calls backward."""
# ruff: noqa

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from narrowgauge import Engine


def tune(loader, steps=1000):
    model = AutoModelForCausalLM.from_pretrained("gpt2").cuda()
    engine = Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-5), recipe="fp8")
    for step, batch in zip(range(steps), loader):
        with engine.forward():
            outputs = model(**batch, labels=batch["input_ids"])
        outputs.loss.backward()  # lint: engine-backward
        engine.step()
        if step % 100 == 0:
            print(step, outputs.loss.item())


def distil(student, teacher, optimizer, loader):
    engine = Engine(student, optimizer, recipe="bf16-lean")
    for tokens in loader:
        with torch.no_grad():
            wanted = teacher(tokens).logits.softmax(-1)
        found = student(tokens).logits.log_softmax(-1)  # lint: engine-outside
        loss = F.kl_div(found, wanted, reduction="batchmean")
        if not torch.isfinite(loss):
            continue
        engine.step()  # lint: engine-no-backward
    torch.save({"student": student.state_dict()}, "student.pt")  # lint: engine-lean-save
