"""One engine step from the drafter's side: features in, ragged drafts out. Knows nothing of vLLM.

The engine's step verifies the drafts of the step before. Then, here: append the new features, ask the drafter
for the whole batch at once, decide how much of its answer the next step verifies.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from dspark_ray.protocol import DraftAnswer, RoundRecord
from dspark_ray.target.context import RequestContexts, StepRow
from dspark_ray.target.drafter_client import DrafterClient, DraftQuestion
from dspark_ray.target.stats import ShimStats
from dspark_ray.target.step_profile import StepProfile
from dspark_ray.target.verify import DraftedRow, VerifyPlanner


@dataclass(frozen=True)
class _Round:
    """What was drafted for a request and is being verified."""

    confidence_logits: tuple[float, ...]
    full: bool


class DraftLoop:
    """Drafts for the requests of one engine.

    Args:
        contexts: their features.
        client: the drafter or drafters.
        planner: decides lengths.
        profile: learns what drafting costs.
        stats: counted into.
        exactness: recorded with full rounds.
        refeed_rows: feature rows given to drafters in one step at most; one request is always served.
        max_questions: requests in one draft call at most.
    """

    def __init__(
        self,
        contexts: RequestContexts,
        client: DrafterClient,
        planner: VerifyPlanner,
        profile: StepProfile,
        stats: ShimStats,
        *,
        exactness: str,
        refeed_rows: int,
    ):
        self.contexts = contexts
        self.client = client
        self.planner = planner
        self.profile = profile
        self.stats = stats
        self._exactness = exactness
        self._refeed_rows = refeed_rows
        self._rounds: dict[str, _Round] = {}
        self._finished: list[str] = []
        self._turn = 0

    def finish(self, keys: Sequence[str], *, flush: bool) -> None:
        """Forget requests. Drafters hear of it with the next call, or now when no step follows."""
        for key in keys:
            self._rounds.pop(key, None)
        self._finished += self.contexts.finish(keys)
        if flush and self._finished:
            self.client.draft([], self._take_finished())

    def step(self, rows: Sequence[StepRow], features: Tensor) -> list[list[int]]:
        """Drafts to verify in the next step, in the order of rows.

        Args:
            rows: one for each request in the engine's batch.
            features: [sum of rows, d] projected features of the valid rows.
        """
        self._account(rows)
        self.contexts.advance(rows, features)
        for key in self.client.forgotten():
            if key in self.contexts:
                self.contexts[key].sent = None
        asking, questions = self._questions(rows)
        drafts: list[list[int]] = [[] for _ in rows]
        if not questions and not self._finished:
            return drafts
        started = time.perf_counter()
        answers = self.client.draft(questions, self._take_finished())
        waited_ms = (time.perf_counter() - started) * 1e3
        self.stats.draft_wait_ms += waited_ms
        if questions:
            self.stats.steps_drafted += 1
            self.profile.observe_draft(len(questions), waited_ms)
        started = time.perf_counter()
        usable = self._settle(rows, asking, questions, answers)
        self._choose_lengths(rows, usable, drafts)
        self.stats.schedule_ms += (time.perf_counter() - started) * 1e3
        return drafts

    def _account(self, rows: Sequence[StepRow]) -> None:
        """Close the rounds that this step verified."""
        self.stats.steps += 1
        for row in rows:
            if row.anchor_token_id is not None:
                self.stats.tokens_committed += row.accepted + 1
            drafted = self._rounds.pop(row.key, None)
            if drafted is None:
                continue
            self.planner.observe_round(row.verified, row.accepted)
            if row.verified:
                self.stats.observe_round(row.verified, row.accepted)
            if drafted.full and row.verified == len(drafted.confidence_logits):
                self.stats.full_rounds.append(
                    RoundRecord(
                        drafted.confidence_logits,
                        row.verified,
                        row.accepted,
                        row.temperature,
                        self._exactness,
                    )
                )

    def _questions(self, rows: Sequence[StepRow]) -> tuple[list[int], list[DraftQuestion]]:
        """Requests to draft for in this step, with the features their drafter lacks."""
        able = [i for i, row in enumerate(rows) if row.anchor_token_id is not None]
        lengths = {i: self.planner.draft_len(rows[i].room) for i in able}
        able = [i for i in able if lengths[i] > 0]
        if not able:
            return [], []
        prompt_tokens = sum(row.rows for row in rows if row.anchor_token_id is None)
        if not self.planner.worth_drafting(len(able), prompt_tokens):
            self.stats.steps_skipped += 1
            return [], []
        self._turn += 1
        turn = self._turn % len(able)
        asking, questions, budget = [], [], self._refeed_rows
        for i in able[turn:] + able[:turn]:
            row, context = rows[i], self.contexts[rows[i].key]
            base, fresh = context.unsent()
            if context.have - base > budget and asking:
                continue
            budget -= context.have - base
            asking.append(i)
            questions.append(
                DraftQuestion(
                    row.key, base, context.rows_from(base), row.anchor_token_id or 0, lengths[i], fresh
                )
            )
            self.stats.rows_sent += context.have - base
        return asking, questions

    def _settle(
        self,
        rows: Sequence[StepRow],
        asking: Sequence[int],
        questions: Sequence[DraftQuestion],
        answers: Sequence[DraftAnswer | None],
    ) -> dict[int, DraftAnswer]:
        """Note what the drafters hold now; keep the answers that have drafts."""
        usable = {}
        for i, question, answer in zip(asking, questions, answers, strict=True):
            context = self.contexts[rows[i].key]
            if answer is None:
                continue  # not known to have arrived: the same rows go out again
            if answer.missing_from is not None:
                self.stats.missing_context += 1
                context.missing(answer.missing_from)
                continue
            context.sent = question.base_position + len(question.features)
            if answer.draft_token_ids:
                self.stats.tokens_drafted += len(answer.draft_token_ids)
                usable[i] = answer
        return usable

    def _choose_lengths(
        self, rows: Sequence[StepRow], usable: dict[int, DraftAnswer], drafts: list[list[int]]
    ) -> None:
        if not usable:
            return
        candidates = [
            DraftedRow(answer.confidence_logits, rows[i].temperature, rows[i].room)
            for i, answer in usable.items()
        ]
        others = len(rows) - len(usable)
        lengths, full = self.planner.lengths(candidates, others)
        for (i, answer), length, is_full in zip(usable.items(), lengths, full, strict=True):
            drafts[i] = answer.draft_token_ids[:length]
            self.stats.tokens_scheduled += length
            self._rounds[rows[i].key] = _Round(tuple(answer.confidence_logits), is_full)

    def _take_finished(self) -> list[str]:
        finished, self._finished = self._finished, []
        return finished
