"""What drills call ok, wrong, failed, hung and cut, as a client of a server that does each of these sees it."""

import asyncio
import json
from collections import Counter

import pytest

from dspark_ray.bench.drills.deployment import Shape, app_args
from dspark_ray.bench.drills.drill import Resources, leaks, reasons
from dspark_ray.bench.drills.traffic import Case, ask, cases, http_client
from dspark_ray.config import parse_app_config

CASE = Case("/v1/completions", {"prompt": "x"}, "one two")
END = {"choices": [{"text": "", "finish_reason": "length"}]}


def event(document) -> str:
    return f"data: {json.dumps(document)}\n\n"


def part(text: str) -> str:
    return event({"choices": [{"text": text, "finish_reason": None}]})


STREAMS = {
    "ok": part("one ") + part("two") + event(END) + "data: [DONE]\n\n",
    "wrong": part("one ") + part("three"),
    "wrong, twice the end": part("one two") + 2 * event(END) + "data: [DONE]\n\n",
    "wrong, too short": part("one") + event(END) + "data: [DONE]\n\n",
    "failed": part("one ") + event({"error": {"code": "replica_died"}}) + "data: [DONE]\n\n",
    "cut": part("one ") + part("two"),
    "hung": part("one "),
}


@pytest.mark.parametrize("kind", STREAMS)
async def test_streams(kind: str) -> None:
    served = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")
        writer.write(STREAMS[kind].encode())
        await writer.drain()
        if kind == "hung":
            await reader.read()  # until the client has had enough
        writer.close()
        await writer.wait_closed()
        served.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, http_client(f"http://127.0.0.1:{port}") as client:
        outcome = await ask(client, CASE, stream=True, timeout_s=0.5)
        await asyncio.wait_for(served.wait(), 10)
    assert outcome.verdict == kind.partition(",")[0], outcome


def test_what_makes_a_drill_fail() -> None:
    clean = {"wrong": 0, "hung": 0, "cut": 0, "failed": 0, "recovered_s": 1.0,
             "leaked": [], "problems": [], "rss_mib": [100, 104]}  # fmt: skip
    assert reasons(clean) == []
    for change in ({"wrong": 1}, {"failed": 1}, {"hung": 1}, {"cut": 1}, {"recovered_s": None}, {"leaked": ["a slot"]},
                   {"problems": ["it was never called"]}):  # fmt: skip
        assert len(reasons(clean | change)) == 1


def test_leaks_are_counted_in_processes_that_lived_all_the_while() -> None:
    before = Resources(
        Counter(engine=2), {1: 50, 2: 50}, {1: 9}, Counter(engine=100), {1: "engine", 2: "engine"}
    )
    same = Resources(
        Counter(engine=2), {1: 55, 3: 900}, {1: 10}, Counter(engine=100), {1: "engine", 3: "engine"}
    )
    more = Resources(
        Counter(engine=3), {1: 80, 2: 50}, {1: 20}, Counter(engine=100), {1: "engine", 2: "engine"}
    )
    assert leaks(before, same) == []
    assert len(leaks(before, more)) == 3


def test_the_deployment_is_valid_and_its_requests_differ() -> None:
    config = parse_app_config(app_args(Shape(verifiers=2)))
    assert config.models[0].verifier.replicas == 2
    made = cases(12)
    assert len({json.dumps(case.body) for case in made}) == 12
    assert {case.path for case in made} == {"/v1/completions", "/v1/chat/completions"}
    assert any("seed" in case.body for case in made)
