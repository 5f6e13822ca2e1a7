"""Names in torch and narrowgauge, by meaning: scalers, autocasts, optimizers, losses, formats."""

from __future__ import annotations


def words(text: str) -> list[str]:
    """Split names at spaces."""
    return text.split()


SCALERS = frozenset({
    "torch.amp.GradScaler", "torch.amp.grad_scaler.GradScaler", "torch.cuda.amp.GradScaler",
    "torch.cuda.amp.grad_scaler.GradScaler", "torch.cpu.amp.GradScaler", "narrowgauge.LossScaler",
    "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler",
})  # fmt: skip
AUTOCASTS = frozenset({
    "torch.autocast", "torch.amp.autocast", "torch.amp.autocast_mode.autocast", "torch.cuda.amp.autocast",
    "torch.cuda.amp.autocast_mode.autocast", "torch.cpu.amp.autocast",
})  # fmt: skip
OPTIMIZER_EPS: dict[str, float | None] = {
    "Adam": 1e-8, "AdamW": 1e-8, "NAdam": 1e-8, "RAdam": 1e-8, "Adamax": 1e-8, "RMSprop": 1e-8, "Adagrad": 1e-10,
    "SparseAdam": 1e-8, "Adadelta": 1e-6, "SGD": None, "ASGD": None, "Rprop": None, "LBFGS": None,
    "Muon": None,
}  # fmt: skip
"""Optimizers in torch.optim with the default of eps; None: no such argument."""
CLIPS = frozenset(
    f"torch.nn.utils{middle}.{name}"
    for middle in ("", ".clip_grad")
    for name in ("clip_grad_norm_", "clip_grad_value_", "clip_grad_norm")
)
LOSS_FUNCTIONS = frozenset(
    f"torch.nn.functional.{name}"
    for name in words(
        "cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss huber_loss kl_div binary_cross_entropy "
        "binary_cross_entropy_with_logits cosine_embedding_loss hinge_embedding_loss margin_ranking_loss "
        "multilabel_margin_loss multi_margin_loss poisson_nll_loss soft_margin_loss triplet_margin_loss ctc_loss "
        "gaussian_nll_loss"
    )
)
LOSS_CLASSES = frozenset(
    f"torch.nn.{name}"
    for name in words(
        "CrossEntropyLoss NLLLoss MSELoss L1Loss SmoothL1Loss HuberLoss KLDivLoss BCELoss BCEWithLogitsLoss "
        "CosineEmbeddingLoss HingeEmbeddingLoss MarginRankingLoss MultiLabelMarginLoss MultiMarginLoss PoissonNLLLoss "
        "SoftMarginLoss TripletMarginLoss CTCLoss GaussianNLLLoss"
    )
)
PRODUCTS = ("torch.nn.Linear", "torch.nn.Conv", "torch.nn.Bilinear")
"""Prefixes of layers that autocast computes in 16 bits."""
DTYPES = {
    "torch.float16": "fp16", "torch.half": "fp16", "torch.bfloat16": "bf16", "torch.float32": "fp32",
    "torch.float": "fp32", "torch.float64": "fp64", "torch.double": "fp64",
}  # fmt: skip
LARGEST = {"torch.finfo(fp32)": 3.4028234663852886e38, "torch.finfo(bf16)": 3.3895313892515355e38}
"""The largest numbers of formats, by the name of ``torch.finfo(...)``."""
CASTS = {"half": "fp16", "bfloat16": "bf16", "float": "fp32", "double": "fp64"}
"""Methods that cast."""
HARMLESS = frozenset(
    words(
        "print len id type isinstance repr str hasattr getattr list tuple dict set sum max min sorted enumerate zip "
        "range iter next any all map filter vars dir callable"
    )
)
"""Builtins that do not change their arguments."""


def is_optimizer(name: str) -> bool:
    """Return whether a full name is an optimizer class."""
    parts = name.split(".")
    return name.startswith(("torch.optim.", "narrowgauge.optim.")) and parts[-1] in OPTIMIZER_EPS
