"""Options of ``quire worker``."""

from __future__ import annotations

from dataclasses import dataclass

from shared import options
from shared.config import option


@dataclass(frozen=True)
class WorkerConfig:
    model: str = options.model()
    connect: str = options.connect()
    index: int = options.index()  # the rank
    worker: str = option("model", "'null' is a toy model on simulated memory, for tests", choices=("model", "null"))
    device: str = option("auto", "where the model runs", choices=("auto", "cpu", "cuda"))
    dtype: str = option("auto", "of weights, and KV", choices=("auto", "float32", "bfloat16", "float16"))
    attention_backend: str = option(
        "auto",
        "the kernels; cpu and triton refuse block sizes they are not made for, auto on a CPU takes torch's attention",
        choices=("auto", "reference", "cpu", "triton"),
    )
    kv_cache_dtype: str = option(
        "auto", "of KV: int8 takes about half of bfloat16's memory on CPUs, less exact", choices=("auto", "int8")
    )
    quantization: str = option(
        "none",
        "of weights, on CPUs: int8 and int4 round them; gguf keeps a GGUF file's own blocks of 4, 5 or 8 bits",
        choices=("none", "int8", "int4", "gguf"),
    )
    block_size: int = options.block_size()
    max_model_len: int | None = options.max_model_len()
    max_num_seqs: int = option(256, "sequences that run at once", minimum=1, maximum=65536)
    max_num_batched_tokens: int = option(2048, "tokens computed in one step", minimum=1, maximum=1 << 20)
    kv_cache_memory_bytes: int | None = option(None, "memory for KV, exactly, with a suffix such as 4GiB", size=True)
    gpu_memory_utilization: float = option(0.92, "share of GPU memory used in all", minimum=0.01, maximum=1.0)
    enforce_eager: bool = option(False, "no CUDA graphs")
    cudagraph_capture_sizes: list[int] = option([], "decode rows to capture CUDA graphs for; default: chosen")
    cpu_memory_utilization: float = option(0.4, "share of free memory for KV on a CPU", minimum=0.01, maximum=0.95)
    num_gpu_blocks_override: int | None = option(None, "KV blocks, exactly (block 0, the padding, included)", minimum=2)
    swap_space: int = option(
        0,
        "host memory for KV of preempted requests, with a suffix such as 4GiB; never more than the device's KV",
        size=True,
    )
    generation_config: str = option(
        "auto", "sampling defaults: 'auto' the model's generation_config.json, 'vllm' neutral ones, or a file or folder"
    )
    override_generation_config: str = option("", 'JSON that replaces some of them, such as {"temperature": 0.6}')
    logprobs_mode: str = option(
        "raw_logprobs",
        "what logprobs tell: raw the model's own, processed after penalties, masks, temperature and filters; or logits",
        choices=("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"),
    )
    threads: int = option(
        0,
        "compute threads, at most two a CPU; 0: a core each, as far as affinity and the cgroup's quota go",
        minimum=0,
    )
    download_dir: str = option("", "where models are kept; default: the user's cache")
    null_step_ms: float = option(0.0, "time a step of the null worker takes", minimum=0)
    cluster_key_file: str = options.cluster_key_file()
    insecure_tcp: bool = options.insecure_tcp()
    log_level: str = options.log_level()
