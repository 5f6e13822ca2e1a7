"""Logits are cast to FP16 before the loss."""
# ruff: noqa

import torch
import torch.nn.functional as F
from torch import nn


def distill(teacher, student, loader, temperature=2.0):
    optimizer = torch.optim.SGD(student.parameters(), lr=0.01)
    teacher.eval()
    for images, labels in loader:
        with torch.no_grad():
            wanted = teacher(images)
        logits = student(images).half()
        loss = F.cross_entropy(logits, labels)  # lint: half-loss
        soft = F.kl_div(
            F.log_softmax(logits.float() / temperature, -1),
            F.softmax(wanted.float() / temperature, -1),
            reduction="batchmean",
        )
        loss = loss + temperature**2 * soft
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return student
