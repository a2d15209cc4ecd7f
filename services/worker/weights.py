"""Model weights as named tensors, whatever file they come from.

GGUF weights are dequantised once and kept beside the model's converted folder as safetensors of the wanted dtype, which
later starts map into memory instead of computing. Everything goes tensor by tensor: no model is in memory twice.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
import struct
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from gguf import quants
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from kernels.quantized import QuantizedWeight
from services.worker import gguf_codes
from shared.errors import ConfigError
from shared.models import ModelFiles
from shared.models.cache import locked, new_file
from shared.models.gguf_file import GGUFFile, TensorInfo

log = logging.getLogger(__name__)

_VERSION = "1"
"""Part of the converted file's metadata; raised when the conversion changes, so that older files are made anew."""

_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")

_CHUNK = 1 << 20
"""Values dequantised at a time."""

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_IGNORED = re.compile(r"rope_freqs\.weight|blk\.\d+\.attn_rot_embd(\.weight)?")
"""Rotary tables; the frequency factors are in the converted config.json."""


def load_weights(
    files: ModelFiles, dtype: torch.dtype, *, keep_blocks: bool = False, progress: bool = False
) -> Iterator[tuple[str, torch.Tensor | QuantizedWeight]]:
    """Yields every weight under its Hugging Face name, on the CPU, in ``dtype`` (float32, bfloat16 or float16).

    Tensors may be views of a file mapped into memory: copy what is to be written to. keep_blocks: matrices of a GGUF
    file whose blocks kernels can multiply come as they are in it. progress: a bar on stderr even where that is not a
    terminal. Raises ConfigError naming the file when it cannot be read or holds what is unknown.
    """
    if dtype not in _DTYPES:
        raise ConfigError(f"weights cannot be loaded as {dtype}; float32, bfloat16 and float16 can")
    if files.gguf is None:
        return _safetensors(files.weights, dtype, progress)
    if keep_blocks:
        file = GGUFFile.read(files.gguf)
        return _kept(file, _names(file), dtype, progress)
    return _gguf(files, files.gguf, dtype, progress)


def _safetensors(paths: list[Path], dtype: torch.dtype, progress: bool) -> Iterator[tuple[str, torch.Tensor]]:
    with _bar("loading weights", len(paths), "file", progress) as bar:
        for path in paths:
            try:
                with safe_open(path, framework="pt", device="cpu") as shard:
                    for name in shard.keys():  # noqa: SIM118 (not a dict)
                        yield name, shard.get_tensor(name).to(dtype)
            except (OSError, SafetensorError) as error:
                raise ConfigError(f"cannot read the weights in {path}: {error}") from error
            bar.update()


def _gguf(files: ModelFiles, path: Path, dtype: torch.dtype, progress: bool) -> Iterator[tuple[str, torch.Tensor]]:
    converted = files.folder / f"dequantized-{_DTYPES[dtype].lower()}.safetensors"
    if not _is_current(converted, files.digest):
        file = GGUFFile.read(path)
        names = _names(file)
        needed = sum(_count(file.tensors[name]) for name in names) * dtype.itemsize
        free = shutil.disk_usage(files.folder).free
        if needed > free:
            log.warning("no room to keep converted weights (%d bytes, %d free): converting at each start", needed, free)
            yield from _dequantized(file, names, dtype, progress)
            return
        with locked(converted):
            if not _is_current(converted, files.digest):
                log.info("converting %s to %s once", path.name, dtype)
                _write(converted, file, names, dtype, files.digest, progress)
    yield from _safetensors([converted], dtype, progress)


def _is_current(converted: Path, digest: str) -> bool:
    """Whether ``converted`` is whole (safe_open checks its length) and made from this model by this version."""
    try:
        with safe_open(converted, framework="pt", device="cpu") as shard:
            return bool(shard.metadata() == {"digest": digest, "version": _VERSION})
    except (OSError, SafetensorError):
        return False


