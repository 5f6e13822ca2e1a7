"""The three matrix products of a linear layer: their formats, their operands, and the layer itself."""
