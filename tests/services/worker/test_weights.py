from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from kernels.ops import select
from kernels.quantized import QuantizedWeight
from services.worker import weights
from services.worker.models.config import ModelConfig
from services.worker.models.decoder import Decoder
from services.worker.weights import load_weights
from shared.errors import ConfigError
from shared.models import ModelFiles, locate
from tests.services.worker import forward
from tests.shared.models.build import Writer, tiny

HIDDEN, HEADS, KV_HEADS, INNER, LAYERS = 64, 4, 2, 96, 2


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "cache"))


# --- whole models ----------------------------------------------------------------------------------------------------


def random_model(arch: str, vocab: int, tied: bool) -> torch.nn.Module:
    torch.manual_seed(0)
    cls = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}[arch]
    extra = {"head_dim": 32} if arch == "qwen3" else {}
    config = cls(
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        vocab_size=vocab,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
        **extra,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():  # norms of one and biases of zero would hide a mix-up
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.copy_(torch.randn_like(parameter))
    return model.eval()


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """The row order llama.cpp's convert_hf_to_gguf.py gives q and k of llama models."""
    shape = weight.shape
    return np.ascontiguousarray(weight.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2)).reshape(
        shape
    )


def write_model(path: Path, arch: str, *, tied: bool = False, kind: Kind = Kind.F32) -> torch.nn.Module:
    """A random model as transformers has it, written as llama.cpp's converter would; returns the model."""
    numbers = {"attention.key_length": 32, "attention.value_length": 32} if arch == "qwen3" else {}
    made = Writer(path, arch, **numbers)
    size = made.byte_bpe_default("qwen2")
    model = random_model(arch, size, tied)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], LAYERS)
    for name, tensor in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        values = tensor.numpy()
        if arch == "llama" and "q_proj" in name:
            values = permute(values, HEADS)
        elif arch == "llama" and "k_proj" in name:
            values = permute(values, KV_HEADS)
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert target is not None, name
        made.tensor(target, values, kind if values.ndim == 2 else None)
    made.close()
    return model


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_every_weight_of_a_model_comes_back(tmp_path: Path, arch: str, tied: bool) -> None:
    model = write_model(tmp_path / "m.gguf", arch, tied=tied)
    loaded = dict(load_weights(locate(str(tmp_path / "m.gguf")), torch.float32))
    expected = {name: tensor for name, tensor in model.state_dict().items() if not (tied and name == "lm_head.weight")}
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(loaded[name], tensor), name


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_the_converted_folder_and_weights_make_the_same_logits(tmp_path: Path, arch: str) -> None:
    model = write_model(tmp_path / "m.gguf", arch)
    files = locate(str(tmp_path / "m.gguf"))
    again = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(files.folder), dtype=torch.float32).eval()
    again.load_state_dict(dict(load_weights(files, torch.float32)))
    ids = torch.arange(40)[None]
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, model(ids).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1])
def test_quantised_models_load_as_transformers_loads_them(tmp_path: Path, kind: Kind) -> None:
    model = write_model(tmp_path / "m.gguf", "llama", kind=kind)
    loaded = dict(load_weights(locate(str(tmp_path / "m.gguf")), torch.float32))
    theirs = load_gguf_checkpoint(str(tmp_path / "m.gguf"), return_tensors=True, model_to_load=model)["tensors"]
    assert loaded.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(loaded[name], tensor.to(torch.float32)), name


def test_the_built_in_model_loads_as_transformers_loads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUIRE_CACHE")
    files = locate("")
    assert files.gguf is not None
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(files.folder))
    theirs = load_gguf_checkpoint(str(files.gguf), return_tensors=True, model_to_load=model)["tensors"]
    loaded = dict(load_weights(files, torch.float32))
    assert len(loaded) == 272 and loaded.keys() == theirs.keys()
    assert sum(tensor.numel() for tensor in loaded.values()) == 134_515_008
    for name, tensor in theirs.items():
        assert torch.equal(loaded[name], tensor), name


# --- block formats, read by hand in float64 --------------------------------------------------------------------------


