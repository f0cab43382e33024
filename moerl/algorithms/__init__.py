"""Reinforcement-learning algorithms as pure functions on tensors.

Runs in trainer processes; knows neither models nor process groups. Shape legend of the package: T = tokens
(rows of a packed microbatch), B = rollouts of a batch.
"""
