"""The description of a transformer block, as data: which of its modules compute what, and in which order.

A block is recognized from a run (``recognize``), not from names, so a description only says what was observed:

    pre       x1 = x + post1(out(attend(inputs(norm1(x)))));  y = x1 + post2(down(act(up(norm2(x1)))))
    post      x1 = norm1(x + out(attend(inputs(x))));         y = norm2(x1 + down(act(up(x1))))
    parallel  y  = x + out(attend(inputs(norm1(x)))) + down(act(up(norm2(x))))

Attention itself is what happens between the input projections and the output projection. It stays the model's own code
(``own``) unless it was shown to be one of the forms that we compute faster.
"""

from __future__ import annotations

from dataclasses import dataclass

ORDERS = ("pre", "post", "parallel")


@dataclass(frozen=True)
class NormSpec:
    """A norm over the last dimension: y = normalized * (offset + weight) + bias."""

    path: str
    kind: str
    """layer or rms."""
    eps: float
    offset: float = 0.0
    """1 for norms whose weight is stored as its difference from 1 (Gemma)."""


@dataclass(frozen=True)
class AttentionSpec:
    """What is computed between the input projections and the output projection."""

    kind: str = "own"
    """own: the model's code; plain: attention on heads as they are; rotary: with rotated queries and keys."""
    heads: int = 0
    kv_heads: int = 0
    causal: bool = False
    half_angles: bool = False
    """Whether cosines and sines are given for one half of a head, and are the same for the other."""
    scale: float | None = None
    """Factor of the scores; None for 1 / sqrt(head size)."""
    q_norm: NormSpec | None = None
    k_norm: NormSpec | None = None
    dropout: tuple[str, str] | None = None
    """Where the block holds the dropout of attention's weights: a submodule's path, and an attribute."""


@dataclass(frozen=True)
class BlockSpec:
    """A block: paths are relative to its module."""

    order: str
    norm1: NormSpec
    inputs: tuple[str, ...]
    """Projections into attention: query, key and value, or one for all."""
    attention: AttentionSpec
    output: str
    norm2: NormSpec
    ups: tuple[str, ...]
    """The MLP's first projection; for a gated MLP gate and up, or one for both."""
    activation: str
    """gelu, gelu-tanh, gelu-quick, relu, silu; gated: swiglu, geglu, geglu-tanh."""
    down: str
    post1: NormSpec | None = None
    """A norm of attention's branch before it is added (Gemma)."""
    post2: NormSpec | None = None
    dropout1: str | None = None
    """The nn.Dropout of attention's branch."""
    dropout2: str | None = None
    gate_last: bool = False
    """Whether the second half of a gated projection is the gate, or the second of two."""
    in_tuple: bool = False
    """Whether the block returns a tuple with the hidden state in front."""

    @property
    def linears(self) -> tuple[str, ...]:
        """All projections, in the order in which they run."""
        return (*self.inputs, self.output, *self.ups, self.down)

    @property
    def norms(self) -> tuple[NormSpec, ...]:
        return tuple(norm for norm in (self.norm1, self.norm2, self.post1, self.post2) if norm is not None)
