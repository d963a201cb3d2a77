"""A pool of real drafter services and one verifier's client, over real sockets."""

import threading
import time
from contextlib import contextmanager

import pytest
import torch
from tiny_drafter import BLOCK, VOCAB, WIDTH, tiny_model, tiny_runner

from dspark_ray.drafter.runner import DraftItem
from dspark_ray.drafter.service import DrafterService, answers_of
from dspark_ray.drafter.wire import check_bind, check_proposal, decode_call, decode_features, encode
from dspark_ray.errors import ConfigError, ProtocolError
from dspark_ray.protocol import DraftAnswer, DraftEntry, DrafterRoute, DraftProposal, DraftRequest
from dspark_ray.target.drafter_client import DraftQuestion
from dspark_ray.target.handoff import HandoffServer, HandoffStore
from dspark_ray.target.remote_drafter import RemoteDrafters

MODEL = tiny_model()
SECRET = "the deployment's secret"


class Slow:
    """A runner that takes its time when told to."""

    def __init__(self, runner):
        self._runner, self.delay_s, self.drafting = runner, 0.0, False

    def __getattr__(self, name):
        return getattr(self._runner, name)

    def draft(self, items):
        self.drafting = True
        time.sleep(self.delay_s)
        self.drafting = False
        return self._runner.draft(items)


@contextmanager
def service(bind="tcp://127.0.0.1:*", **options):
    runner = Slow(tiny_runner(MODEL, window=16))
    arguments = {"fingerprint": "pair", "width": WIDTH, "max_batch": 8, "secret": SECRET} | options
    running = DrafterService(runner, bind=bind, **arguments)
    running.slow = runner
    thread = threading.Thread(target=running.run)
    thread.start()
    try:
        yield running
    finally:
        running.stop()
        thread.join()


@contextmanager
def client(*services, **options):
    routes = [DrafterRoute(f"d{i}", s.endpoint, 1.0) for i, s in enumerate(services)]
    arguments = {
        "verifier": "v", "fingerprint": "pair", "width": WIDTH, "vocab_size": VOCAB, "secret": SECRET,
        "deadline_ms": 2000.0, "drafters": routes,
    } | options  # fmt: skip
    pool = RemoteDrafters(**arguments)
    try:
        yield pool
    finally:
        pool.close()


def question(key: str, rows: int = 5, **changes) -> DraftQuestion:
    torch.manual_seed(sum(map(ord, key)))
    fields = {
        "base_position": 0, "features": torch.randn(rows, WIDTH).bfloat16(), "anchor_token_id": 7,
        "draft_len": BLOCK, "fresh": True,
    } | changes  # fmt: skip
    return DraftQuestion(key, **fields)


