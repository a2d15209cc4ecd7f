"""The forward pass in one native call against the same operations one by one: equal bits, whatever is in the batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.decoder import Batch
from kernels.errors import UnavailableError
from kernels.kv import quantized
from kernels.ops import Kernels, select
from services.worker.models.config import ModelConfig
from services.worker.models.decoder import Decoder
from shared.errors import ConfigError
from tests.services.worker import forward, random_models
from tests.services.worker.plans import Driver

CPU = torch.device("cpu")
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama group of 7": (
        "llama",
        {"hidden_size": 112, "num_attention_heads": 7, "num_key_value_heads": 1, "head_dim": 80},
    ),
    "mistral window": ("mistral", {"sliding_window": 20, "head_dim": 64}),
    "qwen2 windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 128, "tie_word_embeddings": True}),
    "odd columns": ("llama", {"hidden_size": 90, "head_dim": 16, "intermediate_size": 108, "vocab_size": 333}),
    "quantized": ("llama", {"hidden_size": 128, "num_attention_heads": 2, "head_dim": 64, "intermediate_size": 192}),
    "long": ("llama", {"max_position_embeddings": 2048}),
}


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    try:
        return select(CPU, "cpu")
    except UnavailableError as error:
        pytest.skip(str(error))


def load(
    folder: Path, kernels: Kernels, kind: str, dtype: torch.dtype, quantization: str = "none", *, fused: bool = True
) -> Decoder:
    name, changes = KINDS[kind]
    model = random_models.save(folder, name, **changes)
    config = ModelConfig.load(folder)
    decoder = Decoder(config, config.rope.limit, dtype, CPU, kernels, quantization)
    decoder.load((key, tensor.to(dtype)) for key, tensor in model.state_dict().items())
    assert (decoder.fused is not None) == fused
    return decoder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_the_bits_of_the_operations_one_by_one(kernels: Kernels, kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    decoder = load(tmp_path, kernels, kind, dtype)
    length = 1200 if kind == "long" else 60
    ids = random_models.prompts(length, vocab_size=decoder.config.vocab_size)[0]
    chunks = [1, 13, length - 20]
    torch.set_num_threads(3)
    fused = forward.logits(decoder, ids, chunks)
    decoder.fused = None
    assert torch.equal(fused, forward.logits(decoder, ids, chunks))
    assert fused.isfinite().all()


def mixed(samples: list[int]) -> tuple[Batch, torch.Tensor]:
    """Two sequences that decode, at 5 and 18 tokens, a row of padding and chunks of 7 and 3 tokens."""
    tables = torch.tensor([[1, 0], [2, 3], [0, 0], [4, 0], [5, 6]], dtype=torch.int32)
    positions = torch.tensor([4, 17, 0, *range(7), 14, 15, 16])
    sequence = torch.tensor([0, 1, 2, *[3] * 7, *[4] * 3])
    slots = tables[sequence, positions // 16].long() * 16 + positions % 16
    slots[2] = -1
    batch = Batch(
        tokens=torch.arange(len(positions)) + 3,
        positions=positions,
        slot_mapping=slots,
        decode_tables=tables[:3].contiguous(),
        decode_lens=torch.tensor([5, 18, 0], dtype=torch.int32),
        chunk_tables=tables[3:].contiguous(),
        chunk_cu_seqlens=torch.tensor([0, 7, 10], dtype=torch.int32),
        chunk_lens=torch.tensor([7, 17], dtype=torch.int32),
    )
    return batch, torch.tensor(samples, dtype=torch.int64)


@pytest.mark.parametrize("int8_kv", [False, True])
@pytest.mark.parametrize("samples", [[], [0, 1, 9, 12], [12, 12, 12, 0], list(range(13)), [9] * 20])
def test_a_mixed_batch_gives_the_rows_that_sample(
    kernels: Kernels, samples: list[int], int8_kv: bool, tmp_path: Path
) -> None:
    decoder = load(tmp_path, kernels, "qwen3", torch.bfloat16)
    config = decoder.config
    shape = (7, 2, config.num_kv_heads, 16, config.head_dim)
    memory = torch.randn((config.num_layers, *shape), generator=torch.Generator().manual_seed(1)).bfloat16()
    if int8_kv:
        memory = quantized(memory)
    batch, rows = mixed(samples)
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        kvs = [list(memory.clone()) for _ in range(2)]
        likeliest = torch.full((len(rows),), -1)
        logits, times = decoder.step(batch, kvs[0], rows, likeliest)
        expected = decoder.logits(decoder.forward(batch, kvs[1])[rows])
        assert torch.equal(logits, expected)
        assert torch.equal(likeliest, expected.argmax(-1))
        assert all(map(torch.equal, kvs[0], kvs[1]))
        assert times.keys() == {"linear", "attention", "other", "head"}


def test_int8_kv(kernels: Kernels, tmp_path: Path) -> None:
    """Logits near those over KV as it is, and the same from the reference's float32 arithmetic."""
    ids, chunks = random_models.prompts(60)[0], [1, 30]
    decoder = load(tmp_path / "cpu", kernels, "long", torch.float32)
    plain = load(tmp_path / "reference", select(CPU, "reference"), "long", torch.float32, fused=False)
    found = forward.logits(decoder, ids, chunks, torch.int8)
    torch.testing.assert_close(found, forward.logits(plain, ids, chunks, torch.int8), atol=0.02, rtol=0)
    exact = forward.logits(decoder, ids, chunks)
    assert torch.cosine_similarity(found, exact, dim=-1).min() > 0.99
    assert not torch.equal(found, exact)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_rounded_weights(kernels: Kernels, quantization: str, tmp_path: Path) -> None:
    """The bits of the operations one by one again, and logits near those of what the rounded weights stand for."""
    ids = random_models.prompts(60)[0]
    decoder = load(tmp_path, kernels, "quantized", torch.bfloat16, quantization)
    fused = forward.logits(decoder, ids, [1, 30])
    decoder.fused = None
    assert torch.equal(fused, forward.logits(decoder, ids, [1, 30]))

    oracle = load(tmp_path, select(CPU, "reference"), "quantized", torch.bfloat16, quantization, fused=False)
    expected = forward.logits(oracle, ids, [1, 30])
    exact = forward.logits(load(tmp_path, kernels, "quantized", torch.bfloat16), ids, [1, 30])
    likeness = torch.cosine_similarity(fused, expected, dim=-1)
    assert likeness.min() > 0.97 and not torch.equal(expected, exact)


