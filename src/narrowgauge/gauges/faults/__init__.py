"""Faults: classic low-precision mistakes that `narrowgauge break` makes on purpose."""
