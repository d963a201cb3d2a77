"""Whether to draft in this step, and how many of each request's drafts to verify."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from dspark_ray.config import SchedulingConfig, VerifyMode
from dspark_ray.decoding.calibration import CalibrationTable, Scaling, round_survivals
from dspark_ray.decoding.prefix_scheduler import schedule, throughput_budget
from dspark_ray.protocol import TargetControl
from dspark_ray.target.step_profile import StepProfile

_GAIN = 0.05
_ROUNDS_BEFORE_SKIPPING = 16
_PROBE_EVERY = 48
_PROBE_ROUNDS = 8
_THROUGHPUT_MODES = ("throughput", "tau+throughput")


@dataclass(frozen=True)
class DraftedRow:
    """One request's drafts, as far as their length is decided on them."""

    confidence_logits: Sequence[float]
    """z_1..z_γ'."""
    temperature: float
    """Of the request's sampling; picks its calibration."""
    room: int
    """Drafts that can be verified at most: context end, tokens left."""


class VerifyPlanner:
    """The prefix scheduler of one engine.

    Args:
        config: modes and fixed values.
        tau: threshold until a policy arrives.
        profile: costs of this engine's steps.
        exactness: picks the calibration.
        block_size: γ.
        calibration: of the confidences; None uses them as they are.
        rng: chooses the rounds that are verified in full.
    """

    def __init__(
        self,
        config: SchedulingConfig,
        *,
        tau: float,
        profile: StepProfile,
        exactness: str,
        block_size: int,
        calibration: CalibrationTable | None,
        rng: random.Random,
    ):
        self._config = config
        self.mode: VerifyMode = config.mode
        self._tau = tau
        self._fixed_tau = config.fixed_tau
        self._fixed_len = config.fixed_len
        self._max_verify_len: int | None = None
        self._profile = profile
        self._exactness = exactness
        self._block_size = block_size
        self._calibration = calibration
        self._scalings: dict[float, Scaling | None] = {}
        self._rng = rng
        self._rounds = 0
        self._accepted = 0.0  # running mean a round
        self._verified = 0.0
        self._steps_judged = 0

    @property
    def tau(self) -> float:
        """The threshold in use."""
        return self._fixed_tau if self.mode == "fixed_tau" else self._tau

    def control(self, message: TargetControl) -> None:
        """Follow what the replica says; fields that are None stay as they are."""
        if message.mode is not None and message.mode != self.mode:
            self.mode = message.mode
            self._rounds = self._steps_judged = 0  # what another mode verified says nothing of this one
        self._tau = self._tau if message.tau is None else message.tau
        self._fixed_tau = self._fixed_tau if message.fixed_tau is None else message.fixed_tau
        self._fixed_len = self._fixed_len if message.fixed_len is None else message.fixed_len
        if message.max_verify_len is not None:
            self._max_verify_len = message.max_verify_len
        if message.step_cost is not None:
            cost = message.step_cost
            self._profile.adopt(cost.tokens, [seconds * 1e3 for seconds in cost.seconds])
        if message.calibration is not None:
            self._calibration = CalibrationTable.model_validate_json(message.calibration)
            self._scalings.clear()
        names = ("min_verify_len", "full_round_share")
        said = {name: value for name in names if (value := getattr(message, name)) is not None}
        self._config = self._config.model_copy(update=said)

    def draft_len(self, room: int) -> int:
        """γ' of one request: no longer than what could be verified."""
        longest = min(self._block_size, room)
        if self._max_verify_len is not None:
            longest = min(longest, self._max_verify_len)
        if self.mode == "fixed_len" and self._fixed_len is not None:
            longest = min(longest, self._fixed_len)
        return max(0, longest)

    def worth_drafting(self, requests: int, extra_tokens: int) -> bool:
        """Whether the expected gain of drafting, judged before it, exceeds its cost.

        Goodput with what recent rounds accepted and verified, against plain decoding at the same load. Every few dozen
        steps the other way is tried, so that what it costs and yields stays known: drafting for some rounds, since
        one says little of how well drafts do by now. Only in the throughput modes: the others say themselves what
        they want.
        """
        if self.mode not in _THROUGHPUT_MODES or self._rounds < _ROUNDS_BEFORE_SKIPPING:
            return True
        plain_ms = self._profile.milliseconds(requests + extra_tokens, plain=True)
        tokens = round(requests * (1 + self._verified)) + extra_tokens
        drafted_ms = self._profile.milliseconds(tokens, plain=False) + self._profile.draft_ms(requests)
        worth = (1 + self._accepted) / drafted_ms >= 1 / plain_ms
        self._steps_judged += 1
        if self._steps_judged < _PROBE_EVERY:
            return worth
        self._steps_judged = 0
        if not worth:
            self._rounds = _ROUNDS_BEFORE_SKIPPING - _PROBE_ROUNDS
        return not worth

    def lengths(self, rows: Sequence[DraftedRow], extra_tokens: int) -> tuple[list[int], list[bool]]:
        """Verify lengths of one step, and which of them are full rounds for the calibration's sake.

        Args:
            rows: requests with drafts; others do not count here but in `extra_tokens`.
            extra_tokens: other tokens in the next step: prefill, requests without drafts.
        """
        survivals = [
            round_survivals(row.confidence_logits, self._scaling_for(row.temperature)) for row in rows
        ]
        rooms = [
            row.room if self._max_verify_len is None else min(row.room, self._max_verify_len) for row in rows
        ]
        curve = budget = None
        if self.mode in _THROUGHPUT_MODES:
            curve = self._profile.curve(len(rows))
            if self._profile.is_jagged:
                # drafts are an argmax here, so confidences of this very step may decide
                budget = throughput_budget(survivals, curve, extra_tokens)
        lengths = schedule(
            survivals,
            mode=self.mode,
            tau=self.tau,
            min_verify_len=self._config.min_verify_len,
            fixed_len=self._fixed_len,
            step_curve=curve,
            extra_tokens=extra_tokens,
            max_len=rooms,
            budget=budget,
        )
        full = [self._rng.random() < self._config.full_round_share for _ in rows]
        for index, (row, room) in enumerate(zip(rows, rooms, strict=True)):
            if full[index]:
                lengths[index] = min(len(row.confidence_logits), room)
        return lengths, full

    def observe_round(self, verified: int, accepted: int) -> None:
        """Take in a request's round in which it had drafts, also if none of them was verified."""
        self._rounds += 1
        gain = max(_GAIN, 1 / self._rounds)
        self._accepted += gain * (accepted - self._accepted)
        self._verified += gain * (verified - self._verified)

    def _scaling_for(self, temperature: float) -> Scaling | None:
        if self._calibration is None:
            return None
        if temperature not in self._scalings:
            if len(self._scalings) > 1024:
                self._scalings.clear()
            self._scalings[temperature] = self._calibration.scaling_for(
                self._exactness, temperature, self._block_size
            )
        return self._scalings[temperature]
