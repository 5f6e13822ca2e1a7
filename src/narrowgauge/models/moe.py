"""MoE: Llama's attention, and a mixture of experts in place of its MLP.

A router scores every expert for a token. The token goes to the ``chosen`` experts with the highest probabilities, which
are divided by their sum. Routing is computed in FP32 for any format of the model: the experts with the highest scores
change if the scores are rounded.

Two losses are added in training, each averaged over layers (evaluation reports the cross-entropy alone):

    balance   E * sum over experts of (share of the choices) * (mean probability), as in Switch Transformer. It is 1 if
              all experts get equally many tokens, and E if one expert gets all of them.
    z         mean of logsumexp(router logits)^2, as in ST-MoE. Without it, logits grow until softmax is one-hot.

Shapes: B batch, T context, D width, N = BT tokens, E experts, C chosen experts per token, I width of an expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrowgauge.errors import UsageError
from narrowgauge.models.llama import RMSNorm, attend, compute_angles
from narrowgauge.models.weights import init_weights, pad_vocab, widen
from narrowgauge.nn.keep_fp32 import keep_fp32

EXPERT_MULTIPLE = 8
"""Grouped products read rows that start on 16 bytes: 8 numbers in 16 bits."""


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """The dimensions of a mixture-of-experts model."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    """Heads of keys and values. Each is shared by heads / kv_heads query heads."""
    experts: int
    """Experts in each layer."""
    chosen: int
    """Experts that compute for each token."""
    hidden: int
    """Width of each expert's MLP."""
    shared: int = 0
    """Experts that compute for every token, besides the chosen ones."""
    context: int
    """Sequence length in training. Rotary position embedding itself has no limit."""
    vocab: int
    """Number of tokens. The embedding is padded to a multiple of 128."""
    rope_base: float = 10_000.0
    """Base of the rotary frequencies."""
    balance_factor: float = 0.01
    """Factor of the load-balancing loss."""
    z_factor: float = 0.001
    """Factor of the router z-loss."""

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "kv_heads", "experts", "chosen", "hidden", "context", "vocab"):
            if getattr(self, name) < 1:
                raise UsageError(f"MoE with {name} {getattr(self, name)}: {name} must be at least 1")
        if self.shared < 0:
            raise UsageError(f"MoE with shared {self.shared}: shared must be at least 0")
        if self.chosen > self.experts:
            raise UsageError(f"MoE with {self.experts} experts: {self.chosen} per token are more than there are")
        if self.width % (2 * self.heads):
            raise UsageError(f"a width of {self.width} does not divide into {self.heads} heads of an even size")
        if self.heads % self.kv_heads:
            raise UsageError(
                f"{self.heads} heads cannot share {self.kv_heads} key-value heads evenly; change one of them"
            )
        for name in ("width", "hidden"):
            if getattr(self, name) % EXPERT_MULTIPLE:
                raise UsageError(
                    f"MoE with {name} {getattr(self, name)}: {name} must be a multiple of {EXPERT_MULTIPLE}, because "
                    "grouped products read rows that start on 16 bytes"
                )

    @property
    def padded_vocab(self) -> int:
        """The size of the embedding."""
        return pad_vocab(self.vocab)

    @property
    def head_size(self) -> int:
        """The width of one head."""
        return self.width // self.heads

    def parameters(self) -> int:
        """Return the number of parameters."""
        return self._count(self.experts)

    def active_parameters(self) -> int:
        """Return the number of parameters that one token meets: of the experts, the chosen and the shared ones."""
        return self._count(self.chosen)

    def flops_per_token(self) -> float:
        """Return the FLOPs of forward and backward: 6 per parameter that multiplies a token, and 12LDT for attention.

        Of the experts, only the chosen and the shared ones count.
        """
        multiplied = self.active_parameters() - self.padded_vocab * self.width
        return 6.0 * multiplied + 12.0 * self.layers * self.width * self.context

    def _count(self, experts: int) -> int:
        attention = self.width * self.head_size * (2 * self.heads + 2 * self.kv_heads)
        mixture = self.experts * self.width + 3 * self.width * self.hidden * (experts + self.shared)
        block = attention + mixture + 2 * self.width
        return 2 * self.padded_vocab * self.width + self.layers * block + self.width


class Router(nn.Module):
    """Scores each expert for each token, in FP32 under every recipe."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.chosen = config.chosen
        self.weight = nn.Parameter(torch.empty(config.experts, config.width))

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Choose the experts of each token.

        Args:
            hidden: Tokens, shape (N, D).

        Returns:
            The indices (N, C) of the chosen experts, their weights (N, C), which add up to 1, and the balance loss and
            the z-loss as one tensor (2,).
        """
        index, weights, losses = _route(hidden, self.weight, self.chosen)
        return index, weights, losses


@keep_fp32
def _route(hidden: Tensor, weight: Tensor, chosen: int) -> tuple[Tensor, Tensor, Tensor]:
    logits = F.linear(hidden, weight)  # N, E
    shares = logits.softmax(-1)
    weights, index = shares.topk(chosen, dim=-1)
    experts = weight.shape[0]
    # A one-hot sum, because bincount waits for the device, and histc does not take integers on every device.
    choices = torch.zeros_like(shares).scatter(1, index, 1.0).mean(0) / chosen  # E
    balance = experts * (choices * shares.mean(0)).sum()
    z = logits.logsumexp(-1).square().mean()
    return index, weights / weights.sum(-1, keepdim=True), torch.stack([balance, z])


