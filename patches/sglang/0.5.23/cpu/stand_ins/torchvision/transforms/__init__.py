"""See the package."""

from .._absent import InterpolationMode, absent
from . import functional, v2

__all__ = ["InterpolationMode", "functional", "v2"]
__getattr__ = absent(__name__)
