"""Experiment trackers: W&B, MLflow and trackio, each in a process of its own, which the controller starts."""
