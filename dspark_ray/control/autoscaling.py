"""How many prefill, drafter and verifier replicas a model should have, decided together. Pure.

The numbers are wishes: Ray Serve applies each deployment's bounds and delays, its cold start from zero and
the cluster's capacity afterwards (see `dspark_ray.serving.autoscaling`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dspark_ray.config import AutoscalingTargets
from dspark_ray.control.membership import Member
from dspark_ray.protocol import Role, SizingDecision

TAU_RESERVE = 0.02
EPSILON = 1e-9


@dataclass(frozen=True, slots=True)
class RoleTelemetry:
    """What the live replicas of one deployment report together."""

    reporting: int = 0
    """Replicas with a live sample."""
    running: int = 0
    waiting: int = 0
    """In the engines' queues and before them."""
    seats: float = 0.0
    """max_num_seqs of one replica."""
    kv_share: float = 0.0
    ttft_s: float = 0.0
    """Mean over the replicas that saw a first token lately."""
    tokens_per_s: float = 0.0
    slots_used: int = 0
    slots: float = 0.0
    """Context slots of one drafter."""
    miss_share: float = 0.0
    tau: float = 0.0

    @property
    def requests(self) -> int:
        """Requests in the replicas."""
        return self.running + self.waiting

    @property
    def token_latency_s(self) -> float:
        """Mean time per token of one stream; 0 while no token flows."""
        return self.running / self.tokens_per_s if self.tokens_per_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class RoleSize:
    """One deployment as the autoscaler finds it."""

    target: int
    """Replicas that Serve aims at now."""
    serve_requests: float
    """Requests that Serve counts, queued at the callers' handles or under way."""
    telemetry: RoleTelemetry
    serve_target: float = 0.0
    """Requests that Serve's own policy would give one replica; what counts while there is no telemetry."""


def summarise(members: Sequence[Member]) -> RoleTelemetry:
    """The telemetry of one deployment out of its live replicas."""
    if not members:
        return RoleTelemetry()
    samples = [m.sample for m in members]
    rates = [m.rates() for m in members]
    count = len(samples)
    blocks = sum(s.kv_blocks_total for s in samples)
    firsts = [s.ttft_s for s in samples if s.ttft_s > 0]
    return RoleTelemetry(
        reporting=count,
        running=sum(s.requests_running for s in samples),
        waiting=sum(s.requests_waiting + s.requests_queued for s in samples),
        seats=sum(s.requests_max for s in samples) / count,
        kv_share=sum(s.kv_blocks_used for s in samples) / blocks if blocks else 0.0,
        ttft_s=sum(firsts) / len(firsts) if firsts else 0.0,
        tokens_per_s=sum(r.tokens_per_s for r in rates),
        slots_used=sum(s.slots_used for s in samples),
        slots=sum(s.slots_total for s in samples) / count,
        miss_share=max(r.miss_share for r in rates),
        tau=sum(s.tau for s in samples) / count,
    )


def size_model(
    model: str,
    roles: Mapping[Role, RoleSize],
    targets: AutoscalingTargets,
    tau_max: float | None,
    fixed_verifier: RoleTelemetry | None = None,
) -> dict[Role, SizingDecision]:
    """Size the autoscaled roles of one model together.

    Args:
        model: its id, for the decisions.
        roles: the deployments that may be scaled; the others are absent.
        targets: what to aim at.
        tau_max: up to where raising tau relieves a verifier; None where tau does not follow load.
        fixed_verifier: what the verifiers report where they are not in `roles`; None while they are silent.

    Returns:
        A decision with its reason for each of `roles`.
    """
    wishes: dict[Role, tuple[int, str]] = {}
    verifier = roles.get("verifier")
    if verifier is not None:
        wishes["verifier"] = _size_verifiers(verifier, targets, tau_max)
    seen = (fixed_verifier or RoleTelemetry()) if verifier is None else verifier.telemetry
    busy = _is_busy(verifier, seen)
    if "prefill" in roles:
        wishes["prefill"] = _size_prefill(roles["prefill"], busy, targets)
    if "drafter" in roles:
        coming = 0.0
        if verifier is not None:
            added = wishes["verifier"][0] - verifier.target
            coming = min(seen.waiting, max(0.0, added * seen.seats))
        # It is the verifiers that wait.
        late = max(roles["drafter"].telemetry.miss_share, seen.miss_share)
        wishes["drafter"] = _size_drafters(roles["drafter"], busy, coming, late, targets)
    return {
        role: SizingDecision(model, role, roles[role].target, wanted, reason)
        for role, (wanted, reason) in wishes.items()
    }


def _is_busy(verifier: RoleSize | None, seen: RoleTelemetry) -> bool | None:
    """Whether the verifiers have requests; None while nobody says.

    Args:
        verifier: as the autoscaler finds them; None where they are not autoscaled.
        seen: what they report.
    """
    if seen.requests > 0 or (verifier is not None and verifier.serve_requests > 0):
        return True
    scaled_to_zero = verifier is not None and verifier.target == 0
    return False if seen.reporting > 0 or scaled_to_zero else None


