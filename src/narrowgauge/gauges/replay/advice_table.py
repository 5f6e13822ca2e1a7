"""The table of advice: for each op, phase and kind of value, why the op produced inf or NaN and how to fix it.

Ops are the names of aten (``log`` for aten.log, aten.log_ and LogBackward0), never parts of names. The first row that
matches wins, so a row with a condition stands before the row without it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One cause."""

    ops: tuple[str, ...]
    """Names of aten ops without "aten."; in backward, the op whose derivative is computed."""
    phase: str | None
    """forward, backward, or None for both."""
    kind: str | None
    """nan, inf, or None for both."""
    advice: str
    when: str | None = None
    """A condition on the inputs, by its name in advice.py."""


LOGARITHMS = ("log", "log2", "log10")
EXPONENTIALS = ("exp", "exp2", "expm1", "sinh", "cosh")
DIVISIONS = ("div", "reciprocal", "addcdiv", "true_divide", "floor_divide")
REMAINDERS = ("fmod", "remainder")
VARIANCES = ("var", "std", "var_mean", "std_mean")
NORMS = ("native_layer_norm", "native_group_norm", "native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm",
         "batch_norm_elemt", "rms_norm", "fused_rms_norm")  # fmt: skip
SOFTMAXES = ("softmax", "log_softmax", "safe_softmax", "scaled_dot_product_attention",
             "scaled_dot_product_efficient_attention", "scaled_dot_product_flash_attention",
             "scaled_dot_product_flash_attention_for_cpu", "scaled_dot_product_cudnn_attention",
             "scaled_dot_product_attention_math", "native_multi_head_attention")  # fmt: skip
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot", "matmul", "linear", "convolution",
            "mkldnn_convolution", "cudnn_convolution", "convolution_backward", "scaled_mm", "trilinear", "addr",
            "mkldnn_rnn_layer", "Block")  # fmt: skip
SUMS = ("sum", "mean", "cumsum", "nansum", "add", "sub", "rsub", "mul", "addcmul", "lerp", "prod", "cumprod",
        "mse_loss", "accumulate_grad", "gradient sum", "logsumexp", "smooth_l1_loss", "huber_loss", "embedding",
        "linalg_vector_norm", "index_add", "scatter_add", "foreach_add", "foreach_mul", "norm")  # fmt: skip
CASTS = ("to_copy", "copy", "to", "convert_element_type")

