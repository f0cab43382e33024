"""All algorithms, by the name in their section. Torch-free; any process."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from moerl.algorithms.custom import Custom
from moerl.algorithms.grpo import GRPO

AlgorithmConfig = Annotated[GRPO | Custom, Field(discriminator="name")]
"""The ``algorithm`` section of a configuration: that of the algorithm with this name."""
