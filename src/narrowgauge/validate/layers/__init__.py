"""Compares a candidate recipe with the reference layer by layer, within one step."""
