"""The built-in model, SmolLM2-135M-Instruct, against transformers on the same weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from services.worker.config import WorkerConfig
from services.worker.model_executor import ModelExecutor
from shared.errors import ConfigError
from shared.models import ModelFiles, locate
from tests.services.worker import forward, oracle
from tests.services.worker.plans import Driver

TOKENS = 32
CODE = "def merge(a, b):\n    # merges two sorted lists\n    out = []\n    while a and b:\n"
CHATS: list[tuple[str | None, str]] = [
    (None, "What is the capital of France?"),
    (None, "Hi"),
    ("", "Name three colours."),
    ("You are a pirate.", "Where is the treasure?"),
    (None, "프랑스의 수도는 어디인가요?"),
    (None, "오늘 날씨가 정말 좋네요. 무엇을 하면 좋을까요?"),
    (None, "法国的首都是哪里？"),
    (None, "请用一句话解释什么是人工智能。"),
    (None, "日本の首都はどこですか？"),
    (None, "Explain these: 🍎🚗👩‍👩‍👧‍👦🏳️‍🌈"),
    (None, "🙂" * 12),
    (None, f"Finish this function:\n```python\n{CODE}```"),
    (None, "SELECT name, count(*) FROM users GROUP BY name HAVING count(*) > 1; -- what does it do?"),
    (None, "¿Cuál es la capital de España?"),
    (None, "Was ist die Hauptstadt von Österreich?"),
    (None, "Translate to French: 'The weather is nice today.'"),
    (None, "1 + 1 = ? And 17 * 23?"),
    (None, "   leading and trailing spaces, tabs\tand\n\n\nnew lines   "),
    (None, "Write a haiku about block tables."),
    (None, "Summarise this text: " + "The quick brown fox jumps over the lazy dog near the river bank. " * 107),
]


@pytest.fixture(scope="module")
def files() -> ModelFiles:
    try:
        return locate("")
    except ConfigError as error:
        pytest.skip(f"the built-in model is not here: {error}")


@pytest.fixture(scope="module")
def theirs(files: ModelFiles) -> Any:
    torch.set_num_threads(2)
    return oracle.builtin(files)


@pytest.fixture(scope="module")
def prompts(files: ModelFiles) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(files.folder)
    encoded = []
    for system, user in CHATS:
        messages = [{"role": "user", "content": user}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        encoded.append(tokenizer.encode(text, add_special_tokens=False))
    assert 1400 < max(map(len, encoded)) < 1700
    return encoded


def executor(dtype: str) -> ModelExecutor:
    options = {"max_num_seqs": 32, "num_gpu_blocks_override": 400, "threads": 2}
    return ModelExecutor(WorkerConfig(dtype=dtype, device="cpu", **options))


@pytest.fixture(scope="module")
def float32() -> ModelExecutor:
    return executor("float32")


@pytest.fixture(scope="module")
def outputs(float32: ModelExecutor, prompts: list[list[int]]) -> list[list[int]]:
    """Our ids in float32, all prompts in one batch and the long ones in chunks."""
    driver = Driver(float32, chunks=lambda i: [97, 256, 33][i % 3], budget=400)
    return driver.generate(prompts, TOKENS, at_once=20)


@pytest.fixture(scope="module")
def logits(theirs: Any, prompts: list[list[int]], outputs: list[list[int]]) -> list[torch.Tensor]:
    """transformers' float32 logits [TOKENS, vocab] along those ids, by prompt."""
    return [oracle.follow(theirs, prompt, output) for prompt, output in zip(prompts, outputs, strict=True)]


def test_float32_greedy_equals_transformers(
    float32: ModelExecutor, prompts: list[list[int]], outputs: list[list[int]], logits: list[torch.Tensor]
) -> None:
    assert outputs == [rows.argmax(-1).tolist() for rows in logits]
    assert [Driver(float32).generate([prompt], TOKENS)[0] for prompt in prompts[:12:3]] == outputs[:12:3]


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="bfloat16 products would be too slow")
def test_bfloat16_is_near(prompts: list[list[int]], outputs: list[list[int]], logits: list[torch.Tensor]) -> None:
    ours = executor("bfloat16")
    together = Driver(ours, chunks=lambda i: 200, budget=400).generate(prompts, TOKENS, at_once=20)
    for got, wanted, exact in zip(together, outputs, logits, strict=True):
        if got != wanted:
            # the two are nearly tied in float32 where they part
            first = next(i for i in range(TOKENS) if got[i] != wanted[i])
            assert exact[first, wanted[first]] - exact[first, got[first]] < 0.3
    differences = []
    for prompt, wanted, exact in list(zip(prompts, outputs, logits, strict=True))[:18:2]:
        near = forward.logits(ours.decoder, [*prompt, *wanted[:-1]], [len(prompt)]).log_softmax(-1)[-TOKENS:]
        forced = torch.tensor(wanted)[:, None]
        differences.append((near.gather(1, forced) - exact.log_softmax(-1).gather(1, forced)).abs().flatten())
    assert torch.cat(differences).mean() <= 0.03
