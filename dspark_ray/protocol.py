"""What crosses a process: typed messages, encoded with msgspec. Imports neither torch, ray nor vllm."""

from typing import Annotated, Literal

import msgspec

# --- Control plane: what replicas report and what they are told -------------------------------------------
# Different versions of this package read them from Redis during a rolling change: fields are only ever added,
# with defaults, and unknown ones are ignored.

Role = Literal["ingress", "prefill", "drafter", "verifier"]
Count = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]
Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]


class StepCost(msgspec.Struct, frozen=True, omit_defaults=True):
    """A measured step-cost curve: ``seconds[i]`` is a whole engine step of ``tokens[i]`` verified tokens."""

    tokens: tuple[int, ...]
    """Tokens in the step, anchors included, strictly rising."""
    seconds: tuple[float, ...]
    """Seconds a step, one for each entry of tokens."""
    weight: float = 1.0
    """Steps measured behind the curve."""


class CalibrationBins(msgspec.Struct, frozen=True):
    """Counters over equal bins of predicted survival: how often the drafter's confidence was right."""

    counts: tuple[int, ...]
    """Verified positions whose survival fell into the bin."""
    predicted: tuple[float, ...]
    """Sum of their survivals."""
    accepted: tuple[int, ...]
    """How many of them were accepted together with all before them."""


class RoundRecord(msgspec.Struct, frozen=True):
    """One round that was verified in full, on which calibration from serving logs is fitted (spec 3)."""

    confidence_logits: tuple[float, ...]
    """z_1..z_γ before any temperature."""
    verify_len: Count
    accept_len: Count
    """Accepted drafts, without the bonus token."""
    temperature: Seconds
    """The request's sampling temperature; 0 is greedy."""
    exactness: str = "coupled"


class LoadSample(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one replica reports a few times a second. Counters rise from the replica's start."""

    role: Role
    model: str
    replica: str
    """Unique for each start of a replica."""
    sequence: Count
    """Rises with each sample; a reader tells a live replica by its changes, on the reader's own clock."""
    uptime_s: Seconds = 0.0
    """The writer's monotonic clock, for rates between two samples of the same replica."""
    node: str = ""
    deployment: str = ""
    """Name of the Serve deployment the replica belongs to."""
    device_kind: str = "cpu"
    endpoint: str = ""
    """Where a drafter's ZeroMQ socket listens."""

    requests_running: Count = 0
    """In the engine's batch; at an ingress: in its hands, whatever their state; at a drafter: in work."""
    requests_waiting: Count = 0
    """In the engine's own queue; at a drafter: calls queued."""
    requests_queued: Count = 0
    """In the replica, but not handed to the engine yet (waiting for their prefill)."""
    requests_max: Count = 0
    """The engine's max_num_seqs."""
    kv_blocks_used: Count = 0
    kv_blocks_total: Count = 0
    device_memory_used_bytes: Count = 0
    device_memory_total_bytes: Count = 0
    slots_used: Count = 0
    """A drafter's context slots in use."""
    slots_total: Count = 0

    step_time_s: Seconds = 0.0
    """Recent mean of one engine step; at a drafter: of one draft call."""
    ttft_s: Seconds = 0.0
    """Recent mean from a request's arrival at the replica to its first token."""
    tau: Fraction = 0.0
    """The threshold in use."""
    policy_epoch: Count = 0
    """Epoch of the policy in use; 0 while none was seen."""
    policy_local: bool = False
    """Whether tau comes from the replica's own load, no policy being valid."""

    rounds: Count = 0
    """Verified rounds, one for each request and step with a drafter in use."""
    tokens_drafted: Count = 0
    tokens_verified: Count = 0
    """Drafted tokens that went through the verify pass."""
    tokens_accepted: Count = 0
    tokens_committed: Count = 0
    """All tokens emitted: accepted drafts, bonus tokens and plain decoding."""
    draft_calls: Count = 0
    deadline_misses: Count = 0
    calibration: CalibrationBins | None = None
    step_cost: StepCost | None = None
    """Sent when it has changed noticeably, not with each sample."""

    @property
    def tokens_wasted(self) -> int:
        """Drafted tokens that were verified and rejected."""
        return max(0, self.tokens_verified - self.tokens_accepted)


class DrafterRoute(msgspec.Struct, frozen=True):
    """One drafter that a verifier may assign requests to."""

    replica: str
    endpoint: str
    weight: Fraction
    """Share of the new requests that should go there."""


class VerifyPolicy(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the cluster scheduler tells one verifier replica."""

    epoch: Count
    """Rises with each change of the ruling scheduler; an older one never overrides a newer."""
    version: Count
    """Rises with each decision inside an epoch."""
    tau: Fraction
    lifetime_s: Seconds
    """How long the policy holds after its reader first saw it, on the reader's clock."""
    max_verify_len: Count | None = None
    """Most drafts verified per request and step; None: the whole block."""
    load: Fraction = 0.0
    """The smoothed load that tau follows from."""
    drafters: tuple[DrafterRoute, ...] = ()


class SizingDecision(msgspec.Struct, frozen=True):
    """What the autoscaling policy wants of one deployment, and why."""

    model: str
    role: Role
    current: Count
    """Replicas now."""
    wanted: Count
    """Replicas wanted, before Serve's bounds and delays."""
    reason: str
