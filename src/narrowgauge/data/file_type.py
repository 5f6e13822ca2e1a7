"""What a file really is, by its first bytes: a format that cannot say what it is must not swallow another one.

The first bytes of a PyTorch checkpoint make perfectly good tokens, and those of an archive perfectly good bytes.
"""

from __future__ import annotations

KINDS = {
    b"PK\x03\x04": "a zip archive or PyTorch checkpoint",
    b"\x80\x02": "a Python pickle",
    b"\x80\x04": "a Python pickle",
    b"\x1f\x8b": "a gzip archive",
    b"\x28\xb5\x2f\xfd": "a zstd archive",
    b"\x93NUMPY": "a numpy array",
    b"GGUF": "a GGUF model",
    b"\x89HDF": "an HDF5 file",
    b"PAR1": "a Parquet file",
    b"ARROW1": "an Arrow file",
    b"%PDF": "a PDF",
}
"""How files of other kinds begin."""
LOOK_BYTES = 8192
"""How far a file is looked into for a zero byte, which is how git tells binary from text."""


def recognise(start: bytes) -> str | None:
    """What a file that begins like this is, if it is one of the known kinds."""
    return next((what for magic, what in KINDS.items() if start.startswith(magic)), None)


def why_no_text(start: bytes) -> str | None:
    """What keeps a file that begins like this from being text, or None."""
    if what := recognise(start):
        return f"is {what}"
    return "has zero bytes, so it is binary (or UTF-16)" if b"\0" in start[:LOOK_BYTES] else None
