"""Dumps that other systems' own code writes; see `scripts.foreign_dumps.__main__`."""
