"""What the draft loop asks of a drafter, wherever it runs; and the drafter that runs in this very process."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from dspark_ray.drafter.runner import DraftItem, DraftRunner
from dspark_ray.drafter.service import answers_of
from dspark_ray.errors import ProtocolError
from dspark_ray.protocol import DraftAnswer, DrafterRoute

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DraftQuestion:
    """One request of a draft call; its anchor stands at base_position + n."""

    key: str
    base_position: int
    features: Tensor
    """[n, d] bf16."""
    anchor_token_id: int
    draft_len: int
    fresh: bool


@dataclass
class ClientCounters:
    """Since the start."""

    calls: int = 0
    deadline_misses: int = 0
    unavailable: int = 0
    """Calls that found no drafter to send to."""
    refused: int = 0
    mismatched: int = 0
    """Of those, calls to a drafter of other weights or another version than this verifier's."""
    bad_replies: int = 0
    """Replies that did not fit their call, stale ones, and failures of a drafter of one's own."""
    bytes_sent: int = 0
    bytes_received: int = 0
    draft_ms: float = 0.0
    """Sum of the time that drafters computed for the calls that were answered in time."""
    transport_ms: float = 0.0
    """Sum of the rest of the time that the step waited for them."""


class DrafterClient(Protocol):
    """Drafts for a whole step in one go."""

    counters: ClientCounters

    def draft(self, questions: Sequence[DraftQuestion], finished: Sequence[str]) -> list[DraftAnswer | None]:
        """Answers in order; None where a request's drafter was late, away or unwilling.

        Args:
            questions: may be empty.
            finished: keys whose context is no longer needed.
        """

    def forgotten(self) -> set[str]:
        """Keys whose context went with a drafter since the last call: they are to be fed anew."""

    def route(self, drafters: Sequence[DrafterRoute]) -> None:
        """Use these drafters from now on."""

    def close(self) -> None:
        """Give back sockets."""


class ColocatedDrafter:
    """A `DraftRunner` in the verifier's worker."""

    def __init__(self, runner: DraftRunner):
        self._runner = runner
        self.counters = ClientCounters()

    def draft(self, questions: Sequence[DraftQuestion], finished: Sequence[str]) -> list[DraftAnswer | None]:
        """Draft at once; a runner of one's own is never late."""
        self._runner.free(finished)
        if not questions:
            return []
        started = time.perf_counter()
        self.counters.calls += 1
        items = [
            DraftItem(q.key, q.base_position, q.features, q.anchor_token_id, q.draft_len, q.fresh)
            for q in questions
        ]
        try:
            answers = answers_of(self._runner.draft(items))
        except (RuntimeError, ProtocolError):  # a GPU without memory left among them
            logger.exception("the drafter failed; this step decodes without drafts")
            self.counters.bad_replies += 1
            return [None] * len(questions)
        self.counters.draft_ms += (time.perf_counter() - started) * 1e3
        return list(answers)

    def forgotten(self) -> set[str]:
        """Nothing gets lost; evicted slots say so themselves."""
        return set()

    def route(self, drafters: Sequence[DrafterRoute]) -> None:
        """There is only this one."""

    def close(self) -> None:
        """Nothing to give back."""
