"""Rules for silent faults of the forward pass: attention, positions, the loss's format, batch norm statistics.

``lasting`` decides which are reported. Thresholds are far from what healthy training shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from narrowgauge.findings import WARNING, Finding
from narrowgauge.gauges.rules.silent_rules import ModelHistory
from narrowgauge.gauges.rules.tensor_rules import UpdateContext

_LARGE_LOGITS = 1000.0
"""Logits of large models reach some hundreds while they train well; published divergences begin at several thousand."""
_GROWN_LOGITS, _GROWTH = 200.0, 20.0
_COARSE_ANGLE = 0.25
"""Radians. A rounding error this large makes the sine of an angle wrong in its first digit."""
_OFFSET, _SPREAD = 2.0, 2.0
"""Standard deviations, and powers of two, between the running statistics and the batch, in the median channel."""


def find_forward_faults(context: UpdateContext, before: ModelHistory) -> list[Finding]:
    """Return what every rule in ``RULES`` finds in one snapshot."""
    return [finding for rule in RULES for finding in rule(context, before)]


def check_attention(context: UpdateContext, before: ModelHistory) -> Iterator[Finding]:
    """Find attention logits that are very large, or have grown to a size at which softmax is one-hot."""
    for path, logits in _select(context, "attention_logits"):
        first = before.first_logits.get(path, logits)
        if logits > _LARGE_LOGITS or (logits > _GROWN_LOGITS and logits > _GROWTH * first):
            yield Finding(
                rule="attention-logits",
                severity=WARNING,
                where=path or "attention",
                detail=f"the largest logit is {logits:.4g} above the mean of its row; at first it was {first:.3g}",
                why="attention becomes one-hot and its gradients vanish; growing logits end in divergence",
                fix="normalize queries and keys (QK norm), lower the learning rate, or check the scale of the logits",
            )


def check_positions(context: UpdateContext, _: ModelHistory) -> Iterator[Finding]:
    """Find positions and angles in a 16-bit format that cannot tell them apart."""
    for path, error in _select(context, "coarse_angles"):
        if error > _COARSE_ANGLE:
            yield Finding(
                rule="positions-in-16-bits",
                severity=WARNING,
                where=path or "model",
                detail=f"sin or cos of angles in 16 bits; the largest is rounded by up to {error:.2g} radians",
                why="distant positions get the same or wrong encodings",
                fix="compute angles in FP32: .float() before, and autocast(enabled=False) around a product",
            )
    for path, _value in _select(context, "coarse_positions"):
        yield Finding(
            rule="positions-in-16-bits",
            severity=WARNING,
            where=path or "model",
            detail="torch.arange counts in 16 bits beyond what the format can count (BF16 256, FP16 2,048)",
            why="neighbouring positions become equal",
            fix="create positions as integers or in FP32",
        )


def check_loss_format(context: UpdateContext, _: ModelHistory) -> Iterator[Finding]:
    """Find a loss function that runs in 16 bits."""
    if _select(context, "loss_format"):
        yield Finding(
            rule="loss-in-16-bits",
            severity=WARNING,
            where="loss",
            detail="the loss function ran in 16 bits; autocast runs it in FP32",
            why="BF16 has 8 significant bits: a loss of 4 changes in steps of 0.03, and small gradients are rounded",
            fix="compute the loss inside engine.forward(), or from logits.float()",
        )


def check_batch_statistics(context: UpdateContext, _: ModelHistory) -> Iterator[Finding]:
    """Find batch norms whose running statistics are far from those of the batches that they get."""
    spreads = dict(_select(context, "spread"))
    for path, offset in _select(context, "offset"):
        if offset > _OFFSET or spreads.get(path, 0.0) > _SPREAD:
            yield Finding(
                rule="batchnorm-far-from-batch",
                severity=WARNING,
                where=path,
                detail=f"in half of its channels, its running mean is {offset:.2g} deviations from that of the "
                f"batch, or its deviation off by a factor of {2 ** spreads.get(path, 0.0):.3g}",
                why="evaluation normalizes with other statistics than training, and its results differ",
                fix="check its momentum, and whether one batch norm gets several kinds of batches (give each its own)",
            )


RULES: tuple[Callable[[UpdateContext, ModelHistory], Iterator[Finding]], ...] = (
    check_attention,
    check_positions,
    check_loss_format,
    check_batch_statistics,
)


def _select(context: UpdateContext, name: str) -> list[tuple[str, float]]:
    return [(path, value) for (fact, path), value in context.snapshot.facts.items() if fact == name]
