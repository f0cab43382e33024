"""Experiment trackers: W&B, MLflow and trackio, each in a process of its own beside the controller."""
