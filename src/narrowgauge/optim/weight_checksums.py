"""Checksums by which an optimizer detects that something else has written a BF16 weight.

Half of a split master is the model's weight, and any code may write it: pruning, copying an EMA, ``load_state_dict``,
``.data``, ``set_``. No hook and no version counter sees all of these. So the state has, for every 128 weights, a 32-bit
checksum of the weights as the optimizer wrote them. If it differs from that of the current weights, the group's
remainders are stale and count as 0: the master is the weight that was written.

    checksum = sum over the 64 pairs of the group of  t * (t >> 15)          all modulo 2**32, unsigned
    t        = even * A + odd * B + index of the pair * C                    even, odd: the bits of two neighbours

The update has the weights in registers, so a checksum costs a few integer operations and no pass over memory. The index
makes a swap visible. The product makes the sum nonlinear, so that changes of many weights at once (a sign, an ulp) do
not cancel. One changed sign is always detected: with t = 2**15 u + l it changes t by 2**15 A and the checksum by
2**15 (2uA + A**2) + lA modulo 2**32 (less 2**17 l if u wraps), which is a multiple of 2**15 only for l = 0, and then an
odd one; B is odd, too. With these A and B, no two neighbours give the same t after changes of less than 65,120 each.
Any other change is missed once in about 2**32 groups, and then costs half a BF16 step.

Reading respects the checksums and changes nothing. Weights that are swapped out for an evaluation and swapped back
match their checksums again, and no bit is lost.
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
"""Groups per pass, so that a large embedding needs no large temporaries."""


def compute_checksums(weight: Tensor) -> Tensor:
    """Return the int32 checksums of a BF16 tensor, one for every 128 values in row-major order."""
    bits = weight.detach().contiguous().view(torch.int16).reshape(-1)
    rows = pad(bits, (0, -bits.numel() % GROUP)).view(-1, GROUP)
    return _words(rows)


def _words(rows: Tensor) -> Tensor:
    """Return the checksums of groups, given as [groups, 128] in int16."""
    places = torch.arange(GROUP // 2, dtype=torch.int32, device=rows.device) * C
    words = []
    for some in rows.split(_AT_ONCE):
        even, odd = some.view(-1, GROUP // 2, 2).to(torch.int32).unbind(2)
        state = even.mul(A).add_(odd * B).add_(places)
        words.append(((state >> 15) & 0x1FFFF).mul_(state).sum(1).to(torch.int32))
    return torch.cat(words)


def find_own_groups(weight: Tensor, words: Tensor) -> Tensor:
    """Return for each group whether the optimizer wrote it last."""
    return compute_checksums(weight) == words


def zero_stale_remainders(weight: Tensor, remainder: Tensor, words: Tensor | None) -> Tensor:
    """Return the remainders, with 0 where something else wrote the weight. Without ``words`` all are valid."""
    if words is None:
        return remainder
    own = expand_groups(find_own_groups(weight, words), weight.numel()).view(weight.shape)
    return torch.where(own, remainder, 0)


def expand_groups(of_groups: Tensor, numel: int) -> Tensor:
    """Repeat one value per group for each value of the group."""
    return of_groups[:, None].expand(-1, GROUP).reshape(-1)[:numel]


def sample_valid_remainders(weight: Tensor, remainder: Tensor, words: Tensor | None, every: int) -> Tensor:
    """Return every k-th value of ``zero_stale_remainders``, flat, and check only the groups that are sampled."""
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
    """Return the FP32 master of a BF16 weight from its remainders and checksums, or from its FP32 copy."""
    if other.dtype is torch.int16:
        return join(weight, zero_stale_remainders(weight, other, words))
    return torch.where(is_rounded_from(weight, other), other, weight.float())
