"""Proves, or fails to prove, that a recipe trains as good a model as the reference."""
