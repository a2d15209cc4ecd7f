"""``quire bench step``: where the time of a step goes, beside the least that its matrix products take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from services.worker.config import WorkerConfig
from services.worker.main import build_executor
from shared import log
from shared.config import option, parse_many
from shared.errors import ConfigError
from shared.metrics import Registry

ABOUT = "Times the parts of a step by batch size: decode at a context, and whole prompts."
HIDDEN = ("connect", "index", "worker", "cluster_key_file", "insecure_tcp")


@dataclass(frozen=True)
class BenchConfig:
    batches: str = option("1,8,32,64", "sequences that decode at once, by commas")
    prompts: str = option("128,1024", "tokens of a prompt, by commas")
    context: int = option(128, "tokens each sequence has before it decodes", minimum=1)
    steps: int = option(48, "decode steps of each batch, and half as many prompts", minimum=2)


def main(argv: Sequence[str]) -> int:
    if not argv or argv[0] != "step":
        raise ConfigError("there is one benchmark here: quire bench step; --help tells its options")
    configs = parse_many([BenchConfig, WorkerConfig], argv[1:], prog="quire bench step", about=ABOUT, hidden=HIDDEN)
    bench: BenchConfig = configs[0]
    config: WorkerConfig = configs[1]
    log.configure("bench", config.log_level)
    batches, prompts = _numbers("--batches", bench.batches), _numbers("--prompts", bench.prompts)
    longest = max(bench.context + bench.steps + 1, *prompts)
    per_sequence = -(-longest // config.block_size)
    config = replace(
        config,
        max_num_seqs=max(*batches, 1),
        num_gpu_blocks_override=max(batches) * per_sequence + 1,
        max_num_batched_tokens=max(config.max_num_batched_tokens, *prompts),
    )
    executor = build_executor(config, Registry())
    from services.worker.accounting import account  # torch must not be loaded before the executor sets threads up
    from services.worker.model_executor import ModelExecutor

    assert isinstance(executor, ModelExecutor)
    if longest > executor.memory.max_model_len:
        raise ConfigError(f"{longest} tokens are more than the model's limit of {executor.memory.max_model_len}")
    executor.begin()
    for line in account(executor, batches, prompts, bench.context, bench.steps):
        print(line, flush=True)
    return 0


def _numbers(name: str, text: str) -> list[int]:
    numbers = [int(part) for part in text.split(",") if part.strip().isdecimal()]
    if not numbers or min(numbers) < 1 or len(numbers) != len(text.split(",")):
        raise ConfigError(f"{name} {text}: not positive whole numbers with commas between them")
    return numbers
