"""The cluster as `dspark-ray status` and `dspark-ray top` show it.

Built from the store alone, so it also works while the scheduler is down.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from dspark_ray.control.membership import Member, SampleBook
from dspark_ray.control.telemetry import Lease, TelemetryStore
from dspark_ray.protocol import DrafterRoute, Role, SizingDecision, VerifyPolicy

ROLES: tuple[Role, ...] = ("ingress", "prefill", "drafter", "verifier")


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """One live replica. Ratios are in [0, 1]; fields that its role does not have are 0."""

    replica: str
    role: Role
    node: str
    silent_s: float
    """Since its sample last changed, on the reader's clock."""
    running: int
    waiting: int
    kv_share: float
    device_memory_bytes: int
    slots_used: int
    slots_total: int
    load: float | None
    """Smoothed load of the policy last published; None without one."""
    tau: float
    tau_source: str
    """``cluster``, ``local`` or, for roles without tau, empty."""
    policy_epoch: int
    max_verify_len: int | None
    verify_len: float
    accept_len: float
    waste: float
    miss_share: float
    tokens_per_s: float
    step_time_s: float
    ttft_s: float
    drift: float
    """Gap between predicted and observed acceptance, last measured by the scheduler."""


@dataclass(frozen=True, slots=True)
class ModelView:
    """One model: its replicas, the weights of its drafters, and what autoscaling wants of it."""

    model: str
    replicas: list[ReplicaView] = field(default_factory=list)
    drafters: dict[str, float] = field(default_factory=dict)
    sizing: list[SizingDecision] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ClusterView:
    """Everything at one moment."""

    ruler: str
    """The scheduler that rules; empty while none does, and replicas follow their own load."""
    epoch: int
    models: list[ModelView]


def cluster_view(
    book: SampleBook,
    policies: Mapping[str, VerifyPolicy],
    routes: Mapping[str, tuple[DrafterRoute, ...]],
    sizing: Mapping[str, SizingDecision],
    lease: Lease | None,
) -> ClusterView:
    """Arrange what is known by model and role."""
    models: dict[str, ModelView] = {}
    for member in book.members.values():
        view = models.setdefault(member.sample.model, ModelView(member.sample.model))
        view.replicas.append(_replica_view(member, policies.get(member.sample.replica), book.observed_s))
    for decision in sizing.values():
        models.setdefault(decision.model, ModelView(decision.model)).sizing.append(decision)
    for view in models.values():
        view.replicas.sort(key=lambda r: (ROLES.index(r.role), r.replica))
        view.sizing.sort(key=lambda d: ROLES.index(d.role))
        view.drafters.update({r.replica: r.weight for r in routes.get(view.model, ())})
    ordered = [models[name] for name in sorted(models)]
    return ClusterView(lease.owner if lease else "", lease.epoch if lease else 0, ordered)


def _replica_view(member: Member, policy: VerifyPolicy | None, observed_s: float) -> ReplicaView:
    sample, rates = member.sample, member.rates()
    has_tau = sample.role == "verifier"
    return ReplicaView(
        replica=sample.replica,
        role=sample.role,
        node=sample.node,
        silent_s=observed_s - member.changed_at_s,
        running=sample.requests_running,
        waiting=sample.requests_waiting + sample.requests_queued,
        kv_share=sample.kv_blocks_used / sample.kv_blocks_total if sample.kv_blocks_total else 0.0,
        device_memory_bytes=sample.device_memory_used_bytes,
        slots_used=sample.slots_used,
        slots_total=sample.slots_total,
        load=policy.load if policy is not None else None,
        tau=sample.tau,
        tau_source=("local" if sample.policy_local else "cluster") if has_tau else "",
        policy_epoch=sample.policy_epoch,
        max_verify_len=policy.max_verify_len if policy is not None else None,
        verify_len=rates.verify_len,
        accept_len=rates.accept_len,
        waste=rates.waste,
        miss_share=rates.miss_share,
        tokens_per_s=rates.tokens_per_s,
        step_time_s=sample.step_time_s,
        ttft_s=sample.ttft_s,
        drift=policy.drift if policy is not None else 0.0,
    )


class ClusterWatcher:
    """Looks at the cluster from outside, with its own judgement of who is alive."""

    def __init__(
        self,
        store: TelemetryStore,
        sample_lifetime_s: float,
        clock: Callable[[], float],
        window_s: float = 3.0,
    ) -> None:
        """A watcher that has seen nothing yet, whose rates are over the last `window_s`."""
        self._store = store
        self._book = SampleBook(sample_lifetime_s, window_s)
        self._clock = clock

    def look(self) -> ClusterView:
        """The cluster now; rates are over the looks before. May raise one of `telemetry.STORE_ERRORS`."""
        self._book.observe(self._store.samples(), self._clock())
        return cluster_view(
            self._book,
            self._store.policies(),
            self._store.routes(),
            self._store.sizing(),
            self._store.lease(),
        )
