"""What waits between engines and trainer: groups of rollouts, their slots and order, and where each of them ended."""
