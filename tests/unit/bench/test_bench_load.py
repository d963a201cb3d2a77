"""The load engine against a small server that streams as OpenAI's API does."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from dspark_ray.bench.arms import Arm, Offer
from dspark_ray.bench.load import LoadEngine, first_model
from dspark_ray.bench.paired import SETTLE_TOKENS, PairedRun

EVENTS, TOKENS_AN_EVENT = 4, 2


class Handler(BaseHTTPRequestHandler):
    """Answers `say busy` with 503, everything else with four events of two tokens."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        known = self.path == "/v1/models"
        body = json.dumps({"data": [{"id": "tiny"}]}).encode() if known else b"{}"
        self.send_response(200 if known else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        server = self.server
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.requests.append(request)
            server.under_way += 1
            server.most = max(server.most, server.under_way)
        try:
            if "busy" in json.dumps(request["messages"]):
                self.send_response(503, "Service Unavailable")
                self.send_header("Content-Length", "0")
                self.end_headers()
            else:
                self._stream()
        finally:
            with server.lock:
                server.under_way -= 1

    def _stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for _ in range(EVENTS):
            self._event({"choices": [{"delta": {"content": "ab"}}]})
            time.sleep(0.02)
        usage = {"completion_tokens": EVENTS * TOKENS_AN_EVENT, "prompt_tokens": 5}
        self._event({"choices": [], "usage": usage})
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _event(self, payload: dict) -> None:
        self._chunk(f"data: {json.dumps(payload)}\n\n".encode())

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
        self.wfile.flush()


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.lock, server.requests, server.under_way, server.most = threading.Lock(), [], 0, 0
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def arm(server: ThreadingHTTPServer) -> Arm:
    return Arm(name="a", url=f"http://127.0.0.1:{server.server_port}/v1", model="tiny")


def engine(*prompts: str) -> LoadEngine:
    return LoadEngine(prompts, max_tokens=9, temperature=0.0, ignore_eos=False)


def test_a_closed_loop_keeps_its_streams_and_counts_tokens_not_events(server, arm):
    turn = asyncio.run(engine("a", "b", "c").offer(arm, Offer(streams=2, requests=6), first=1, seed=0))
    assert server.most == 2
    prompts = [request["messages"][0]["content"] for request in server.requests]
    assert sorted(prompt[0]["text"] if isinstance(prompt, list) else prompt for prompt in prompts) == [
        *"aabbcc"
    ]
    assert all(request["temperature"] == 0 and request["stream"] for request in server.requests)
    for answer in turn.answers:
        assert (answer.output_tokens, answer.prompt_tokens, answer.text) == (8, 5, "ab" * EVENTS)
        assert len(answer.gaps_s) == EVENTS - 1
        assert answer.token_s == pytest.approx(sum(answer.gaps_s) / 7)
        assert not answer.error


def test_arrivals_of_an_open_loop_come_from_the_seed(arm):
    offer = Offer(rate_per_s=50, requests=5)
    both = [asyncio.run(engine("a").offer(arm, offer, first=0, seed=seed)) for seed in (3, 3)]
    assert [len(turn.answers) for turn in both] == [5, 5]


def test_a_refusal_is_a_failed_request(arm):
    turn = asyncio.run(engine("busy").offer(arm, Offer(streams=1, requests=1), first=0, seed=0))
    assert turn.answers[0].error == "Service Unavailable"


def test_the_first_model_is_asked_for(arm):
    assert first_model(arm.url) == "tiny"


def test_arms_get_the_same_prompts_and_one_that_is_gone_costs_no_other(server, arm):
    gone = Arm(name="gone", url="http://127.0.0.1:1/v1", model="m")
    seen = []
    run = PairedRun(
        engine("a", "b", "c", "d"), [arm, gone], None, seed=0, progress=lambda *what: seen.append(what[:2])
    )
    records = run.run([Offer(streams=1, requests=2)], rounds=2)
    assert [(r.arm, r.round) for r in records] == [("a", 0), ("gone", 0), ("gone", 1), ("a", 1)]
    assert [bool(r.requests) for r in records] == [True, False, False, True]
    assert all(r.failed == 2 and r.error for r in records if r.arm == "gone")
    assert seen[-1] == (4, 4)
    lengths = [request["max_completion_tokens"] for request in server.requests]
    assert lengths == [SETTLE_TOKENS, 9, 9] * 2  # what settles the engine is not what is measured
