"""From load to tau: the policies ``guide``, ``fixed_tau`` and ``goodput`` (spec section 4).

The same functions run in the cluster scheduler, in a replica whose policy has expired, in tests and in the
simulation of ``dspark_ray.bench.control``.
"""

import math
from dataclasses import dataclass, replace

from dspark_ray.config import ControlConfig
from dspark_ray.control.load import SmoothedLoad
from dspark_ray.control.membership import IDLE, Rates

GOODPUT_NOISE = 0.02
COMPARABLE_LOAD = 0.25


def guide_tau(load: float, tau_min: float, tau_max: float) -> float:
    """The guide's threshold: ``tau_min + (tau_max − tau_min)·load²``."""
    return tau_min + (tau_max - tau_min) * load * load


@dataclass(frozen=True, slots=True)
class GoodputSearch:
    """Where policy ``goodput`` stands: perturb and observe, around the guide's tau.

    Acceptance is no guide (spec section 4, last paragraph): it can stay high while a longer verify length
    costs throughput. So tau moves a step, and the direction turns whenever committed tokens a second fell.
    """

    offset: float = 0.0
    """What is added to the guide's tau."""
    direction: int = 1
    started_at_s: float | None = None
    """Start of the running period; None before the first one."""
    last_goodput: float | None = None
    """Tokens per second of the period before; None when it cannot be compared."""
    last_running: int = 0

    def step(
        self, now_s: float, rates: Rates, running_requests: int, control: ControlConfig
    ) -> "GoodputSearch":
        """The state at `now_s`; unchanged inside a period.

        Periods whose batch differs much from the one before are not compared: more requests give more tokens
        at any tau. An idle replica forgets its offset.
        """
        if self.started_at_s is None:
            return replace(self, started_at_s=now_s)
        if now_s - self.started_at_s < control.goodput_period_s:
            return self
        if running_requests == 0:
            return GoodputSearch(offset=self.offset / 2, direction=self.direction, started_at_s=now_s)
        direction = self.direction
        comparable = abs(running_requests - self.last_running) <= COMPARABLE_LOAD * self.last_running
        least = self.last_goodput * (1.0 - GOODPUT_NOISE) if self.last_goodput and comparable else 0.0
        if rates.tokens_per_s < least:
            direction = -direction
        offset = self.offset + direction * control.goodput_step
        if abs(offset) > control.goodput_span:
            offset = math.copysign(control.goodput_span, offset)
            direction = -direction
        return GoodputSearch(offset, direction, now_s, rates.tokens_per_s, running_requests)


def decide_tau(load: float, offset: float, control: ControlConfig) -> float:
    """The configured policy's tau; inside [tau_min, tau_max] but for ``fixed_tau``.

    Args:
        load: smoothed load in [0, 1].
        offset: what the goodput search adds; ignored by the other policies.
        control: policy and bounds.
    """
    if control.policy == "fixed_tau":
        return control.fixed_tau
    tau = guide_tau(load, control.tau_min, control.tau_max)
    if control.policy == "goodput":
        tau = min(control.tau_max, max(control.tau_min, tau + offset))
    return tau


def verify_cap(accept_len: float, control: ControlConfig) -> int:
    """Most drafts to verify per request and step on a replica whose drafter is out of calibration.

    tau trusts the drafter's confidence. Where that is off by more than `drift_limit`, the length is bounded
    by what was really accepted, with one position to notice an improvement.

    Args:
        accept_len: mean committed tokens a round lately, bonus token included; 0 without a round.
        control: the operator's own bound.
    """
    observed = math.ceil(max(0.0, accept_len - 1.0)) + 1
    return observed if control.max_verify_len is None else min(control.max_verify_len, observed)


@dataclass(slots=True)
class ReplicaControl:
    """The moving part of one replica's control: smoothed load and goodput search."""

    smoothed: SmoothedLoad
    search: GoodputSearch = GoodputSearch()
    stepped_at_s: float | None = None

    def step(
        self,
        now_s: float,
        load: float,
        control: ControlConfig,
        rates: Rates = IDLE,
        running_requests: int = 0,
    ) -> float:
        """Take in the load at `now_s` and return tau."""
        elapsed_s = 0.0 if self.stepped_at_s is None else max(0.0, now_s - self.stepped_at_s)
        self.stepped_at_s = now_s
        self.smoothed = self.smoothed.step(load, elapsed_s, control)
        if control.policy == "goodput":
            self.search = self.search.step(now_s, rates, running_requests, control)
        return decide_tau(self.smoothed.held, self.search.offset, control)

    @classmethod
    def resumed(cls, load: float, tau: float, control: ControlConfig) -> "ReplicaControl":
        """The control of a replica whose last policy had this load and tau: a restart goes on from there."""
        offset = (
            tau - guide_tau(load, control.tau_min, control.tau_max) if control.policy == "goodput" else 0.0
        )
        bounded = min(control.goodput_span, max(-control.goodput_span, offset))
        return cls(SmoothedLoad.starting_at(load), GoodputSearch(offset=bounded))
