"""Trackers: TensorBoard, Weights & Biases and MLflow, written beside the record of a run."""
