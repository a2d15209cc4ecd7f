"""What is told of tokens' likelihoods: of which logits (``--logprobs-mode``, as in vLLM), and its way to the host.

``raw`` is the model's own, ``processed`` what a token was drawn from: after mask, rules, temperature and filters. Of
both either the logits themselves are told or their log-softmax.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt
import torch

from shared.wire import Logprobs

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LogprobsMode:
    processed: bool = False
    as_logits: bool = False

    @classmethod
    def named(cls, name: str) -> LogprobsMode:
        """name: as ``--logprobs-mode`` has it."""
        return cls(name.startswith("processed"), name.endswith("logits"))

    def values(self, logits: torch.Tensor) -> torch.Tensor:
        """What is told of each of ``logits [S, V]``, float32."""
        return logits.float() if self.as_logits else torch.log_softmax(logits.float(), dim=-1)


RAW_LOGPROBS = LogprobsMode()


@dataclass(frozen=True, slots=True)
class FetchedLogprobs:
    """On their way to the host, for each of ``entries``: its token's logprob and rank, and the likeliest tokens'."""

    entries: Ints
    counts: Ints
    sampled: torch.Tensor
    ranks: torch.Tensor
    top_ids: torch.Tensor
    top: torch.Tensor

    def take(self) -> Logprobs:
        wanted = torch.arange(self.top.shape[1]) < torch.from_numpy(self.counts).unsqueeze(1)
        return Logprobs(
            entries=self.entries.tolist(),
            sampled=self.sampled.tolist(),
            top_counts=self.counts.tolist(),
            top_ids=self.top_ids[wanted].tolist(),
            top=self.top[wanted].tolist(),
            ranks=self.ranks.tolist(),
        )


def joined(parts: Sequence[FetchedLogprobs]) -> Logprobs | None:
    """All of several, in their order; None of none."""
    if not parts:
        return None
    everything = Logprobs([], [], [], [], [], [])
    for part in parts:
        taken = part.take()
        for column in fields(Logprobs):
            getattr(everything, column.name).extend(getattr(taken, column.name))
    return everything
