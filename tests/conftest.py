"""What all tests share: subprocesses find the package in the source tree, and kernels can be interpreted."""

import os
from pathlib import Path

import torch

SOURCE = Path(__file__).parent.parent / "src"
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH")]))
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated; only tests/kernels asks for it
