"""The draft loop over a real runner: whatever happens to the drafter, its context is what the verifier knows."""

import random

import numpy as np
import pytest
import torch
from tiny_drafter import BLOCK, VOCAB, WIDTH, drafts_of_a_fresh_drafter, tiny_model, tiny_runner

from dspark_ray.config import SchedulingConfig
from dspark_ray.protocol import DraftAnswer, TargetControl
from dspark_ray.target.context import RequestContexts, StartedRequest, StepRow
from dspark_ray.target.draft_loop import DraftLoop
from dspark_ray.target.drafter_client import ColocatedDrafter, DraftQuestion
from dspark_ray.target.stats import ShimStats
from dspark_ray.target.step_profile import StepProfile
from dspark_ray.target.verify import VerifyPlanner

WINDOW = 12
MODEL = tiny_model()


class Flaky(ColocatedDrafter):
    """A drafter that is late now and then, before or after it did the work, and is restarted now and then."""

    def __init__(self, dice: random.Random, slots: int):
        super().__init__(tiny_runner(MODEL, window=WINDOW, slots=slots))
        self._dice, self._slots = dice, slots

    def draft(self, questions, finished) -> list[DraftAnswer | None]:
        fate = self._dice.random()
        if fate < 0.1:
            return [None] * len(questions)
        if fate < 0.15:
            self._runner = tiny_runner(MODEL, window=WINDOW, slots=self._slots)
        answers = super().draft(questions, finished)
        return [None] * len(questions) if fate > 0.9 else answers


def test_a_drafter_of_ones_own_that_fails_costs_its_drafts_only():
    class Failing:
        def free(self, keys):
            pass

        def draft(self, items):
            raise torch.OutOfMemoryError("no memory left")

    client = ColocatedDrafter(Failing())
    question = DraftQuestion("r", 0, torch.randn(2, WIDTH).bfloat16(), 7, BLOCK, fresh=True)
    assert client.draft([question, question], []) == [None, None]
    assert client.counters.bad_replies == 1


def loop_over(client, *, mode="fixed_len", refeed_rows=64, profile=None) -> DraftLoop:
    stats = ShimStats()
    profile = profile or StepProfile([1, 8, 64], [1.0, 2.0, 9.0])
    planner = VerifyPlanner(
        SchedulingConfig(mode=mode, full_round_share=0.0), tau=0.0, profile=profile, exactness="coupled",
        block_size=BLOCK, calibration=None, rng=random.Random(0),
    )  # fmt: skip
    contexts = RequestContexts(WINDOW, WIDTH, prefix=None, stats=stats)
    return DraftLoop(contexts, client, planner, profile, stats, exactness="coupled", refeed_rows=refeed_rows)


class Request:
    """A request whose tokens and features are made up, and which accepts as the dice fall."""

    def __init__(self, key: str, dice: random.Random):
        self.key, self.dice = key, dice
        self.prompt = dice.randint(1, 30)
        self.features = torch.randn(400, WIDTH).bfloat16()
        self.tokens = np.array([dice.randrange(VOCAB - 1) for _ in range(401)], dtype=np.int32)
        self.computed = self.computed_at_start = dice.choice([0, 0, min(4, self.prompt - 1)])
        self.drafts: list[int] = []
        self.low = self.computed

    def advance(self) -> tuple[StepRow, torch.Tensor]:
        first = self.computed
        if first < self.prompt:  # a chunk of the prompt
            last = min(self.prompt, first + self.dice.randint(1, 12))
            verified = accepted = 0
        else:
            verified = len(self.drafts)
            accepted = self.dice.randint(0, verified)
            last = first + 1 + accepted
        self.computed = last
        anchor = int(self.tokens[last]) if last >= self.prompt else None
        row = StepRow(
            self.key, first, last - first, self.tokens[: last + 1], anchor, room=BLOCK, verified=verified,
            accepted=accepted,
        )  # fmt: skip
        return row, self.features[first:last]

    def preempt(self) -> None:
        self.computed, self.drafts, self.prompt = 0, [], max(self.prompt, self.computed)