ROWS: tuple[Row, ...] = (
    Row(("mean", *VARIANCES), None, "nan", "the mean of an empty tensor is 0/0: a selection is empty", "empty"),
    Row(("nll_loss_forward", "nll_loss2d_forward", "nll_loss", "nll_loss2d", "HeadLoss"), None, "nan",
        "every target has ignore_index, so the mean is 0/0: make sure that at least one target is not ignored"),
    Row(("nll_loss_forward", "nll_loss2d_forward", "nll_loss", "nll_loss2d", "HeadLoss"), None, "inf",
        "the loss of a target with probability 0 is infinite: keep logits small (lower learning rate, soft capping) "
        "and compute the loss in FP32"),
    Row(("ctc_loss",), None, None, "no alignment exists, because a target is longer than its input (repeated labels "
        "need a blank between them): filter such samples, or pass zero_infinity=True"),
    Row(SOFTMAXES, "forward", "nan", "softmax of a fully masked row is NaN: leave one position unmasked, or mask with "
        "a large finite number", "infinite input"),
    Row(SOFTMAXES, None, None, "the scores exceed the range of the format: scale the queries down, or normalize "
        "queries and keys"),
    Row((*SUMS, *PRODUCTS), None, "nan", "inf - inf and 0 * inf are NaN: apply the mask after this op, or mask with a "
        "large finite number", "infinite input"),
    Row(LOGARITHMS, "forward", "inf", "log of 0 is -inf: clamp the argument (x.clamp_min(1e-12)); for probabilities "
        "use log_softmax or logsigmoid"),
    Row(LOGARITHMS, "forward", "nan", "log of a negative number is NaN: find out why the argument is negative, or "
        "clamp it"),
    Row(LOGARITHMS, "backward", None, "the derivative of log is infinite at 0: clamp the argument (x.clamp_min(1e-12)) "
        "before the log"),
    Row(("log1p",), "forward", "inf", "log1p of -1 is -inf: clamp the argument above -1"),
    Row(("log1p",), "forward", "nan", "log1p of a number below -1 is NaN: clamp the argument above -1"),
    Row(("log1p",), "backward", None, "the derivative of log1p is infinite at -1: clamp the argument above -1"),
    Row(("logit",), "forward", "inf", "logit of 0 or 1 is infinite: pass eps (torch.logit(x, eps=1e-6)), or let the "
        "model return the logits"),
    Row(("logit",), "forward", "nan", "logit is defined between 0 and 1: its argument is no probability"),
    Row(("logit",), "backward", None, "the derivative of logit is infinite at 0 and 1: pass eps "
        "(torch.logit(x, eps=1e-6))"),
    Row(("xlogy", "special_xlog1py", "special_entr"), "forward", "inf", "the logarithm's argument is 0 while its "
        "factor is not (for entr: it is negative): clamp the argument"),
    Row(("xlogy", "special_xlog1py", "special_entr"), "forward", "nan", "the logarithm's argument is negative: clamp "
        "it"),
    Row(("xlogy", "special_xlog1py", "special_entr"), "backward", None, "the derivative of x*log(y) is infinite at 0 "
        "and undefined where both are 0: clamp the argument of the logarithm, or detach targets"),
    Row(("lgamma", "mvlgamma", "digamma", "polygamma"), "forward", None, "the gamma functions are infinite or "
        "undefined at 0 and the negative integers: keep the argument positive (softplus, clamp_min)"),
    Row(("lgamma", "mvlgamma", "digamma", "polygamma"), "backward", None, "the derivative of a gamma function is "
        "infinite at 0 and the negative integers: keep the argument positive (softplus, clamp_min)"),
    Row(("sqrt", "rsqrt"), "forward", "nan", "the root of a negative number is NaN: clamp the argument at 0, and find "
        "out why it is negative (a difference of two close numbers, such as E[x^2] - E[x]^2, can be)"),
    Row(("rsqrt",), "forward", "inf", "rsqrt of 0 is infinite: add an epsilon that the format can represent inside the "
        "root"),
    Row(("sqrt", "rsqrt"), "backward", None, "the derivative of a square root is infinite at 0: add an epsilon inside "
        "the root, not outside"),
    Row(("norm", "linalg_vector_norm", "cdist", "cdist_forward", "pdist_forward", "dist", "hypot", "std", "std_mean"),
        "backward", None, "the derivative of a norm, distance or standard deviation does not exist at 0: compute the "
        "root by hand with an epsilon inside, (x.square().sum(-1) + eps).sqrt()"),
    Row(EXPONENTIALS, None, None, "exp overflows FP16 at 11.1 and FP32 and BF16 at 88.7: subtract the largest value "
        "first, or clamp the argument"),
    Row(("pow",), "forward", "nan", "a fractional power of a negative base is NaN: clamp the base at 0, or take its "
        "absolute value"),
    Row(("pow",), "forward", "inf", "a negative power of 0 is infinite: clamp the base away from 0",
        "negative exponent"),
    Row(("pow",), "forward", "inf", "the power exceeds the range of the format: scale or clamp the base first"),
    Row(("pow",), "backward", None, "the derivative of a power with an exponent below 1 is infinite at 0, and that of "
        "a negative base to a tensor's power is NaN: clamp the base away from 0"),
    Row(DIVISIONS, None, "nan", "0/0 is NaN: numerator and denominator are both 0; treat that case separately "
        "(torch.where on the denominator before dividing), or add an epsilon that the format can represent"),
    Row(DIVISIONS, None, "inf", "division by 0, or by a number too small for the format (FP16 flushes below 6e-8): add "
        "an epsilon that the format can represent"),
    Row(REMAINDERS, None, None, "the remainder of a division by 0 is NaN: keep the divisor away from 0"),
    Row(("acosh",), "forward", None, "acosh is defined from 1 upwards: clamp the argument at 1"),
    Row(("acosh",), "backward", None, "the derivative of acosh is infinite at 1: clamp the argument slightly above 1"),
    Row(("acos", "asin"), "forward", None, "acos and asin are defined from -1 to 1: clamp the argument (rounding alone "
        "can exceed 1 by a bit)"),
    Row(("acos", "asin"), "backward", None, "the derivative of acos and asin is infinite at -1 and 1: clamp the "
        "argument inside, for example to 1 - 1e-6"),
    Row(("atanh", "erfinv", "special_erfinv"), "forward", "inf", "atanh and erfinv are infinite at -1 and 1: clamp the "
        "argument inside, for example to 1 - 1e-6"),
    Row(("atanh", "erfinv", "special_erfinv"), "forward", "nan", "atanh and erfinv are defined between -1 and 1: clamp "
        "the argument inside"),
    Row(("atanh", "erfinv", "special_erfinv"), "backward", None, "the derivative of atanh and erfinv is infinite at -1 "
        "and 1: clamp the argument inside"),
    Row(VARIANCES, "forward", "nan", "the variance of one value with correction=1 is 0/0: use more values, or "
        "correction=0"),
    Row(NORMS, None, None, "check the range of the input; norms need FP32 statistics and an epsilon that the format "
        "can represent"),
    Row(("linalg_eigh", "linalg_eig", "linalg_svd"), "backward", None, "the derivative of eigenvectors or "
        "singular vectors does not exist if two eigenvalues or singular values are equal: use a loss of the values "
        "alone (eigvalsh, svdvals), or break the tie with a small random diagonal"),
    Row(("linalg_eigh", "linalg_eig", "linalg_svd"), "forward", None, "the decomposition failed: check that the matrix "
        "has a moderate range, and compute it in FP32 or FP64"),
    Row(("linalg_inv_ex", "linalg_solve_ex", "linalg_solve_triangular", "linalg_slogdet", "linalg_det",
         "linalg_cholesky_ex", "linalg_qr", "linalg_lu_factor_ex", "cholesky_solve", "triangular_solve"), None, None,
        "the matrix is singular, or nearly: add a small multiple of the identity, or use lstsq or pinv"),
    Row(("gradient norm",), None, None, "find the layer whose gradients explode, and lower the learning rate"),
    Row(PRODUCTS, None, None, "the result exceeds the range of the format: scale the inputs or weights down, normalize "
        "before, or lower the learning rate"),
    Row(SUMS, None, None, "a number that is an argument of this op is infinite: check where it comes from",
        "infinite number"),
    Row(SUMS, None, None, "the result exceeds the range of the format: compute it in FP32, or scale the inputs down",
        "16 bits"),
    Row(SUMS, None, None, "the result exceeds the range of FP32 (3.4e38): scale the inputs down, and find out why they "
        "are so large"),
    Row(CASTS, None, None, "the value exceeds the range of the target format: leave it in FP32, or scale it first"),
)  # fmt: skip

GENERAL = "check the ranges of its inputs: one of them is outside the domain of the op"
DELIBERATE = "this value was set on purpose and reached the loss or a gradient: check the mask"
DELIBERATE_NAN = (
    "NaN was written as a constant here: some ops do so for an undefined result (logdet of a negative determinant); "
    "check the arguments at this line"
)
SOURCES = {
    "input": "fix the data: the batch is not finite before the model sees it",
    "parameter": "the weights were not finite before this step: resume from an earlier checkpoint and capture an "
    "earlier step",
    "buffer": "the buffer was not finite before this step: resume from an earlier checkpoint and capture an "
    "earlier step",
    "unseen": "check what writes this tensor: a kernel that bypasses the dispatcher, NumPy, an attribute of the module",
}
KEEP = "finite in FP32: keep this module in FP32 (keep={module} in the recipe)"
UPCAST = "finite in FP32: compute it in FP32 (call .float() on its inputs)"
BF16 = ", or use bf16, which has the range of FP32"
FIXED_SCALE = (
    "the loss scale is fixed at {scale:g} and multiplies every gradient: use a dynamic loss scale (recipe fp16), or a "
    "smaller one"
)
