"""Low-precision copies of weights: what writes them, what reads them, and why none can be stale.

A copy is made by the forward that reads it, from the weight as it is then. It is freed at the latest when the backward
of that forward has read it. No copy lives from one forward to the next, so none has to be kept up to date:

    copy                     written by                      read by           freed after
    FP8, [O, I]              BoundWeight.fp8, in forward     output            the forward of its layer or block
    FP8 transposed, [I, O]   the same pass over the weight   grad_input        the backward of this forward
                             or fp8_transposed, in backward  grad_input        the backward of its layer or block
    BF16 (or FP32)           BoundWeight.wide                products in BF16  the backward of this forward
    BF16, padded (the head)  PaddedWeight.wide, in forward   all its products  the head's forward
    none: stored in FP8      make_stored, for a new engine   output            never: these are the weights

The second way to a transposed copy takes less memory: lean recipes and FSDP's gathered weights use it.

Readers are the three products of a layer (``nn.products.gemm``). They know the weight as a ``CastableWeight``, and ask
it for a format. They compare no versions and no flags.

Optimizers neither write copies nor know of them, and there is no hook on optimizers. This was different once: the
optimizer's kernel wrote FP8 copies, and a global hook and torch's version counters marked them as old. Both miss a
write through ``.data``, numpy or a raw pointer. A check on the device would have to read the weight, and so would save
nothing: a cast reads 4 bytes per FP32 weight and writes 2. Measured before and after, FP8 had 1.488x and 1.477x of the
speed of compiled BF16 at 124M parameters, 1.731x and 1.734x at 8 x 4096 (docs/results.md).

What is checked is the scale, not the copy. With delayed scaling it comes from earlier updates, and a weight that was
written by other code may not fit it. The kernel finds this on the device, and casts again (``kernels.cast_weights``).

If a weight is written between a forward and its backward, kept copies are those of the weight as forward saw it. Where
backward reads the weight again, torch raises an error if it was changed in place; after a write through ``.data`` the
gradient is that at the new weight, as in any torch model.

Elsewhere:

    CUDA graphs      contain the casts: each replay casts the current weights, into the graph's own memory. Addresses of
                     weights are part of a recording's key (``nn.fused.graphs``).
    torch.autocast   casts the weights of layers that no code of ours computes, and keeps the copies until its context,
                     ``engine.forward()``, ends. For loops that update weights inside of the context, the engine's
                     ``backward``, ``step`` and ``load_state_dict`` clear them.
    FSDP             gathers weights in 16 bits for each forward and backward; these are the weights that are cast here.
    masters          of BF16 weights are wider, not narrower. The optimizer owns them, and detects weights that other
                     code has written by checksums (``optim.weight_checksums``).
    small tensors    (biases, adapters) are cast where they are used, at each use.

    casts.py      which copies a layer needs (WeightCastPlan), and those of one forward and its backward (BoundWeight)
    stored.py     frozen weights that are stored in FP8
    adjacent.py   several weights as one: placed next to each other in memory
"""
