"""The whole worker on random weights: its memory, its steps with and without graphs, and a server around it."""

from __future__ import annotations

import gc
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models

from benchmarks.gpu.correctness import Checks
from benchmarks.gpu.shapes import Shape
from services.worker import model_executor
from services.worker.accounting import account
from services.worker.config import WorkerConfig
from services.worker.model_executor import ModelExecutor
from shared.codec import int32
from shared.metrics import Registry
from shared.wire import NewRow, Plan

START_LIMIT = 150.0


def write_config(folder: Path, shape: Shape, context: int) -> None:
    """All of a model's folder but its weights."""
    kind = "Qwen3" if shape.qk_norm else "Llama"
    config = {
        "architectures": [f"{kind}ForCausalLM"],
        "model_type": kind.lower(),
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "eos_token_id": shape.vocab - 1,
        "bos_token_id": 0,
        "torch_dtype": "bfloat16",
    }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    words = Tokenizer(models.WordLevel({f"Ġw{i}": i for i in range(shape.vocab)}, unk_token="Ġw0"))
    words.decoder = decoders.ByteLevel()
    words.save(str(folder / "tokenizer.json"))


def random_weights(shape: Shape, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors as a Hugging Face file has them, made one by one on the device.

    Large enough that attention and positions decide the logits, so that no two tokens are near a tie.
    """
    generator = torch.Generator(device).manual_seed(7)

    def tensor(*size: int, mean: float = 0.0) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=device) * 2 * size[-1] ** -0.5 + mean

    inner, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield "model.embed_tokens.weight", tensor(shape.vocab, shape.hidden)
    yield "model.norm.weight", tensor(shape.hidden, mean=1.0)
    for layer in range(shape.layers):
        name = f"model.layers.{layer}."
        yield name + "input_layernorm.weight", tensor(shape.hidden, mean=1.0)
        yield name + "post_attention_layernorm.weight", tensor(shape.hidden, mean=1.0)
        for part, outputs, inputs in (
            ("self_attn.q_proj", inner, shape.hidden),
            ("self_attn.k_proj", kv, shape.hidden),
            ("self_attn.v_proj", kv, shape.hidden),
            ("self_attn.o_proj", shape.hidden, inner),
            ("mlp.gate_proj", shape.intermediate, shape.hidden),
            ("mlp.up_proj", shape.intermediate, shape.hidden),
            ("mlp.down_proj", shape.hidden, shape.intermediate),
        ):
            yield f"{name}{part}.weight", tensor(outputs, inputs)
        if shape.qk_norm:
            yield name + "self_attn.q_norm.weight", tensor(shape.head_dim, mean=1.0)
            yield name + "self_attn.k_norm.weight", tensor(shape.head_dim, mean=1.0)


def executor(folder: Path, shape: Shape, device: torch.device, registry: Registry, **options: Any) -> ModelExecutor:
    """The worker's executor; its weights are not read from the folder, which would take minutes for a large model."""
    if not folder.exists():
        write_config(folder, shape, 8192)
        save_file({"none": torch.zeros(1)}, str(folder / "model.safetensors"))
    model_executor.load_weights = lambda *_, **__: random_weights(shape, device)  # type: ignore[assignment]
    config = WorkerConfig(model=str(folder), device=device.type, attention_backend="triton", **options)
    return ModelExecutor(config, registry)


def time_steps(
    folder: Path, shape: Shape, device: torch.device, batches: list[int], prompts: list[int], context: int, steps: int
) -> None:
    """The table of ``quire bench step``, with CUDA graphs and without; a CPU has none."""
    for eager in (False, True) if device.type == "cuda" else (True,):
        registry = Registry()
        longest = max(context + steps + 1, *prompts)
        options = {"max_num_seqs": max(batches), "max_model_len": longest, "enforce_eager": eager}
        made = executor(folder, shape, device, registry, max_num_batched_tokens=max(2048, *prompts), **options)
        print(f"  {shape.name}, {made.memory.num_blocks} KV blocks, {'without graphs' if eager else 'with graphs'}")
        fitting = [rows for rows in batches if rows * -(-longest // made.memory.block_size) < made.memory.num_blocks]
        for line in account(made, fitting, prompts, context, steps):
            print(f"    {line}", flush=True)
        del made
        _free(device)


def check_steps(
    folder: Path, shape: Shape, device: torch.device, batches: Sequence[int], tokens: int, checks: Checks
) -> None:
    """In float32: what replays give, padded and not, is what eager steps give; a swapped sequence goes on alike; steps
    launched ahead too; and nothing is compiled after the start."""
    found, late = [], 0.0
    options: dict[str, Any] = {
        "dtype": "float32",
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 256,
    }
    for more in ({"enforce_eager": True}, {"cudagraph_capture_sizes": [1, 4, 8]}):
        registry = Registry()
        made = executor(
            folder, shape, device, registry, swap_space=1 << 24, num_gpu_blocks_override=64, **options, **more
        )
        found.append([_generated(made, rows, tokens) for rows in batches])
        swapped = _generated(made, 1, tokens, swap=True)
        checks.that(f"{shape.name}: a sequence that was swapped out and in goes on alike", swapped == found[-1][0])
        late += registry.snapshot()["quire:worker_late_compiles"][3][0][1]
        del made
        _free(device)
    checks.that(f"{shape.name}: tokens of graphs are those of eager steps", found[0] == found[1])
    alike = [rows[0] for rows in found[0]]
    checks.that(f"{shape.name}: a sequence's tokens are the same in any batch", alike.count(alike[0]) == len(alike))
    checks.that(f"{shape.name}: {late:.0f} kernels were compiled after the start", late == 0)


def _free(device: torch.device) -> None:
    """What an executor held: it and its graphs name each other, so only the collector finds them."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _generated(made: ModelExecutor, rows: int, tokens: int, swap: bool = False) -> list[list[int]]:
    """Greedy tokens of ``rows`` prompts, each step launched before the output of the one before is looked at."""
    prompts = [[(7 * row + 3 * i) % made.memory.vocab_size for i in range(5)] for row in range(rows)]
    length = 5 + tokens + 1
    blocks = -(-length // made.memory.block_size)
    tables = [[1 + row * blocks + i for i in range(blocks)] for row in range(rows)]
    first = _plan(
        full=True,
        new_rows=[NewRow(row, 0, 0, 0.0, 1.0, 0, 0.0, seed=0) for row in range(rows)],
        table_slots=list(range(rows)),
        table_lens=[blocks] * rows,
        table_blocks=int32([block for table in tables for block in table]),
        chunk_slots=list(range(rows)),
        chunk_starts=[0] * rows,
        chunk_lens=[5] * rows,
        chunk_samples=[[row] for row in range(rows)],
        tokens=int32([token for prompt in prompts for token in prompt]),
    )
    plans = [first, *[_plan(decodes=rows)] * (tokens - 1)]
    found: list[list[int]] = []
    running = []
    for number, plan in enumerate(plans):
        if swap and number == tokens // 2:
            while running:
                found.append(_ended(running.pop(0)))
            plan = _away_and_back(made, tables[0], 5 + number - 1, found[-1][0])
        running.append(made.launch(plan))
        if len(running) > 1:
            found.append(_ended(running.pop(0)))
    found += [_ended(step) for step in running]
    return [[ids[row] for ids in found] for row in range(rows)]


def _ended(step: model_executor.RunningStep) -> list[int]:
    step.wait()
    return step.output().ids.tolist()


def _away_and_back(made: ModelExecutor, table: list[int], length: int, token: int) -> Plan:
    """Swaps the one row out, and makes the plan by which it comes back in other blocks, in place of its next decode."""
    host = list(range(len(table)))
    _ended(made.launch(_plan(release=[0], swap_out=int32([n for pair in zip(table, host, strict=True) for n in pair]))))
    moved = [made.memory.num_blocks - 1 - i for i in range(len(table))]
    return _plan(
        new_rows=[NewRow(0, 0, length, 0.0, 1.0, 0, 0.0, seed=0)],
        table_slots=[0],
        table_lens=[len(table)],
        table_blocks=int32(moved),
        chunk_slots=[0],
        chunk_starts=[length],
        chunk_lens=[1],
        chunk_samples=[[0]],
        tokens=int32([token]),
        swap_in=int32([n for pair in zip(host, moved, strict=True) for n in pair]),
    )


def _plan(*, full: bool = False, decodes: int = 0, **columns: Any) -> Plan:
    return Plan(step_id=1, scheduler_epoch=1, worker_epoch=1, full=full, decodes=decodes, **columns)


def check_server(folder: Path, shape: Shape, device: torch.device, tokens: int, limit: float, checks: Checks) -> None:
    """``quire serve`` on the device: greedy tokens of its answers are transformers', whatever else runs; a sampled,
    a penalized and a logprobs request too are answered whole."""
    write_config(folder, shape, 512)
    weights = {name: tensor.float().cpu().contiguous() for name, tensor in random_weights(shape, torch.device("cpu"))}
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    prompts = [[(11 * row + 5 * i) % (shape.vocab - 1) for i in range(3 + 9 * row)] for row in range(4)]
    expected = _continued(folder, prompts, tokens, device)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = ["--port", str(port), "--device", device.type, "--attention-backend", "triton", "--dtype", "float32"]
    flags += ["--max-num-seqs", "16", "--max-num-batched-tokens", "64", "--num-gpu-blocks-override", "200"]
    command = [sys.executable, "-m", "services.cli", "serve", str(folder), *flags]
    log = folder / "server.log"
    with log.open("wb") as out:
        server = subprocess.Popen(
            command, stdout=out, stderr=out, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        )
    try:
        deadline = time.monotonic() + min(limit, START_LIMIT)
        while server.poll() is None and "ready in" not in log.read_text() and time.monotonic() < deadline:
            time.sleep(0.2)
        checks.that("the server becomes ready", "ready in" in log.read_text())
        url = f"http://127.0.0.1:{port}"
        model = _call(f"{url}/v1/models")["data"][0]["id"]
        plain = {"model": model, "max_tokens": tokens, "ignore_eos": True, "return_token_ids": True, "temperature": 0}
        others: list[dict[str, Any]] = [
            {"prompt": prompts[1], "temperature": 1.0, "top_p": 0.9, "top_k": 20, "seed": 5, "n": 3},
            {"prompt": prompts[2], "repetition_penalty": 1.2, "logprobs": 3},
            {"prompt": prompts[3], "temperature": 0.8, "min_p": 0.05, "seed": 6},
        ]
        bodies = [plain | {"prompt": prompt} for prompt in prompts] + [plain | other for other in others]
        with ThreadPoolExecutor(len(bodies)) as pool:
            answers = list(pool.map(lambda body: _call(f"{url}/v1/completions", body), bodies))
        ids = [[choice["token_ids"] for choice in answer["choices"]] for answer in answers]
        checks.that("tokens over HTTP are transformers'", [one for (one,) in ids[: len(prompts)]] == expected)
        lengths = {len(one) for choices in ids for one in choices}
        checks.that(f"every answer has {tokens} tokens", lengths == {tokens} and len(ids[len(prompts)]) == 3)
        checks.that("nothing was compiled while serving", _late_compiles(url) == 0)
    except Exception:
        print(log.read_text()[-3000:], flush=True)
        raise
    finally:
        server.terminate()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _continued(folder: Path, prompts: list[list[int]], tokens: int, device: torch.device) -> list[list[int]]:
    """transformers' greedy tokens, each from a forward pass over the whole sequence, in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    found = []
    with torch.inference_mode():
        for prompt in prompts:
            ids = list(prompt)
            for _ in range(tokens):
                ids.append(int(model(torch.tensor([ids], device=device)).logits[0, -1].argmax()))
            found.append(ids[len(prompt) :])
    return found


def _late_compiles(url: str) -> float | None:
    """What the server's metrics say, once the worker's are among them."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        with urllib.request.urlopen(f"{url}/metrics", timeout=20) as page:
            found = re.search(r"^quire:worker_late_compiles_total\S* (\S+)$", page.read().decode(), re.MULTILINE)
        if found:
            return float(found[1])
        time.sleep(0.5)
    return None


def _call(url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)
