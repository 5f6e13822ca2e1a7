"""Trackers copy the metrics of a run to TensorBoard, Weights & Biases or MLflow.

base.py          the base class of all trackers
background.py    runs a tracker in a thread
registry.py      the trackers that ``--log`` knows; a new tracker is a new file here and a line in the registry
"""
