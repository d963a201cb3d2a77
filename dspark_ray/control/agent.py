"""A replica's side of the control plane: reports load, picks up policies, never makes anybody wait.

All talk with Redis happens in one background thread. `report` and `policy` only touch memory.
"""

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from dspark_ray.config import ControlConfig, TelemetryConfig
from dspark_ray.control.connection import Backoff
from dspark_ray.control.knowledge import Pooled
from dspark_ray.control.load import SmoothedLoad, replica_load
from dspark_ray.control.policy import ReplicaControl
from dspark_ray.control.telemetry import STORE_ERRORS, TelemetryStore
from dspark_ray.protocol import DrafterRoute, LoadSample, RoundRecord, StepCost, VerifyPolicy

logger = logging.getLogger(__name__)
ROUNDS_HELD = 512
POOL_INTERVAL_S = 15.0
"""Time between two looks for a newly shared calibration."""


@dataclass(frozen=True, slots=True)
class ActivePolicy:
    """What a verifier acts on now."""

    tau: float
    max_verify_len: int | None
    """None: the whole block."""
    drafters: tuple[DrafterRoute, ...]
    """The last ones heard of; empty before the first policy."""
    load: float
    epoch: int
    local: bool
    """Whether tau follows from the replica's own load, because no policy is valid."""


class PolicyHolder:
    """The newest policy seen, and whether it still holds, on this process's clock."""

    def __init__(self) -> None:
        """No policy yet."""
        # One attribute, so that readers in other threads never see a policy with another one's time.
        self._held: tuple[VerifyPolicy, float] | None = None

    def offer(self, policy: VerifyPolicy | None, now_s: float) -> None:
        """Take in what the store had; only a newer (epoch, version) counts, an old one never comes back."""
        if policy is None:
            return
        stamp = (policy.epoch, policy.version)
        if self._held is None or stamp > (self._held[0].epoch, self._held[0].version):
            self._held = policy, now_s
        elif stamp == (self._held[0].epoch, self._held[0].version):
            self._held = policy, self._held[1]  # the same decision; its model's drafters may be newer

    def get(self, now_s: float) -> tuple[VerifyPolicy | None, bool]:
        """The newest policy seen, and whether its lifetime since then is still running."""
        if self._held is None:
            return None, False
        policy, seen_at_s = self._held
        return policy, now_s - seen_at_s <= policy.lifetime_s


