"""Inputs of every package: log-probs, advantages, rewards and masks, in float64, the same for all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

GROUPS = (0, 1, 0, 2, 0, 1, 2, 1, 0)
ALONE = (0, 1, 0, 2, 0, 1, 3, 1, 0)
"""The same, but the two of group 2 are groups of one."""
TOKENS, LONGEST = 8, 12


@dataclass(frozen=True, slots=True)
class Inputs:
    """N sequences of T tokens, with values for untrained tokens, too.

    trainer_NT, proximal_NT, rollout_NT: log-probs below 0, apart by 0.3; some are far apart. mask_NT: bool; ends of
    sequences and single tokens inside are False, and every sequence has a token. advantages_N, rewards_N: of both
    signs; the rewards of group 2 are equal. versions_NT: int64; of the weights that sampled each token, of which the
    trainer has version 5; never the newest two alone. groups_N, alone_N: int64; two ways to group.
    """

    trainer_NT: Tensor
    proximal_NT: Tensor
    rollout_NT: Tensor
    mask_NT: Tensor
    advantages_N: Tensor
    rewards_N: Tensor
    versions_NT: Tensor
    groups_N: Tensor
    alone_N: Tensor

    def of_each_token(self) -> Tensor:
        """float64 [N, T]: the advantage of its sequence."""
        return self.advantages_N[:, None].expand_as(self.trainer_NT).clone()

    def rewards_of_tokens(self) -> Tensor:
        """float64 [N, T]: the reward at the last trained token of its sequence."""
        last_N = (self.mask_NT * torch.arange(self.mask_NT.shape[1])).argmax(1)
        rewards_NT = torch.zeros_like(self.trainer_NT)
        rewards_NT[torch.arange(len(last_N)), last_N] = self.rewards_N
        return rewards_NT

    def stored(self) -> dict[str, Any]:
        """For the file; names of fields without their suffix."""
        return {name.rpartition("_")[0]: plain(getattr(self, name)) for name in self.__slots__}


def drawn(seed: int = 0) -> Inputs:
    """The inputs; rounded to four digits, so that no version of torch draws others."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(GROUPS), TOKENS)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    proximal_NT = -normal(*shape).abs() - 0.02
    far_NT = 1.0 + 3.0 * (torch.rand(shape, generator=generator) < 0.1)
    trainer_NT = (proximal_NT + 0.3 * far_NT * normal(*shape)).clamp(max=-0.01)
    rollout_NT = (proximal_NT + 0.3 * normal(*shape)).clamp(max=-0.01)
    lengths_N = torch.tensor([8, 2, 5, 1, 7, 3, 6, 4, 8])
    mask_NT = torch.arange(TOKENS) < lengths_N[:, None]
    mask_NT[0, 3] = mask_NT[2, 0] = mask_NT[4, 4] = mask_NT[8, 6] = False
    rewards_N = normal(shape[0])
    rewards_N[torch.tensor(GROUPS) == 2] = 0.7
    return Inputs(
        trainer_NT=trainer_NT.round(decimals=4),
        proximal_NT=proximal_NT.round(decimals=4),
        rollout_NT=rollout_NT.round(decimals=4),
        mask_NT=mask_NT,
        advantages_N=normal(shape[0]).round(decimals=4),
        rewards_N=rewards_N.round(decimals=3),
        versions_NT=torch.randint(1, 6, shape, generator=generator),
        groups_N=torch.tensor(GROUPS),
        alone_N=torch.tensor(ALONE),
    )


def plain(values: Tensor) -> list[Any]:
    """Converts a tensor to nested lists; masks become 0 and 1."""
    return (values.long() if values.dtype == torch.bool else values.detach()).tolist()


def loss_and_gradient(loss: Tensor, leaf_NT: Tensor, mask_NT: Tensor) -> dict[str, Any]:
    """A loss and its gradient with respect to the trainer's log-probs; 0 for untrained tokens."""
    (gradient_NT,) = torch.autograd.grad(loss, leaf_NT)
    return {"loss": float(loss.detach()), "gradient": plain(torch.where(mask_NT, gradient_NT, 0.0))}
