"""Settings of the libraries of a run: how much they print, and their threads."""

from __future__ import annotations

import logging
import warnings

import torch
from transformers.utils import logging as transformers_logging


def quiet_libraries() -> None:
    """Keeps library chatter off the progress display; warnings and errors of our own are printed by the reporter."""
    warnings.filterwarnings("ignore", module=r"(megatron|torch|transformers)\..*")
    for name in ("megatron", "nvidia_resiliency_ext"):
        logging.getLogger(name).setLevel(logging.ERROR)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def set_threads(num_threads: int) -> None:
    """Sets the CPU threads with which torch computes in this process."""
    torch.set_num_threads(num_threads)
