"""Executes plans with a model on this machine's device."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from kernels.errors import UnavailableError
from kernels.kv import SCALE_BYTES, layer_shape, scale_elements
from kernels.ops import Kernels, select
from services.worker import machine
from services.worker.config import WorkerConfig
from services.worker.device import Cpu, Device
from services.worker.executor import MaskSource, StepOutput, no_mask
from services.worker.generation import GenerationConfig
from services.worker.host_memory import HostMemory
from services.worker.logprobs import LogprobsMode
from services.worker.models.config import ModelConfig
from services.worker.models.decoder import Decoder
from services.worker.rows import Limits
from services.worker.runner import Runner, RunningStep
from services.worker.sampler import PROMPT_ROWS
from services.worker.trial import Trial
from services.worker.weights import load_weights
from shared.errors import ConfigError
from shared.metrics import Registry
from shared.models import ModelFiles, locate
from shared.wire import Memory, Plan

log = logging.getLogger(__name__)


class ModelExecutor:
    """Weights, KV memory and rows of one rank. Loading happens in the constructor and raises ConfigError."""

    def __init__(self, config: WorkerConfig, registry: Registry | None = None) -> None:
        cgroup = machine.Cgroup()
        threads = machine.compute_threads(config.threads, cgroup)
        torch.set_num_threads(threads)
        where = machine.pick_device(config.device)
        self._dtype = machine.pick_dtype(config.dtype, where)
        kernels = _kernels(where, config)
        self._kernels = kernels
        self.device = _device(where, config, cgroup)
        if config.quantization != "none" and where.type != "cpu":
            raise ConfigError(f"--quantization {config.quantization} is for CPUs, not {where}")
        files = locate(config.model, download_dir=config.download_dir, progress=True)
        if config.quantization == "gguf" and files.gguf is None:
            raise ConfigError(f"--quantization gguf: {files.name} is no GGUF file; int8 and int4 round any model")
        model = ModelConfig.load(files.folder)
        generation = GenerationConfig.load(files.folder, config.generation_config, config.override_generation_config)
        max_model_len = model.max_model_len(config.max_model_len)
        _check_kv(kernels, config, model)
        self._kv_dtype = _kv_dtype(config.kv_cache_dtype, self._dtype, kernels, model)
        log.info(
            "%s: %s, %s on %s, quantization %s, %d threads, %s kernels",
            files.name,
            model.architecture,
            _name(self._dtype),
            where,
            config.quantization,
            threads,
            kernels.name,
        )
        self._decoder = self._load(model, files, max_model_len, kernels, config.quantization)
        limits = Limits(config.max_num_seqs, 0, config.block_size, max_model_len, model.vocab_size)
        allocate = partial(self._allocate, model, config.block_size)
        told = LogprobsMode.named(config.logprobs_mode)
        trial = Trial(self.device, kernels, self._decoder, limits, config.max_num_batched_tokens, allocate, told)
        row_bytes = (model.head_dim + scale_elements(self._kv_dtype)) * self._kv_dtype.itemsize
        bytes_per_token = 2 * model.num_kv_heads * row_bytes * model.num_layers
        bytes_per_block = bytes_per_token * config.block_size
        num_blocks = config.num_gpu_blocks_override
        if num_blocks is None:
            estimate = _activation_bytes(model, config.max_num_batched_tokens, self._dtype)
            budget = self.device.kv_budget(config, estimate, trial)
            num_blocks = _num_blocks(config, budget, bytes_per_block, max_model_len)
        # What a larger host pool held could never come back at once.
        host_blocks = min(config.swap_space // bytes_per_block, num_blocks - 1)
        self.device.check_room(num_blocks * bytes_per_block, host_blocks * bytes_per_block)
        kv = allocate(num_blocks)
        host = self._host_memory(kv, host_blocks)
        self.device.prepare(trial, kv, _late_compiles(registry or Registry()))
        limits = replace(limits, num_blocks=num_blocks, host_blocks=host_blocks)
        self._runner = Runner(self.device, kernels, self._decoder, limits, kv, host, told)
        self._memory = Memory(
            num_blocks=num_blocks,
            host_blocks=host_blocks,
            block_size=config.block_size,
            bytes_per_block=bytes_per_block,
            max_model_len=max_model_len,
            vocab_size=model.vocab_size,
            eos_ids=list(generation.eos_ids or model.eos_ids),
            model_digest=files.digest,
            model_name=files.name,
            dtype=_name(self._dtype),
            defaults=generation.defaults,
            kv_cache_dtype=_name(self._kv_dtype),
            quantization=config.quantization,
        )
        log.info("sampling where a request leaves it open: %s", generation.defaults)
        log.info(
            "KV: %s, %d bytes per token, %d blocks of %d, %.1f requests of %d tokens fit",
            _name(self._kv_dtype),
            bytes_per_token,
            num_blocks,
            config.block_size,
            (num_blocks - 1) / limits.max_blocks,
            max_model_len,
        )

    @property
    def memory(self) -> Memory:
        return self._memory

    @property
    def decoder(self) -> Decoder:
        return self._decoder

    def begin(self) -> None:
        self.device.begin(self._kernels, self._runner.kv)

    def launch(self, plan: Plan, mask: MaskSource = no_mask) -> RunningStep:
        return self._runner.launch(plan, mask)

    def execute(self, plan: Plan, mask: MaskSource = no_mask) -> StepOutput:
        """Runs one plan whole."""
        step = self._runner.launch(plan, mask)
        step.wait()
        return step.output()

    def _load(
        self, model: ModelConfig, files: ModelFiles, max_model_len: int, kernels: Kernels, quantization: str
    ) -> Decoder:
        begin = time.perf_counter()
        decoder = Decoder(model, max_model_len, self._dtype, self.device.where, kernels, quantization)
        decoder.load(load_weights(files, self._dtype, keep_blocks=quantization == "gguf", progress=True))
        log.info("weights loaded in %.1f s", time.perf_counter() - begin)
        return decoder

    def _allocate(self, model: ModelConfig, block_size: int, num_blocks: int) -> list[torch.Tensor]:
        """KV memory, one tensor a layer. Only block 0 is cleared: the rest is written before it is read."""
        shape = layer_shape(num_blocks, model.num_kv_heads, block_size, model.head_dim, self._kv_dtype)
        try:
            kv = [self.device.memory(shape, self._kv_dtype) for _ in range(model.num_layers)]
        except (OSError, RuntimeError) as error:  # torch.OutOfMemoryError is a RuntimeError
            raise ConfigError(f"no memory for {num_blocks} KV blocks of {block_size} tokens") from error
        for layer in kv:
            layer[0].zero_()
        return kv

    def _host_memory(self, kv: list[torch.Tensor], num_blocks: int) -> HostMemory:
        try:
            return HostMemory(self.device, kv, num_blocks)
        except RuntimeError as error:  # pinned memory has limits of its own
            raise ConfigError(f"--swap-space: no memory for {num_blocks} blocks of the host: {error}") from error


def _device(where: torch.device, config: WorkerConfig, cgroup: machine.Cgroup) -> Device:
    """The one place that knows what kinds of devices there are."""
    if where.type == "cpu":
        return Cpu(cgroup)
    from services.worker.cuda import Cuda

    return Cuda(where, config, cgroup)


def _late_compiles(registry: Registry) -> Callable[[], None]:
    return registry.counter("quire:worker_late_compiles", "Kernels compiled while serving.").inc


def _kernels(device: torch.device, config: WorkerConfig) -> Kernels:
    try:
        return select(device, config.attention_backend)
    except UnavailableError as error:
        raise ConfigError(f"--attention-backend {config.attention_backend}: {error}") from error


def _check_kv(kernels: Kernels, config: WorkerConfig, model: ModelConfig) -> None:
    try:
        kernels.check_kv(config.block_size, model.head_dim)
    except UnavailableError as error:
        raise ConfigError(f"the {kernels.name} kernels do not run this: {error}") from error


def _kv_dtype(wanted: str, dtype: torch.dtype, kernels: Kernels, model: ModelConfig) -> torch.dtype:
    if wanted == "auto":
        return dtype
    if kernels.name == "triton":
        raise ConfigError("--kv-cache-dtype int8 runs on CPUs only, not with the Triton kernels")
    if model.head_dim % SCALE_BYTES:
        raise ConfigError(
            f"--kv-cache-dtype int8 needs a head size that is a multiple of {SCALE_BYTES}; the model's is "
            f"{model.head_dim}"
        )
    return torch.int8


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _activation_bytes(model: ModelConfig, tokens: int, dtype: torch.dtype) -> int:
    """A generous estimate of what one step of ``tokens`` allocates beside weights and KV."""
    widest = max(2 * model.intermediate_size, (model.num_heads + 2 * model.num_kv_heads) * model.head_dim)
    per_token = (4 * model.hidden_size + 2 * widest) * max(dtype.itemsize, 4)
    return tokens * per_token + min(tokens, PROMPT_ROWS) * model.vocab_size * 16  # logits, their logarithms, and a sort


def _num_blocks(config: WorkerConfig, budget: int, bytes_per_block: int, max_model_len: int) -> int:
    """KV blocks, the padding included: what the budget holds and full-length requests can use."""
    usable = config.max_num_seqs * -(-max_model_len // config.block_size)
    blocks = min(max(budget, 0) // bytes_per_block, usable + 1)
    if blocks < 2:
        raise ConfigError(
            f"no memory for KV: a block of {config.block_size} tokens takes {bytes_per_block} bytes, two are needed "
            f"(one is padding), and there are {max(budget, 0)} bytes"
        )
    return blocks
