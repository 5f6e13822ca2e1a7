"""The kind of work that an operator or a kernel does, derived from its name: one table for forecasts and profiles.

Names are those of torch's operators (``aten::mm``), of narrowgauge's (``narrowgauge::cast``), and of the kernels of
cuBLAS, cuDNN, CUTLASS, Inductor and narrowgauge. A kernel that Inductor fused from several kinds of work counts as the
first kind of the table that its name matches.
"""

from __future__ import annotations

import functools
import re

KINDS = {
    "communication": r"nccl|all_?reduce|all_?gather|reduce_?scatter",
    "attention": r"sdpa|fmha|flash|attention|mha_",
    "gauges": r"_stats_kernel",
    "optimizer": r"adam|muon_|multi_tensor_apply|foreach|_squares_kernel|_norms_kernel|gradient_norms|vector_norm|"
    r"lpnorm|^optimizer\.|amp_(update|non_finite)|clip_grad",
    "product": r"nvjet|gemm|gemv|xmma|cutlass|splitk|cublas|triton_tem|wgrad|dgrad|mkldnn_linear|"
    r"_multiply_(experts|slots)_kernel|narrowgauge::multiply|"
    r"::(_scaled_|_grouped_|_int_)?(mm|addmm|bmm|baddbmm|matmul|linear|mv|addmv|dot|einsum)\b",
    "convolution": r"convol|conv\d",
    "loss": r"softmax|nll_?loss|cross_entropy|logsumexp|mse_loss|statistics_kernel|_logits|rescale|"
    r"statistics$|loss_gradient|loss_and_grad",
    "norm": r"layer_?norm|rms_?norm|batch_?norm|group_?norm|native_norm|gammabeta|rowwisemoments|bn_(fw|bw)|"
    r"^(forward|backward|sum)_kernel|narrowgauge::norm",
    "activation": r"gelu|silu|swish|swiglu|glu_|relu|threshold|tanh|sigmoid|^pointwise_kernel|gated_backward|"
    r"narrowgauge::activation|activate_(experts|wide)",
    "embedding": r"embedding",
    "cast": r"_cast_kernel|transpose_kernel|_max_abs_kernel|(round|spread)_blocks|"
    r"narrowgauge::(cast|gather_cast|transpose|max_abs)",
    "copy": r"copy|clone|contiguous|catarray|::(cat|stack|to)$|narrowgauge::(pack|gather$)|_gather_kernel|memcpy|"
    r"memset|fill|zero_$",
}
"""Each kind with the pattern of its names; the first that matches counts."""
OTHER = "pointwise"
"""What matches none of them: elementwise work, reductions, indexing."""
_RULES = [(kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in KINDS.items()]


@functools.lru_cache(maxsize=4096)
def classify(name: str) -> str:
    """The kind of work of an operator ("aten::mm") or a kernel ("nvjet_tst_192x192...")."""
    return next((kind for kind, pattern in _RULES if pattern.search(name)), OTHER)
