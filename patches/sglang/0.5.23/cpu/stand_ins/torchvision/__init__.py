"""Stands in for `torchvision` on CPU: SGLang imports names from it for vision models, which are not served here."""

from . import io, transforms

__all__ = ["io", "transforms"]
__version__ = "0.0.0"