def half(data: bytes) -> float:
    return float(np.frombuffer(data, np.float16)[0])


def by_hand_q8_0(b: bytes) -> list[float]:
    return [half(b[:2]) * int(q) for q in np.frombuffer(b[2:34], np.int8)]


def by_hand_q4_0(b: bytes) -> list[float]:
    return [half(b[:2]) * (q - 8) for q in [x & 15 for x in b[2:18]] + [x >> 4 for x in b[2:18]]]


def by_hand_q4_1(b: bytes) -> list[float]:
    return [half(b[:2]) * q + half(b[2:4]) for q in [x & 15 for x in b[4:20]] + [x >> 4 for x in b[4:20]]]


def fifth_bits(b: bytes) -> list[int]:
    word = int.from_bytes(b, "little")
    return [(word >> i & 1) << 4 for i in range(32)]


def by_hand_q5_0(b: bytes) -> list[float]:
    low = [x & 15 for x in b[6:22]] + [x >> 4 for x in b[6:22]]
    return [half(b[:2]) * ((q | h) - 16) for q, h in zip(low, fifth_bits(b[2:6]), strict=True)]


def by_hand_q5_1(b: bytes) -> list[float]:
    low = [x & 15 for x in b[8:24]] + [x >> 4 for x in b[8:24]]
    return [half(b[:2]) * (q | h) + half(b[2:4]) for q, h in zip(low, fifth_bits(b[4:8]), strict=True)]


