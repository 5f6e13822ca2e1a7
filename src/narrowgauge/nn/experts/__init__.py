"""Mixtures of experts in FP8: experts whose matrices are stacked in two parameters, as in transformers.

find.py     finds such modules, and shows before use that they compute what the fused function computes
routers.py  finds routers, which compute in FP32
survey.py   decides which of them compute in FP8, and says why others do not
plan.py     what a module's products need: its weights' casts and the scales of its tensors
run.py      the function with its hand-written backward, on the kernels of ``kernels/experts``
"""
