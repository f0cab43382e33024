"""Tools for developers; a package, so that `python -m scripts.golden` finds its own modules before those of others."""
