"""Memory that operations allocate in addition to their results, which a trace of tensors does not show.

cuBLAS           a workspace for every thread that runs products, which is never freed: PyTorch allocates 32 MiB on
                 Hopper and later, 8.1 MiB before (its CUBLAS_WORKSPACE_CONFIG default); forward and backward are two
                 threads. Measured: the first model of a process held exactly 64 MiB more than the next ones (fp32 and
                 tf32 in bench/results/h200-gpt2-124m-run1.json). FP8 products are timed on a separate stream once,
                 which makes three
attention        backward accumulates the gradient of the queries in FP32, and has one value for each row and head
                 (FlashAttention 2's dq_accum and softmax_d; cuDNN has the same)
norm_backward    partial sums of the weight's gradient, one row of FP32 for each program (kernels.norm)
embedding        backward sorts the indices: four lists of 8 bytes each
cross_entropy    nothing: its kernels write only results
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from narrowgauge.forecast.trace.trace import TensorRef
from narrowgauge.hardware import Gpu
from narrowgauge.kernels.norm import choose_backward_launch
from narrowgauge.nn.survey import Layer
from narrowgauge.recipe import Recipe

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm")


def get_cublas_bytes(gpu: Gpu) -> int:
    """What a thread's first product allocates and never frees."""
    return 32 << 20 if gpu.capability >= (9, 0) else 8320 << 10


def times_products(recipe: Recipe, layers: Iterable[Layer]) -> bool:
    """Whether an engine times products on a separate stream when it is made, which allocates a workspace for it."""
    return recipe.products == "fastest" and any(layer.decision is not None for layer in layers)


class Workspaces:
    """The workspaces of operations on a GPU."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu

    def __call__(self, name: str, reads: list[TensorRef], writes: list[TensorRef]) -> int:
        """Bytes while the operation runs."""
        if name.endswith("attention_backward") and len(reads) > 1:
            query = reads[1].shape
            return 4 * prod(query) + 4 * prod(query[:-1])
        if name == "norm_backward":
            rows, columns = reads[1].shape
            cut = choose_backward_launch(columns)
            return 4 * columns * min(-(-rows // cut.rows), cut.programs * self.gpu.sms)
        if name == "embedding_dense_backward":
            return 4 * 8 * prod(reads[1].shape)
        return 0
