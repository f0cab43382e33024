"""The trainer's ranks: what one of them runs, and where they run."""
