"""Queue between engines and trainer: groups of rollouts, their slots and order, and an account of how each ended."""
