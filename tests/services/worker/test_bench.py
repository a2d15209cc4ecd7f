"""``quire bench step`` on a small model: a row for each batch and prompt, with parts that add up to the step."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.worker import accounting, bench
from shared.errors import ConfigError
from tests.services.worker import random_models

OPTIONS = ["--threads", "1", "--batches", "1,3", "--prompts", "40", "--context", "20", "--steps", "4"]


def test_a_row_for_each_batch_and_prompt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    random_models.save(tmp_path, "qwen3", head_dim=16)
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")  # main sets it if nothing does
    assert bench.main(["step", str(tmp_path), *OPTIONS]) == 0
    peaks, header, *rows = capsys.readouterr().out.splitlines()
    assert peaks.startswith("peaks: ")
    assert header == accounting.HEADER
    assert [row[:14].strip() for row in rows] == ["decode 1", "decode 3", "prompt 40"]
    for row in rows:
        median, *parts = map(float, row[14:].split()[1:8])
        assert min(parts[0], parts[-1]) > 0 and sum(parts) == pytest.approx(median, rel=0.8, abs=0.1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "quire bench step"),
        (["step", "--batches", "1,x"], "--batches 1,x: not positive whole numbers"),
        (["step", "--batches", "²"], "--batches ²: not positive whole numbers"),
        (["step", "--prompts", "0"], "--prompts 0: not positive"),
        (["step", "--connect", "ipc:///x"], "unrecognized arguments: --connect"),
    ],
)
def test_what_cannot_run_says_why(options: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        bench.main(options)


def test_the_work_of_a_step_is_counted_by_hand(tmp_path: Path) -> None:
    random_models.save(tmp_path, "llama", num_hidden_layers=1)
    decoder = random_models.executor(tmp_path).decoder
    # hidden 96, 6 heads and 2 kv heads of 16, inner 160, vocabulary 320
    weights = 96 * 96 + 2 * 96 * 32 + 96 * 96 + 3 * 96 * 160
    flops, read = accounting._work(decoder, rows=5, samples=2, context=10, token_bytes=2 * 32 * 4)
    assert flops == 2 * 5 * weights + 2 * 2 * 96 * 320 + 4 * 5 * 10 * 96
    assert read == 4 * (weights + 96 * 320 + 2 * 2 * 10 * 32)
