"""A deployment of ours behind the load: setting its verify mode, and counting what speculation did in a turn.

Both go through Serve's handles, as any driver of the Ray cluster does, not over HTTP.
"""

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dspark_ray.bench.arms import Arm

REPLY_TIMEOUT_S = 30.0
SAMPLE_EVERY_S = 0.5
FRESH_S = 0.6
"""Counters in a replica are those of its last report, a few times a second."""

Counters = dict[str, Any]


class DraftCounts(msgspec.Struct, frozen=True, omit_defaults=True):
    """What speculation did in one turn, or in several together (`+`). Milliseconds are sums over steps."""

    rounds: float = 0
    verified: float = 0
    accepted: float = 0
    committed: float = 0
    steps: float = 0
    steps_drafted: float = 0
    deadline_misses: float = 0
    draft_calls: float = 0
    bytes_sent: float = 0
    verify_ms: float = 0
    between_ms: float = 0
    feature_ms: float = 0
    draft_wait_ms: float = 0
    draft_ms: float = 0
    transport_ms: float = 0
    schedule_ms: float = 0
    accepted_at: tuple[float, ...] = ()
    reached_at: tuple[float, ...] = ()
    tau: float | None = None
    """Mean over the turn."""

    def __add__(self, other: "DraftCounts") -> "DraftCounts":
        """Counts together; tau is the mean weighted by steps."""
        total: dict[str, Any] = {}
        for name in self.__struct_fields__:
            mine, yours = getattr(self, name), getattr(other, name)
            if isinstance(mine, tuple):
                total[name] = tuple(_longer(mine, yours))
            elif name != "tau":
                total[name] = mine + yours
        taus = [(c.tau, max(c.steps, 1)) for c in (self, other) if c.tau is not None]
        weight = sum(steps for _, steps in taus)
        total["tau"] = sum(tau * steps for tau, steps in taus) / weight if taus else None
        return DraftCounts(**total)

    @property
    def accept_len(self) -> float | None:
        """Tokens a round, bonus included."""
        return 1 + self.accepted / self.rounds if self.rounds else None

    @property
    def verify_len(self) -> float | None:
        """Drafts verified per request and step, steps without any included where those are counted."""
        request_steps = self.committed - self.accepted if self.committed else self.rounds
        return self.verified / request_steps if request_steps else None

    @property
    def waste(self) -> float | None:
        """Share of verified drafts that were rejected."""
        return 1 - self.accepted / self.verified if self.verified else None

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens in the verify pass of a mean step, anchors included."""
        return (self.committed - self.accepted + self.verified) / self.steps if self.steps else None

    @property
    def step_ms(self) -> float | None:
        """A mean step without its draft call."""
        return (self.verify_ms + self.between_ms) / self.steps if self.steps else None

    @property
    def acceptance_at(self) -> tuple[float, ...]:
        """Acceptance at each position of those drafts whose predecessors were all accepted."""
        return tuple(a / r for a, r in zip(self.accepted_at, self.reached_at, strict=True) if r)


def _longer(a: Sequence[float], b: Sequence[float]) -> list[float]:
    length = max(len(a), len(b))
    return [sum(row[i] for row in (a, b) if i < len(row)) for i in range(length)]


def counts_between(before: Sequence[Counters], after: Sequence[Counters], tau: float | None) -> DraftCounts:
    """What happened between two snapshots of a model's verifiers, summed over them."""
    total = DraftCounts()
    known = {name for name in DraftCounts.__struct_fields__ if name != "tau"}
    for old, new in zip(before, after, strict=True):
        first, last = _flat(old), _flat(new)
        change: dict[str, Any] = {}
        for name in known & last.keys():
            if isinstance(last[name], Sequence):
                start = first.get(name, ())
                change[name] = tuple(_longer(last[name], [-value for value in start]))
            else:
                change[name] = last[name] - first.get(name, 0)
        total += DraftCounts(**change)
    return msgspec.structs.replace(total, tau=tau)


def _flat(snapshot: Counters) -> dict[str, Any]:
    """The counters of one verifier's ``stats()`` under our names."""
    workers: Mapping[str, Any] = snapshot.get("workers") or {}
    merged: dict[str, Any] = {**workers.get("client", {}), **workers.get("shim", {})}
    for ours, theirs in (("verified", "tokens_verified"), ("accepted", "tokens_accepted")):
        merged[ours] = merged.pop(theirs, 0)
    merged["committed"] = merged.pop("tokens_committed", 0)
    merged["draft_calls"] = merged.pop("calls", 0)
    return merged


class Deployment:
    """The running application, reached through the Ray cluster that RAY_ADDRESS names."""

    def __init__(self) -> None:
        import ray

        if not ray.is_initialized():
            ray.init(address="auto", log_to_driver=False, logging_level=logging.WARNING)
        self._handles: dict[str, Any] = {}

    def set_mode(self, arm: Arm) -> None:
        """Have the arm's verifiers speculate as it says, from their next step on."""
        from dspark_ray.protocol import SpeculationSetting
        from dspark_ray.serving.speculation_mode import set_speculation

        mode: Any = None if arm.mode == "configured" else arm.mode
        set_speculation(arm.model, SpeculationSetting(mode=mode, tau=arm.tau, fixed_len=arm.verify_len))

    def snapshot(self, model: str) -> list[Counters]:
        """Counters of all verifiers of a model, always in the same order."""
        from dspark_ray.serving.speculation_mode import verifier_handle

        if model not in self._handles:
            self._handles[model] = verifier_handle(model)
        snapshots: list[Counters] = self._handles[model].broadcast("stats").results(timeout_s=REPLY_TIMEOUT_S)
        return sorted(snapshots, key=lambda snapshot: int(snapshot["pid"]))


class Watch:
    """Counts what a model's verifiers do while it is open; they must not restart meanwhile.

        with Watch(deployment, model) as watch: ...
        watch.counts, watch.step_table

    Args:
        deployment: where they are.
        model: whose verifiers.
    """

    def __init__(self, deployment: Deployment, model: str):
        self._deployment = deployment
        self._model = model
        self._taus: list[float] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self.counts = DraftCounts()
        self.step_table: tuple[list[int], list[float]] = ([], [])
        """Tokens, and the milliseconds that the first verifier's profile has for them at the end."""

    def __enter__(self) -> "Watch":
        """Begin to count."""
        time.sleep(FRESH_S)
        self._before = self._deployment.snapshot(self._model)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End counting."""
        self._over.set()
        self._thread.join()
        time.sleep(FRESH_S)
        after = self._deployment.snapshot(self._model)
        tau = sum(self._taus) / len(self._taus) if self._taus else None
        self.counts = counts_between(self._before, after, tau)
        step = (after[0].get("workers") or {}).get("step") or {}
        self.step_table = list(step.get("tokens", [])), list(step.get("milliseconds", []))

    def _sample(self) -> None:
        while not self._over.wait(SAMPLE_EVERY_S):
            for snapshot in self._deployment.snapshot(self._model):
                workers = snapshot.get("workers") or {}
                if workers.get("tau") is not None and snapshot.get("requests_running"):
                    self._taus.append(workers["tau"])
