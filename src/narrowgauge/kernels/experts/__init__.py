"""The kernels of a mixture of experts in FP8.

A router sends each token to a few of E experts, MLPs of the same shape. A pair is a token and one of its experts. The
pairs of an expert lie together, in slots: rows of a buffer in which each expert begins at a multiple of 128, so that a
tile of a product belongs to one expert. Between experts there are at most 127 empty slots, filled with zeros.

    slots.py        which pair is in which slot, from the router's choice, without waiting for the GPU
    rows.py         tokens to slots, cast to FP8 in both layouts; and back: the sum of each token's slots
    activation.py   the gated activation between an expert's two products, multiplied by the router's weight
    products.py     products of slots with the matrix of their expert, and the gradients of these matrices
"""
