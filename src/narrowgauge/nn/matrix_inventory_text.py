"""The matrix inventory as text: a table of all matrices, and one line with the share of each format."""

from __future__ import annotations

from collections.abc import Sequence

from narrowgauge.nn.matrix_inventory import Matrix

NOUNS = {
    "linear": "linear layer",
    "block": "linear layer",
    "head": "head",
    "experts": "expert tensor",
    "attention": "attention projection",
    "recurrent": "recurrent weight",
    "convolution": "convolution",
    "bilinear": "bilinear form",
    "computed": "parametrized weight",
    "raw": "raw parameter",
}
SHOWN = 4
"""How many groups of other formats the line lists."""


def tabulate(matrices: Sequence[Matrix]) -> str:
    """Return one line per matrix: path, shape, kind, formats of its three products, and the reason."""
    rows = [
        (m.path, "x".join(map(str, m.shape)) or "?", m.kind, "/".join(m.formats) or "not multiplied", _format_reason(m))
        for m in matrices
    ]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(4)]
    return "\n".join(
        "  ".join([*(f"{cell:<{width}}" for cell, width in zip(row[:4], widths, strict=True)), row[4]]) for row in rows
    )


def _format_reason(matrix: Matrix) -> str:
    return (
        f"{matrix.reason}; {_format_name(matrix)} where autocast supports the product"
        if matrix.assumed
        else matrix.reason
    )


def _format_name(matrix: Matrix) -> str:
    return matrix.formats[0].upper()


def summarize(matrices: Sequence[Matrix], compute: str, fused: str = "") -> str:
    """Return the share of multiplied parameters in the recipe's format, then the formats of the rest.

    ``fused`` is text to add after the first part.
    """
    multiplied = [matrix for matrix in matrices if matrix.formats]
    if not multiplied:
        return "none: no parameter is multiplied"
    total = sum(matrix.size for matrix in multiplied) or 1
    share = measure_share(matrices, compute)
    amount = f"{_format_percent(share)} of the multiplied parameters{_format_flops_share(multiplied, compute, share)}"
    groups: dict[tuple[str, str, bool], list[Matrix]] = {}
    for matrix in multiplied:
        for format in dict.fromkeys(matrix.formats):
            if format != compute or matrix.assumed:
                groups.setdefault((NOUNS[matrix.kind], format, matrix.assumed), []).append(matrix)
    parts = sorted((_format_group(*key, members, total) for key, members in groups.items()), reverse=True)
    told = [text for _, text in parts[:SHOWN]]
    if len(parts) > SHOWN:
        told.append(f"others ({_format_percent(sum(size for size, _ in parts[SHOWN:]))})")
    rest = f"; the rest: {', '.join(told)}" if told else ""
    return amount + fused + rest + _format_unknown_format_flops_share(multiplied)


def measure_share(matrices: Sequence[Matrix], compute: str) -> float:
    """Return the share of multiplied parameters that are known to be multiplied in a format."""
    multiplied = [matrix for matrix in matrices if matrix.formats]
    total = sum(matrix.size for matrix in multiplied) or 1
    return sum(_count_in_format(matrix, compute) for matrix in multiplied if not matrix.assumed) / total


def _count_in_format(matrix: Matrix, format: str) -> float:
    """Return how many parameters of a matrix count for a format: each of its three products counts a third."""
    return matrix.size * matrix.formats.count(format) / len(matrix.formats)


def _format_group(noun: str, format: str, assumed: bool, members: list[Matrix], total: int) -> tuple[float, str]:
    size = sum(_count_in_format(matrix, format) for matrix in members) / total
    names = f": {', '.join(m.path for m in members[:3])}{' and more' if len(members) > 3 else ''}"
    where = f"left to autocast, {format.upper()} where it supports them" if assumed else f"in {format.upper()}"
    number = f"{len(members)} {noun}{'s' if len(members) > 1 else ''}"
    return size, f"{number} {where} ({_format_percent(size)}{names if noun == NOUNS['linear'] else ''})"


def _format_flops_share(multiplied: list[Matrix], compute: str, share: float) -> str:
    """Return the share of the known FLOPs per token, if it differs: a token uses few of the experts."""
    known = [(matrix, matrix.active) for matrix in multiplied if matrix.active is not None]
    total = sum(matrix.size * active for matrix, active in known)
    done = sum(_count_in_format(matrix, compute) * active for matrix, active in known if not matrix.assumed)
    text = _format_percent(done / total) if total else _format_percent(share)
    word = "FLOPs" if len(known) == len(multiplied) else "known FLOPs"
    return f", {text} of their {word}" if text != _format_percent(share) else ""


def _format_unknown_format_flops_share(multiplied: list[Matrix]) -> str:
    """Name the matrices whose FLOPs depend on the input."""
    counts: dict[str, int] = {}
    for matrix in multiplied:
        if matrix.active is None:
            counts[NOUNS[matrix.kind]] = counts.get(NOUNS[matrix.kind], 0) + 1
    if not counts or len(multiplied) == sum(counts.values()):
        return ""
    named = " and ".join(f"{count} {noun}{'s' if count > 1 else ''}" for noun, count in counts.items())
    return f"; FLOPs are unknown for {named}"


def _format_percent(share: float) -> str:
    if 0 < share < 0.005:
        return "<1%"
    return ">99%" if 0.995 <= share < 1 else f"{share:.0%}"
