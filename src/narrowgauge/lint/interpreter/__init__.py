"""Interprets a script without running it: which values its names have, on every path, and what happens to gradients.

``flow`` follows statements, ``frames`` enters the script's functions, ``evaluate`` finds the value of an expression.
Calls are handled by ``constructors``, ``gradients``, ``modules``, ``tensors`` and ``engines``, which know torch and
narrowgauge. Nothing in here imports a rule: each step is reported to observers (``observer``).
"""
