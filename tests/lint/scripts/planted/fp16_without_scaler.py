"""FP16 by default, and the loss is not scaled."""
# ruff: noqa

import torch
from torch import nn
from torch.utils.data import DataLoader

from speech import Dataset, Encoder


def train(path, steps, lr=1e-4):
    loader = DataLoader(Dataset(path), batch_size=32, shuffle=True, num_workers=4)
    model = Encoder(80, 512).cuda()
    head = nn.Linear(512, 32).cuda()
    ctc = nn.CTCLoss(zero_infinity=True)
    optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step, (audio, text, lengths, text_lengths) in enumerate(loader):
        with torch.autocast("cuda"):
            features = model(audio.cuda())
            log_probs = head(features).log_softmax(-1).transpose(0, 1)
            loss = ctc(log_probs, text, lengths, text_lengths)
        optimizer.zero_grad()
        loss.backward()  # lint: fp16-without-scaler
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step == steps:
            break
    return model
