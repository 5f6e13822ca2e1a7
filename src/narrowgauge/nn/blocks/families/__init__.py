"""Conventions of families for their blocks' arguments: one file each, with ``make_examples(block, x)``."""
