"""Finds transformer blocks in any model by what they compute, and describes them for the fused implementation."""
