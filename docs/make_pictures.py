"""Makes the pictures of the documentation from the real output of the commands.

usage: python docs/make_pictures.py [NAME...]      (default: all)
"""

import io
import os
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

PICTURES = {
    "formats": "narrowgauge formats 1.2e-7",
    "doctor": "narrowgauge doctor",
}
FOLDER = Path(__file__).parent / "pictures"


def draw(name: str, command: str) -> None:
    """Run a command as if in a terminal and save its output as an SVG."""
    environment = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": "100", "TERM": "xterm-256color"}
    arguments = [sys.executable, "-m", *command.split()]
    shown = subprocess.run(arguments, capture_output=True, text=True, check=True, env=environment).stdout
    console = Console(record=True, width=100, file=io.StringIO())
    console.print(Text.from_ansi(shown.rstrip()))
    FOLDER.mkdir(exist_ok=True)
    svg = console.export_svg(title=command)
    svg = re.sub(r"@font-face\s*\{.*?\}|<!--.*?-->", "", svg, flags=re.DOTALL)  # no requests
    (FOLDER / f"{name}.svg").write_text("\n".join(line.rstrip() for line in svg.splitlines() if line.strip()) + "\n")


for wanted in sys.argv[1:] or PICTURES:
    draw(wanted, PICTURES[wanted])
