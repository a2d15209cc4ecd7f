"""Executes plans with a model on this machine's device."""

from __future__ import annotations

import logging
import time
from typing import Any

import numpy as np
import torch

from kernels.decoder import Batch
from kernels.errors import UnavailableError
from kernels.ops import Kernels, select
from services.worker import machine
from services.worker.config import WorkerConfig
from services.worker.executor import StepOutput
from services.worker.generation import GenerationConfig
from services.worker.host_memory import HostMemory
from services.worker.models.config import ModelConfig
from services.worker.models.decoder import Decoder
from services.worker.rows import Ints, Limits, Rows, Step
from services.worker.sampler import PROMPT_ROWS, Sampler
from services.worker.weights import load_weights
from shared.codec import no_ids
from shared.errors import ConfigError
from shared.models import ModelFiles, locate
from shared.wire import Memory, Plan

log = logging.getLogger(__name__)


class ModelExecutor:
    """Weights, KV memory and rows of one rank. Loading happens in the constructor and raises ConfigError."""

    def __init__(self, config: WorkerConfig) -> None:
        cgroup = machine.Cgroup()
        threads = machine.compute_threads(config.threads, cgroup)
        torch.set_num_threads(threads)
        self._device = machine.pick_device(config.device)
        self._dtype = machine.pick_dtype(config.dtype, self._device)
        self._kernels = _kernels(self._device, config)
        files = locate(config.model, download_dir=config.download_dir, progress=True)
        model = ModelConfig.load(files.folder)
        generation = GenerationConfig.load(files.folder, config.generation_config, config.override_generation_config)
        max_model_len = model.max_model_len(config.max_model_len)
        log.info(
            "%s: %s, %s on %s, %d threads, %s kernels",
            files.name,
            model.architecture,
            _name(self._dtype),
            self._device,
            threads,
            self._kernels.name,
        )
        self._decoder = self._load(model, files, max_model_len)
        reserve = _activation_bytes(model, config.max_num_batched_tokens, self._dtype)
        budget = machine.kv_budget(config, self._device, reserve, cgroup)
        bytes_per_token = 2 * model.num_kv_heads * model.head_dim * self._dtype.itemsize * model.num_layers
        num_blocks = _num_blocks(config, budget, bytes_per_token * config.block_size, max_model_len)
        self._check_room(num_blocks * bytes_per_token * config.block_size, cgroup)
        self._kv = self._allocate(model, num_blocks, config.block_size)
        # What a larger host pool held could never come back at once.
        host_blocks = min(config.swap_space // (bytes_per_token * config.block_size), num_blocks - 1)
        self._check_room(host_blocks * bytes_per_token * config.block_size, cgroup)
        self._host = HostMemory(self._kv, host_blocks)
        limits = Limits(
            config.max_num_seqs, num_blocks, config.block_size, max_model_len, model.vocab_size, host_blocks
        )
        self._rows = Rows(limits)
        self._sampler = Sampler(self._rows, self._kernels, self._upload)
        self._memory = Memory(
            num_blocks=num_blocks,
            host_blocks=host_blocks,
            block_size=config.block_size,
            bytes_per_block=bytes_per_token * config.block_size,
            max_model_len=max_model_len,
            vocab_size=model.vocab_size,
            eos_ids=list(generation.eos_ids or model.eos_ids),
            model_digest=files.digest,
            model_name=files.name,
            dtype=_name(self._dtype),
            defaults=generation.defaults,
        )
        log.info("sampling where a request leaves it open: %s", generation.defaults)
        log.info(
            "KV: %d bytes per token, %d blocks of %d, %.1f requests of %d tokens fit",
            bytes_per_token,
            num_blocks,
            config.block_size,
            (num_blocks - 1) / self._rows.limits.max_blocks,
            max_model_len,
        )

    @property
    def memory(self) -> Memory:
        return self._memory

    @property
    def decoder(self) -> Decoder:
        return self._decoder

    @torch.inference_mode()
    def execute(self, plan: Plan) -> StepOutput:
        begin = time.perf_counter()
        step = self._rows.apply(plan)
        self._sampler.change(plan)
        timings = self._move(plan)
        if not len(step.positions):
            return StepOutput(no_ids(), no_ids(), timings | {"total": time.perf_counter() - begin})
        started = time.perf_counter()
        batch, samples = self._batch(step, plan), self._upload(step.sample_tokens)
        prompt_logprobs = None
        if self._sampler.tells_of_prompts(step):
            hidden = self._decoder.forward(batch, self._kv)
            logits, parts = self._decoder.logits(hidden[samples]), dict[str, float]()
            prompt_logprobs = self._sampler.prompt_logprobs(hidden, self._decoder.logits, step)
        else:
            logits, parts = self._decoder.step(batch, self._kv, samples)
        forward = time.perf_counter()
        ids, logprobs = self._sampler.sample(logits, step)
        self._rows.last_token[step.sample_slots] = ids
        end = time.perf_counter()
        timings |= {"forward": forward - started, "sample": end - forward, "total": end - begin, **parts}
        return StepOutput(step.sample_slots.astype(np.int32), ids.astype(np.int32), timings, logprobs, prompt_logprobs)

    def _move(self, plan: Plan) -> dict[str, float]:
        """Swaps and copies, in this order. Returns the seconds that swapping took, where there was any."""
        timings = {}
        for name, moves, move in (
            ("swap_out", plan.swap_out, self._host.swap_out),
            ("swap_in", plan.swap_in, self._host.swap_in),
        ):
            if len(moves):
                begin = time.perf_counter()
                pairs = torch.from_numpy(moves.astype(np.int64))
                move(self._kv, pairs[::2], pairs[1::2])
                timings[name] = time.perf_counter() - begin
        if len(plan.copies):
            pairs = self._upload(plan.copies.astype(np.int64))
            self._kernels.copy_blocks(self._kv, pairs[::2], pairs[1::2])
        return timings

    def _load(self, model: ModelConfig, files: ModelFiles, max_model_len: int) -> Decoder:
        begin = time.perf_counter()
        decoder = Decoder(model, max_model_len, self._dtype, self._device, self._kernels)
        decoder.load(load_weights(files, self._dtype, progress=True))
        log.info("weights loaded in %.1f s", time.perf_counter() - begin)
        return decoder

    def _check_room(self, kv_bytes: int, cgroup: machine.Cgroup) -> None:
        """A host gives out more memory than it has and kills whoever uses it; so a size asked for is checked here."""
        if self._device.type == "cpu" and kv_bytes > (free := machine.free_host_memory(cgroup)):
            raise ConfigError(f"the KV blocks asked for take {kv_bytes} bytes, but {free} bytes of memory are free")

    def _allocate(self, model: ModelConfig, num_blocks: int, block_size: int) -> list[torch.Tensor]:
        """KV memory, one tensor a layer. Only block 0 is cleared: the rest is written before it is read."""
        shape = (num_blocks, 2, model.num_kv_heads, block_size, model.head_dim)
        try:
            kv = [torch.empty(shape, dtype=self._dtype, device=self._device) for _ in range(model.num_layers)]
        except RuntimeError as error:  # torch.OutOfMemoryError is one too
            raise ConfigError(f"no memory for {num_blocks} KV blocks of {block_size} tokens") from error
        for layer in kv:
            layer[0].zero_()
        return kv

    def _batch(self, step: Step, plan: Plan) -> Batch:
        rows = self._rows
        decodes = len(step.decode_slots)
        tokens = np.concatenate([rows.last_token[step.decode_slots], plan.tokens.astype(np.int64)])
        return Batch(
            tokens=self._upload(tokens),
            positions=self._upload(step.positions),
            slot_mapping=self._upload(rows.slot_mapping(step)),
            decode_tables=self._tables(step.decode_slots),
            decode_lens=self._upload((step.positions[:decodes] + 1).astype(np.int32)),
            chunk_tables=self._tables(step.chunk_slots),
            chunk_cu_seqlens=self._upload(np.concatenate([[0], np.cumsum(step.chunk_lens)]).astype(np.int32)),
            chunk_lens=self._upload(step.chunk_ends.astype(np.int32)),
        )

    def _tables(self, slots: Ints) -> torch.Tensor:
        """The slots' block tables, as wide as the longest."""
        width = int(self._rows.state.blocks[slots].max(initial=0))
        return self._upload(self._rows.tables[slots, :width])

    def _upload(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)


def _kernels(device: torch.device, config: WorkerConfig) -> Kernels:
    try:
        return select(device, config.attention_backend, config.quantization)
    except UnavailableError as error:
        option = "attention-backend" if config.quantization == "none" else "quantization"
        value = config.attention_backend if config.quantization == "none" else config.quantization
        raise ConfigError(f"--{option} {value}: {error}") from error


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _activation_bytes(model: ModelConfig, tokens: int, dtype: torch.dtype) -> int:
    """A generous estimate of what one step of ``tokens`` allocates beside weights and KV."""
    widest = max(2 * model.intermediate_size, (model.num_heads + 2 * model.num_kv_heads) * model.head_dim)
    per_token = (4 * model.hidden_size + 2 * widest) * max(dtype.itemsize, 4)
    return tokens * per_token + min(tokens, PROMPT_ROWS) * model.vocab_size * 16  # logits, their logarithms, and a sort


def _num_blocks(config: WorkerConfig, budget: int, bytes_per_block: int, max_model_len: int) -> int:
    """KV blocks, the padding included: as asked, else what the budget holds and full-length requests can use."""
    if config.num_gpu_blocks_override is not None:
        return config.num_gpu_blocks_override
    usable = config.max_num_seqs * -(-max_model_len // config.block_size)
    blocks = min(max(budget, 0) // bytes_per_block, usable + 1)
    if blocks < 2:
        raise ConfigError(
            f"no memory for KV: a block of {config.block_size} tokens takes {bytes_per_block} bytes, two are needed "
            f"(one is padding), and there are {max(budget, 0)} bytes"
        )
    return blocks
