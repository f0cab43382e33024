"""Ranks as actors of a Ray cluster (`launch.on=ray`). The only package that imports Ray, which is an extra."""
