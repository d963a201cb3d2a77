"""A verifier replica's link to its engine's workers: policies and drafters in, counters out."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from dspark_ray.control.agent import ActivePolicy
from dspark_ray.protocol import DrafterRoute, LoadSample, RoundRecord, StepCost, TargetControl
from dspark_ray.serving.drafter_directory import DrafterDirectory
from dspark_ray.serving.engine import DSparkEngine
from dspark_ray.serving.telemetry import ReplicaIdentity

DIRECTORY_PERIOD_S = 1.0
STEP_COST_PERIOD_S = 10.0


class VerifierControl:
    """Hands each new policy to the workers and turns their counters into load samples.

    Args:
        engine: started.
        identity: of this replica.
        block_size: γ; 0 without a drafter of ours, then there is nothing to steer.
        directory: finds the pool where no policy names it; None unless drafters are remote.
        requests_queued: tells how many requests are in the replica, but not in its engine yet.
    """

    def __init__(
        self,
        engine: DSparkEngine,
        identity: ReplicaIdentity,
        *,
        block_size: int = 0,
        directory: DrafterDirectory | None = None,
        requests_queued: Callable[[], int] = lambda: 0,
    ):
        self._engine = engine
        self._identity = identity
        self._block_size = block_size
        self._directory = directory
        self._requests_queued = requests_queued
        self._routes: tuple[DrafterRoute, ...] = ()
        self._routes_read_s = float("-inf")
        self._step_cost_sent_s = time.monotonic()
        self._told: TargetControl | None = None
        self._steps_seen = 0
        self._step_ms_seen = self._step_time_s = 0.0
        self.workers: dict[str, Any] = {}
        """The workers' counters as of the last collection."""

    async def collect(self, policy: ActivePolicy) -> tuple[LoadSample, Sequence[RoundRecord]]:
        """Let the workers follow `policy`, and read their counters."""
        numbers = self._engine.counters.load() | {"requests_queued": self._requests_queued()}
        if not self._block_size:
            return self._identity.sample(**numbers), ()
        await self._steer(policy)
        self.workers = await read_workers(self._engine)
        shim, client = self.workers["shim"], self.workers["client"]
        numbers |= {
            "rounds": shim["rounds"],
            "tokens_drafted": shim["tokens_drafted"],
            "tokens_verified": shim["tokens_verified"],
            "tokens_accepted": shim["tokens_accepted"],
            "tokens_committed": shim["tokens_committed"],
            "step_time_s": self._recent_step_time_s(shim["steps"], shim["verify_ms"] + shim["between_ms"]),
            "draft_calls": client["calls"],
            "deadline_misses": client["deadline_misses"],
            "step_cost": self._step_cost(),
        }
        rounds = msgspec.convert(shim["full_rounds"], tuple[RoundRecord, ...])
        return self._identity.sample(**numbers), rounds

    async def _steer(self, policy: ActivePolicy) -> None:
        control = TargetControl(
            tau=policy.tau,
            max_verify_len=self._block_size if policy.max_verify_len is None else policy.max_verify_len,
            drafters=await self._drafters(policy),
        )
        if control != self._told:
            await self._engine.client.collective_rpc(
                "dspark_control", args=(msgspec.msgpack.encode(control),)
            )
            self._told = control

    async def _drafters(self, policy: ActivePolicy) -> tuple[DrafterRoute, ...] | None:
        """The pool: as the ruling scheduler weighs it, else as Ray knows it. None leaves it as it is."""
        if self._directory is None:
            return None
        if policy.drafters and not policy.local:
            return policy.drafters
        now_s = time.monotonic()
        if now_s - self._routes_read_s >= DIRECTORY_PERIOD_S:
            self._routes, self._routes_read_s = await self._directory.routes(), now_s
        return self._routes

    def _recent_step_time_s(self, steps: int, total_ms: float) -> float:
        """Mean of the steps since the last collection; the one before where there were none."""
        if steps > self._steps_seen:
            self._step_time_s = (total_ms - self._step_ms_seen) / 1e3 / (steps - self._steps_seen)
            self._steps_seen, self._step_ms_seen = steps, total_ms
        return self._step_time_s

    def _step_cost(self) -> StepCost | None:
        """The step curve, now and then: it is pooled for the replicas that start later."""
        now_s = time.monotonic()
        if now_s - self._step_cost_sent_s < STEP_COST_PERIOD_S:
            return None
        self._step_cost_sent_s = now_s
        step = self.workers["step"]
        return StepCost(
            tuple(step["tokens"]),
            tuple(ms / 1e3 for ms in step["milliseconds"]),
            float(step["observed"] or 1),
        )


async def read_workers(engine: DSparkEngine) -> dict[str, Any]:
    """The counters of the worker that drafts or hands features over; empty where none does."""
    for reply in await engine.client.collective_rpc("dspark_stats"):
        if reply is not None:
            found: dict[str, Any] = msgspec.msgpack.decode(reply)
            return found
    return {}
