"""Lint: the known pitfalls of mixed precision, found before anything runs.

In scripts by reading them (``script.check``, no torch needed), in models by looking at modules, parameters, optimizer
and recipe (``model.check``). No false alarm matters as much as finding: a rule that is not sure stays silent.
"""
