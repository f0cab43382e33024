"""The trainer's ranks: the code that a rank runs, and the placements of ranks."""