def by_hand_q2_k(b: bytes) -> list[float]:
    """scales[16], qs[64], d, dmin: 16 groups of 16; a byte holds values 32 apart, each 128 values on 32 bytes."""
    scales, qs, d, least = b[:16], b[16:80], half(b[80:82]), half(b[82:84])
    found = []
    for i in range(256):
        q = qs[i // 128 * 32 + i % 32] >> (i % 128 // 32 * 2) & 3
        s = scales[i // 16]
        found.append(d * (s & 15) * q - least * (s >> 4))
    return found


def by_hand_q3_k(b: bytes) -> list[float]:
    """hmask[32], qs[64], scales[12] (six bits each, minus 32), d; a clear high bit takes 4 away."""
    mask, qs, packed, d = b[:32], b[32:96], b[96:108], half(b[108:110])
    found = []
    for i in range(256):
        g = i // 16
        low = packed[g] & 15 if g < 8 else packed[g - 8] >> 4
        scale = (low | (packed[8 + g % 4] >> (g // 4 * 2) & 3) << 4) - 32
        q = qs[i // 128 * 32 + i % 32] >> (i % 128 // 32 * 2) & 3
        high = mask[i % 32] >> (i // 32) & 1
        found.append(d * scale * (q - (0 if high else 4)))
    return found


def six_bit_pair(packed: bytes, j: int) -> tuple[int, int]:
    """Scale and minimum of group j of eight, as get_scale_min_k4 unpacks them."""
    if j < 4:
        return packed[j] & 63, packed[j + 4] & 63
    return packed[j + 4] & 15 | packed[j - 4] >> 6 << 4, packed[j + 4] >> 4 | packed[j] >> 6 << 4


def by_hand_q4_k(b: bytes) -> list[float]:
    d, least, packed, qs = half(b[:2]), half(b[2:4]), b[4:16], b[16:144]
    found = []
    for i in range(256):
        scale, minimum = six_bit_pair(packed, i // 32)
        q = qs[i // 64 * 32 + i % 32] >> (4 if i % 64 >= 32 else 0) & 15
        found.append(d * scale * q - least * minimum)
    return found


def by_hand_q5_k(b: bytes) -> list[float]:
    d, least, packed, high, qs = half(b[:2]), half(b[2:4]), b[4:16], b[16:48], b[48:176]
    found = []
    for i in range(256):
        scale, minimum = six_bit_pair(packed, i // 32)
        q = qs[i // 64 * 32 + i % 32] >> (4 if i % 64 >= 32 else 0) & 15
        q += (high[i % 32] >> (i // 32) & 1) << 4
        found.append(d * scale * q - least * minimum)
    return found


def by_hand_q6_k(b: bytes) -> list[float]:
    """ql[128], qh[64], scales[16] (int8), d: each 128 values take 64 low bytes and 32 high ones."""
    ql, qh, scales, d = b[:128], b[128:192], np.frombuffer(b[192:208], np.int8), half(b[208:210])
    found = []
    for i in range(256):
        part, r = i // 128, i % 128
        low = ql[part * 64 + r % 64] >> (4 if r >= 64 else 0) & 15
        high = qh[part * 32 + r % 32] >> (r // 32 * 2) & 3
        found.append(d * int(scales[i // 16]) * ((low | high << 4) - 32))
    return found


FORMATS: dict[Kind, tuple[Callable[[bytes], list[float]], list[int]]] = {
    Kind.Q8_0: (by_hand_q8_0, [0]),
    Kind.Q4_0: (by_hand_q4_0, [0]),
    Kind.Q4_1: (by_hand_q4_1, [0, 2]),
    Kind.Q5_0: (by_hand_q5_0, [0]),
    Kind.Q5_1: (by_hand_q5_1, [0, 2]),
    Kind.Q2_K: (by_hand_q2_k, [80, 82]),
    Kind.Q3_K: (by_hand_q3_k, [108]),
    Kind.Q4_K: (by_hand_q4_k, [0, 2]),
    Kind.Q5_K: (by_hand_q5_k, [0, 2]),
    Kind.Q6_K: (by_hand_q6_k, [208]),
}
"""How to read one block, and where its float16 numbers are."""


def random_blocks(kind: Kind, rows: int, columns: int) -> np.ndarray:
    """Any bytes are a valid block, but for its float16 scales, which are made ordinary numbers."""
    values, width = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(int(kind))
    blocks = rng.integers(0, 256, (rows * columns // values, width), dtype=np.uint8)
    for at in FORMATS[kind][1]:
        scales = (rng.standard_normal(len(blocks)) * 0.05).astype(np.float16)
        blocks[:, at : at + 2] = scales[:, None].view(np.uint8)
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize("kind", FORMATS, ids=lambda kind: kind.name)
def test_blocks_of_every_format_mean_what_its_layout_says(tmp_path: Path, kind: Kind) -> None:
    blocks = random_blocks(kind, rows=6, columns=512)
    made = Writer(tmp_path / "m.gguf")
    made.byte_bpe_default()
    made.tensor("token_embd.weight", np.zeros((4, 64), np.float32))
    made.tensor("blk.0.ffn_up.weight", blocks, kind)
    files = locate(str(made.close()))
    read, (_, width) = FORMATS[kind][0], gguf.GGML_QUANT_SIZES[kind]
    data = blocks.tobytes()
    expected = np.concatenate([read(data[at : at + width]) for at in range(0, len(data), width)]).reshape(6, 512)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        loaded = dict(load_weights(files, dtype))["model.layers.0.mlp.up_proj.weight"]
        assert loaded.dtype == dtype
        # float32 arithmetic may round the product and the difference; then one more rounding to dtype.
        tolerance = 2 * 2**-24 + torch.finfo(dtype).eps / 2
        np.testing.assert_allclose(loaded.double().numpy(), expected, rtol=0, atol=tolerance * np.abs(expected).max())
        assert torch.equal(
            loaded, dict(load_weights(files, torch.float32))["model.layers.0.mlp.up_proj.weight"].to(dtype)
        )


# --- blocks kept as they are ------------------------------------------------------------------------------------------

KEPT = (Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0, Kind.Q4_K, Kind.Q5_K)


@pytest.mark.parametrize("kind", FORMATS, ids=lambda kind: kind.name)
def test_kept_blocks_stand_for_what_their_layout_says(tmp_path: Path, kind: Kind) -> None:
    blocks = random_blocks(kind, rows=6, columns=512)
    made = Writer(tmp_path / "m.gguf")
    made.byte_bpe_default()
    made.tensor("token_embd.weight", np.zeros((4, 64), np.float32))
    made.tensor("blk.0.ffn_up.weight", blocks, kind)
    kept = dict(load_weights(locate(str(made.close())), torch.float32, keep_blocks=True))
    weight = kept["model.layers.0.mlp.up_proj.weight"]
    assert isinstance(weight, QuantizedWeight) == (kind in KEPT)
    if not isinstance(weight, QuantizedWeight):
        return
    read, (_, width) = FORMATS[kind][0], gguf.GGML_QUANT_SIZES[kind]
    data = blocks.tobytes()
    expected = np.concatenate([read(data[at : at + width]) for at in range(0, len(data), width)]).reshape(6, 512)
    # Scales of K-quants are products of 17 bits, kept with 11: half a unit of the last for the code and the minimum.
    tolerance = 2**-23 if kind not in (Kind.Q4_K, Kind.Q5_K) else 2**-11
    bound = np.abs(expected).max() * tolerance
    np.testing.assert_allclose(weight.dequantize(torch.float64).numpy(), expected, rtol=0, atol=bound)
    assert int(weight.codes.max()) < 2**weight.bits


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q8_0])
def test_a_model_whose_blocks_are_kept_is_the_dequantised_one(tmp_path: Path, arch: str, kind: Kind) -> None:
    """Rows in the same order, and next to the same logits: inputs of two digits are all that is rounded."""
    write_model(tmp_path / "m.gguf", arch, kind=kind, tied=arch == "qwen2")
    files = locate(str(tmp_path / "m.gguf"))
    config = ModelConfig.load(files.folder)
    logits = []
    for keep in (False, True):
        kernels = select(torch.device("cpu"))
        decoder = Decoder(config, 64, torch.float32, torch.device("cpu"), kernels, "gguf")
        decoder.load(load_weights(files, torch.float32, keep_blocks=keep))
        logits.append(forward.logits(decoder, list(range(40)), [7, 20]))
    assert not torch.equal(*logits) or select(torch.device("cpu")).name == "reference"
    torch.testing.assert_close(logits[1], logits[0], rtol=0, atol=1e-3 * float(logits[0].std()))


# --- keeping what was converted --------------------------------------------------------------------------------------


def converted(files: ModelFiles) -> Path:
    return files.folder / "dequantized-f32.safetensors"


def test_weights_are_converted_once_per_dtype(tmp_path: Path) -> None:
    files = locate(str(write_path(tmp_path)))
    first = dict(load_weights(files, torch.float32))
    made = converted(files).stat().st_mtime_ns
    second = dict(load_weights(files, torch.float32))
    assert converted(files).stat().st_mtime_ns == made
    assert all(torch.equal(first[name], second[name]) for name in first)
    dict(load_weights(files, torch.bfloat16))
    assert sorted(p.name for p in files.folder.glob("dequantized-*.safetensors")) == [
        "dequantized-bf16.safetensors",
        "dequantized-f32.safetensors",
    ]


def write_path(tmp_path: Path) -> Path:
    write_model(tmp_path / "m.gguf", "llama", kind=Kind.Q8_0)
    return tmp_path / "m.gguf"


@pytest.mark.parametrize("damage", ["cut", "junk", "other"])
def test_a_converted_file_that_is_not_whole_is_made_anew(tmp_path: Path, damage: str) -> None:
    files = locate(str(write_path(tmp_path)))
    expected = {name: tensor.clone() for name, tensor in load_weights(files, torch.float32)}
    path = converted(files)
    content = path.read_bytes()
    path.unlink()
    if damage == "cut":
        path.write_bytes(content[:-100])
    elif damage == "junk":
        path.write_bytes(b"junk")
    else:
        save_file({"a": torch.zeros(1)}, path, metadata={"digest": "another", "version": "1"})
    loaded = dict(load_weights(files, torch.float32))
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


def test_a_conversion_that_breaks_off_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = locate(str(write_path(tmp_path)))
    calls = []

    def fail(*args: object) -> torch.Tensor:
        calls.append(args)
        if len(calls) > 5:
            raise KeyboardInterrupt
        return original(*args)  # type: ignore[arg-type]

    original = weights.dequantize
    monkeypatch.setattr(weights, "dequantize", fail)
    with pytest.raises(KeyboardInterrupt):
        dict(load_weights(files, torch.float32))
    assert not list(files.folder.glob("dequantized-*safetensors*part")) and not converted(files).exists()
    monkeypatch.undo()


def test_without_room_weights_are_converted_at_each_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_model(tmp_path / "m.gguf", "llama")
    files = locate(str(tmp_path / "m.gguf"))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(weights.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    loaded = dict(load_weights(files, torch.float32))
    assert all(torch.equal(loaded[name], tensor) for name, tensor in model.state_dict().items())
    assert not converted(files).exists()


def test_two_processes_convert_one_after_the_other(tmp_path: Path) -> None:
    path = write_path(tmp_path)
    code = (
        "import torch, sys; from shared.models import locate; from services.worker.weights import load_weights\n"
        f"print(sum(float(t.double().sum()) for _, t in load_weights(locate({str(path)!r}), torch.float32)))"
    )
    children = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=os.environ.copy())
        for _ in range(2)
    ]
    answers = [child.communicate(timeout=120)[0] for child in children]
    assert [child.returncode for child in children] == [0, 0]
    expected = sum(float(t.double().sum()) for _, t in load_weights(locate(str(path)), torch.float32))
    assert [float(answer) for answer in answers] == [expected, expected]


# --- safetensors -----------------------------------------------------------------------------------------------------


def test_sharded_safetensors_come_in_the_wanted_dtype(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = {f"model.layers.{i}.mlp.up_proj.weight": torch.randn(8, 4) for i in range(4)}
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"]}))
    (tmp_path / "tokenizer.json").write_text("{}")
    index = {}
    for i, (name, tensor) in enumerate(tensors.items()):
        shard = f"model-{i + 1:05}-of-00004.safetensors"
        save_file({name: tensor}, tmp_path / shard)
        index[name] = shard
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        loaded = dict(load_weights(locate(str(tmp_path)), dtype))
        assert loaded.keys() == tensors.keys()
        assert all(torch.equal(loaded[name], tensor.to(dtype)) for name, tensor in tensors.items())


def test_float32_becomes_bfloat16_to_nearest_even(tmp_path: Path) -> None:
    values = np.array([[1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -(1 + 2**-8)]], np.float32)
    made = Writer(tmp_path / "m.gguf")
    made.byte_bpe_default()
    made.tensor("token_embd.weight", values)
    loaded = dict(load_weights(locate(str(made.close())), torch.bfloat16))["model.embed_tokens.weight"]
    assert loaded.tolist() == [[1.0, 1 + 2**-6, 1 + 2**-7, -1.0]]


# --- what cannot work ------------------------------------------------------------------------------------------------


def test_unknown_tensors_and_formats_are_named(tmp_path: Path) -> None:
    made = Writer(tmp_path / "a.gguf")
    made.byte_bpe_default()
    made.tensor("token_embd.weight", np.zeros((4, 64), np.float32))
    made.tensor("blk.0.odd.weight", np.zeros((4, 64), np.float32))
    files = locate(str(made.close()))
    with pytest.raises(ConfigError, match=r"a\.gguf: tensor 'blk\.0\.odd\.weight' is not one of a llama model's"):
        dict(load_weights(files, torch.float32))
    made = Writer(tmp_path / "b.gguf")
    made.byte_bpe_default()
    made.tensor("token_embd.weight", np.zeros((4, 66), np.uint8), Kind.IQ2_XXS)
    with pytest.raises(ConfigError, match=r"quantised as IQ2_XXS, which is not supported; supported are F32, .*Q6_K"):
        dict(load_weights(locate(str(made.close())), torch.float32))


def test_a_dtype_that_is_no_weight_dtype(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"torch\.int8"):
        load_weights(locate(str(tiny(tmp_path / "m.gguf"))), torch.int8)
