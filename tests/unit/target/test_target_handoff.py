"""Prompt features between a prefill worker and a verifier's, over real sockets."""

import time

import numpy as np
import torch

from dspark_ray.target.context import RequestContexts, StartedRequest, StepRow
from dspark_ray.target.handoff import HandoffFetcher, HandoffServer, HandoffStore
from dspark_ray.target.stats import ShimStats

WINDOW, WIDTH = 16, 4


def rows(count: int) -> torch.Tensor:
    torch.manual_seed(count)
    return torch.randn(count, WIDTH).bfloat16()


def test_a_prompt_is_handed_over_once_and_put_in_front():
    """Prefill in chunks of 7 here; there KV arrives, only the last position is computed, drafts need all of it.

    Also late: the rows come some steps after the request has started. Breaks when only the last chunk is kept.
    """
    length, features = 20, rows(23)
    ids = np.arange(40, dtype=np.int32)
    store = HandoffStore(1 << 20, 60.0)
    prefill = RequestContexts(WINDOW, WIDTH, prefix=None, stats=ShimStats(), offers=store)
    prefill.start([StartedRequest("p", 0, ids[:length], {"dspark_handoff": "h1"})])
    for first, last in ((0, 7), (7, 14), (14, 20)):
        done = last == length
        prefill.advance(
            [StepRow("p", first, last - first, ids[: last + done], int(ids[last]) if done else None)],
            features[first:last],
        )
    prefill.finish(["p"])  # the prefill engine is done with the request at once
    assert len(store) == 1
    server = HandoffServer(store, bind="tcp://127.0.0.1:*", fingerprint="pair", width=WIDTH, secret="s")
    fetcher = HandoffFetcher(fingerprint="pair", width=WIDTH, secret="s")
    stranger = HandoffFetcher(fingerprint="other", width=WIDTH, secret="s")
    stats = ShimStats()
    verifier = RequestContexts(WINDOW, WIDTH, prefix=None, stats=stats, fetcher=fetcher)
    try:
        stranger.ask(server.endpoint, "h1")
        time.sleep(0.3)
        assert stranger.arrived() == []
        extra = {"dspark_handoff": "h1", "dspark_handoff_endpoint": server.endpoint}
        verifier.start([StartedRequest("v", length - 1, ids[:length], extra)])
        position = length - 1
        end = time.monotonic() + 5
        while not stats.handoffs_received and time.monotonic() < end:
            if position < 23:
                verifier.advance(
                    [StepRow("v", position, 1, ids[: position + 2], int(ids[position + 1]))],
                    features[position : position + 1],
                )
                position += 1
            else:
                verifier.advance([], features[:0])
            time.sleep(0.02)
        context = verifier["v"]
        low = max(0, position - WINDOW)
        assert context.unsent() == (context.low, True)
        assert low <= context.low <= low + 3
        assert torch.equal(context.rows_from(context.low), features[context.low : position])
        assert len(store) == 0
        fetcher.ask(server.endpoint, "h1")  # a second fetch finds nothing
        end = time.monotonic() + 5
        while not (answers := fetcher.arrived()) and time.monotonic() < end:
            time.sleep(0.01)
        assert [len(found) for *_, found in answers] == [0]
    finally:
        fetcher.close()
        stranger.close()
        server.close()


def test_offers_are_bounded_in_bytes_and_in_time():
    now = [0.0]
    row_bytes = WIDTH * 2
    store = HandoffStore(10 * row_bytes, 5.0, clock=lambda: now[0])
    for name in "abc":
        store.put(name, 0, rows(4))
    assert len(store) == 2
    assert store.take("a") is None
    assert store.take("b").rows == 4
    now[0] = 6.0
    assert store.take("c") is None
    assert store.expired == 2
    store.put("d", 0, rows(11))  # larger than all of it
    assert len(store) == 0
