"""The names of the files of a checkpoint.

checkpoints/step-00000100/       written by one process        written by several ranks
    weights.safetensors          the model's state dict        -
    state.safetensors            every other tensor            -
    shards.json                  -                             where each part of each tensor is
    shard-N.safetensors          -                             the parts that rank N has written
    random-N.safetensors         -                             the random generator states of rank N
    state.json                   everything that is not a tensor, and where each tensor belongs
    manifest.json                size and SHA-256 of the other files
"""

from __future__ import annotations

FORMAT = 1
WEIGHTS = "weights.safetensors"
TENSORS = "state.safetensors"
STATE = "state.json"
FILES = (WEIGHTS, TENSORS, STATE)
"""What one process writes, apart from the manifest."""
MANIFEST = "manifest.json"
SHARD_TABLE = "shards.json"
"""A manifest that lists this file describes a sharded checkpoint."""
PICKLED = ".metadata"
"""The table of contents of torch's own storage, which earlier versions wrote for several ranks."""
