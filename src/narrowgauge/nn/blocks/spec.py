"""The description of a transformer block, as data: which of its modules compute what, and in which order.

A block is recognized from a run (``recognize``), not from names, so a description only says what was observed:

    pre       x1 = x + branch1(out(attend(inputs(norm1(x)))));  y = x1 + branch2(down(act(up(norm2(x1)))))
    post      x1 = norm1(x + branch1(out(attend(inputs(x)))));  y = norm2(x1 + branch2(down(act(up(x1)))))
    parallel  y  = x + branch1(out(attend(inputs(norm1(x))))) + branch2(down(act(up(norm2(x)))))
    half      x1 = x + branch1(out(attend(inputs(norm1(x)))));  y = x1 + mlp(norm2(x1))

In a "half" the MLP is a module that runs as it is, such as a mixture of experts.

Between attention and MLP, a "pre" or "post" block may have cross-attention to an encoder's output e, a ``CrossSpec``:

    pre       x1 = x1 + drop(out(attend(query(norm(x1)), inputs(e))))
    post      x1 = norm(x1 + drop(out(attend(query(x1), inputs(e)))))

A projection may have a low-rank adapter, an ``AdapterSpec``. What a branch goes through before it is added is a
``BranchSpec``: a norm, dropout, a scale, stochastic depth. A "pre"
block whose branches are normed may have no other norms (OLMo 2).

Attention itself is what happens between the input projections and the output projection. It stays the model's own code
(``own``) unless it was shown to be one of the forms that we compute faster.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

ORDERS = ("pre", "post", "parallel", "half")
WEIGHTS = "attention weights"
"""In place of a name in ``BlockSpec.returned``."""
Place = tuple[str, str]
"""Where a block holds a number: the path of a submodule, and an attribute."""


class NotABlock(Exception):
    """Why a module is not a block that can be fused."""


@dataclass(frozen=True)
class NormSpec:
    """A norm over the last dimension: y = normalized * (offset + weight) + bias."""

    path: str
    kind: str
    """layer or rms."""
    eps: float
    offset: float = 0.0
    """1 for norms whose weight is stored as its difference from 1 (Gemma)."""
    weight: str = "weight"
    """The name of the weight in its module; empty for a norm without one."""
    bias: str = "bias"
    width: int = 0
    """The columns of a norm without weight."""

    @property
    def parameters(self) -> tuple[str, str]:
        """The names of weight and bias, from the block."""
        return f"{self.path}.{self.weight}", f"{self.path}.{self.bias}"

    def get_width(self, block: nn.Module) -> int:
        """Return the number of columns."""
        return self.width or len(block.get_parameter(f"{self.path}.{self.weight}"))


@dataclass(frozen=True)
class AttentionSpec:
    """What is computed between the input projections and the output projection."""

    kind: str = "own"
    """own: the model's code; plain: attention on heads as they are; rotary: with rotated queries and keys."""
    heads: int = 0
    kv_heads: int = 0
    causal: bool = False
    angles: str = "all"
    """Which cosines and sines are given, as in ``angles.USES``."""
    pairs: bool = False
    """Whether neighbouring columns are rotated together, not columns of two halves."""
    scale: float | None = None
    """Factor of the scores; None for 1 / sqrt(head size)."""
    q_norm: NormSpec | None = None
    k_norm: NormSpec | None = None
    dropout: Place | None = None
    """Where the block holds the dropout of attention's weights."""
    mask: str | None = None
    """The argument for a boolean mask [B or 1, H or 1, T, T], if attention reads it as torch's fused attention does."""


@dataclass(frozen=True)
class BranchSpec:
    """What a branch goes through before it is added: depth(factor * scale * dropout(norm(branch)))."""

    norm: NormSpec | None = None
    """A norm of the branch (Gemma)."""
    dropout: Place | None = None
    """Where the block holds the probability of the branch's dropout, of a module or of a call of a function."""
    scale: str | None = None
    """The parameter that multiplies the branch (LayerScale)."""
    depth: str | None = None
    """The module that drops the branch of whole samples in training (DropPath, stochastic depth)."""
    factor: float = 1.0
    """The number that multiplies the branch (Granite)."""


