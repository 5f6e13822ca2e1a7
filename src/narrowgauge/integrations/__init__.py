"""narrowgauge in training loops that other libraries run: Lightning, Accelerate, the Hugging Face Trainer.

    lightning.py      ng_precision: a precision plugin for Fabric and the Trainer
    accelerate.py     prepare, adopt, engine_of: an Accelerator under a recipe
    transformers.py   adapt, gauges_of, replay_loss: the Hugging Face Trainer and TRL's SFTTrainer under a recipe
    trained_weights.py  the weights that a recipe trains, for a model that was loaded in BF16
    gauges.py         Gauges: findings and captures in any of these loops
    hosted.py         Hosted: the engine behind all of them

Each file imports its library when its functions are called, so narrowgauge depends on none of them.
"""
