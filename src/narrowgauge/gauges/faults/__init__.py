"""Faults: classic mistakes of low-precision training as small runs, each with a healthy counterpart."""
