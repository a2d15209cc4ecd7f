"""What a huge request costs everybody else: inter-token gaps of open streams, and /health, with and without it.

    quire serve & python -m benchmarks.big_prompt --url http://127.0.0.1:8000

Opens a few streams, measures their gaps for a while, then measures again while 5 MB prompts arrive one after another
(each is refused or served, as the model's context allows). Prints both p99s, their ratio, and the p99 of 100 probes of
/health during the second half.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time

import httpx

from benchmarks.stats import percentile


class Streams:
    """Endless streams whose inter-token gaps (seconds) collect in ``gaps``."""

    def __init__(self, client: httpx.AsyncClient, model: str, count: int) -> None:
        self.gaps: list[float] = []
        self._client, self._model = client, model
        self._tasks = [asyncio.create_task(self._read(index)) for index in range(count)]

    async def _read(self, index: int) -> None:
        body = {"model": self._model, "prompt": f"Stream {index}", "max_tokens": 1500, "ignore_eos": True}
        while True:
            async with self._client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
                last = None
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        now = time.perf_counter()
                        if last is not None:
                            self.gaps.append(now - last)
                        last = now

    async def measure(self, seconds: float) -> list[float]:
        self.gaps = []
        await asyncio.sleep(seconds)
        return self.gaps

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--megabytes", type=float, default=5)
    parser.add_argument("--pause", type=float, default=1.0, help="seconds between two big prompts")
    args = parser.parse_args()
    async with httpx.AsyncClient(base_url=args.url, timeout=300, trust_env=False) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        streams = Streams(client, model, args.streams)
        await asyncio.sleep(3)
        before = await streams.measure(args.seconds)
        body = json.dumps({"model": model, "prompt": "lorem ipsum " * int(args.megabytes * 1e6 / 12), "max_tokens": 1})
        answers: list[int] = []
        probes: list[float] = []

        async def send_big() -> None:
            while True:
                answer = await client.post("/v1/completions", content=body)
                answers.append(answer.status_code)
                await asyncio.sleep(args.pause)

        async def probe() -> None:
            for _ in range(100):
                start = time.perf_counter()
                await client.get("/health")
                probes.append(time.perf_counter() - start)
                await asyncio.sleep(args.seconds / 110)

        others = [asyncio.create_task(send_big()), asyncio.create_task(probe())]
        during = await streams.measure(args.seconds)
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await streams.close()
    for name, gaps in (("alone", before), (f"with {args.megabytes:g} MB prompts", during)):
        p50, p99 = percentile(gaps, 0.5), percentile(gaps, 0.99)
        print(f"inter-token {name}: {len(gaps)} gaps, p50 {p50 * 1e3:.1f} ms, p99 {p99 * 1e3:.1f} ms")
    print(f"p99 ratio: {percentile(during, 0.99) / percentile(before, 0.99):.2f}")
    print(f"big prompts answered meanwhile: {len(answers)}, statuses {sorted(set(answers))}")
    print(f"/health: {len(probes)} probes, p99 {percentile(probes, 0.99) * 1e3:.1f} ms")


if __name__ == "__main__":
    asyncio.run(main())