class Experts(nn.Module):
    """Gated MLPs (SwiGLU) with stacked weights. Takes the arguments of transformers' experts."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.num_experts = config.experts
        self.gate_up_proj = nn.Parameter(torch.empty(config.experts, 2 * config.hidden, config.width))
        self.down_proj = nn.Parameter(torch.empty(config.experts, config.width, config.hidden))

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Compute the weighted sum of the chosen experts. Nothing waits for the device.

        Args:
            hidden: Tokens, shape (N, D).
            index: The experts of each token, shape (N, C).
            weights: Their weights, shape (N, C).

        Returns:
            The sums, shape (N, D), in the format of ``hidden``.
        """
        tokens, chosen = index.shape
        experts, order = index.flatten().sort(stable=True)  # NC pairs of a token and an expert, by expert
        # The last row of each expert, plus one. An expert without tokens ends where the one before it ends.
        ends = torch.searchsorted(experts, torch.arange(self.num_experts, device=index.device), right=True).int()
        gate, up = _multiply(hidden[order // chosen], self.gate_up_proj, ends).chunk(2, dim=-1)  # NC, I
        made = _multiply(F.silu(gate) * up, self.down_proj, ends)  # NC, D
        back = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=order.device))
        mixed = made[back].view(tokens, chosen, -1) * weights.unsqueeze(-1)
        return mixed.sum(1).to(hidden.dtype)


def _multiply(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply rows that are sorted by expert by the transposed matrices [E, O, I] of their experts."""
    kind = rows.device.type
    # torch's autocast does not know grouped products, so that the casts are here.
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
    rows, weight = rows.to(dtype), weight.to(dtype).transpose(-2, -1)
    compiles = dtype is torch.bfloat16 or not torch.compiler.is_compiling()  # torch compiles them in BF16 only
    product: Tensor = (F.grouped_mm if compiles else _grouped_mm_uncompiled)(rows, weight, offs=ends)
    return product


_grouped_mm_uncompiled: Any = torch.compiler.disable(F.grouped_mm)


class SharedExpert(nn.Module):
    """A gated MLP that computes for every token."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        made: Tensor = self.down(F.silu(self.gate(hidden)) * self.up(hidden))
        return made


class Mixture(nn.Module):
    """A router, its experts, and the shared experts, which are one MLP of their width together."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.top_k = config.chosen
        self.router = Router(config)
        self.experts = Experts(config)
        self.shared = SharedExpert(config.width, config.shared * config.hidden) if config.shared else None

        self.losses: Tensor | None = None
        """The balance loss and the z-loss (2,) of the last forward. Not returned, so that the block is like others."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the output (B, T, D)."""
        flat = hidden.flatten(0, -2)  # N, D
        index, weights, self.losses = self.router(flat)
        mixed: Tensor = self.experts(flat, index, weights).view_as(hidden)
        return mixed if self.shared is None else mixed + self.shared(hidden)


class Block(nn.Module):
    """Attention and a mixture of experts, each after a norm and added to the residual stream."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_size = config.heads, config.kv_heads, config.head_size
        self.norm1 = RMSNorm(config.width)
        self.qkv = nn.Linear(config.width, (config.heads + 2 * config.kv_heads) * config.head_size, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)
        self.norm2 = RMSNorm(config.width)
        self.mixture = Mixture(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.out(attend(self.qkv(self.norm1(x)), self.heads, self.kv_heads, cos, sin))
        branch: Tensor = self.mixture(self.norm2(x))
        return x + branch


class MoE(nn.Module):
    """A mixture-of-experts language model. Maps tokens to logits or, with targets, to the loss in nats."""

    def __init__(self, config: MoEConfig) -> None:
        """Make the model with initialized weights.

        Args:
            config: The dimensions of the model.
        """
        super().__init__()
        self.config = config
        self.tok = nn.Embedding(config.padded_vocab, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.width)
        self.lm_head = nn.Linear(config.width, config.padded_vocab, bias=False)
        init_weights(self, config.layers)

    def forward(self, inputs: Tensor, targets: Tensor | None = None, routing: bool = False) -> Tensor:
        """Run the model.

        Args:
            inputs: Tokens, shape (B, T).
            targets: The next tokens, shape (B, T), or None.
            routing: Return the losses of the routers alone.

        Returns:
            Logits of shape (B, T, V), or the mean cross-entropy if there are targets. In training mode, the losses of
            the routers are added to it. With ``routing``: the balance loss and the z-loss, shape (2,).
        """
        x = widen(self.tok(inputs))  # B, T, D
        cos, sin = compute_angles(inputs.shape[1], self.config.head_size, self.config.rope_base, inputs.device)
        all_losses = []
        for block in self.blocks:
            x = block(x, cos, sin)
            all_losses.append(block.mixture.losses)  # type: ignore[union-attr]
            block.mixture.losses = None  # type: ignore[union-attr]
        routed = torch.stack(all_losses).mean(0)  # type: ignore[arg-type]
        if routing:
            return routed
        made = self.finish(x, targets)
        if targets is None or not self.training:
            return made
        balance, z = routed.unbind()
        return made + self.config.balance_factor * balance + self.config.z_factor * z

    def finish(self, x: Tensor, targets: Tensor | None) -> Tensor:
        """Compute logits from the output of the last block, or the cross-entropy if there are targets."""
        logits: Tensor = self.lm_head(self.norm(x))  # B, T, V
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
