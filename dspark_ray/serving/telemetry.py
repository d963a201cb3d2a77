"""A Serve replica's side of the control plane: who it is, its metrics, and the loop that reports.

    identity = ReplicaIdentity.of_this_replica("drafter", model_id)
    agent = start_agent(config.control, config.telemetry)
    task = asyncio.create_task(report_forever(agent, collect, config.telemetry.sample_interval_s))

``collect(policy)`` is called with the policy to act on and returns ``(identity.sample(...), rounds)``. Replicas
with an engine use `dspark_ray.serving.engine_report`, an ingress `report_ingress`.
"""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray import serve
from ray.util.metrics import Counter, Gauge

from dspark_ray.config import AppConfig, ControlConfig, RoleConfig, TelemetryConfig
from dspark_ray.control.agent import ActivePolicy, ReplicaAgent
from dspark_ray.control.metrics import AGENT_METRICS, SAMPLE_METRICS, Metric
from dspark_ray.control.telemetry import TelemetryStore
from dspark_ray.protocol import LoadSample, Role, RoundRecord

logger = logging.getLogger(__name__)

Collect = Callable[[ActivePolicy], Awaitable[tuple[LoadSample, Sequence[RoundRecord]]]]


@dataclass(frozen=True, slots=True)
class ReplicaIdentity:
    """What never changes in a replica's samples."""

    role: Role
    model: str
    replica: str
    node: str
    deployment: str
    device_kind: str = "cpu"

    @classmethod
    def of_this_replica(cls, role: Role, model: str, device_kind: str = "cpu") -> "ReplicaIdentity":
        """The identity of the Serve replica that calls this; unique for each start of a replica.

        Args:
            role: the replica's role.
            model: the model it serves; an ingress has one identity for each model.
            device_kind: ``cpu`` or the GPU's name.
        """
        context = serve.get_replica_context()
        name = context.replica_id.unique_id
        return cls(
            role,
            model,
            f"{model}/{name}" if role == "ingress" else name,
            ray.get_runtime_context().get_node_id(),
            context.deployment,
            device_kind,
        )

    def sample(self, **fields: Any) -> LoadSample:
        """A `LoadSample` of this replica; `fields` are the numbers."""
        return LoadSample(
            role=self.role,
            model=self.model,
            replica=self.replica,
            sequence=0,
            node=self.node,
            deployment=self.deployment,
            device_kind=self.device_kind,
            **fields,
        )


def process_stats() -> dict[str, int]:
    """The process of a replica and the tasks in its event loop, from within that loop."""
    return {"pid": os.getpid(), "asyncio_tasks": len(asyncio.all_tasks())}


def device_kind(role: RoleConfig) -> str:
    """What a replica of the role computes on, as `LoadSample.device_kind` says it."""
    return (role.accelerator_type or "gpu") if role.gpus else "cpu"


def open_store(control: ControlConfig, telemetry: TelemetryConfig) -> TelemetryStore | None:
    """The configured store; None where the environment names no Redis: control is local then.

    Raises:
        ConfigError: the URL cannot be understood.
    """
    url = os.environ.get(telemetry.redis_url_env)
    return TelemetryStore(url, telemetry, control) if url else None


def start_agent(
    control: ControlConfig,
    telemetry: TelemetryConfig,
    *,
    step_cost_key: str | None = None,
    calibration_key: str | None = None,
) -> ReplicaAgent:
    """A running `ReplicaAgent` that also exports this replica's metrics.

    Args:
        control: bounds and lifetimes.
        telemetry: where and how often.
        step_cost_key: from `control.knowledge.step_cost_key`; None for roles without an engine.
        calibration_key: from `control.knowledge.calibration_key`; None without a drafter.

    Raises:
        ConfigError: the Redis URL cannot be understood.
    """
    agent = ReplicaAgent(
        control,
        telemetry,
        open_store(control, telemetry),
        step_cost_key=step_cost_key,
        calibration_key=calibration_key,
        on_report=SampleExporter().export,
    )
    agent.start()
    return agent


async def report_forever(agent: ReplicaAgent, collect: Collect, interval_s: float) -> None:
    """Report this replica's load until cancelled. A collection that fails is logged once and tried again.

    Args:
        agent: from `start_agent`.
        collect: given the policy to act on now, hands it to the engine and returns the replica's numbers and
            the fully verified rounds since its last call.
        interval_s: time between reports.
    """
    failing = False
    while True:
        try:
            sample, rounds = await collect(agent.policy())
            agent.report(sample, rounds)
            failing = False
        except Exception:  # a broken engine must not end reporting for good: it may be restarted
            if not failing:
                logger.exception("the load of this replica cannot be read")
            failing = True
        await asyncio.sleep(interval_s)


def report_ingress(config: AppConfig, in_hand: Mapping[str, int]) -> list[asyncio.Task[None]]:
    """Report what an ingress holds of each model, from which the scheduler learns the queue inside Serve.

    Args:
        config: of the application.
        in_hand: requests in this ingress's hands by model id, kept up to date by the ingress.

    Returns:
        Running tasks, to be kept and cancelled with the replica.
    """

    def collector(identity: ReplicaIdentity) -> Collect:
        async def collect(_policy: ActivePolicy) -> tuple[LoadSample, Sequence[RoundRecord]]:
            return identity.sample(requests_running=in_hand.get(identity.model, 0)), ()

        return collect

    interval_s = config.telemetry.sample_interval_s
    return [
        asyncio.create_task(
            report_forever(
                start_agent(config.control, config.telemetry),
                collector(ReplicaIdentity.of_this_replica("ingress", model.id)),
                interval_s,
            )
        )
        for model in config.models
    ]


class MetricSet:
    """Ray metrics for entries of the metrics table, set by name."""

    def __init__(self, metrics: Sequence[Metric]) -> None:
        """Registers the metrics with Ray."""
        kinds = {"gauge": Gauge, "counter": Counter}
        self._metrics: dict[str, Gauge | Counter] = {
            m.name: kinds[m.kind](m.name, description=f"{m.description} [{m.unit}]", tag_keys=m.tags)
            for m in metrics
        }
        self._totals: dict[tuple[str, ...], float] = {}

    def set(self, name: str, value: float, tags: dict[str, str]) -> None:
        """Set a gauge, or bring a counter to a total that only rises."""
        metric = self._metrics[name]
        if isinstance(metric, Gauge):
            metric.set(value, tags=tags)
            return
        key = (name, *tags.values())
        increase = value - self._totals.get(key, 0.0)
        if increase > 0:
            metric.inc(increase, tags=tags)
            self._totals[key] = value


class SampleExporter:
    """Exports a replica's samples as Prometheus metrics through Ray."""

    def __init__(self) -> None:
        """Registers the metrics with Ray."""
        self._metrics = MetricSet(SAMPLE_METRICS + AGENT_METRICS)

    def export(self, sample: LoadSample, agent: ReplicaAgent) -> None:
        """Export one sample; called in the agent's background thread."""
        tags = {"model": sample.model, "role": sample.role, "replica": sample.replica}
        for metric in SAMPLE_METRICS:
            if sample.role in metric.roles and metric.read is not None:
                self._metrics.set(metric.name, float(metric.read(sample)), tags)
        self._metrics.set("dspark_telemetry_connected", float(agent.connected), tags)
        self._metrics.set("dspark_telemetry_failures", agent.failures, tags)
        self._metrics.set("dspark_policy_expirations", agent.expirations, tags)
