"""Fused blocks, head and norms: transformer parts that run as one function with hand-written backward."""
