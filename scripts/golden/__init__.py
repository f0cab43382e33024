"""Golden vectors; see `__main__.py`."""
