"""Reinforcement-learning algorithms as pure functions on tensors.

Losses run in trainer processes, advantages and facts of batches in the controller. Shape legend of the package: T =
tokens (rows of a packed microbatch), B = rollouts of a batch.
"""
