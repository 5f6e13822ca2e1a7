"""What all tests share: subprocesses find the package in the source tree, and torch's threads stay few."""

import os
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src"
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH")]))
