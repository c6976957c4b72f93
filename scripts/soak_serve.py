"""Memory of a server over many requests: python scripts/soak_serve.py [REQUESTS]. Ends with 1 where it grows.

Starts `k3cuda serve tiny-random` and sends whole answers, streams, streams that are left in the middle, bodies that are refused and prompts
that share a beginning, 64 at a time. Needs Linux, for the memory of another process.
"""
import asyncio
import re
import subprocess
import sys
from pathlib import Path

import httpx

AT_A_TIME, SAMPLES, MAY_GROW = 64, 20, 8e6   # bytes from the middle to the end; the allocator alone moves by a few million


def resident_bytes(pid: int) -> int:
    return int(re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())[1]) * 1024


async def send(client: httpx.AsyncClient, number: int) -> None:
    kind = number % 8
    body = {"prompt": "ab"[:1 + number % 2], "max_tokens": 2, "seed": number}
    if kind == 0:
        assert (await client.post("/v1/completions", json=body | {"temperature": 9})).status_code == 400
    elif kind == 1:
        async with client.stream("POST", "/v1/completions", json=body | {"stream": True, "max_tokens": 100, "ignore_eos": True}) as answer:
            async for _ in answer.aiter_lines():
                break   # and away
    elif kind == 2:
        assert (await client.post("/v1/completions", json=body | {"stream": True})).text.endswith("data: [DONE]\n\n")
    elif kind == 3 and number % 64 == 3:
        assert (await client.post("/v1/completions", json=body | {"prompt": "a shared beginning of a page " * 4 + str(number)})).status_code == 200
    else:
        assert (await client.post("/v1/completions", json=body)).status_code == 200


async def soak(url: str, pid: int, total: int) -> list[int]:
    numbers, memory = iter(range(total)), []

    async def worker(client):
        for number in numbers:
            await send(client, number)
            if number % (total // SAMPLES) == total // SAMPLES - 1:
                memory.append(resident_bytes(pid))
                print(f"{number + 1:6d} requests: {memory[-1] / 1e6:.1f} MB", flush=True)

    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        await asyncio.gather(*(worker(client) for _ in range(AT_A_TIME)))
    return memory


def main() -> int:
    total = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    if total < SAMPLES:
        sys.exit(f"found {total} requests, wanted at least {SAMPLES}: so often memory is looked at")
    command = [sys.executable, "-m", "k3cuda", "serve", "tiny-random", "--port", "0", "--max-batch", "56", "--max-model-len", "256"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            url = re.search(r"http://\S+(?=/v1)", server.stderr.readline())[0]
            memory = asyncio.run(soak(url, server.pid, total))
        finally:
            server.terminate()
    grown = memory[-1] - memory[len(memory) // 2]
    print(f"from the middle to the end: {grown / 1e6:+.1f} MB")
    return int(grown > MAY_GROW)


if __name__ == "__main__":
    sys.exit(main())
