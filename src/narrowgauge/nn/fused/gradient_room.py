"""Memory of gradients that do not exist yet, in which a recomputed block may keep tensors of its forward.

Backward frees what a block has kept, and then allocates the gradients of its parameters. So as long as the blocks up to
any one keep no more than the gradients of the same blocks will take, the peak of memory is that of all gradients, as
without anything kept. Blocks keep in the order of forward: what one leaves, later ones may use.
"""

from __future__ import annotations

SHARE = 0.75
"""How much of this memory is used: the head needs some as well, for logits and their gradients."""


class GradientRoom:
    """The room of one model. A copy of the model has its own."""

    def __init__(self) -> None:
        self._entered: set[str] = set()
        self._left = 0.0

    def __reduce__(self) -> tuple[type[GradientRoom], tuple[()]]:
        return GradientRoom, ()

    def enter(self, path: str, size: float) -> None:
        """Add the room of a block's gradients; a block that comes again begins another forward."""
        if path in self._entered:
            self._entered.clear()
            self._left = 0.0
        self._entered.add(path)
        self._left += SHARE * size

    def take(self, size: float) -> bool:
        """Take room for so many bytes, if there is enough."""
        if size > self._left:
            return False
        self._left -= size
        return True
