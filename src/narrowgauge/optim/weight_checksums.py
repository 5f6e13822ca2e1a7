"""Check words: how an optimizer notices that somebody else has written a BF16 weight.

Half of a split master is the model's weight, and anybody may write it: pruning, an EMA copied in, ``load_state_dict``,
``.data``, ``set_``. No hook and no version counter sees all of that. So beside the remainders stands, for every 128
weights, a word of 32 bits made from the weights as the optimizer wrote them. Where it differs from what is there now,
the group's remainders belong to other weights and count as 0: the master is what was written.

    word = sum over the 64 pairs of the group of  t * (t >> 15)              all modulo 2**32, unsigned
    t    = even * A + odd * B + place of the pair * C                       even, odd: the bits of two neighbours

The update has the weights in registers, so that a word costs a few integer operations and no pass. The place makes a
swap visible; the product makes the sum more than linear, so that changes of many weights at once (a sign, an ulp) do
not cancel. One changed sign is always seen: with t = 2**15 u + l it changes t by 2**15 A and the word by
2**15 (2uA + A**2) + lA modulo 2**32 (less 2**17 l where u wraps), which is a multiple of 2**15 only for l = 0, and then
an odd one; B is odd, too. A and B are such that no two neighbours give the same t after changes of less than 65,120
each. Any other change is missed once in some 2**32 groups, and then costs half a BF16 step.

Reading honours the words and changes nothing. Weights that are taken out, replaced for an evaluation and put back have
their words again, and no bit is lost.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from narrowgauge.optim.split_fp32 import is_rounded_from, join

GROUP = 128
A, B, C = 0x9E3779B1 - 2**32, 0xD6BEFA39 - 2**32, 0x85EBCA77 - 2**32
"""Odd, as int32."""
_AT_ONCE = 1 << 17
"""Groups whose words are made at once, so that a large embedding needs no large temporaries."""


def compute_checksums(weight: Tensor) -> Tensor:
    """The words of a BF16 tensor, int32, one for every 128 values of it in row-major order."""
    bits = weight.detach().contiguous().view(torch.int16).reshape(-1)
    rows = pad(bits, (0, -bits.numel() % GROUP)).view(-1, GROUP)
    return _words(rows)


def _words(rows: Tensor) -> Tensor:
    """The words of groups, [groups, 128] in int16."""
    places = torch.arange(GROUP // 2, dtype=torch.int32, device=rows.device) * C
    words = []
    for some in rows.split(_AT_ONCE):
        even, odd = some.view(-1, GROUP // 2, 2).to(torch.int32).unbind(2)
        state = even.mul(A).add_(odd * B).add_(places)
        words.append(((state >> 15) & 0x1FFFF).mul_(state).sum(1).to(torch.int32))
    return torch.cat(words)


def find_own_groups(weight: Tensor, words: Tensor) -> Tensor:
    """Of each group, whether the optimizer wrote it last."""
    return compute_checksums(weight) == words


def zero_stale_remainders(weight: Tensor, remainder: Tensor, words: Tensor | None) -> Tensor:
    """The remainders that belong to a weight; 0 where somebody else has written the weight. None: all belong to it."""
    if words is None:
        return remainder
    own = expand_groups(find_own_groups(weight, words), weight.numel()).view(weight.shape)
    return torch.where(own, remainder, 0)


def expand_groups(of_groups: Tensor, numel: int) -> Tensor:
    """For each value what there is one of for each group."""
    return of_groups[:, None].expand(-1, GROUP).reshape(-1)[:numel]


def sample_valid_remainders(weight: Tensor, remainder: Tensor, words: Tensor | None, every: int) -> Tensor:
    """Every so many values of ``trusted``, flat, without a pass over all groups where few are looked at."""
    some = remainder.reshape(-1)[::every]
    if words is None:
        return some
    if every <= GROUP:
        return zero_stale_remainders(weight, remainder, words).reshape(-1)[::every]
    bits = weight.detach().contiguous().view(torch.int16).reshape(-1)
    groups = torch.arange(0, bits.numel(), every, device=bits.device) // GROUP
    places = groups[:, None] * GROUP + torch.arange(GROUP, device=bits.device)
    rows = torch.where(places < bits.numel(), bits[places.clamp(max=bits.numel() - 1)], 0)
    return torch.where(_words(rows) == words[groups], some, 0)


def join_master(weight: Tensor, other: Tensor, words: Tensor | None) -> Tensor:
    """The FP32 master of a BF16 weight by its other half: a remainder with its words, or an FP32 copy."""
    if other.dtype is torch.int16:
        return join(weight, zero_stale_remainders(weight, other, words))
    return torch.where(is_rounded_from(weight, other), other, weight.float())
