"""Texts and small archives for tests of the corpus. Makes ``bench`` importable, which is not installed."""

import io
import random
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # the processes that the corpus starts get this path too
COMMON = ["the", "of", "and", "to", "a", "in", "is", "that", "for", "it"]


def make_prose(seed, words=300):
    """English-like paragraphs: random words, of which a third are common ones."""
    generator = random.Random(seed)
    chosen = [
        generator.choice(COMMON) if generator.random() < 0.35 else "".join(generator.choices("aeioubdfklmnprst", k=6))
        for _ in range(words)
    ]
    return "\n\n".join(" ".join(chosen[start : start + 40]).capitalize() + "." for start in range(0, words, 40))


def make_code(seed):
    generator = random.Random(seed)
    names = ["".join(generator.choices("abcdefghij", k=7)) for _ in range(30)]
    return "".join(f"def {name}(value):\n    return value + other_{name}(value)\n\n\n" for name in names)


def write_deb(path, members, more=()):
    """Write a Debian package with files, and ``more`` entries of other types."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:xz") as archive:
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
        for entry in more:
            archive.addfile(entry)
    content = b"!<arch>\n"
    for name, part in {"debian-binary": b"2.0\n", "control.tar.xz": b"odd", "data.tar.xz": data.getvalue()}.items():
        content += f"{name:16}{0:12}{0:6}{0:6}{100644:8}{len(part):10}`\n".encode() + part + b"\n" * (len(part) % 2)
    path.write_bytes(content)
    return path


def write_wheel(path, members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path
