"""Every Prometheus metric of the control plane: its name, unit, tags and meaning, in one table.

Ray puts ``ray_`` before each name, and ``_total`` behind counters. The exporter, the Grafana dashboard's test
and the table in ``cluster/grafana/README.md`` all follow this list; names and units are stable.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from dspark_ray.protocol import LoadSample

REPLICA_TAGS = ("model", "role", "replica")
ANY: frozenset[str] = frozenset({"ingress", "prefill", "drafter", "verifier"})
ENGINES = frozenset({"prefill", "verifier"})
VERIFIER = frozenset({"verifier"})
DRAFTER = frozenset({"drafter"})


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric as Prometheus sees it."""

    name: str
    """Without Ray's prefix and without ``_total``."""
    kind: Literal["gauge", "counter"]
    unit: str
    description: str
    roles: frozenset[str] = ANY
    """Roles whose samples carry it."""
    read: Callable[[LoadSample], float] | None = None
    """Its value in a replica's sample; None for what the scheduler or the agent knows itself."""
    tags: tuple[str, ...] = REPLICA_TAGS

    @property
    def exported_name(self) -> str:
        """The name to query."""
        return f"ray_{self.name}" + ("_total" if self.kind == "counter" else "")


def _kv_share(sample: LoadSample) -> float:
    return sample.kv_blocks_used / sample.kv_blocks_total if sample.kv_blocks_total else 0.0


SAMPLE_METRICS: tuple[Metric, ...] = (
    Metric("dspark_requests_running", "gauge", "requests", "In the batch, or in the ingress's hands",
           ANY, lambda s: s.requests_running),
    Metric("dspark_requests_waiting", "gauge", "requests", "In the engine's or drafter's queue",
           ANY, lambda s: s.requests_waiting),
    Metric("dspark_requests_queued", "gauge", "requests", "In the replica, before its engine",
           VERIFIER, lambda s: s.requests_queued),
    Metric("dspark_kv_used_ratio", "gauge", "0..1", "KV blocks in use", ENGINES, _kv_share),
    Metric("dspark_device_memory_used_bytes", "gauge", "bytes", "Device memory in use; 0 on CPUs",
           ANY, lambda s: s.device_memory_used_bytes),
    Metric("dspark_step_seconds", "gauge", "seconds", "Recent mean of an engine step, or of a draft call",
           ENGINES | DRAFTER, lambda s: s.step_time_s),
    Metric("dspark_ttft_seconds", "gauge", "seconds", "Recent mean time to the first token",
           ENGINES, lambda s: s.ttft_s),
    Metric("dspark_tau", "gauge", "0..1", "Survival threshold in use", VERIFIER, lambda s: s.tau),
    Metric("dspark_policy_local", "gauge", "0 or 1", "Whether tau is local, no policy being valid",
           VERIFIER, lambda s: float(s.policy_local)),
    Metric("dspark_policy_epoch", "gauge", "epoch", "Epoch of the last policy seen",
           VERIFIER, lambda s: s.policy_epoch),
    Metric("dspark_slots_used", "gauge", "requests", "Context slots in use", DRAFTER, lambda s: s.slots_used),
    Metric("dspark_slots", "gauge", "requests", "Context slots", DRAFTER, lambda s: s.slots_total),
    Metric("dspark_rounds", "counter", "rounds", "Verified rounds", VERIFIER, lambda s: s.rounds),
    Metric("dspark_tokens_drafted", "counter", "tokens", "Drafted tokens",
           VERIFIER | DRAFTER, lambda s: s.tokens_drafted),
    Metric("dspark_tokens_verified", "counter", "tokens", "Drafted tokens verified",
           VERIFIER, lambda s: s.tokens_verified),
    Metric("dspark_tokens_accepted", "counter", "tokens", "Drafted tokens accepted",
           VERIFIER, lambda s: s.tokens_accepted),
    Metric("dspark_tokens_wasted", "counter", "tokens", "Drafted tokens verified and rejected",
           VERIFIER, lambda s: s.tokens_wasted),
    Metric("dspark_tokens_committed", "counter", "tokens", "Tokens emitted",
           ENGINES, lambda s: s.tokens_committed),
    Metric("dspark_draft_calls", "counter", "calls", "Draft calls",
           VERIFIER | DRAFTER, lambda s: s.draft_calls),
    Metric("dspark_deadline_misses", "counter", "calls", "Draft calls past their deadline",
           VERIFIER | DRAFTER, lambda s: s.deadline_misses),
    Metric("dspark_drafter_mismatches", "counter", "calls",
           "Refused: drafter and verifier have other weights or versions, as in a roll-out",
           VERIFIER, lambda s: s.drafter_mismatches),
)  # fmt: skip

AGENT_METRICS: tuple[Metric, ...] = (
    Metric("dspark_telemetry_connected", "gauge", "0 or 1", "Whether Redis answered the last time"),
    Metric("dspark_telemetry_failures", "counter", "attempts", "Redis did not answer in time"),
    Metric("dspark_policy_expirations", "counter", "events", "A policy ran out and tau became local"),
)

INGRESS_METRICS: tuple[Metric, ...] = (
    Metric("dspark_verifier_losses", "counter", "answers",
           "Lost their verifier under way: restarted, continued, or given_up with an error",
           tags=("model", "outcome")),
)  # fmt: skip

SCHEDULER_METRICS: tuple[Metric, ...] = (
    Metric("dspark_scheduler_ruling", "gauge", "0 or 1", "Whether this one holds the lease",
           tags=("owner",)),
    Metric("dspark_scheduler_tick_seconds", "gauge", "seconds", "Time to read, decide and publish",
           tags=("owner",)),
    Metric("dspark_scheduler_ticks", "counter", "ticks", "Decisions published", tags=("owner",)),
    Metric("dspark_replicas", "gauge", "replicas", "Replicas alive", tags=("model", "role")),
    Metric("dspark_load", "gauge", "0..1", "Smoothed load that tau follows", tags=("model", "replica")),
    Metric("dspark_drifting", "gauge", "0 or 1", "Predicted and observed acceptance differ too much",
           tags=("model", "replica")),
    Metric("dspark_replicas_wanted", "gauge", "replicas", "Autoscaling wish before bounds and delays",
           tags=("model", "role")),
)  # fmt: skip

METRICS = SAMPLE_METRICS + AGENT_METRICS + INGRESS_METRICS + SCHEDULER_METRICS


def markdown_table() -> str:
    """The table of the documentation."""
    rows = ["| metric | kind | unit | tags | meaning |", "|---|---|---|---|---|"]
    rows += [
        f"| `{m.exported_name}` | {m.kind} | {m.unit} | {', '.join(m.tags)} | {m.description} |"
        for m in METRICS
    ]
    return "\n".join(rows)
