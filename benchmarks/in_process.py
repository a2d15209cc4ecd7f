"""Engines without a server of their own, for benchmarks.compare: runs its requests and prints one JSON line.

    PYTHON in_process.py openvino MODEL_FOLDER {file} [--cache-gib 2]
    PYTHON in_process.py transformers MODEL_FOLDER {file} [--dtype bfloat16]

PYTHON is one in whose environment the engine is installed; nothing of this tree is imported. {file} is as benchmarks.
compare writes it. openvino: GenAI's paged, continuous batching, ``concurrency`` requests at a time. transformers:
``generate`` on static batches of ``concurrency``; each batch runs until its longest answer is done, and only tokens
asked for count. Loading and a first tiny request are not timed.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

WARM_UP = 10**9  # an id no request has


def openvino(folder: str, cache_gib: int) -> Callable[[list[dict[str, Any]], int], dict[str, Any]]:
    import numpy as np
    import openvino  # type: ignore[import-not-found]
    import openvino_genai  # type: ignore[import-not-found]

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = cache_gib
    scheduler.max_num_batched_tokens, scheduler.max_num_seqs = 2048, 256
    scheduler.dynamic_split_fuse, scheduler.enable_prefix_caching = True, False
    pipeline = openvino_genai.ContinuousBatchingPipeline(folder, scheduler, "CPU")

    def add(number: int, prompt: list[int], max_tokens: int) -> Any:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = max_tokens, True, False
        return pipeline.add_request(number, openvino.Tensor(np.array([prompt], dtype=np.int64)), config)

    add(WARM_UP, [100] * 16, 2)
    while pipeline.has_non_finished_requests():
        pipeline.step()

    def run(requests: list[dict[str, Any]], concurrency: int) -> dict[str, Any]:
        ids: list[list[int]] = [[] for _ in requests]
        first, last = [0.0] * len(requests), [0.0] * len(requests)
        due = [0.0] * len(requests)
        active: dict[int, Any] = {}
        sent = 0
        while sent < len(requests) or active:
            while len(active) < concurrency and sent < len(requests):
                due[sent] = time.perf_counter()
                active[sent] = add(sent, requests[sent]["prompt"], requests[sent]["max_tokens"])
                sent += 1
            pipeline.step()
            now = time.perf_counter()
            for number, handle in list(active.items()):
                while handle.can_read():
                    ids[number] += [one for output in handle.read().values() for one in output.generated_ids]
                    first[number] = first[number] or now
                    last[number] = now
                if handle.get_status() != openvino_genai.GenerationStatus.RUNNING:
                    del active[number]
        times = [(end - begin, len(some)) for begin, end, some in zip(first, last, ids, strict=True)]
        return {
            "ids": ids,
            "ttft_s": [begin - when for begin, when in zip(first, due, strict=True)],
            "tpot_s": [length / (count - 1) for length, count in times if count > 1],
        }

    return run


def transformers(folder: str, dtype: str) -> Callable[[list[dict[str, Any]], int], dict[str, Any]]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()

    def generate(prompts: list[list[int]], count: int) -> list[list[int]]:
        longest = max(map(len, prompts))
        padded = torch.tensor([[0] * (longest - len(one)) + one for one in prompts])
        mask = torch.tensor([[0] * (longest - len(one)) + [1] * len(one) for one in prompts])
        with torch.inference_mode():
            output = model.generate(
                padded, attention_mask=mask, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0
            )
        return [row[longest:].tolist() for row in output]

    generate([[100] * 16], 2)

    def run(requests: list[dict[str, Any]], concurrency: int) -> dict[str, Any]:
        ids: list[list[int]] = []
        for start in range(0, len(requests), concurrency):
            batch = requests[start : start + concurrency]
            outputs = generate([one["prompt"] for one in batch], max(one["max_tokens"] for one in batch))
            ids += [output[: one["max_tokens"]] for output, one in zip(outputs, batch, strict=True)]
        return {"ids": ids}

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=("openvino", "transformers"))
    parser.add_argument("folder")
    parser.add_argument("file", type=Path)
    parser.add_argument("--cache-gib", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    load = json.loads(args.file.read_text())
    if args.engine == "openvino":
        run = openvino(args.folder, args.cache_gib)
    else:
        run = transformers(args.folder, args.dtype)
    start = time.perf_counter()
    told = run(load["requests"], load["concurrency"])
    seconds = time.perf_counter() - start
    print(json.dumps({"output_tokens_per_s": sum(map(len, told["ids"])) / seconds, **told}))


if __name__ == "__main__":
    main()
