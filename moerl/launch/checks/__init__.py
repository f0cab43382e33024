"""Checks of a run before it starts, for every command that can know something of it. Torch-free."""
