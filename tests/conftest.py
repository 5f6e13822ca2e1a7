"""What all tests share: subprocesses find the package in the source tree, and kernels can be interpreted."""

import os
from pathlib import Path

import pytest
import torch

SOURCE = Path(__file__).parent.parent / "src"
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH")]))
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated; only tests/kernels asks for it


@pytest.fixture(autouse=True)
def mkldnn_stays_on():
    """A BF16 product that oneDNN cannot do makes torch turn oneDNN off for good, and later products round otherwise."""
    enabled = torch.backends.mkldnn.enabled
    yield
    if torch.backends.mkldnn.enabled != enabled:
        torch.backends.mkldnn.set_flags(enabled)
