"""Executes plans with a model on this machine's device."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from kernels.errors import UnavailableError
from kernels.ops import Kernels, select
from services.worker import machine
from services.worker.config import WorkerConfig
from services.worker.device import Cpu, Device
from services.worker.executor import MaskSource, StepOutput, no_mask
from services.worker.generation import GenerationConfig
from services.worker.host_memory import HostMemory
from services.worker.kv_memory import KvForm
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
        torch.set_num_threads(machine.compute_threads(config.threads, cgroup))
        where = machine.pick_device(config.device)
        dtype = machine.pick_dtype(config.dtype, where)
        self._kernels = _kernels(where, config)
        self.device = _device(where, config, cgroup)
        files = _files(config, where)
        model = ModelConfig.load(files.folder)
        generation = GenerationConfig.load(files.folder, config.generation_config, config.override_generation_config)
        max_model_len = model.max_model_len(config.max_model_len)
        form = KvForm.build(config, model, dtype, self._kernels)
        log.info(
            "%s: %s, %s on %s, quantization %s, %d threads, %s kernels",
            files.name,
            model.architecture,
            _name(dtype),
            where,
            config.quantization,
            torch.get_num_threads(),
            self._kernels.name,
        )
        self.decoder = self._load(model, files, max_model_len, dtype, config.quantization)
        limits = Limits(config.max_num_seqs, 0, config.block_size, max_model_len, model.vocab_size)
        self._runner = self._make_runner(config, form, limits, registry or Registry())
        self._memory = _memory(config, form, self._runner.limits, model, generation, files, dtype)
        log.info("sampling where a request leaves it open: %s", generation.defaults)
        log.info(
            "KV: %s, %d bytes per token, %d blocks of %d, %.1f requests of %d tokens fit",
            _name(form.dtype),
            form.bytes_per_token,
            self._memory.num_blocks,
            config.block_size,
            (self._memory.num_blocks - 1) / limits.max_blocks,
            max_model_len,
        )

    @property
    def memory(self) -> Memory:
        return self._memory

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
        self, model: ModelConfig, files: ModelFiles, max_model_len: int, dtype: torch.dtype, quantization: str
    ) -> Decoder:
        begin = time.perf_counter()
        decoder = Decoder(model, max_model_len, dtype, self.device.where, self._kernels, quantization)
        decoder.load(load_weights(files, dtype, keep_blocks=quantization == "gguf", progress=True))
        log.info("weights loaded in %.1f s", time.perf_counter() - begin)
        return decoder

    def _make_runner(self, config: WorkerConfig, form: KvForm, limits: Limits, registry: Registry) -> Runner:
        """Finds out how many blocks there is room for, and takes their memory. limits: all but numbers of blocks."""
        told = LogprobsMode.named(config.logprobs_mode)
        trial = Trial(
            self.device,
            self._kernels,
            self.decoder,
            limits,
            config.max_num_batched_tokens,
            lambda num_blocks: form.allocate(self.device, num_blocks),
            told,
        )
        num_blocks = config.num_gpu_blocks_override
        if num_blocks is None:
            estimate = _activation_bytes(self.decoder, config.max_num_batched_tokens)
            budget = self.device.kv_budget(config, estimate, trial)
            num_blocks = form.num_blocks(budget, config.max_num_seqs, limits.max_model_len)
        # What a larger host pool held could never come back at once.
        host_blocks = min(config.swap_space // form.bytes_per_block, num_blocks - 1)
        self.device.check_room(num_blocks * form.bytes_per_block, host_blocks * form.bytes_per_block)
        kv = form.allocate(self.device, num_blocks)
        host = self._host_memory(kv, host_blocks)
        self.device.prepare(trial, kv, _late_compiles(registry))
        limits = replace(limits, num_blocks=num_blocks, host_blocks=host_blocks)
        return Runner(self.device, self._kernels, self.decoder, limits, kv, host, told)

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


def _kernels(device: torch.device, config: WorkerConfig) -> Kernels:
    try:
        return select(device, config.attention_backend)
    except UnavailableError as error:
        raise ConfigError(f"--attention-backend {config.attention_backend}: {error}") from error


def _files(config: WorkerConfig, where: torch.device) -> ModelFiles:
    """Raises ConfigError when the model cannot be had, or not as --quantization says."""
    if config.quantization != "none" and where.type != "cpu":
        raise ConfigError(f"--quantization {config.quantization} is for CPUs, not {where}")
    files = locate(config.model, download_dir=config.download_dir, progress=True)
    if config.quantization == "gguf" and files.gguf is None:
        raise ConfigError(f"--quantization gguf: {files.name} is no GGUF file; int8 and int4 round any model")
    return files


def _memory(
    config: WorkerConfig,
    form: KvForm,
    limits: Limits,
    model: ModelConfig,
    generation: GenerationConfig,
    files: ModelFiles,
    dtype: torch.dtype,
) -> Memory:
    return Memory(
        num_blocks=limits.num_blocks,
        host_blocks=limits.host_blocks,
        block_size=limits.block_size,
        bytes_per_block=form.bytes_per_block,
        max_model_len=limits.max_model_len,
        vocab_size=limits.vocab_size,
        eos_ids=list(generation.eos_ids or model.eos_ids),
        model_digest=files.digest,
        model_name=files.name,
        dtype=_name(dtype),
        defaults=generation.defaults,
        kv_cache_dtype=_name(form.dtype),
        quantization=config.quantization,
    )


def _late_compiles(registry: Registry) -> Callable[[], None]:
    return registry.counter("quire:worker_late_compiles", "Kernels compiled while serving.").inc


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _activation_bytes(decoder: Decoder, tokens: int) -> int:
    """A generous estimate of what one step of ``tokens`` allocates beside weights and KV."""
    model = decoder.config
    widest = max(2 * model.intermediate_size, (model.num_heads + 2 * model.num_kv_heads) * model.head_dim)
    per_token = (4 * model.hidden_size + 2 * widest) * max(decoder.embedding.dtype.itemsize, 4)
    return tokens * per_token + min(tokens, PROMPT_ROWS) * model.vocab_size * 16  # logits, their logarithms, and a sort
