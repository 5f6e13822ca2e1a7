"""Kernel tests run on a GPU where there is one, and in Triton's interpreter where there is none."""

import pytest
import torch

from narrowgauge import kernels


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    monkeypatch.setattr(kernels, "interpreting", not torch.cuda.is_available())
