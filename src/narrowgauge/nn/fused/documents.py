"""Finds packed documents in a boolean mask, so that attention can skip what the mask hides.

transformers makes a mask [B, 1, T, T] of positions that start again: a token sees its own document up to itself. A mask
is read here as exactly that, or not at all. In each of its rows, with

    first(i)    the first token that token i sees        count(i)    how many it sees
    reader(j)   the first token that sees token j

the mask consists of documents if, for all i and j,

    reader(j) = j                       no token sees a later one, and all see themselves
    count(i) = i - first(i) + 1         a token sees all from the first one to itself
    first(i) = i or first(i - 1)        it starts a document, or belongs to the one of the token before it

An empty row satisfies the second only with first(i) = i + 1, which it does not have. Padding, windows, prefixes that
all tokens see, and holes each break one of the equations.

The three numbers are reductions, without a temporary of the mask's size. The host reads the outcome once per mask. It
waits for the GPU then; transformers does so too when it makes such a mask. All layers of a model get the same mask, so
what was found is kept as long as the mask exists and is not changed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

SHORTEST_LIMIT = 64
"""Lengths of documents are rounded up to a power of two from here on, so that one CUDA graph serves many batches."""
FEWEST = 8
"""Numbers of documents are rounded up to a power of two from here on, for the same reason. The rest are empty."""
ALWAYS_FEW = 64
"""Up to this many documents a batch may have in any case."""
FEWEST_TOKENS = 32
"""Tokens that documents must have on average, beyond ``ALWAYS_FEW``. FlashAttention's backward allocates FP32 queries
for 128 more tokens per document; if each token of padding is a document, that would be 128 times the queries."""


@dataclass(frozen=True)
class Documents:
    """Documents of a batch."""

    bounds: Tensor | None
    """Where each starts in the B T tokens, and at last B T, as cu_seqlens: int32 [N + 1]. None: each row is one."""
    longest: int
    """At least the length of the longest."""

    def with_bounds(self, bounds: Tensor | None) -> Documents:
        return replace(self, bounds=bounds)


class _Found(NamedTuple):
    version: int
    rows: int
    documents: Documents | None


_found = WeakTensorKeyDictionary()


def find_documents(mask: Tensor, rows: int) -> Documents | None:
    """Return the documents of a boolean mask [B or 1, H or 1, T, T] over ``rows`` rows; None if it says anything else.

    None also where its values cannot be read (tensors without values, a CUDA graph that is being captured), and where
    one cannot know if they were changed since (inference mode).
    """
    if type(mask) is not Tensor or mask.is_inference() or mask.shape[1] != 1:
        return None
    with torch._C.DisableTorchFunction():  # in a forecast, meta tensors are said to be on a GPU
        if mask.device.type not in ("cpu", "cuda"):
            return None
    if mask.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    known: _Found | None = _found.get(mask)
    if known is None or known.version != mask._version or known.rows != rows:
        known = _found[mask] = _Found(mask._version, rows, _read_mask(mask[:, 0], rows))
    return known.documents


def _read_mask(seen: Tensor, rows: int) -> Documents | None:
    """Read a mask [B or 1, T, T]."""
    length, device = seen.shape[-1], seen.device
    numbers = seen.detach().view(torch.uint8)  # argmax takes no booleans; of equal values it returns the first
    token = torch.arange(length, device=device)
    first, reader = numbers.argmax(-1), numbers.argmax(-2)
    starts = first == token
    continues = torch.zeros_like(starts)
    continues[:, 1:] = first[:, 1:] == first[:, :-1]
    sizes = token - first + 1
    fits = (reader == token) & (seen.sum(-1) == sizes) & (starts | continues)
    copies = rows // len(seen)
    is_valid, count, longest = torch.stack([fits.all().long(), copies * starts.sum(), sizes.max()]).tolist()
    if not is_valid:
        return None
    if count == rows:
        return Documents(None, length)
    room, tokens = _round_up(count, FEWEST), rows * length
    if room > max(ALWAYS_FEW, tokens // FEWEST_TOKENS):
        return None
    places = torch.arange(tokens, device=device).masked_fill_(~starts.repeat(copies, 1).flatten(), tokens)
    bounds = torch.full((room + 1,), tokens, dtype=torch.int32, device=device)
    kept = min(room, tokens)
    bounds[:kept] = places.sort().values[:kept]
    return Documents(bounds, min(length, _round_up(longest, SHORTEST_LIMIT)))


def _round_up(number: int, least: int) -> int:
    """Return the next power of two."""
    return max(least, 1 << (number - 1).bit_length())
