"""Training one model with several processes: the ranks, how the model is distributed over them, and what they agree on.

world.py        the processes, as torchrun starts them
init_model.py   initializes the model of a run, even one that no GPU could hold whole
distribute.py   distributes a model: FSDP2 shards or DDP copies, as the recipe requires
update_sync.py  what an update needs from all ranks: gradients of copies, the norm, FP8 scales
"""

from narrowgauge.ranks.distribute import replicate, shard

__all__ = ["replicate", "shard"]