def until_answered(pool, questions, within_s=5.0):
    """Draft until every question has an answer, as steps do; connections take a moment."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if all(answers := pool.draft(questions, [])):
            return answers
        time.sleep(0.02)
    raise AssertionError("no answer")


def connected(pool, *services):
    """Wait until every service has answered a call: requests stay where they were assigned first."""
    for number in range(200):
        keys = [f"warm{number}.{index}" for index in range(len(services))]  # one for each, when all are there
        pool.draft([question(key) for key in keys], [])
        pool.draft([], keys)
        if all(one.counters.calls for one in services):
            return
        time.sleep(0.02)
    raise AssertionError("not all services were called")


def expected(questions) -> list[DraftAnswer]:
    items = [
        DraftItem(q.key, q.base_position, q.features, q.anchor_token_id, q.draft_len, q.fresh)
        for q in questions
    ]
    return answers_of(tiny_runner(MODEL, window=16).draft(items))


def test_a_pool_answers_what_a_runner_of_ones_own_would():
    """Two drafters in parallel; requests are spread over both and stay where they are."""
    with service() as first, service() as second, client(first, second) as pool:
        connected(pool, first, second)
        questions = [question(f"r{i}") for i in range(6)]
        got = until_answered(pool, questions)
        for answer, wanted in zip(got, expected(questions), strict=True):
            assert answer.draft_token_ids == wanted.draft_token_ids
            assert answer.confidence_logits == pytest.approx(wanted.confidence_logits, abs=1e-5)
        until_answered(pool, questions)
        assert first.slow.slots_in_use == second.slow.slots_in_use == 3
        pool.draft([], [q.key for q in questions])  # an idle step still frees them
        assert _soon(lambda: first.slow.slots_in_use == second.slow.slots_in_use == 0)


def _soon(condition, within_s=3.0) -> bool:
    end = time.monotonic() + within_s
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def test_requests_of_a_dead_drafter_move_and_are_fed_anew():
    with service() as alive, client() as pool:
        with service() as dying:
            pool.route([DrafterRoute("a", alive.endpoint, 1.0), DrafterRoute("b", dying.endpoint, 1.0)])
            connected(pool, alive, dying)
            questions = [question(f"r{i}") for i in range(4)]
            until_answered(pool, questions)
            assert dying.slow.slots_in_use == 2
        died = time.monotonic()
        answers = until_answered(pool, questions)
        assert time.monotonic() - died < 2.0
        assert [a.draft_token_ids for a in answers] == [a.draft_token_ids for a in expected(questions)]
        assert len(pool.forgotten()) == 2
        assert alive.slow.slots_in_use == 4


def test_a_drafter_that_leaves_the_pool_holds_nothing_back():
    """Also while it lives: it may come back, and its slots would never be freed as those of a silent verifier."""
    with service() as leaving, service() as staying, client(leaving, staying) as pool:
        connected(pool, leaving, staying)
        questions = [question(key) for key in "abcd"]
        until_answered(pool, questions)
        assert leaving.slow.slots_in_use == 2
        pool.route([DrafterRoute("d1", staying.endpoint, 1.0)])
        assert _soon(lambda: leaving.slow.slots_in_use == 0)
        until_answered(pool, questions)
        assert staying.slow.slots_in_use == 4


def test_a_drafter_that_was_left_alone_for_a_while_keeps_no_slot_of_who_has_moved():
    with (
        service() as hanging,
        service() as other,
        client(hanging, other, deadline_ms=150.0) as pool,
    ):
        connected(pool, hanging, other)
        questions = [question(key) for key in "abcd"]
        until_answered(pool, questions)
        assert hanging.slow.slots_in_use == 2
        hanging.slow.delay_s = 0.6
        assert _soon(lambda: all(pool.draft(questions, [])))  # they have moved
        assert len(pool.forgotten()) == 2
        hanging.slow.delay_s = 0.0
        # Others keep it in use, so its slots are not those of a silent verifier.
        late, calls = [question(f"late{n}") for n in range(4)], hanging.counters.calls
        assert _soon(lambda: all(pool.draft(late, [])) and hanging.counters.calls > calls)
        pool.draft([], [q.key for q in [*questions, *late]])
        assert _soon(lambda: hanging.slow.slots_in_use == other.slow.slots_in_use == 0)


def test_a_restarted_drafter_says_what_it_misses():
    with client() as pool:
        with service() as first:
            pool.route([DrafterRoute("a", first.endpoint, 1.0)])
            until_answered(pool, [question("r", 9)])
            endpoint = first.endpoint
        with service(bind=endpoint):
            tail = question("r", 1, base_position=9, fresh=False)
            (answer,) = until_answered(pool, [tail])
            assert answer.missing_from == 0
            assert answer.draft_token_ids == []


def test_a_late_reply_is_dropped_and_never_answers_a_later_call():
    """Breaks when replies are matched by order instead of epoch: the old drafts would come out."""
    with service() as slow, client(slow, deadline_ms=200.0) as pool:
        until_answered(pool, [question("warm")])
        missed = pool.counters.deadline_misses  # a busy machine may have been late before
        old, new = question("r", 5, anchor_token_id=3), question("r", 5, anchor_token_id=9)
        assert expected([old])[0].draft_token_ids != expected([new])[0].draft_token_ids
        slow.slow.delay_s = 0.5
        assert pool.draft([old], []) == [None]
        assert pool.counters.deadline_misses == missed + 1
        slow.slow.delay_s = 0.0
        time.sleep(0.8)
        (answer,) = until_answered(pool, [new])
        assert answer.draft_token_ids == expected([new])[0].draft_token_ids
        assert pool.counters.bad_replies >= 1


def test_a_call_that_a_newer_one_has_overtaken_only_feeds_its_context():
    with service() as busy, client(busy, deadline_ms=80.0) as pool, client(busy, verifier="w") as other:
        until_answered(pool, [question("r", 5)])
        until_answered(other, [question("x", 5)])
        busy.slow.delay_s = 0.5
        blocker = threading.Thread(target=other.draft, args=([question("x", 5)], []))
        blocker.start()
        time.sleep(0.1)
        assert pool.draft([question("r", 1, base_position=5, fresh=False)], []) == [None]
        assert pool.draft([question("r", 1, base_position=6, fresh=False)], []) == [None]
        blocker.join()
        busy.slow.delay_s = 0.0
        assert _soon(lambda: busy.counters.queued == 0 and busy.counters.overtaken == 1)
        assert busy.counters.late == 1
        (answer,) = until_answered(pool, [question("r", 1, base_position=7, fresh=False)])
        assert answer.missing_from is None


def test_a_request_that_ended_while_its_call_waited_keeps_no_slot():
    with service() as busy, client(busy, deadline_ms=80.0) as pool, client(busy, verifier="w") as other:
        until_answered(pool, [question("warm")])
        until_answered(other, [question("x")])
        pool.draft([], ["warm"])
        busy.slow.delay_s = 0.5
        blocker = threading.Thread(target=other.draft, args=([question("x")], []))
        blocker.start()
        time.sleep(0.1)
        assert pool.draft([question("r")], []) == [None]  # it waits behind the other verifier's
        pool.draft([], ["r"])
        blocker.join()
        busy.slow.delay_s = 0.0
        assert _soon(lambda: busy.counters.queued == 0 and not busy.slow.drafting)
        assert busy.slow.slots_in_use == 1


def test_a_reply_that_lay_unread_does_not_stretch_the_deadline():
    """One that missed its deadline by little, before a pause of the engine: it was not under way all that time."""
    with service() as slow, client(slow, deadline_ms=None) as pool:
        for _ in range(20):
            until_answered(pool, [question("r")])
        (link,) = pool._links.values()
        before = link.deadline.seconds
        slow.slow.delay_s = before + 0.1
        assert pool.draft([question("r")], []) == [None]
        slow.slow.delay_s = 0.0
        time.sleep(before + 2.0)
        pool.draft([question("r")], [])
        assert link.deadline.seconds < 0.5


def test_an_answer_that_its_verifier_has_gone_on_without_is_counted():
    with service() as busy, client(busy, deadline_ms=100.0) as pool:
        until_answered(pool, [question("r", 5)])
        late = busy.counters.late
        busy.slow.delay_s = 0.4
        assert pool.draft([question("r", 1, base_position=5, fresh=False)], []) == [None]
        assert pool.draft([question("r", 1, base_position=6, fresh=False)], []) == [None]
        assert _soon(lambda: busy.counters.late == late + 1)
        assert busy.counters.overtaken == 0


@pytest.mark.parametrize("bind", ["tcp://0.0.0.0:*", "tcp://*:*", "tcp://10.1.2.3:5555"])
def test_without_a_secret_nobody_listens_on_the_network(bind: str):
    with pytest.raises(ConfigError, match="set DSPARK_SECRET"):
        DrafterService(None, fingerprint="pair", width=WIDTH, max_batch=8, bind=bind)
    with pytest.raises(ConfigError, match="set DSPARK_SECRET"):
        HandoffServer(HandoffStore(1 << 20, 60.0), bind=bind, fingerprint="pair", width=WIDTH, secret=None)
    check_bind("tcp://127.0.0.1:*", None)
    check_bind(bind, SECRET)


def test_a_full_queue_says_busy_at_once():
    with service(max_queued_calls=1) as full:
        verifiers = [client(full, verifier=f"v{i}") for i in range(4)]
        pools = [verifier.__enter__() for verifier in verifiers]
        for pool in pools:
            until_answered(pool, [question("r")])
        full.slow.delay_s = 1.0
        threads = [threading.Thread(target=pool.draft, args=([question("r")], [])) for pool in pools]
        threads[0].start()
        assert _soon(lambda: full.slow.drafting)
        for thread in threads[1:]:
            thread.start()
            time.sleep(0.05)
        for thread in threads:
            thread.join()
        assert full.counters.refused == {"busy": 2}
        assert sorted(pool.counters.refused for pool in pools) == [0, 0, 1, 1]
        for verifier in verifiers:
            verifier.__exit__(None, None, None)


def test_another_pair_of_models_is_refused_and_left_alone():
    with service(fingerprint="other") as strange, client(strange) as pool:
        assert _soon(lambda: pool.draft([question("r")], []) == [None] and pool.counters.refused == 1)
        assert strange.slow.slots_in_use == 0


@pytest.mark.parametrize("secret", ["wrong", None])
def test_a_peer_without_the_secret_gets_nothing(secret):
    with service() as closed, client(closed, secret=secret, deadline_ms=50.0) as pool:
        for _ in range(10):
            assert pool.draft([question("r")], []) == [None]
            time.sleep(0.03)
        assert closed.counters.calls == 0


def test_slots_of_a_silent_verifier_expire():
    now = [0.0]
    with service(slot_lifetime_s=30.0, clock=lambda: now[0]) as held, client(held) as pool:
        until_answered(pool, [question("a"), question("b")])
        assert held.slow.slots_in_use == 2
        now[0] = 29.0
        until_answered(pool, [question("a")])
        now[0] = 58.0
        assert not _soon(lambda: held.slow.slots_in_use < 2, within_s=0.5)
        now[0] = 60.0
        assert _soon(lambda: held.slow.slots_in_use == 0)
        assert held.counters.slots_expired == 2


def test_garbage_is_refused_and_the_service_lives_on():
    import zmq

    from dspark_ray.drafter.wire import secure

    with service() as attacked, client(attacked) as pool:
        context = zmq.Context()
        socket = context.socket(zmq.DEALER)
        secure(socket, SECRET, server=False)
        socket.linger = 0
        socket.connect(attacked.endpoint)
        entry = DraftEntry("r", 0, 3, 7, BLOCK)

        def call(**changes):
            fields = {
                "version": 1, "verifier": "x", "epoch": 5, "fingerprint": "pair", "width": WIDTH, "dtype": "bf16",
                "entries": [entry], "finished": [],
            } | changes  # fmt: skip
            return encode(DraftRequest(**fields), b"\0" * 3 * WIDTH * 2)

        garbage = [
            [b"not msgpack", b""], [b""], [], [b"\x93\x01\x02\x03", b""], call(width=8), call(version=9),
            call(entries=[entry, entry]), call(entries=[entry] * 9), [*call()[:1], b"\0" * 7],
            call(entries=[DraftEntry("r", 0, 3, VOCAB, BLOCK)]), call(entries=[DraftEntry("r", 0, 3, 1, BLOCK + 1)]),
        ]  # fmt: skip
        for frames in garbage:
            socket.send_multipart(frames or [b""])
            assert socket.poll(3000)
            socket.recv_multipart()
        assert sum(attacked.counters.refused.values()) == len(garbage)
        assert until_answered(pool, [question("r")])[0].draft_token_ids
        socket.close()
        context.term()


@pytest.mark.parametrize(
    "answers",
    [
        [],
        [DraftAnswer([1, 2], [0.1])],
        [DraftAnswer([1, 2, 3], [0.1, 0.2, 0.3])],
        [DraftAnswer([VOCAB], [0.1])],
        [DraftAnswer([1], [0.1]), DraftAnswer([1], [0.1])],
    ],
)
def test_a_proposal_that_does_not_fit_its_call_is_refused(answers):
    with pytest.raises(ProtocolError):
        check_proposal(DraftProposal(1, answers, 0.0), [2], VOCAB)


def test_features_survive_the_wire_bit_for_bit():
    rows = torch.randn(7, WIDTH).bfloat16()
    request = DraftRequest(1, "v", 1, "pair", WIDTH, "bf16", [DraftEntry("r", 0, 7, 1, 2)], [])
    from dspark_ray.drafter.wire import encode_features

    decoded, frame = decode_call(encode(request, encode_features([rows[:3], rows[3:]])))
    assert decoded == request
    assert torch.equal(decode_features(frame, 7, WIDTH), rows)
