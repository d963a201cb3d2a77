"""What an engine replica reports and how it obeys: one exchange with its worker a few times a second.

In a verifier, once its engine has started (a prefill replica passes its role and no routes)::

    self._report = report_engine(
        "verifier", model, config, self.engine.counters, self.engine.client.collective_rpc,
        has_shim=..., queued=lambda: remote.waiting, routes=DrafterDirectory(app, model.id).routes,
    )
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
from pydantic import ValidationError

from dspark_ray.config import AppConfig, ControlConfig, ModelConfig, SchedulingConfig
from dspark_ray.control.agent import ActivePolicy, ReplicaAgent
from dspark_ray.control.knowledge import Pooled, calibration_key, merge_step_costs, step_cost_key
from dspark_ray.decoding.calibration import CalibrationTable
from dspark_ray.errors import ConfigError
from dspark_ray.protocol import (
    DrafterRoute,
    LoadSample,
    Role,
    RoundRecord,
    SpeculationSetting,
    StepCost,
    TargetControl,
)
from dspark_ray.serving.calibration_tally import CalibrationTally
from dspark_ray.serving.model_folders import checkpoint_folder
from dspark_ray.serving.telemetry import ReplicaIdentity, report_forever, start_agent

logger = logging.getLogger(__name__)

BINS_EVERY = 5
"""Reports between two that carry the calibration bins, their largest part."""
UNBOUNDED_VERIFY_LEN = 32
"""The longest block there is."""
QUIET_REPORTS = 10
"""Reports after the last event in the engine that still ask its worker: aborts reach it with a later step."""
STEP_COST_CHANGE = 0.1
"""A curve whose points have moved by this share is worth sharing again."""


class Counters(Protocol):
    """What vLLM says of itself: `dspark_ray.serving.engine_stats.EngineCounters`."""

    requests_running: int
    requests_waiting: int
    requests_max: int
    kv_blocks_used: int
    kv_blocks_total: int
    tokens_generated: int
    ttft_s: float


def report_engine(
    role: Role,
    model: ModelConfig,
    config: AppConfig,
    counters: Counters,
    collective_rpc: Callable[..., Awaitable[list[Any]]],
    *,
    has_shim: bool,
    queued: Callable[[], int] = lambda: 0,
    device_kind: str = "cpu",
    routes: Callable[[], tuple[DrafterRoute, ...]] | None = None,
) -> "EngineReport":
    """Start reporting an engine replica's load and obeying its policy.

    Args:
        role: ``verifier`` or ``prefill``.
        model: the model it serves.
        config: of the application.
        counters: of the engine.
        collective_rpc: the engine client's.
        has_shim: whether the worker is `dspark_ray.target`'s.
        queued: requests in the replica that the engine has not got yet.
        device_kind: ``cpu`` or the GPU's name; replicas of one kind share their step costs.
        routes: the drafters that run, for when no policy names any.

    Returns:
        The report, whose `task` runs for as long as it is kept.
    """
    drafter = model.drafter
    calibration = shared_as = None
    if has_shim and role == "verifier" and drafter.source is not None:
        checkpoint = checkpoint_folder(model)
        calibration, shared_as = CalibrationTable.load(checkpoint), calibration_key(checkpoint)
    # What a step costs depends on the engine and on the block whose verification it includes.
    engine = {
        **model.target.model_dump(),
        "cores": model.verifier.cpu_cores,
        "env": model.verifier.env,
        "block": drafter.block_size,
    }
    key = step_cost_key(model.target.source, device_kind, engine) if role == "verifier" else None
    agent = start_agent(config.control, config.telemetry, step_cost_key=key, calibration_key=shared_as)
    report = EngineReport(
        ReplicaIdentity.of_this_replica(role, model.id, device_kind),
        counters,
        collective_rpc,
        has_shim=has_shim,
        queued=queued,
        calibration=calibration,
        routes=routes,
        scheduling=model.scheduling,
        pooled=lambda: agent.pooled,
    )
    report.agent = agent
    interval_s = config.telemetry.sample_interval_s
    report.task = asyncio.create_task(report_forever(agent, report.collect, interval_s))
    return report


class EngineReport:
    """Collects a replica's numbers and hands its engine what the policy says.

    Args:
        identity: who reports.
        counters: of the engine, in this process.
        collective_rpc: the engine client's; called twice a report at most.
        has_shim: whether the worker is ours (``dspark_stats``, ``dspark_control``); without it there are no
            speculation numbers and nothing to obey.
        queued: requests in the replica that its engine has not got yet.
        calibration: of the drafter, to compare what it predicts with what is accepted.
        routes: the drafters that run, for when no policy names any; None where there is no pool.
        scheduling: as configured, for what no `SpeculationSetting` overrides.
        pooled: what other replicas have measured, as far as it is known.
    """

    def __init__(
        self,
        identity: ReplicaIdentity,
        counters: Counters,
        collective_rpc: Callable[..., Awaitable[list[Any]]],
        *,
        has_shim: bool,
        queued: Callable[[], int] = lambda: 0,
        calibration: CalibrationTable | None = None,
        routes: Callable[[], tuple[DrafterRoute, ...]] | None = None,
        scheduling: SchedulingConfig | None = None,
        pooled: Callable[[], Pooled] = Pooled,
    ) -> None:
        """Nothing is asked before the first `collect`."""
        self._identity = identity
        self._counters = counters
        self._rpc = collective_rpc
        self._has_shim = has_shim
        self._queued = queued
        self._routes = routes
        self._pooled = pooled
        self._learnt = Pooled()
        self._step_cost: StepCost | None = None
        self.task: asyncio.Task[None] | None = None
        """Reports, once `report_engine` has started it."""
        self.agent: ReplicaAgent | None = None
        """Of the control plane; from `report_engine`."""
        self.worker: Mapping[str, Any] = {}
        """The shim's counters as of the last `collect`."""
        self._scheduling = scheduling or SchedulingConfig()
        self._setting = SpeculationSetting()
        self._policy: ActivePolicy | None = None
        self._obeyed: TargetControl | None = None
        self._obeying = asyncio.Lock()
        self._bins = CalibrationTally(calibration)
        self._reports = 0
        self._seen: tuple[Any, ...] = ()
        self._quiet_reports = 0
        self._step_ms: tuple[float, ...] = ()
        self._last_steps = (0, 0.0)
        self._step_s = 0.0

    async def collect(self, policy: ActivePolicy) -> tuple[LoadSample, Sequence[RoundRecord]]:
        """Obey the policy and report. Raises whatever the engine raises when it is broken."""
        rounds: list[RoundRecord] = []
        if self._has_shim:
            if self._identity.role == "verifier":
                await self._obey(policy)
                await self._learn(self._pooled())
            if self._may_have_news():
                rounds = await self._ask_worker()
        worker = self.worker
        shim: Mapping[str, Any] = worker.get("shim", {})
        client: Mapping[str, Any] = worker.get("client", {})
        counters = self._counters
        sample = self._identity.sample(
            requests_running=counters.requests_running,
            requests_waiting=counters.requests_waiting,
            requests_queued=self._queued(),
            requests_max=counters.requests_max,
            kv_blocks_used=counters.kv_blocks_used,
            kv_blocks_total=counters.kv_blocks_total,
            ttft_s=counters.ttft_s,
            step_time_s=self._mean_step_s(shim),
            rounds=shim.get("rounds", 0),
            tokens_drafted=shim.get("tokens_drafted", 0),
            tokens_verified=shim.get("tokens_verified", 0),
            tokens_accepted=shim.get("tokens_accepted", 0),
            tokens_committed=counters.tokens_generated,
            draft_calls=client.get("calls", 0),
            deadline_misses=client.get("deadline_misses", 0),
            drafter_mismatches=client.get("mismatched", 0),
            calibration=self._bins.bins() if self._reports % BINS_EVERY == 0 else None,
            step_cost=self._changed_step_cost(worker.get("step")),
        )
        self._reports += 1
        return sample, rounds

    def _may_have_news(self) -> bool:
        """Whether anything has happened in the engine since its worker was last asked, or a little earlier.

        Not asked for its own sake: each question has vLLM's engine and worker processes spin for a second more
        while they wait for the next one, so that an idle engine would take a core all the time.
        """
        counters = self._counters
        now = (
            counters.requests_running, counters.requests_waiting, counters.tokens_generated, self._obeyed,
        )  # fmt: skip
        if now != self._seen or counters.requests_running:
            self._seen, self._quiet_reports = now, 0
        self._quiet_reports += 1
        return self._quiet_reports <= QUIET_REPORTS

    async def _ask_worker(self) -> list[RoundRecord]:
        """Read the worker's counters; its full rounds since the last time are returned, and counted."""
        answers = await self._rpc("dspark_stats")
        payload = next((answer for answer in answers if answer is not None), None)
        self.worker = msgspec.msgpack.decode(payload) if payload else {}
        rounds = msgspec.convert(self.worker.get("shim", {}).get("full_rounds", []), list[RoundRecord])
        self._bins.count(rounds)
        return rounds

    def configure(self, control: ControlConfig, scheduling: SchedulingConfig) -> None:
        """Follow changed bounds and modes from the next report on."""
        self._scheduling = scheduling
        if self.agent is not None:
            self.agent.configure(control)

    async def swap_drafter(self, checkpoint: Path) -> None:
        """Have the worker draft with another checkpoint, calibrated as that says.

        Raises:
            ConfigError: it cannot; everything stays as it was.
        """
        async with self._obeying:
            answers = await self._rpc("dspark_swap", args=(str(checkpoint),))
            refused = next((answer for answer in answers if answer), None)
            if refused is not None:
                raise ConfigError(refused)
            self._obeyed = None  # the new client knows no drafters yet
            self._bins.use(CalibrationTable.load(checkpoint))
            self._learnt = Pooled(self._learnt.step_cost, None)
            if self.agent is not None:
                self.agent.share_calibration(calibration_key(checkpoint))

    async def set_speculation(self, setting: SpeculationSetting) -> dict[str, Any]:
        """Have the worker follow an operator's setting from its next step on.

        Returns:
            The replica's name, and the mode and tau that it goes by now.

        Raises:
            ConfigError: this engine has no drafter of ours.
        """
        if not self._has_shim or self._identity.role != "verifier":
            raise ConfigError(f"model {self._identity.model}: no drafter whose use could be changed")
        self._setting = setting
        if self._policy is not None:
            await self._obey(self._policy)
        control = self._obeyed or TargetControl(mode=self._scheduling.mode)
        mode = "off" if setting.mode == "off" else control.mode
        tau = control.fixed_tau if mode == "fixed_tau" else control.tau
        return {"replica": self._identity.replica, "mode": mode, "tau": tau}

    async def _obey(self, policy: ActivePolicy) -> None:
        """Tell the worker what has changed."""
        async with self._obeying:
            self._policy = policy
            # An expired policy may name drafters that are gone.
            drafters = () if policy.local else policy.drafters
            if not drafters and self._routes is not None:
                drafters = self._routes()
            control = target_control(self._setting, self._scheduling, policy, drafters)
            if control != self._obeyed:
                await self._rpc("dspark_control", args=(msgspec.msgpack.encode(control),))
                self._obeyed = control

    async def _learn(self, pooled: Pooled) -> None:
        """Have the worker go on from the pooled step costs, once, and use a calibration that was shared."""
        known = self._learnt
        if pooled == known or self._step_cost is None:
            return
        self._learnt = pooled
        cost = table = None
        if pooled.step_cost is not None and known.step_cost is None:
            cost = merge_step_costs(pooled.step_cost, self._step_cost)
            logger.info("step costs go on from %.0f steps of replicas alike", pooled.step_cost.weight)
        if pooled.calibration is not None and pooled.calibration != known.calibration:
            try:
                self._bins.use(CalibrationTable.model_validate_json(pooled.calibration))
            except ValidationError as error:
                logger.warning("the calibration in Redis is none: %s", error.errors()[0]["msg"])
            else:
                table = pooled.calibration
                logger.info("a calibration was shared and is used from now on")
        if cost is not None or table is not None:
            control = TargetControl(step_cost=cost, calibration=table)
            await self._rpc("dspark_control", args=(msgspec.msgpack.encode(control),))

    def _mean_step_s(self, shim: Mapping[str, Any]) -> float:
        """Mean seconds of the steps since the last report; the last known mean while none ran."""
        steps = shim.get("steps", 0)
        spent_ms = sum(shim.get(part, 0.0) for part in ("verify_ms", "draft_wait_ms", "schedule_ms"))
        last_steps, last_ms = self._last_steps
        if steps > last_steps:
            self._step_s = max(0.0, spent_ms - last_ms) / (steps - last_steps) / 1e3
            self._last_steps = steps, spent_ms
        return self._step_s

    def _changed_step_cost(self, step: Mapping[str, Any] | None) -> StepCost | None:
        """The worker's step curve, if it has moved since it was last reported."""
        if step is None or not step["tokens"]:
            return None
        milliseconds = tuple(step["milliseconds"])
        known = self._step_ms
        moved = len(known) != len(milliseconds) or any(
            abs(new - old) > STEP_COST_CHANGE * old for new, old in zip(milliseconds, known, strict=True)
        )
        if not moved:
            return None
        self._step_ms = milliseconds
        weight = float(1 + step["observed"])
        self._step_cost = StepCost(tuple(step["tokens"]), tuple(ms / 1e3 for ms in milliseconds), weight)
        return self._step_cost


def target_control(
    setting: SpeculationSetting,
    scheduling: SchedulingConfig,
    policy: ActivePolicy,
    drafters: tuple[DrafterRoute, ...],
) -> TargetControl:
    """What the worker is to do: the operator's setting first, then the policy, then the configuration.

    An unbounded length is said, too: None would leave the worker with what it was told before. Without any drafter
    in sight it keeps those it knows: its calls find out by themselves.
    """
    length = scheduling.fixed_len if setting.fixed_len is None else setting.fixed_len
    longest = 0 if setting.mode == "off" else policy.max_verify_len
    return TargetControl(
        mode=scheduling.mode if setting.mode in (None, "off") else setting.mode,
        # Rounded: the load's last trickle changes nothing.
        tau=round(policy.tau, 3) if setting.tau is None else setting.tau,
        fixed_tau=scheduling.fixed_tau if setting.tau is None else setting.tau,
        fixed_len=UNBOUNDED_VERIFY_LEN if length is None else length,
        min_verify_len=scheduling.min_verify_len,
        full_round_share=scheduling.full_round_share,
        max_verify_len=UNBOUNDED_VERIFY_LEN if longest is None else longest,
        drafters=drafters or None,
    )
