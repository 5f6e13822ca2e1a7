"""The names of torch and its neighbours that rules know, by what they mean."""

from __future__ import annotations


def words(text: str) -> list[str]:
    """Names between blanks."""
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
DEPRECATED = {
    "torch.cuda.amp.autocast": "torch.autocast('cuda')",
    "torch.cuda.amp.autocast_mode.autocast": "torch.autocast('cuda')",
    "torch.cpu.amp.autocast": "torch.autocast('cpu')",
    "torch.cuda.amp.GradScaler": "torch.amp.GradScaler('cuda')",
    "torch.cuda.amp.grad_scaler.GradScaler": "torch.amp.GradScaler('cuda')",
    "torch.cpu.amp.GradScaler": "torch.amp.GradScaler('cpu')",
    "torch.cuda.amp.custom_fwd": "torch.amp.custom_fwd(device_type='cuda')",
    "torch.cuda.amp.custom_bwd": "torch.amp.custom_bwd(device_type='cuda')",
    "apex.amp.initialize": "torch.autocast and torch.amp.GradScaler",
    "apex.amp.scale_loss": "torch.amp.GradScaler",
}
OPTIMIZER_EPS: dict[str, float | None] = {
    "Adam": 1e-8, "AdamW": 1e-8, "NAdam": 1e-8, "RAdam": 1e-8, "Adamax": 1e-8, "RMSprop": 1e-8, "Adagrad": 1e-10,
    "SparseAdam": 1e-8, "Adadelta": 1e-6, "SGD": None, "ASGD": None, "Rprop": None, "LBFGS": None,
}  # fmt: skip
"""torch.optim's optimizers, and the eps of each; None: it has none."""
CLIPS = frozenset(
    f"torch.nn.utils{middle}.{name}"
    for middle in ("", ".clip_grad")
    for name in ("clip_grad_norm_", "clip_grad_value_", "clip_grad_norm")
)
NORMS = frozenset(
    f"torch.nn.{name}"
    for name in words(
        "LayerNorm RMSNorm GroupNorm BatchNorm1d BatchNorm2d BatchNorm3d SyncBatchNorm LazyBatchNorm1d LazyBatchNorm2d "
        "LazyBatchNorm3d InstanceNorm1d InstanceNorm2d InstanceNorm3d"
    )
)
WITH_NORMS = ("torch.nn.Transformer", "torchvision.models.resnet", "torchvision.models.efficientnet",
              "torchvision.models.mobilenet", "torchvision.models.densenet", "torchvision.models.convnext",
              "torchvision.models.vit", "torchvision.models.swin", "torchvision.models.regnet",
              "torchvision.models.resnext", "torchvision.models.wide_resnet", "transformers.")  # fmt: skip
"""Models from elsewhere that have norms inside, by how their names begin."""
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
BCE = frozenset({"torch.nn.functional.binary_cross_entropy", "torch.nn.BCELoss"})
FUSED_ATTENTION = ("scaled_dot_product_attention", "flash_attn", "memory_efficient_attention", "flex_attention")
"""Parts of names that say that the script knows the fused kernels."""
DTYPES = {
    "torch.float16": "fp16", "torch.half": "fp16", "torch.bfloat16": "bf16", "torch.float32": "fp32",
    "torch.float": "fp32", "torch.float64": "fp64", "torch.double": "fp64",
}  # fmt: skip
CASTS = {"half": "fp16", "bfloat16": "bf16", "float": "fp32", "double": "fp64"}
"""Methods that cast."""
FRAMEWORKS = ("accelerate", "deepspeed", "apex", "lightning", "pytorch_lightning", "colossalai", "fairscale", "ignite",
              "narrowgauge", "composer", "torchtune", "megatron")  # fmt: skip
"""Libraries that scale losses themselves: where one is imported, a missing scaler is not missed."""
HARMLESS = frozenset(
    words(
        "print len id type isinstance repr str hasattr getattr list tuple dict set sum max min sorted enumerate zip "
        "range iter next any all map filter vars dir callable"
    )
)
"""Builtins that change nothing of what they are given."""


def is_optimizer(name: str) -> bool:
    parts = name.split(".")
    return name.startswith(("torch.optim.", "narrowgauge.optim.")) and parts[-1] in OPTIMIZER_EPS