def _write(
    target: Path, file: GGUFFile, names: dict[str, str], dtype: torch.dtype, digest: str, progress: bool
) -> None:
    """Writes a safetensors file tensor by tensor; its header needs only shapes, which are known before."""
    header: dict[str, object] = {"__metadata__": {"digest": digest, "version": _VERSION}}
    end = 0
    for gguf_name, name in names.items():
        info = file.tensors[gguf_name]
        start, end = end, end + _count(info) * dtype.itemsize
        header[name] = {"dtype": _DTYPES[dtype], "shape": info.shape, "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    try:
        with new_file(target) as part, open(part, "wb") as out:
            out.write(struct.pack("<Q", len(encoded)) + encoded)
            for _, tensor in _dequantized(file, names, dtype, progress):
                out.write(tensor.contiguous().view(torch.uint8).numpy().data)
            out.flush()
    except OSError as error:
        raise ConfigError(f"cannot write converted weights to {target}: {error.strerror}") from error


def _names(file: GGUFFile) -> dict[str, str]:
    """GGUF name to Hugging Face name of all that are weights."""
    return {info.name: name for info in file.tensors.values() if (name := hf_name(file, info)) is not None}


def _kept(
    file: GGUFFile, names: dict[str, str], dtype: torch.dtype, progress: bool
) -> Iterator[tuple[str, torch.Tensor | QuantizedWeight]]:
    total = sum(file.tensors[name].nbytes for name in names)
    with _bar("loading weights", total, "B", progress) as bar:
        for gguf_name, name in names.items():
            weight = gguf_codes.kept(file, gguf_name)
            if weight is None:
                yield name, dequantize(file, gguf_name, dtype)
            else:
                yield name, weight.reordered(partial(_hf_rows, file, gguf_name))
            bar.update(file.tensors[gguf_name].nbytes)


def _dequantized(
    file: GGUFFile, names: dict[str, str], dtype: torch.dtype, progress: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    total = sum(file.tensors[name].nbytes for name in names)
    with _bar("converting weights", total, "B", progress) as bar:
        for gguf_name, name in names.items():
            yield name, dequantize(file, gguf_name, dtype)
            bar.update(file.tensors[gguf_name].nbytes)


def hf_name(file: GGUFFile, info: TensorInfo) -> str | None:
    """The Hugging Face name of a tensor, None for one without weights. Raises ConfigError when it is unknown."""
    if _IGNORED.fullmatch(info.name):
        return None
    stem, _, suffix = info.name.rpartition(".")
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if layer is not None and layer[2] in _LAYER_NAMES:
        name = f"model.layers.{layer[1]}.{_LAYER_NAMES[layer[2]]}.{suffix}"
    elif stem in _NAMES:
        name = f"{_NAMES[stem]}.{suffix}"
    else:
        raise ConfigError(f"{file.path}: tensor {info.name!r} is not one of a {file.architecture()} model's")
    if info.kind.name not in _KINDS:
        raise ConfigError(
            f"{file.path}: tensor {info.name!r} is quantised as {info.kind.name}, which is not supported; "
            f"supported are {', '.join(_KINDS)}"
        )
    return name


def dequantize(file: GGUFFile, name: str, dtype: torch.dtype) -> torch.Tensor:
    """The tensor ``name`` of a GGUF file in its own shape, q and k rows in Hugging Face order.

    Values are computed in float32 and rounded once. Rows go in chunks: the embedding of a large model alone would
    otherwise take several gigabytes of temporary arrays.
    """
    info = file.tensors[name]
    blocks = file.blocks(name)
    plain = {"F32": np.float32, "F16": np.float16}.get(info.kind.name)
    rows = np.atleast_2d(blocks if plain is None else blocks.view(plain))
    made = torch.empty(len(rows), info.shape[-1], dtype=dtype)
    step = max(1, _CHUNK // info.shape[-1])
    for start in range(0, len(rows), step):
        values = quants.dequantize(rows[start : start + step], info.kind).astype(np.float32)
        made[start : start + step] = torch.from_numpy(values)
    return _hf_rows(file, name, made.reshape(info.shape))


def _hf_rows(file: GGUFFile, name: str, rows: torch.Tensor) -> torch.Tensor:
    """Rows of the tensor ``name`` in Hugging Face's order."""
    part = re.fullmatch(r"blk\.\d+\.attn_([qk])\.(?:weight|bias)", name)
    if part is not None and file.architecture() == "llama":
        return _half_split(rows, _heads(file, part[1]))
    return rows


def _half_split(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Undoes llama.cpp's row order: its RoPE turns neighbouring rows (2i, 2i + 1), Hugging Face's (i, i + dim / 2)."""
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)


def _heads(file: GGUFFile, part: str) -> int:
    heads = file.metadata["llama.attention.head_count"]
    heads = file.metadata.get("llama.attention.head_count_kv", heads) if part == "k" else heads
    return int(heads[0] if isinstance(heads, list) else heads)


def _count(info: TensorInfo) -> int:
    count = 1
    for extent in info.shape:
        count *= extent
    return count


def _bar(what: str, total: int, unit: str, progress: bool) -> tqdm[Iterable[object]]:
    shown = progress or sys.stderr.isatty()
    return tqdm(total=total, desc=what, unit=unit, unit_scale=unit == "B", disable=not shown, file=sys.stderr)
