"""Only the norms are cast to FP16."""
# ruff: noqa

import torch
from torch import nn

from vision import VisionTransformer, train_loader


def cast_norms(model):
    for module in model.modules():
        if isinstance(module, (nn.LayerNorm, nn.BatchNorm2d)):
            module.half()  # lint: half-norms


model = VisionTransformer(depth=12, width=768).cuda()
cast_norms(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.3)
scaler = torch.amp.GradScaler("cuda")
criterion = nn.CrossEntropyLoss(label_smoothing=0.1)

for images, labels in train_loader():
    with torch.autocast("cuda", dtype=torch.float16):
        loss = criterion(model(images), labels)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
