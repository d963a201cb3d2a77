"""Incremental drafting equals recomputation after any sequence of events (property test).

A verifier is played with several requests that come, draft, commit, retry, lose a call, are aborted and come
again, against fewer slots than requests. It holds the last W features of each, as the real one does.
"""

from dataclasses import dataclass, field

import torch
from drafter_recompute import BLOCK, VOCAB, WIDTH, from_scratch, tiny_model, tiny_runner
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import Tensor

from dspark_ray.drafter.runner import DraftItem

WINDOW, SLOTS = 6, 3
MODEL = tiny_model(draft_vocab_size=30)


@dataclass
class Request:
    first: int
    """Position from which features exist."""
    generator: torch.Generator
    fed: int
    """Position up to which the drafter was fed, as far as the verifier knows."""
    features: Tensor = field(default_factory=lambda: torch.zeros(0, WIDTH))

    @property
    def end(self) -> int:
        return self.first + len(self.features)

    def grow(self, count: int) -> None:
        self.features = torch.cat([self.features, torch.randn(count, WIDTH, generator=self.generator)])

    def rows(self, start: int) -> Tensor:
        return self.features[start - self.first :]


class VerifierAndDrafter(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.runner = tiny_runner(MODEL, window=WINDOW, slots=SLOTS)
        self.requests: dict[str, Request] = {}
        self.serial = 0

    @rule(key=st.sampled_from("abcde"), first=st.sampled_from([0, 0, 3, 9]), prompt=st.integers(1, 14))
    def arrive(self, key: str, first: int, prompt: int) -> None:
        if key in self.requests:
            return
        self.serial += 1
        request = Request(first, torch.Generator().manual_seed(self.serial), fed=first)
        request.grow(prompt)
        self.requests[key] = request

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), lost=st.sampled_from([False, False, False, True]))
    def step(self, data, lost: bool) -> None:
        keys = data.draw(st.lists(st.sampled_from(sorted(self.requests)), unique=True, max_size=SLOTS))
        items = []
        for key in keys:
            request = self.requests[key]
            request.grow(data.draw(st.integers(0, BLOCK + 1)))
            items.append(self.item(key, data.draw(st.integers(0, BLOCK)), data.draw(st.integers(0, 2))))
        result = self.runner.draft(items)
        if lost:  # past its deadline: the verifier does not know what the drafter has
            return
        for row, item in enumerate(items):
            if (missing := result.missing_from[row]) is not None:
                item = self.item(item.key, item.draft_len, 0, start=missing)  # noqa: PLW2901
                again = self.runner.draft([item])
                assert again.missing_from == [None]
                self.check(item, again.draft_token_ids[0])
            else:
                self.check(item, result.draft_token_ids[row])
            self.requests[item.key].fed = self.requests[item.key].end

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data) -> None:
        key = data.draw(st.sampled_from(sorted(self.requests)))
        del self.requests[key]
        self.runner.free([key])

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), back=st.integers(1, 12))
    def preempt(self, data, back: int) -> None:
        """A request is taken back to an earlier position and goes on with other tokens."""
        request = self.requests[data.draw(st.sampled_from(sorted(self.requests)))]
        keep = max(0, len(request.features) - back)
        request.features = request.features[:keep]
        request.fed = min(request.fed, request.end)
        request.grow(1)

    @invariant()
    def memory_is_bounded(self) -> None:
        assert self.runner.slots_in_use <= SLOTS

    def item(self, key: str, draft_len: int, resend: int, start: int | None = None) -> DraftItem:
        """What the verifier sends: from what it believes was fed, perhaps some rows again."""
        request = self.requests[key]
        base = request.fed - resend if start is None else start
        base = max(base, request.first, request.end - WINDOW)
        fresh = base == request.first
        anchor = int(request.features.sum().abs() * 1000) % VOCAB
        return DraftItem(key, base, request.rows(base), anchor, draft_len, fresh=fresh)

    def check(self, item: DraftItem, drafted: Tensor) -> None:
        request, n = self.requests[item.key], item.draft_len
        assert drafted[n:].tolist() == [-1] * (BLOCK - n)
        if n:
            expected = from_scratch(MODEL, request.features, request.first, item.anchor_token_id, n, WINDOW)[
                0
            ]
            assert drafted[:n].tolist() == expected.tolist()


VerifierAndDrafter.TestCase.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
TestIncremental = VerifierAndDrafter.TestCase
