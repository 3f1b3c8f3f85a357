"""A communication hook: what people put in place of the reduction of gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class CommHook:
    """A function and what it is given first, in the form of the hooks of `torch.distributed`.

    Attributes:
        state: Passed to the hook.
        hook: Called with `state` and a bucket's whole gradients, of which it makes the mean over the ranks in place;
            where they are sharded, also with a tensor of its own for this rank's part of the mean.
    """

    state: object
    hook: Callable[..., object]

    def mean(self, gradients: torch.Tensor, part_numel: int) -> torch.Tensor:
        """Give this rank's part of the mean; the hook may give it another dtype, and uses up the gradients.

        Args:
            gradients: Of this rank. # [numel]
            part_numel: Elements of the part; all of them where nothing is sharded.

        Returns:
            # [part_numel]

        Collective:
            What the hook issues: all ranks come here in one order; blocks if the hook does.
        """
        given = gradients.detach()  # hooks may replace its `.data`, and the buffer is used again
        if part_numel == gradients.numel():
            self.hook(self.state, given)
            return given
        part = given.new_empty(part_numel)
        self.hook(self.state, given, part)
        return part
