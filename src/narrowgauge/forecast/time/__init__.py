"""Predicts time: the roofline of every traced operation."""
