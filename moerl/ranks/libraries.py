"""Settings of the libraries of a run: how much they print."""

from __future__ import annotations

import logging
import warnings

from transformers.utils import logging as transformers_logging


def quiet_libraries() -> None:
    """Keeps library chatter off the progress display; warnings and errors of our own are printed by the reporter."""
    warnings.filterwarnings("ignore", module=r"(megatron|torch|transformers)\..*")
    for name in ("megatron", "nvidia_resiliency_ext"):
        logging.getLogger(name).setLevel(logging.ERROR)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
