"""Writes the weights of a checkpoint as a Hugging Face folder, in 16 or 32 bits or in FP8."""
