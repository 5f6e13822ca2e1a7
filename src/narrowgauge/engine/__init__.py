"""The engine: one training step under a recipe.

engine.py          Engine: forward, backward, step
step_function.py   StepFunction: all three as one function, recorded as a CUDA graph
base.py            EngineBase: the parts of an engine; saving and loading
checks.py          checks of the arguments
setup.py           what an engine prepares when it is made: optimizers, converted layers, loss scaler
updates.py         one update: the check of the gradients, and the optimizers' steps
state.py           saving and loading
"""

from narrowgauge.engine.engine import Engine

__all__ = ["Engine"]