def _replicas(demand: float, target: int, margin: float) -> int:
    """Replicas for a demand counted in replicas at their targets; fewer than now only with room to spare."""
    wanted = math.ceil(demand - EPSILON)
    if wanted >= target:
        return wanted
    return min(target, max(wanted, math.ceil(demand / margin - EPSILON)))


def _size_verifiers(size: RoleSize, targets: AutoscalingTargets, tau_max: float | None) -> tuple[int, str]:
    now = size.telemetry
    requests = max(size.serve_requests, now.requests)
    if now.reporting == 0 or now.seats == 0:
        return _size_blindly(size, targets)
    if requests == 0:
        return 0, "idle"
    by_seats = requests / (targets.verifier_seat_share * now.seats)
    by_kv = now.reporting * now.kv_share / targets.verifier_kv_share
    demand, what = max(
        (by_seats, f"{requests:.0f} requests on {now.seats:.0f} seats each"),
        (by_kv, f"KV {now.kv_share:.0%} used"),
    )
    slow = _latency_trouble(now, targets)
    wanted = max(1, _replicas(demand, size.target, targets.downscale_margin))
    if wanted > size.target and not slow and tau_max is not None and now.tau < tau_max - TAU_RESERVE:
        return size.target, f"{what}, but latency holds: tau {now.tau:.2f} rises first"
    if slow and wanted == size.target and now.waiting > 0:
        wanted += 1
    state = f"; {now.tokens_per_s:.0f} tokens/s, tau {now.tau:.2f}"
    return wanted, what + (f", {slow}" if slow else "") + state


def _size_blindly(size: RoleSize, targets: AutoscalingTargets) -> tuple[int, str]:
    """What Serve's own policy would do with its count of requests; nothing goes to zero on that alone."""
    if size.serve_target <= 0:
        return size.target, "no telemetry: unchanged"
    wanted = _replicas(size.serve_requests / size.serve_target, size.target, targets.downscale_margin)
    return max(min(1, size.target), wanted), f"no telemetry: Serve counts {size.serve_requests:.0f} requests"


def _latency_trouble(now: RoleTelemetry, targets: AutoscalingTargets) -> str:
    """Which latency target is missed; empty if none is."""
    if now.ttft_s > targets.target_ttft_s:
        return f"TTFT {now.ttft_s:.2f} s over {targets.target_ttft_s:g} s"
    if now.token_latency_s > targets.target_token_latency_s:
        return (
            f"{now.token_latency_s * 1e3:.0f} ms a token over {targets.target_token_latency_s * 1e3:.0f} ms"
        )
    return ""


def _size_prefill(size: RoleSize, busy: bool | None, targets: AutoscalingTargets) -> tuple[int, str]:
    now = size.telemetry
    prompts = max(size.serve_requests, now.requests)
    if size.target == 0:
        return (1, "requests at the verifiers") if busy or prompts > 0 else (0, "idle")
    if now.reporting == 0:
        return _size_blindly(size, targets)
    if prompts == 0:
        if busy is False:
            return 0, "idle"
        return 1, "no prompts, but requests at the verifiers" if busy else "no prompts, verifiers unknown"
    wanted = _replicas(prompts / targets.prefill_requests_per_replica, size.target, targets.downscale_margin)
    reason = f"{prompts:.0f} prompts"
    if now.ttft_s > targets.target_ttft_s and now.waiting > 0 and wanted <= size.target:
        wanted = size.target + 1
        reason += f", TTFT {now.ttft_s:.2f} s over {targets.target_ttft_s:g} s"
    return max(1, wanted), reason


def _size_drafters(
    size: RoleSize, busy: bool | None, coming: float, late: float, targets: AutoscalingTargets
) -> tuple[int, str]:
    now = size.telemetry
    if busy is False and now.slots_used == 0:
        return 0, "idle"
    if size.target == 0:
        return (0, "verifiers unknown: unchanged") if busy is None else (1, "requests at the verifiers")
    if now.reporting == 0 or now.slots == 0:
        return size.target, "no telemetry: unchanged"
    demand = (now.slots_used + coming) / (targets.drafter_slot_share * now.slots)
    wanted = max(1, _replicas(demand, size.target, targets.downscale_margin))
    reason = f"{now.slots_used} of {now.slots * now.reporting:.0f} slots"
    if coming:
        reason += f", {coming:.0f} more with the verifiers to come"
    if late > targets.drafter_miss_share and wanted <= size.target:
        return size.target + 1, f"{reason}, {late:.0%} of the calls late"
    if late > targets.downscale_margin * targets.drafter_miss_share:
        wanted = max(wanted, size.target)
    return wanted, reason
