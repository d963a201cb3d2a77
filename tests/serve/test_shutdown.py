"""The end of the application. Last of its tests, by the alphabet, since nothing answers afterwards."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import httpx
from serving_harness import RunningApp


def test_a_drain_lets_streams_finish_and_ends_those_that_cannot_with_an_error_event(app: RunningApp) -> None:
    begun = Barrier(3, timeout=60)

    def stream(max_tokens: int) -> list[str]:
        body = {
            "model": "smollm2",
            "prompt": "Once",
            "max_tokens": max_tokens,
            "stream": True,
            "ignore_eos": True,
        }
        with httpx.stream("POST", f"{app.base_url}/v1/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            said = [next(lines) for _ in range(4)]
            begun.wait()
            return [line for line in (*said, *lines) if line]

    with ThreadPoolExecutor(2) as pool:
        short, long = pool.submit(stream, 120), pool.submit(stream, 4000)
        begun.wait()
        app.drill(Path(__file__).with_name("drills.py"), "begin_to_delete")
        short_lines, long_lines = short.result(), long.result()
    assert short_lines[-1] == long_lines[-1] == "data: [DONE]"
    assert json.loads(short_lines[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    assert json.loads(long_lines[-2].removeprefix("data: "))["error"]["code"] == "shutting_down"
    assert len(long_lines) > len(short_lines)
