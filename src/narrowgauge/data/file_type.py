"""Recognizes the type of a file by its first bytes.

Headerless tokens and plain text accept any bytes. Without this check, a PyTorch checkpoint would be read as tokens, and
an archive as text.
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
"""The first bytes of known file types."""
CHECKED_BYTES = 8192
"""How many bytes are searched for a zero byte, by which git, too, recognizes binary files."""


def recognize(start: bytes) -> str | None:
    """Return the type of a file that starts with these bytes, or None if it is not a known type."""
    return next((what for magic, what in KINDS.items() if start.startswith(magic)), None)


def explain_not_text(start: bytes) -> str | None:
    """Return why a file that starts with these bytes is not text, or None if it may be text."""
    if what := recognize(start):
        return f"is {what}"
    return "has zero bytes, so it is binary (or UTF-16)" if b"\0" in start[:CHECKED_BYTES] else None
