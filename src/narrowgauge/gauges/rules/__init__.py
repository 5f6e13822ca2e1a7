"""Rules: turn the numbers of steps, tensors and FP8 sites into findings.

A rule is a function that yields findings. Each of ``step_rules``, ``tensor_rules`` and ``fp8_rules`` lists its rules
in ``RULES``. To add one, write the function, add it to the list in the same file, and test it.
"""
