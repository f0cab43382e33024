"""Names that exist so that they can be imported, and say what is missing when they are used."""

import enum


class InterpolationMode(enum.Enum):
    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def absent(module):
    """A module-level `__getattr__` whose names raise when they are called."""

    def lookup(name):
        if name.startswith("__"):
            raise AttributeError(name)

        def function(*args, **kwargs):
            raise RuntimeError(f"{module}.{name} needs torchvision; this is the stand-in for CPU servers")

        return function

    return lookup
