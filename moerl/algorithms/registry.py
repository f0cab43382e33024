"""All algorithms, by the name in their section. Torch-free; any process."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from moerl.algorithms.cispo import CISPO
from moerl.algorithms.clip_cov import ClipCov
from moerl.algorithms.custom import Custom
from moerl.algorithms.dppo import DPPO
from moerl.algorithms.gmpo import GMPO
from moerl.algorithms.grpo import GRPO
from moerl.algorithms.gspo import GSPO
from moerl.algorithms.kl_cov import KLCov
from moerl.algorithms.sapo import SAPO

AlgorithmConfig = Annotated[
    GRPO | GSPO | CISPO | GMPO | SAPO | DPPO | ClipCov | KLCov | Custom, Field(discriminator="name")
]
"""The ``algorithm`` section of a configuration: that of the algorithm with this name."""
