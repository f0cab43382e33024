"""Rollout dumps of this and other systems, read into one form. Torch-free."""
