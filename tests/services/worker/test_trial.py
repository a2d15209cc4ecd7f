"""The largest steps: counted by hand, and run."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.worker.device import Cpu
from services.worker.machine import Cgroup
from services.worker.rows import Limits
from services.worker.trial import Trial, largest_plans
from tests.services.worker import random_models


@pytest.mark.parametrize(
    ("seqs", "tokens", "max_len", "chunks", "second"),
    [
        (4, 20, 100, [17, 1, 1, 1], (3, [17])),
        (4, 20, 8, [7, 7, 5, 1], (3, [7])),
        (2, 100, 8, [7, 7], (1, [7])),  # more tokens than the rows can have
        (8, 3, 100, [1, 1, 1], (2, [1])),  # more rows than tokens
        (1, 30, 100, [30], None),
    ],
)
def test_every_row_samples_and_the_first_is_as_long_as_it_gets(
    seqs: int, tokens: int, max_len: int, chunks: list[int], second: tuple[int, list[int]] | None
) -> None:
    limits = Limits(seqs, 2, block_size=4, max_model_len=max_len, vocab_size=50)
    plans = list(largest_plans(limits, tokens))
    assert plans[0].chunk_lens == chunks
    assert plans[0].chunk_samples == [[slot] for slot in range(len(chunks))]
    rules = [row.rules for row in plans[0].new_rows]  # a prompt's logprobs are among what is tried: vllm #5907, #5067
    assert [rule and (rule.prompt_logprobs, len(rule.tokens)) for rule in rules] == [(20, count) for count in chunks]
    assert plans[0].table_lens == [-(-max_len // 4)] * len(chunks)
    assert [(p.decodes, p.chunk_lens) for p in plans[1:]] == ([second] if second else [])


def test_they_run(tmp_path: Path) -> None:
    random_models.save(tmp_path, "qwen3", vocab_size=15)  # fewer tokens than logprobs that may be asked for
    executor = random_models.executor(tmp_path)
    decoder = executor.decoder
    asked: list[int] = []

    def allocate(blocks: int) -> list[object]:
        asked.append(blocks)
        return [layer[:blocks].clone() for layer in executor._runner.kv]

    limits = Limits(8, 160, 16, 256, 15)
    Trial(Cpu(Cgroup()), decoder.kernels, decoder, limits, 300, allocate).run()  # type: ignore[arg-type]
    assert asked == [2]