class ReplicaAgent:
    """Reports one replica's load and holds its policy. Works without a store: then everything is local.

    Args:
        control: bounds and lifetimes; the local rule is the same as the scheduler's.
        telemetry: intervals.
        store: None where no Redis is configured.
        step_cost_key: from `knowledge.step_cost_key`, where the replica's step costs are pooled; None for
            roles without an engine.
        calibration_key: from `knowledge.calibration_key`; None without a drafter.
        clock: monotonic seconds.
        rng: jitters the pauses after failures.
        on_report: called with each completed sample, in the background thread (metrics).
    """

    def __init__(
        self,
        control: ControlConfig,
        telemetry: TelemetryConfig,
        store: TelemetryStore | None,
        *,
        step_cost_key: str | None = None,
        calibration_key: str | None = None,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
        on_report: Callable[[LoadSample, "ReplicaAgent"], None] | None = None,
    ) -> None:
        """Nothing runs before `start`."""
        self._control = control
        self._telemetry = telemetry
        self._store = store
        self._step_cost_key = step_cost_key
        self._calibration_key = calibration_key
        self._pool_due_s = float("-inf")
        self._clock = clock
        self._on_report = on_report
        self._started_at_s = clock()
        self._backoff = Backoff(
            telemetry.sample_interval_s,
            telemetry.backoff_max_s,
            rng or random.Random(),  # noqa: S311
        )
        self._holder = PolicyHolder()
        self._local: ReplicaControl | None = None
        self._local_tau = control.tau_min if control.policy != "fixed_tau" else control.fixed_tau
        self._sequence = 0
        self._pending: LoadSample | None = None
        self._step_cost: StepCost | None = None
        self._rounds: deque[RoundRecord] = deque(maxlen=ROUNDS_HELD)
        self._wake = threading.Event()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._was_local = False
        self.pooled = Pooled()
        """What others have measured, once Redis has been asked."""
        self.expirations = 0
        """How often a valid policy ran out."""
        self.failures = 0
        """How often Redis did not answer in time."""

    @property
    def connected(self) -> bool:
        """Whether the last exchange with Redis went through."""
        return self._store is not None and self._backoff.failures == 0

    def configure(self, control: ControlConfig) -> None:
        """Follow changed bounds from the next report on."""
        self._control = control

    def share_calibration(self, key: str) -> None:
        """Share the calibration of another draft checkpoint from now on."""
        self._calibration_key = key
        self.pooled = Pooled(self.pooled.step_cost, None)

    def start(self) -> None:
        """Start the background thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="dspark-telemetry", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Stop the background thread and wait for its last exchange, at most one timeout long."""
        self._stopped.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(self._telemetry.timeout_s * 2)

    def report(self, sample: LoadSample, rounds: Sequence[RoundRecord] = ()) -> LoadSample:
        """Hand over the replica's newest sample. Microseconds, whatever Redis does.

        Args:
            sample: `sequence`, `uptime_s`, `tau`, `policy_epoch` and `policy_local` are filled in here.
            rounds: fully verified rounds since the last call; a bounded number is kept while Redis is away.

        Returns:
            The completed sample.
        """
        now_s = self._clock()
        load = replica_load(sample, self._control)
        if self._local is None:
            self._local = ReplicaControl(SmoothedLoad.starting_at(load))
        self._local_tau = self._local.step(now_s, load, self._control)
        active = self.policy()
        self.expirations += int(active.local and not self._was_local and active.epoch > 0)
        self._was_local = active.local
        self._sequence += 1
        complete = msgspec.structs.replace(
            sample,
            sequence=self._sequence,
            uptime_s=now_s - self._started_at_s,
            tau=active.tau,
            policy_epoch=active.epoch,
            policy_local=active.local,
        )
        self._rounds.extend(rounds)
        self._step_cost = sample.step_cost or self._step_cost
        self._pending = complete
        self._wake.set()
        return complete

    def policy(self) -> ActivePolicy:
        """What to act on now. Memory only."""
        last, valid = self._holder.get(self._clock())
        if last is not None and valid:
            return ActivePolicy(
                last.tau, last.max_verify_len, last.drafters, last.load, last.epoch, local=False
            )
        return ActivePolicy(
            self._local_tau,
            self._control.max_verify_len,
            () if last is None else last.drafters,
            self._local.smoothed.held if self._local else 0.0,
            0 if last is None else last.epoch,
            local=True,
        )

    # --- the background thread

    def _run(self) -> None:
        while True:
            self._wake.wait()
            if self._stopped.is_set():
                return
            self._wake.clear()
            sample, self._pending = self._pending, None
            if sample is None:
                continue
            try:
                if self._on_report is not None:
                    self._on_report(sample, self)
                if self._store is not None:
                    self._exchange(self._store, sample)
            except Exception:  # a fault in one report must not end all reporting
                logger.exception("a load report of %s failed", sample.replica)

    def _exchange(self, store: TelemetryStore, sample: LoadSample) -> None:
        """One exchange with Redis; after a failure a pause, during which newer samples replace this one."""
        rounds = list(self._rounds)
        try:
            self._holder.offer(store.push(sample, rounds), self._clock())
            for _ in rounds:
                self._rounds.popleft()
            self._read_pooled(store)
            measured = self._step_cost
            if measured is not None and self._step_cost_key is not None:
                store.pool_step_cost(self._step_cost_key, measured)
                self._step_cost = None if self._step_cost is measured else self._step_cost
        except STORE_ERRORS as error:
            self.failures += 1
            if self._backoff.failures == 0:
                logger.warning(
                    "telemetry: Redis does not answer (%s); going on without", type(error).__name__
                )
            self._stopped.wait(self._backoff.failed())
            return
        if self._backoff.failures:
            logger.warning("telemetry: Redis answers again after %d attempts", self._backoff.failures)
        self._backoff.succeeded()

    def _read_pooled(self, store: TelemetryStore) -> None:
        """Look what others share; the step costs once, before this replica's own are among them."""
        now_s = self._clock()
        if now_s < self._pool_due_s:
            return
        step_cost, calibration = self.pooled.step_cost, None
        if self._step_cost_key is not None and self._pool_due_s == float("-inf"):
            step_cost = store.step_cost(self._step_cost_key)
        if self._calibration_key is not None:
            calibration = store.calibration(self._calibration_key)
        self.pooled = Pooled(step_cost, calibration)
        self._pool_due_s = now_s + POOL_INTERVAL_S
