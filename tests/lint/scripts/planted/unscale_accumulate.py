"""An update takes four batches, and each of them unscales."""
# ruff: noqa

import torch
import torch.nn.functional as F

from data import make_loader
from model import UNet

ACCUMULATE = 4

model = UNet(channels=64).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
scaler = torch.amp.GradScaler("cuda", init_scale=2.0**14)
loader = make_loader(batch_size=16)

for epoch in range(50):
    for step, (image, mask) in enumerate(loader):
        image, mask = image.cuda(), mask.cuda()
        with torch.autocast("cuda", torch.float16):
            loss = F.binary_cross_entropy_with_logits(model(image), mask)
            loss = loss / ACCUMULATE
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)  # lint: unscale-twice
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if (step + 1) % ACCUMULATE == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    print(epoch)
