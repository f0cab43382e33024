# Nothing that transformers returns has types; without this pyright reads a million lines of it.
from typing import Any

def __getattr__(name: str) -> Any: ...
