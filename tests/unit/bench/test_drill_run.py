"""A whole drill, on a server that is no deployment: what the verdict says of a fault that matters and of one not."""

import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import redis

from dspark_ray.bench.drills import deployment as deployments
from dspark_ray.bench.drills.deployment import Deployment, Shape
from dspark_ray.bench.drills.drill import Drill, Fault, Resources, reasons, run_drill
from dspark_ray.bench.drills.redis_server import RedisServer
from dspark_ray.bench.drills.report import table
from dspark_ray.bench.drills.soak import soak
from dspark_ray.bench.drills.traffic import Case

KNOWN = [Case("/v1/completions", {"prompt": str(number)}, f"answer {number}") for number in range(3)]


class Server(BaseHTTPRequestHandler):
    """Answers as `says` says."""

    protocol_version = "HTTP/1.1"
    says = "right"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        time.sleep(0.005)
        text = f"answer {body['prompt']}" if self.says != "wrong" else "answer nothing"
        choice = {"text": text, "finish_reason": "stop"}
        status = 503 if self.says == "nothing" else 200
        data = json.dumps({"choices": [choice], "error": "down"}).encode()
        if body["stream"] and status == 200:
            data = b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\ndata: [DONE]\n\n"
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


class Connections(ThreadingHTTPServer):
    """Waits for its connections when it is closed."""

    daemon_threads = False


class Pretended(Deployment):
    """Without Ray: idle, with one counter that a leak can raise."""

    left: dict[str, int]

    def stats(self, deployment: str) -> dict:
        return {}

    def wait_idle(self, timeout_s: float) -> dict:
        return self.left

    def metrics(self) -> dict:
        return {"ray_dspark_policy_local": [0.0, 1.0 if Server.says != "right" else 0.0]}


@pytest.fixture
def pretended(tmp_path) -> Iterator[Pretended]:
    server = Connections(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    Server.says = "right"
    pretended = Pretended(Shape(), f"http://127.0.0.1:{server.server_port}", None, tmp_path, own_disk=False)
    pretended.left = {}
    yield pretended
    server.shutdown()
    thread.join()
    server.server_close()


def saying(what: str, *, for_s: float) -> Drill:
    def inject(*_: object) -> Fault:
        Server.says = what

        def heal() -> None:
            Server.says = "right"

        return Fault(heal=heal, heal_after_s=for_s)

    return Drill(f"says {what}", inject)


@pytest.mark.parametrize("what", ["right", "wrong", "nothing"])
def test_the_verdict_on_a_fault(pretended: Pretended, what: str) -> None:
    drill = saying(what, for_s=0.5)
    verdict = run_drill(pretended, drill, KNOWN, 60)
    found = {"right": "ok", "wrong": "wrong", "nothing": "failed"}[what]
    assert verdict["requests"] >= 60
    assert verdict["ok"] >= 12
    assert 0 < verdict["streamed"] < verdict["requests"]
    assert 0.5 <= verdict["recovered_s"] < 10
    if found == "ok":
        assert reasons(verdict) == []
    else:
        assert reasons(verdict) == [f"{verdict[found]} {found}"]
    row = table({drill.name: verdict | {"passed": False, "why": ["because"]}}).splitlines()[-1]
    assert row.count("|") == table({}).splitlines()[0].count("|")


def test_what_stays_behind_fails_a_drill(pretended: Pretended) -> None:
    pretended.left = {"drafters slots_used": 1}
    drill = saying("right", for_s=0.0)
    assert reasons(run_drill(pretended, drill, KNOWN, 12)) == ["left: drafters slots_used: 1"]


def test_a_soak_counts_the_failures_of_all_its_faults(pretended: Pretended, monkeypatch) -> None:
    monkeypatch.setattr("dspark_ray.bench.drills.soak.PERIOD_S", 0.3)
    whole = soak([saying("right", for_s=0.1), saying("nothing", for_s=0.1)], minutes=0.04, seed=3)
    verdict = run_drill(pretended, whole, KNOWN, 12)
    assert set(verdict["notes"]["faults"]) == {"says right", "says nothing"}
    assert reasons(verdict) == [f"{verdict['failed']} failed"]


@pytest.mark.parametrize(("mib", "grows"), [([50, 100, 101, 104], False), ([50, 100, 103, 108], True)])
def test_a_soak_wants_memory_flat_once_it_has_settled(
    pretended: Pretended, monkeypatch, mib: list[int], grows: bool
) -> None:
    monkeypatch.setattr("dspark_ray.bench.drills.soak.PERIOD_S", 0.5)
    monkeypatch.setattr("dspark_ray.bench.drills.soak.SETTLED_AFTER", 0.25)
    taken = iter([*mib, *[mib[-1]] * 9])
    monkeypatch.setattr(
        "dspark_ray.bench.drills.soak.resources",
        lambda _: Resources(Counter(), {}, {}, Counter(engine=next(taken)), {}),
    )
    verdict = run_drill(pretended, soak([saying("right", for_s=0.0)], minutes=1.9 / 60, seed=3), KNOWN, 12)
    assert [why.startswith("memory grew from {'engine': 100}") for why in reasons(verdict)] == [True] * grows


def test_processes_are_found_by_their_titles_also_below_another() -> None:
    """As Ray and vLLM name them; a title changes with the method that runs."""
    sleep = "import time; time.sleep(60)"
    titles = [
        "ray::SERVE_REPLICA::dspark#Verifier:smollm2#ab:ServeReplica:dspark:Verifier:smollm2.__init__",
        "ray::ServeReplica:dspark:Prefill:smollm2", "ray::ClusterScheduler.status", "VLLM::EngineCore",
    ]  # fmt: skip
    started = [
        subprocess.Popen([title, "-c", sleep], executable=sys.executable, stdin=subprocess.DEVNULL)
        for title in titles
    ]
    try:
        deadline = time.monotonic() + 20
        while {deployments.kind_of(p) for p in deployments.family()} < {"verifier", "scheduler", "engine"}:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        somewhere = Deployment(Shape(), "", None, None, own_disk=False)
        for kind, process in zip(("verifier", "prefill", "scheduler", "engine"), started, strict=True):
            assert [p.pid for p in somewhere.processes(kind)] == [process.pid]
        assert somewhere.processes("engine", below="verifier") == []
    finally:
        for process in started:
            process.kill()
            process.wait()


def test_a_redis_that_is_killed_emptied_closed_and_slow() -> None:
    server = RedisServer()
    with server.client() as client:
        client.set("a", 1)
        server.flush()
        assert client.get("a") is None
    server.kill()
    with server.client() as client, pytest.raises(redis.ConnectionError):
        client.ping()
    port = server.port
    server.restart()
    assert server.port == port
    server.change_password("another")
    with server.client() as client, pytest.raises(redis.AuthenticationError):
        client.ping()
    server.change_password("", "another")
    with server.client() as client:
        assert client.ping()
    server.pause(0.2)
    server.kill()
