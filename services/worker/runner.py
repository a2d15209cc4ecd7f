"""Runs plans on KV memory: changes rows, moves blocks, computes and samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from kernels.decoder import Batch
from kernels.ops import Kernels
from services.worker.device import Array, Device, Mark
from services.worker.executor import MaskSource, StepOutput
from services.worker.host_memory import HostMemory
from services.worker.logprobs import RAW_LOGPROBS, FetchedLogprobs, LogprobsMode, joined
from services.worker.models.decoder import Decoder
from services.worker.rows import Ints, Limits, Rows, Step
from services.worker.sampler import Sampled, Sampler
from shared.wire import Plan


@dataclass
class RunningStep:
    """A step given to the device: ``executor.Launched``. spans: parts by name, from mark to mark."""

    slots: Ints
    end: Mark
    spans: dict[str, tuple[Mark, Mark]]
    sampled: Sampled | None = None
    prompt_logprobs: Sequence[FetchedLogprobs] = ()
    parts: dict[str, float] = field(default_factory=dict)

    def done(self) -> bool:
        return all(mark.passed() for mark in self._ends())

    def wait(self) -> None:
        for mark in self._ends():
            mark.wait()

    def output(self) -> StepOutput:
        timings = {name: end.since(begin) for name, (begin, end) in self.spans.items()} | self.parts
        ids, logprobs = self.sampled.take() if self.sampled else (self.slots, None)
        return StepOutput(
            self.slots.astype(np.int32), ids.astype(np.int32), timings, logprobs, joined(self.prompt_logprobs)
        )

    def _ends(self) -> list[Mark]:
        """The step's own end, and that of the swaps beside it: what they name is free only when both are over."""
        return [self.end, *(end for _, end in self.spans.values())]


class Runner:
    """Rows and KV memory of one rank. kv: a tensor a layer; host: for swapped blocks; told: which logprobs."""

    def __init__(
        self,
        device: Device,
        kernels: Kernels,
        decoder: Decoder,
        limits: Limits,
        kv: list[torch.Tensor],
        host: HostMemory,
        told: LogprobsMode = RAW_LOGPROBS,
    ) -> None:
        self.kv, self.limits = kv, limits
        self._device, self._kernels, self._decoder, self._host = device, kernels, decoder, host
        self._rows = Rows(limits)
        self._sampler = Sampler(self._rows, kernels, device, told)
        # By slot. Ids stay on the device: a step begins before the host knows what the one before has sampled.
        self._last_token = torch.zeros(limits.max_num_seqs, dtype=torch.int64, device=device.where)

    @torch.inference_mode()
    def launch(self, plan: Plan, mask: MaskSource) -> RunningStep:
        """Raises PlanError, changing nothing, when the plan contradicts the rows it names."""
        device = self._device
        begin = device.mark()
        step = self._rows.apply(plan)
        new_blocks = max(plan.table_blocks.max(initial=0), plan.append_blocks.max(initial=0))
        device.reach(int(new_blocks))
        self._sampler.change(plan)
        spans = self._move(plan)
        if not len(step.positions):
            end = device.mark()
            return RunningStep(step.sample_slots, end, spans | {"total": (begin, end)})
        started = device.mark()
        batch, samples = self._batch(step, plan), device.upload(step.sample_tokens)
        prompt_logprobs: list[FetchedLogprobs] = []
        likeliest = None
        if self._sampler.tells_of_given(step):
            hidden = self._decoder.forward(batch, self.kv)
            logits, parts = self._decoder.logits(hidden[samples]), dict[str, float]()
            prompt_logprobs = self._sampler.given_logprobs(hidden, self._decoder.logits, step)
        else:
            if self._sampler.takes_likeliest(step):
                likeliest = torch.empty_like(samples)
            logits, parts = self._decoder.step(batch, self.kv, samples, likeliest)
        forward = device.mark()
        sampled = None
        if len(step.sample_slots):
            sampled = self._sampler.sample(logits, step, mask, likeliest)
            self._last_token.index_copy_(0, device.upload(step.sample_slots), sampled.on_device)
        end = device.mark()
        spans |= {"forward": (started, forward), "sample": (forward, end), "total": (begin, end)}
        return RunningStep(step.sample_slots, end, spans, sampled, prompt_logprobs, parts)

    def _move(self, plan: Plan) -> dict[str, tuple[Mark, Mark]]:
        """Swaps and copies, in this order; where each swap begins and ends.

        What is swapped out is stored by earlier steps, and read by this one at most, so it is copied beside it. What
        is swapped in is read by this step, which follows it.
        """
        spans = {}
        if len(plan.swap_out):
            sources, destinations = _pairs(plan.swap_out)
            spans["swap_out"] = self._device.aside(
                lambda: self._kernels.swap_blocks(self.kv, self._host.layers, sources, destinations)
            )
        if len(plan.swap_in):
            back, to = _pairs(plan.swap_in)
            spans["swap_in"] = self._device.aside(
                lambda: self._kernels.swap_blocks(self._host.layers, self.kv, back, to)
            )
            self._device.follow(spans["swap_in"][1])
        if len(plan.copies):
            pairs = self._device.upload(plan.copies.astype(np.int64).reshape(-1, 2).T.copy())
            self._kernels.copy_blocks(self.kv, pairs[0], pairs[1])
        return spans

    def _batch(self, step: Step, plan: Plan) -> Batch:
        upload, rows = self._device.upload, self._rows
        decodes = len(step.decode_slots)
        tokens = self._last_token.index_select(0, upload(step.decode_slots))
        if len(plan.tokens):
            tokens = torch.cat([tokens, upload(plan.tokens.astype(np.int64))])
        return Batch(
            tokens=tokens,
            positions=upload(step.positions),
            slot_mapping=upload(rows.slot_mapping(step)),
            decode_tables=self._tables(step.decode_slots),
            decode_lens=upload((step.positions[:decodes] + 1).astype(np.int32)),
            chunk_tables=self._tables(step.chunk_slots),
            chunk_cu_seqlens=upload(np.concatenate([[0], np.cumsum(step.chunk_lens)]).astype(np.int32)),
            chunk_lens=upload(step.chunk_ends.astype(np.int32)),
        )

    def _tables(self, slots: Ints) -> torch.Tensor:
        """The slots' block tables, as wide as the longest."""
        width = int(self._rows.state.blocks[slots].max(initial=0))
        return self._device.upload(self._rows.tables[slots, :width])


def _pairs(moves: Array) -> tuple[torch.Tensor, torch.Tensor]:
    """Sources and destinations of a plan's column, [P] int64 on the host."""
    pairs = torch.from_numpy(moves.astype(np.int64).reshape(-1, 2).T.copy())
    return pairs[0], pairs[1]
