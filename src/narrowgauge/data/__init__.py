"""Training data: a corpus every machine has, a byte-pair encoding of it, and token files of the user's."""
