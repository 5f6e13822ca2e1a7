"""Rules: turn the numbers of steps, tensors and FP8 sites into findings.

A rule is a function that yields findings. Each of ``step_rules``, ``tensor_rules``, ``silent_rules`` and ``fp8_rules``
lists its rules in ``RULES``. What ``zero_rules``, ``silent_rules`` and ``expert_rules`` find is reported if it lasts
(``lasting``). To add a rule, write the function, add it to the list in the same file, and test it.
"""