@pytest.mark.parametrize("seed", range(6))
def test_drafts_are_those_of_a_fresh_drafter_with_the_same_context(seed: int):
    """Faults 1, 7-10: rejection, chunks, preemption, eviction, restarts and lost calls leave no trace.

    Breaks when features of rejected drafts are kept, positions slip, or a lost call's rows are not sent again.
    """
    dice = random.Random(seed)
    torch.manual_seed(seed)
    slots = dice.choice([3, 8])  # three slots for up to three requests at once: waiting ones are evicted
    loop = loop_over(Flaky(dice, slots), refeed_rows=dice.choice([16, 64]))
    running: list[Request] = []
    checked = 0
    for step in range(60):
        if dice.random() < 0.1 and running:
            gone = running.pop(dice.randrange(len(running)))
            loop.finish([gone.key], flush=dice.random() < 0.5)
        if len(running) < 5 and dice.random() < 0.4:
            running.append(Request(f"r{step}", dice))
            new = running[-1]
            prompt = new.tokens[: new.prompt]
            loop.contexts.start([StartedRequest(new.key, new.computed, prompt, {})])
        if dice.random() < 0.05 and running:
            dice.choice(running).preempt()
        batch = dice.sample(running, min(len(running), 3))  # the others wait
        stepped = [(request, *request.advance()) for request in batch]
        if not stepped:
            continue
        rows = [row for _, row, _ in stepped]
        drafts = loop.step(rows, torch.cat([features for *_, features in stepped]))
        for (request, row, _), drafted in zip(stepped, drafts, strict=True):
            request.drafts = drafted
            if drafted:
                expected = drafts_of_a_fresh_drafter(
                    MODEL, request.features[: request.computed], row.anchor_token_id, window=WINDOW,
                    low=max(request.computed_at_start, request.computed - WINDOW),
                )  # fmt: skip
                assert drafted == expected
                checked += 1
    assert checked > 20


def prompts_of(*lengths: int):
    """Requests that have just finished their prompts."""
    rows, features = [], []
    for number, length in enumerate(lengths):
        ids = np.arange(length + 1, dtype=np.int32) % (VOCAB - 1)
        rows.append(StepRow(f"r{number}", 0, length, ids, int(ids[-1]), room=BLOCK))
        features.append(torch.randn(length, WIDTH))
    return rows, torch.cat(features)


def started(loop: DraftLoop, rows) -> None:
    loop.contexts.start([StartedRequest(row.key, 0, row.tokens[:-1], {}) for row in rows])


def test_refeeding_is_paced_and_reaches_everybody():
    """A restarted drafter is not given all contexts in one step, and no request is starved."""
    loop = loop_over(ColocatedDrafter(tiny_runner(MODEL, window=WINDOW)), refeed_rows=16)
    rows, features = prompts_of(12, 12, 12, 12)
    started(loop, rows)
    drafted: set[str] = set()
    for _ in range(8):
        before = loop.stats.rows_sent
        drafts = loop.step(rows, features)
        assert loop.stats.rows_sent - before <= 16
        drafted |= {row.key for row, own in zip(rows, drafts, strict=True) if own}
        rows = [StepRow(r.key, 12, 0, r.tokens, r.anchor_token_id, room=BLOCK) for r in rows]
        features = features[:0]
    assert drafted == {"r0", "r1", "r2", "r3"}


def test_room_trims_one_request_and_not_its_neighbour():
    """Fault 20: near its end a request drafts less, the others as before."""
    loop = loop_over(ColocatedDrafter(tiny_runner(MODEL, window=WINDOW)))
    rows, features = prompts_of(5, 6, 7)
    rows = [
        StepRow(r.key, 0, r.rows, r.tokens, r.anchor_token_id, room=room)
        for r, room in zip(rows, (0, 2, 9), strict=True)
    ]
    started(loop, rows)
    assert [len(drafts) for drafts in loop.step(rows, features)] == [0, 2, BLOCK]


def test_drafting_switched_off_and_on_again_resumes_with_the_whole_context():
    loop = loop_over(ColocatedDrafter(tiny_runner(MODEL, window=WINDOW)))
    rows, features = prompts_of(9)
    started(loop, rows)
    loop.planner.control(TargetControl(max_verify_len=0))
    assert loop.step(rows, features) == [[]]
    assert loop.stats.rows_sent == 0
    more = torch.randn(2, WIDTH).bfloat16()
    ids = np.arange(12, dtype=np.int32)
    loop.planner.control(TargetControl(max_verify_len=BLOCK))
    drafts = loop.step([StepRow("r0", 9, 2, ids, 11, room=BLOCK)], more)
    everything = torch.cat([features.bfloat16(), more])
    assert drafts[0] == drafts_of_a_fresh_drafter(MODEL, everything, 11, window=WINDOW, low=0)


def test_what_does_not_pay_is_not_drafted_but_tried_again():
    """Steep step costs and nothing accepted: drafting stops, and a step now and then probes."""
    profile = StepProfile([1, 8, 64], [1.0, 8.0, 64.0])
    loop = loop_over(ColocatedDrafter(tiny_runner(MODEL, window=WINDOW)), mode="throughput", profile=profile)
    for _ in range(40):
        loop.planner.observe_round(4, 0)
    rows, features = prompts_of(9)
    started(loop, rows)
    for _ in range(100):
        loop.step(rows, features)
        rows = [StepRow("r0", 9, 0, rows[0].tokens, rows[0].anchor_token_id, room=BLOCK)]
        features = features[:0]
    assert 90 <= loop.stats.steps_skipped < 100
    assert loop.stats.steps_drafted >= 2
