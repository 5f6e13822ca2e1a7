"""Several processes that train one model: who they are, how the model is spread over them, and what they must agree on.

world.py   the processes, as torchrun starts them
draw.py    a run's model, also one that no GPU could hold whole
spread.py  a model over them: FSDP2's shards by a recipe, or DDP's copies
update_sync.py  what an update needs of all of them: gradients of copies, the norm, FP8 scales
"""

from narrowgauge.ranks.distribute import replicate, shard

__all__ = ["replicate", "shard"]
