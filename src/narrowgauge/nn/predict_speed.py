"""Predicts how fast a converted model trains, relative to the same model in BF16 with torch.compile.

When a model is converted, only the shapes of its matrices are known, and how each is multiplied. So the prediction is
for a usual number of tokens per step, and the GPU is assumed to be busy. A matrix with K inputs and N outputs takes

    its three products, each at the rate of its format, and the casts to FP8 (products/choose_formats.py)
    + (K + N) * tokens * REST_BYTES / memory bandwidth * the factor of how the layer runs

The second line stands for everything between products: norms, activations, attention, residual sums, the loss, the
optimizer. ``REST_BYTES`` and the factors were fitted to these measurements on one H200 (ratios to compiled BF16):

    model                                 how it runs                  measured   predicted   source
    transformers Qwen3 10x2048            fp8, blocks fused            1.74       1.64        docs/families.md
    transformers Llama 16x2048            fp8, blocks fused            1.74       1.63        docs/families.md
    nanoGPT 12x768                        fp8, blocks fused            1.44       1.50        docs/families.md
    nanoGPT 12x768                        bf16, blocks fused           1.09       1.16        docs/families.md
    built-in gpt2-124m (12x768)           fp8, blocks fused            1.49       1.50        docs/results.md
    built-in gpt2-124m (12x768)           bf16, blocks fused           1.11       1.16        docs/results.md
    built-in gpt-1.3b (24x2048)           fp8, blocks fused            1.62       1.64        docs/results.md
    built-in gpt:8x4096                   fp8, blocks fused            1.73       1.74        docs/results.md
    transformers Qwen3 10x2048            fp8 by layers, compiled      1.32       1.36        docs/fp8.md
    nanoGPT 12x768                        fp8 by layers, compiled      1.16       1.15        docs/fp8.md
    transformers Qwen3 10x2048            fp8 by layers, uncompiled    0.83       0.94        docs/fp8.md
    nanoGPT 12x768                        fp8 by layers, uncompiled    0.93       0.71        docs/fp8.md

Nothing was fitted to these, whose experts run as one function, too:

    transformers OLMoE 4x2048             fp8, blocks fused            1.55       1.56        docs/experts.md
    transformers Mixtral 2x4096           fp8, blocks fused            1.65       1.74        docs/experts.md

A fused model of few tokens per step may be slower than predicted, because launching its kernels takes longer than they
run (transformers BERT 12x1024 with 16,384 tokens: 0.75). The number of tokens is not known here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from narrowgauge.hardware import Gpu
from narrowgauge.nn.matrix_inventory import Matrix
from narrowgauge.nn.products.choose_formats import predict_costs
from narrowgauge.nn.products.gemm import GemmChoice
from narrowgauge.peak_fractions import get_fraction

ROWS = 16384
"""Tokens per step. Every term of the prediction is proportional to it, so ratios do not depend on it."""
REST_BYTES = 24.0
"""Bytes of memory traffic per element of a layer's input and output, forward and backward, when compiled. What remains
of the measured BF16 steps after their products is 16 (GPTs) to 35 bytes (transformers' Llama and Qwen3)."""
FUSED = 0.75
"""Factor of that traffic in fused blocks and heads. Measured: 0.62 to 0.84."""
UNCOMPILED = 2.0
"""Factor of that traffic in a model's own code without torch.compile. Measured: 1.5 (nanoGPT) and 2.0 (Qwen3). The
larger one, because a slowdown that nobody mentions is worse than a mention too many."""
FUSED_KINDS = ("block", "head")
"""Kinds of matrices in fused blocks and heads. Experts are fused, too, if they can be multiplied in FP8."""


@dataclass(frozen=True)
class Speed:
    """Predicted speeds, relative to the model in BF16 with torch.compile: 2 is twice as fast."""

    as_converted: float
    """In the formats of the conversion."""
    in_bf16: float
    """The same with BF16 instead of FP8: blocks fused where they are now, compiled if it is compiled now."""
    if_compiled: float
    """In the formats of the conversion, with torch.compile for everything that is not fused."""
    fp8_share: float
    """Share of the FLOPs in FP8."""
    fused_share: float
    """Share of the FLOPs in fused blocks and heads."""


def predict_speed(
    matrices: Iterable[Matrix], gpu: Gpu, *, compiled: bool, measured: Mapping[str, float] | None = None
) -> Speed | None:
    """Predict the speed of a converted model.

    Args:
        matrices: The matrices of the model, with the formats of their products.
        gpu: The GPU it trains on.
        compiled: Whether torch.compile compiles what is not fused.
        measured: For layers by path, the time of their products and casts as chosen, relative to BF16, if it is known
            better than from the table.

    Returns:
        The speeds, or None if the model multiplies nothing.
    """
    multiplied = [matrix for matrix in matrices if matrix.formats]
    known = measured or {}
    rest_ms = {matrix.name: _predict_rest_ms(matrix, gpu) for matrix in multiplied}
    bf16_ms = {matrix.name: _predict_products_ms(matrix, gpu, narrow=False) for matrix in multiplied}
    products_ms = {
        matrix.name: bf16_ms[matrix.name] * known[matrix.path]
        if matrix.path in known
        else _predict_products_ms(matrix, gpu, narrow=True)
        for matrix in multiplied
    }
    baseline = sum(bf16_ms.values()) + sum(rest_ms.values())
    if not baseline:
        return None

    def compare(products: Mapping[str, float], otherwise: float) -> float:
        factors = ((matrix.name, FUSED if _is_fused(matrix) else otherwise) for matrix in multiplied)
        return baseline / sum(products[name] + rest_ms[name] * factor for name, factor in factors)

    now = 1.0 if compiled else UNCOMPILED
    total = sum(map(_count_parameters_per_token, multiplied))
    return Speed(
        as_converted=compare(products_ms, now),
        in_bf16=compare(bf16_ms, now),
        if_compiled=compare(products_ms, 1.0),
        fp8_share=sum(_count_parameters_per_token(m) * m.formats.count("fp8") / 3 for m in multiplied) / total,
        fused_share=sum(_count_parameters_per_token(m) for m in multiplied if _is_fused(m)) / total,
    )


def _count_parameters_per_token(matrix: Matrix) -> float:
    """Return how many of its parameters multiply one token. A convolution's count once, though it uses them often."""
    return matrix.size * _get_active_share(matrix)


def _get_active_share(matrix: Matrix) -> float:
    return 1.0 if matrix.active is None else matrix.active


def _predict_products_ms(matrix: Matrix, gpu: Gpu, narrow: bool) -> float:
    """Return the time of a matrix's three products. ``narrow``: with FP8 and its casts, where the formats say so."""
    if narrow and "fp8" in matrix.formats:
        rows, inputs, outputs = _measure_product(matrix)
        costs = predict_costs(round(rows), inputs, outputs, gpu)
        return costs.of(GemmChoice(*matrix.formats), fused=_is_fused(matrix))
    formats = ("fp32" if one == "fp32" else "bf16" for one in matrix.formats)
    rates = (gpu.peak(one) * get_fraction(f"product.{one}") for one in formats)
    return sum(2e3 * ROWS * _count_parameters_per_token(matrix) / rate for rate in rates)


def _predict_rest_ms(matrix: Matrix, gpu: Gpu) -> float:
    """Return the time of the work around a matrix in a compiled model."""
    rows, inputs, outputs = _measure_product(matrix)
    return 1e3 * REST_BYTES * rows * (inputs + outputs) / (gpu.bandwidth * get_fraction("memory.other"))


def _measure_product(matrix: Matrix) -> tuple[float, int, int]:
    """Return rows, inputs and outputs of its product. Experts are stacked in the first dimension; a token is a row for
    each expert that it has."""
    stacked = matrix.kind == "experts" and len(matrix.shape) == 3
    count, outputs = (matrix.shape[0], matrix.shape[1]) if stacked else (1, matrix.shape[0])
    return ROWS * _get_active_share(matrix) * count, matrix.size // (count * outputs), outputs


def _is_fused(matrix: Matrix) -> bool:
    return matrix.kind in FUSED_KINDS or (matrix.kind == "experts" and "fp8" in matrix.formats)
