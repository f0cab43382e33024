"""Checks of a rank's node, and notes for the user about the device. Runs in every trainer rank."""

from __future__ import annotations

import socket
from pathlib import Path

import torch

from moerl.config.schema import ModelConfig
from moerl.config.training import TrainerConfig
from moerl.errors import ConfigError
from moerl.machine.torch_start import has_tf32
from moerl.models.description import CONFIG_FILE
from moerl.trainer import platform


def shares_prompts(trainer: TrainerConfig) -> bool:
    """Returns whether prompts are shared on the device of this rank."""
    wanted = trainer.share_prompts
    return platform.can_share_prompts() if wanted == "auto" else wanted


def device_notes(model: ModelConfig, trainer: TrainerConfig) -> list[str]:
    """Returns lines for the user about a GPU and what it changes; none on a CPU."""
    device = platform.device()
    if device.type == "cpu":
        return []
    notes = [f"trainer on {torch.cuda.get_device_name(device)}, {model.dtype}"]
    if model.dtype == "float32":
        notes.append(
            "products of float32 numbers are TF32's, of 10 bits (log-probs to about 3e-3 nats); trainer.tf32=off has"
            " exact ones"
            if has_tf32()
            else "products of float32 numbers are exact: TF32 is off"
        )
        notes.append(
            "attention in float32 is not fused: scores of all sequences of a microbatch, each as long as the longest,"
            " lie in memory, which plans do not count; model.dtype=bfloat16 has none"
        )
    if trainer.share_prompts == "auto" and not platform.can_share_prompts():
        notes.append("prompts are not shared (trainer.share_prompts=auto): attention on a GPU knows no shared rows")
    return notes


def model_on_this_node(model: str) -> Path:
    """Returns the model's directory.

    Raises:
        ConfigError: the node of this rank does not have it.
    """
    folder = Path(model)
    if not (folder / CONFIG_FILE).is_file():
        raise ConfigError(
            "model.path: the node of this rank does not see the model's directory",
            seen=f"no {folder / CONFIG_FILE} on {socket.gethostname()}",
            expected="the directory as the controller sees it",
            remedy="keep it on a file system that all nodes share, at one path; for a model of the hub, HF_HOME",
        )
    return folder
