"""One decision of the cluster scheduler: samples in, policies out. No I/O, the clock is passed in."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dspark_ray.config import ControlConfig
from dspark_ray.control.assignment import DrafterState, drafter_weights
from dspark_ray.control.load import SmoothedLoad, blended_load, replica_load
from dspark_ray.control.membership import IDLE, Member, SampleBook, calibration_drift
from dspark_ray.control.policy import ReplicaControl, verify_cap
from dspark_ray.protocol import CalibrationBins, DrafterRoute, LoadSample, VerifyPolicy

TAU_RESOLUTION = 0.002
REFRESH_SHARE = 0.3


@dataclass(frozen=True, slots=True)
class Decisions:
    """What one tick decided, as far as it must be published."""

    policies: dict[str, VerifyPolicy]
    """By replica; only those that changed or are due to be renewed."""
    routes: dict[str, tuple[DrafterRoute, ...]]
    """The drafters of each model."""
    dead: list[str]
    """Replicas whose policies go."""
    drifting: dict[str, float]
    """Verifiers whose drafter's confidence is off by more than the limit, and by how much."""


@dataclass(slots=True)
class _Verifier:
    control: ReplicaControl
    published: VerifyPolicy | None = None
    published_at_s: float = float("-inf")
    drift: float = 0.0
    drift_from: CalibrationBins | None = None
    drift_due_s: float = 0.0


class ClusterBrain:
    """Turns samples of all roles and models into policies for the verifiers.

    State is one `ReplicaControl` per verifier and can be rebuilt from the policies last published.
    """

    def __init__(self, control: ControlConfig, sample_lifetime_s: float) -> None:
        """A brain that knows no replica yet."""
        self.control = control
        self.epoch = 0
        self._sample_lifetime_s = sample_lifetime_s
        self.book = SampleBook(sample_lifetime_s, window_s=control.goodput_period_s)
        self._version = 0
        self._verifiers: dict[str, _Verifier] = {}

    def rule(self, epoch: int, published: Mapping[str, VerifyPolicy]) -> None:
        """Start a new epoch from the policies that the scheduler before left behind."""
        self.epoch, self._version = epoch, 0
        for replica, policy in published.items():
            self._verifiers[replica] = _Verifier(
                ReplicaControl.resumed(policy.load, policy.tau, self.control)
            )
        for verifier in self._verifiers.values():
            verifier.published = None

    def tick(self, samples: Iterable[LoadSample], now_s: float) -> Decisions:
        """Decide once.

        Args:
            samples: what a successful read of the store returned.
            now_s: the reader's monotonic clock.
        """
        dead = self.book.observe(samples, now_s)
        if self.book.observed_s > self._sample_lifetime_s:
            # Replicas that a scheduler before us had a policy for, and that never reported to this one.
            dead += self._verifiers.keys() - self.book.members.keys() - set(dead)
        for replica in dead:
            self._verifiers.pop(replica, None)
        by_model: dict[str, dict[str, list[Member]]] = defaultdict(lambda: defaultdict(list))
        for member in self.book.members.values():
            by_model[member.sample.model][member.sample.role].append(member)
        decisions = Decisions({}, {}, dead, {})
        self._version += 1
        for model, roles in by_model.items():
            decisions.routes[model] = drafter_routes(roles["drafter"])
            queued = queued_in_serve(roles["ingress"], roles["verifier"])
            self._decide_model(roles["verifier"], queued, now_s, decisions)
        return decisions

    def published(self) -> dict[str, VerifyPolicy]:
        """The policy last published for each live verifier."""
        return {n: v.published for n, v in self._verifiers.items() if v.published is not None}

    def _decide_model(
        self, verifiers: list[Member], queued: float, now_s: float, decisions: Decisions
    ) -> None:
        if not verifiers:
            return
        own = [replica_load(m.sample, self.control, queued / len(verifiers)) for m in verifiers]
        mean = sum(own) / len(own)
        for member, load in zip(verifiers, own, strict=True):
            replica = member.sample.replica
            blended = blended_load(load, mean, self.control.cluster_weight)
            known = self._verifiers.get(replica)
            if known is None:
                known = _Verifier(ReplicaControl(SmoothedLoad.starting_at(blended)))
                self._verifiers[replica] = known
            drifting = self._is_drifting(known, member, now_s)
            if drifting:
                decisions.drifting[replica] = known.drift
            rates = member.rates() if self.control.policy == "goodput" else IDLE
            tau = known.control.step(now_s, blended, self.control, rates, member.sample.requests_running)
            cap = verify_cap(member.accept_len(), self.control) if drifting else self.control.max_verify_len
            if self._must_publish(known, tau, cap, now_s):
                known.published_at_s = now_s
                known.published = decisions.policies[replica] = VerifyPolicy(
                    epoch=self.epoch,
                    version=self._version,
                    tau=tau,
                    lifetime_s=self.control.policy_lifetime_s,
                    max_verify_len=cap,
                    load=known.control.smoothed.held,
                    drift=known.drift,
                )

    def _is_drifting(self, known: _Verifier, member: Member, now_s: float) -> bool:
        """Whether the replica's drafter is out of calibration.

        Looked at once a period, over as long as it takes until enough positions were verified in full.
        """
        if now_s >= known.drift_due_s:
            # Replicas seen for the first time together are spread over the period: this is the dearest part.
            spread = (len(self._verifiers) % 16) / 16 if known.drift_due_s == 0.0 else 1.0
            known.drift_due_s = now_s + spread * self.control.goodput_period_s
            start, now = known.drift_from, member.bins
            if start is None:
                known.drift_from = now
            elif now is not None and (drift := calibration_drift(start, now)) is not None:
                known.drift, known.drift_from = drift, now
        return known.drift > self.control.drift_limit

    def _must_publish(self, known: _Verifier, tau: float, cap: int | None, now_s: float) -> bool:
        """Whether a decision differs noticeably from the one published, or that one grows old."""
        last = known.published
        return (
            last is None
            or now_s - known.published_at_s >= REFRESH_SHARE * self.control.policy_lifetime_s
            or abs(last.tau - tau) >= TAU_RESOLUTION
            or last.max_verify_len != cap
        )


def queued_in_serve(ingresses: list[Member], verifiers: list[Member]) -> float:
    """Requests of a model that an ingress holds and no verifier has accepted yet."""
    held = sum(m.sample.requests_running for m in ingresses)
    accepted = sum(
        m.sample.requests_running + m.sample.requests_waiting + m.sample.requests_queued for m in verifiers
    )
    return max(0.0, float(held - accepted))


def drafter_routes(drafters: list[Member]) -> tuple[DrafterRoute, ...]:
    """The live drafters of one model with the weights for new requests, heaviest first.

    A drafter's speed is the inverse of its time per call; an unmeasured one counts as typical.
    """
    states = {
        m.sample.replica: DrafterState(
            requests=m.sample.slots_used + m.sample.requests_waiting,
            slots_total=m.sample.slots_total,
            speed=1.0 / m.sample.step_time_s if m.sample.step_time_s > 0 else 0.0,
            miss_share=m.rates().miss_share,
        )
        for m in drafters
    }
    weights = drafter_weights(states)
    endpoints = {m.sample.replica: m.sample.endpoint for m in drafters}
    ordered = sorted(weights.items(), key=lambda item: (-item[1], item[0]))
    return tuple(DrafterRoute(name, endpoints[name], min(1.0, weight)) for name, weight in ordered)
