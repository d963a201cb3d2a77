"""Counters of the shim, read by the replica through a worker call."""

from collections import deque
from dataclasses import asdict, dataclass, field
from typing import Any

from dspark_ray.protocol import RoundRecord

ROUNDS_HELD = 512


@dataclass
class ShimStats:
    """Since the worker's start; milliseconds are sums over steps."""

    steps: int = 0
    """Engine steps with work in them."""
    steps_drafted: int = 0
    steps_skipped: int = 0
    """Steps that did not draft because it would not have paid."""
    rounds: int = 0
    """Requests times steps in which drafts were verified."""
    tokens_drafted: int = 0
    tokens_scheduled: int = 0
    """Drafts handed to the engine for verification."""
    tokens_verified: int = 0
    tokens_accepted: int = 0
    tokens_committed: int = 0
    """All tokens emitted by steps of requests that have left their prompt."""
    accepted_at: list[int] = field(default_factory=list)
    """Rounds that accepted the draft at position k, from 1."""
    verified_at: list[int] = field(default_factory=list)
    reached_at: list[int] = field(default_factory=list)
    """Rounds that verified position k after accepting all before it: what conditional acceptance is a share of."""
    missing_context: int = 0
    rows_sent: int = 0
    """Feature rows given to drafters."""
    prefix_restored: int = 0
    """Requests that began with features of a cached prefix."""
    handoffs_received: int = 0
    handoffs_missed: int = 0
    """Prompt features that were not there when first needed."""
    verify_ms: float = 0.0
    feature_ms: float = 0.0
    draft_wait_ms: float = 0.0
    """Waiting for drafters, transport and their computation together."""
    schedule_ms: float = 0.0
    between_ms: float = 0.0
    """From the end of one step to the beginning of the next while there was work."""
    full_rounds: deque[RoundRecord] = field(default_factory=lambda: deque(maxlen=ROUNDS_HELD))

    def observe_round(self, verified: int, accepted: int) -> None:
        """Count one request's verified round."""
        self.rounds += 1
        self.tokens_verified += verified
        self.tokens_accepted += accepted
        while len(self.verified_at) < verified:
            self.verified_at.append(0)
            self.accepted_at.append(0)
            self.reached_at.append(0)
        for k in range(verified):
            self.verified_at[k] += 1
            self.reached_at[k] += k <= accepted
            self.accepted_at[k] += k < accepted

    def report(self) -> dict[str, Any]:
        """All counters as plain data, and the full rounds since the last report."""
        rounds, self.full_rounds = self.full_rounds, deque(maxlen=ROUNDS_HELD)
        plain = {name: value for name, value in asdict(self).items() if name != "full_rounds"}
        return plain | {
            "tokens_wasted": self.tokens_verified - self.tokens_accepted,
            "full_rounds": list(rounds),
        }