def test_a_block_size_that_is_no_power_of_two(
    kernels: Kernels, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = random_models.save(tmp_path, "llama")
    prompt = random_models.prompts(40)[0]
    expected = random_models.generate(model, prompt, 5)
    assert Driver(random_models.executor(tmp_path, block_size=24)).generate([prompt], 5)[0] == expected
    complaint = "--block-size 24: native attention takes powers of two only"
    assert [r.getMessage() for r in caplog.records if complaint in r.getMessage()] == [
        f"the slower torch attention runs: {complaint}"
    ]
    with pytest.raises(ConfigError, match=f"the cpu kernels do not run this: {complaint}"):
        random_models.executor(tmp_path, block_size=24, attention_backend="cpu")


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("tokens", torch.zeros(13, dtype=torch.int32)),
        ("positions", torch.zeros(12, dtype=torch.int64)),
        ("decode_tables", torch.zeros(2, 3, dtype=torch.int32).T),
        ("chunk_cu_seqlens", torch.zeros(2, dtype=torch.int32)),
    ],
)
def test_a_wrong_argument_is_named(kernels: Kernels, field: str, wrong: torch.Tensor, tmp_path: Path) -> None:
    decoder = load(tmp_path, kernels, "qwen3", torch.float32)
    config = decoder.config
    kv = [torch.zeros(7, 2, config.num_kv_heads, 16, config.head_dim) for _ in decoder.layers]
    batch, rows = mixed([0])
    object.__setattr__(batch, field, wrong)
    with pytest.raises(ValueError, match=f"^{'tokens|positions' if len(wrong) == 12 else field} is torch"):
        decoder.step(batch, kv, rows)
    with pytest.raises(ValueError, match="kv is not 3 contiguous"):
        decoder.step(mixed([0])[0], kv[:2], rows)