@dataclass(frozen=True)
class CrossSpec:
    """Cross-attention between attention and MLP. What it does between its projections is the model's own code."""

    source: str
    """The argument that is the encoder's output."""
    norm: NormSpec
    query: str
    inputs: tuple[str, ...]
    """Projections of the encoder's output: key and value, or one for both."""
    output: str
    before: str
    """The module that contains self-attention, and runs before."""
    before_entries: int
    """How many entries the tuple has that this module returns; 0 if it returns a tensor."""
    dropout: Place | None = None
    """Where the block holds the probability of the branch's dropout."""


@dataclass(frozen=True)
class AdapterSpec:
    """A low-rank adapter of a projection: y = base(x) + scale * b(a(dropout(x)))."""

    path: str
    """The module that computes y."""
    base: str
    """The projection without adapter, as the block's other fields name it."""
    a: str
    b: str
    scale: float
    dropout: Place | None = None
    """Where the block holds the probability of the dropout."""


@dataclass(frozen=True)
class BlockSpec:
    """A block: paths are relative to its module."""

    order: str
    norm1: NormSpec | None
    inputs: tuple[str, ...]
    """Projections into attention: query, key and value, or one for all. A path is that of a linear layer, or names a
    parameter of nn.MultiheadAttention, see ``projections``."""
    attention: AttentionSpec
    output: str
    norm2: NormSpec | None
    ups: tuple[str, ...]
    """The MLP's first projection; for a gated MLP gate and up, or one for both."""
    activation: str
    """gelu, gelu-tanh, gelu-quick, relu, silu; gated: swiglu, geglu, geglu-tanh. A "half" has none of these three."""
    down: str
    branch1: BranchSpec = BranchSpec()
    branch2: BranchSpec = BranchSpec()
    dropout: Place | None = None
    """Where the block holds the probability of dropout after the activation."""
    gate_last: bool = False
    """Whether the second half of a gated projection is the gate, or the second of two."""
    in_tuple: bool = False
    """Whether the block returns a tuple with the hidden state in front."""
    returned: tuple[str | None, ...] = ()
    """What a tuple holds after the hidden state: None, an argument's name if the block passes that on or computes it if
    it is missing (T5's position bias), or ``WEIGHTS``."""

    cross: CrossSpec | None = None
    """Cross-attention, in blocks of a decoder."""
    adapters: tuple[AdapterSpec, ...] = ()
    """Low-rank adapters, in the order in which they run."""
    mlp: str = ""
    """The module that is the MLP of a "half"."""
    given: tuple[str, ...] = ()
    """The arguments of the call that was verified, besides the hidden state."""
    masks: tuple[str, ...] = ()
    """Other arguments that were verified as masks of attention, which the model's own code reads."""

    @property
    def products(self) -> tuple[tuple[str, ...], ...]:
        """Projections that read one input, and are one product, in the order in which they run."""
        mlp = () if self.mlp else (self.ups, (self.down,))
        return self.inputs, (self.output,), *self.cross_products, *mlp

    @property
    def cross_products(self) -> tuple[tuple[str, ...], ...]:
        """Those of cross-attention: of the query, of key and value, and of the output."""
        return () if self.cross is None else ((self.cross.query,), self.cross.inputs, (self.cross.output,))

    @property
    def linears(self) -> tuple[str, ...]:
        """All projections, in the order in which they run."""
        return tuple(path for group in self.products for path in group)

    def get_called(self, path: str) -> str:
        """Return the path of the module that the block calls for a projection: the one with the adapter, if any."""
        return next((adapter.path for adapter in self.adapters if adapter.base == path), path)

    @property
    def norms(self) -> tuple[NormSpec, ...]:
        cross = None if self.cross is None else self.cross.norm
        norms = (self.norm1, self.norm2, self.branch1.norm, self.branch2.norm, cross)
        return tuple(norm for norm in norms if norm is not None)
