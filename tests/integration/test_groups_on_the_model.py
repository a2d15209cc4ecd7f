"""Beams and preemption on the built-in model in fp32: transformers' sequences, and the ids of a run undisturbed."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from services.worker.config import WorkerConfig
from services.worker.executor import Executor
from services.worker.model_executor import ModelExecutor
from shared.models import locate
from tests.integration.prompts import PROMPTS
from tests.services.scheduler.simulation import EOS, Simulation
from tests.services.scheduler.test_logprobs import Told
from tests.services.worker import oracle

VOCAB = 49_152
BLOCKS = 120
BEAM_TOKENS = 12  # more than the capital of France takes
TOLD = {1: 12, 3: 2}  # logprobs that requests ask for: more than four beams need for themselves, and less


class OnModel(Simulation):
    """The pure scheduler with the model for a worker."""

    def __init__(self, executor: ModelExecutor, *, num_blocks: int = BLOCKS, **options: Any) -> None:
        self._model = executor
        super().__init__(
            num_blocks=num_blocks, max_model_len=1024, vocab_size=VOCAB, max_num_batched_tokens=256, **options
        )

    def new_executor(self) -> Executor:
        return self._model


class ToldOnModel(OnModel, Told):
    """Keeps the logprobs that came."""


@pytest.fixture(scope="module")
def executor() -> ModelExecutor:
    blocks = 16 * 46080  # of 16 tokens, 30 layers of 2 x 3 x 64 float32s
    return ModelExecutor(
        WorkerConfig(
            dtype="float32",
            max_model_len=1024,
            num_gpu_blocks_override=BLOCKS,
            max_num_seqs=8,
            swap_space=40 * blocks,
        )
    )


@torch.inference_mode()
def beams(model: Any, ids: list[int], **options: Any) -> list[list[int]]:
    """transformers' four sequences, up to their EOS."""
    inputs = torch.tensor([ids])
    output = model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=BEAM_TOKENS,
        do_sample=False,
        num_beams=4,
        num_return_sequences=4,
        pad_token_id=EOS,
        **options,
    )
    found = []
    for row in output[:, len(ids) :].tolist():
        end = row.index(EOS) + 1 if EOS in row else len(row)
        found.append(row[:end])
    return found


def test_four_beams_give_transformers_sequences(executor: ModelExecutor) -> None:
    files = locate("")
    model, tokenizer = oracle.builtin(files), AutoTokenizer.from_pretrained(files.folder)
    names = [name for name in PROMPTS if name != "long"][:10]
    assert len(names) == 10
    options: dict[str, dict[str, Any]] = {
        names[0]: {"length_penalty": 2.0, "early_stopping": True},
        names[1]: {"length_penalty": 0.5, "early_stopping": "never"},
    }
    simulation = ToldOnModel(executor)
    expected, prompts = {}, {}
    for rid, name in enumerate(names, 1):
        wanted = options.get(name, {})
        prompts[rid] = tokenizer.apply_chat_template(PROMPTS[name], add_generation_prompt=True)["input_ids"]
        expected[rid] = beams(model, prompts[rid], **wanted)
        told: dict[str, Any] = {"logprobs": TOLD[rid]} if rid in TOLD else {}
        ours: dict[str, Any] = {
            key: str(value).lower() if key == "early_stopping" else value for key, value in wanted.items()
        }
        simulation.submit(rid, prompts[rid], BEAM_TOKENS, n=4, use_beam_search=True, **told, **ours)
    simulation.drain()  # two searches at a time, of eight rows
    for rid, name in enumerate(names, 1):
        assert [simulation.outputs[rid, index] for index in range(4)] == expected[rid], name
    for rid, count in TOLD.items():
        for index in range(4):
            output, found = simulation.outputs[rid, index], simulation.told[rid, index]
            exact = torch.log_softmax(oracle.follow(model, prompts[rid], output).double(), -1)
            own, likeliest = exact.gather(1, torch.tensor(output)[:, None]), exact.topk(count)
            assert [one[0] for one in found] == pytest.approx(own.flatten().tolist(), abs=1e-4)
            assert [one[1] for one in found] == ((exact > own).sum(1) + 1).tolist()
            assert [set(one[2]) for one in found] == [set(row) for row in likeliest.indices.tolist()]
            for one, row in zip(found, likeliest.values.tolist(), strict=True):
                assert one[3] == pytest.approx(row, abs=1e-4)
    assert not simulation.told[2, 0]
    lengths = {len(output) for outputs in expected.values() for output in outputs}
    assert min(lengths) < BEAM_TOKENS in lengths  # some ended by themselves
    simulation.check_nothing_is_left()


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_ids_are_the_same_preempted_and_undisturbed(executor: ModelExecutor, mode: str) -> None:
    rng = random.Random(5)
    requests = {rid: [rng.randrange(100, VOCAB) for _ in range(rng.randint(20, 44))] for rid in range(1, 6)}
    kinds: dict[int, dict[str, Any]] = {
        2: {"n": 2, "seed": 8, "temperature": 1.0},
        3: {"n": 2, "use_beam_search": True},
    }
    alone: dict[tuple[int, int], list[int]] = {}
    for rid, prompt in requests.items():
        single = OnModel(executor, enable_prefix_caching=False)
        single.submit(rid, prompt, 30, ignore_eos=True, **kinds.get(rid, {}))
        single.drain()
        alone |= single.outputs
    crowded = OnModel(
        executor,
        num_blocks=19,
        host_blocks=executor.memory.host_blocks,
        preemption_mode=mode,
        enable_prefix_caching=False,
    )
    for rid, prompt in requests.items():
        crowded.submit(rid, prompt, 30, ignore_eos=True, **kinds.get(rid, {}))
    crowded.drain()
    assert crowded.outputs == alone
    assert crowded.scheduler.preemption.counts[mode] > 0
    crowded.check_nothing_is_left()
