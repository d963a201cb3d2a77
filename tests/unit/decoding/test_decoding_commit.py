"""Where a block is cut: stop tokens, stop strings, budget, the context's end (faults 14-16, 20)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_ray.decoding.commit import commit, verify_limit

STOP = 99


@pytest.mark.parametrize(
    ("block", "remaining", "tokens", "reason"),
    [
        ([10, 11, STOP, 20, 21, 22], 5, [10, 11, STOP], "stop"),
        ([10, 11, 12, 13, 14, STOP], 5, [10, 11, 12, 13, 14], "length"),
        ([10, 11, 12, 13, STOP], 5, [10, 11, 12, 13, STOP], "stop"),
        ([10, 11], 5, [10, 11], None),
        ([10, 11], 2, [10, 11], "length"),
        ([STOP], 1, [STOP], "stop"),
    ],
)
def test_stop_is_looked_for_before_the_length(
    block: list[int], remaining: int, tokens: list[int], reason: str
):
    logprobs = [-float(t) for t in block]
    pieces = [f"<{t}>" for t in block]
    done = commit(block, stop_token_ids={STOP}, remaining_tokens=remaining, pieces=pieces, logprobs=logprobs)
    assert (done.token_ids, done.finish_reason) == (tokens, reason)
    # Usage counts token_ids; logprobs go with them, and the stop token adds no text.
    assert done.logprobs == [-float(t) for t in tokens]
    assert done.text == "".join(f"<{t}>" for t in tokens if t != STOP)


def test_a_stop_string_in_mid_block_cuts_text_ids_and_logprobs_together():
    done = commit(
        [1, 2, 3, 4],
        stop_token_ids=(),
        remaining_tokens=9,
        pieces=["ab", "c#", "#d", "e"],
        logprobs=[-1.0, -2.0, -3.0, -4.0],
        stop_strings=["##"],
    )
    assert (done.text, done.token_ids, done.logprobs) == ("abc", [1, 2, 3], [-1.0, -2.0, -3.0])
    assert (done.held_text, done.finish_reason) == ("", "stop")


PIECES = ["a", "b", "ab", "ba", "aab", ""]


@given(
    tokens=st.lists(st.integers(0, len(PIECES) - 1), max_size=12),
    cuts=st.lists(st.integers(1, 4), max_size=12),
    stops=st.lists(st.sampled_from(["aab", "bb", "abab", "b"]), max_size=2),
    stop_token=st.integers(0, 20),
    budget=st.integers(1, 12),
)
def test_blocks_end_where_single_tokens_end(
    tokens: list[int], cuts: list[int], stops: list[str], stop_token: int, budget: int
):
    def decode(sizes: list[int]) -> tuple[str, list[int], str | None]:
        text, emitted, held, reason, at = "", [], "", None, 0
        while at < len(tokens) and reason is None:
            block = tokens[at : at + (sizes.pop(0) if sizes else 1)]
            at += len(block)
            done = commit(
                block,
                stop_token_ids={stop_token},
                remaining_tokens=budget - len(emitted),
                pieces=[PIECES[t] for t in block],
                stop_strings=stops,
                held_text=held,
            )
            assert not any(stop in text + done.text for stop in stops)  # what was streamed stays valid
            text, held, reason = text + done.text, done.held_text, done.finish_reason
            emitted += done.token_ids
        return text + held, emitted, reason

    assert decode(list(cuts)) == decode([])


@pytest.mark.parametrize("max_model_len", [1, 2, 9, 64])
def test_drafts_never_stand_past_the_context_end(max_model_len: int):
    for anchor in range(max_model_len):
        limit = verify_limit(max_model_len, anchor)
        assert anchor + limit == max_model_len - 1  # the last position is used, none after it
    assert verify_limit(max_model_len, max_model_len) == 0


def test_drafts_beyond_the_requests_budget_are_not_verified():
    assert [verify_limit(100, 10, left) for left in (0, 1, 2, 8)] == [0, 0, 1, 7]
