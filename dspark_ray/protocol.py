"""What crosses a process: typed messages, encoded with msgspec. Imports neither torch, ray nor vllm."""

from typing import Annotated, Literal

import msgspec

# --- Control plane: what replicas report and what they are told -------------------------------------------
# Different versions of this package read them from Redis during a rolling change: fields are only ever added,
# with defaults, and unknown ones are ignored. No garbage collection: they hold no cycles, and the scheduler
# reads thousands a second.

Role = Literal["ingress", "prefill", "drafter", "verifier"]
Count = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]
Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]


class StepCost(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A measured step-cost curve: ``seconds[i]`` is a whole engine step of ``tokens[i]`` verified tokens."""

    tokens: tuple[int, ...]
    """Tokens in the step, anchors included, strictly rising."""
    seconds: tuple[float, ...]
    """Seconds a step, one for each entry of tokens."""
    weight: float = 1.0
    """Steps measured behind the curve."""


class CalibrationBins(msgspec.Struct, frozen=True, gc=False):
    """Counters over equal bins of predicted survival: how often the drafter's confidence was right."""

    counts: tuple[int, ...]
    """Verified positions whose survival fell into the bin."""
    predicted: tuple[float, ...]
    """Sum of their survivals."""
    accepted: tuple[int, ...]
    """How many of them were accepted together with all before them."""


class RoundRecord(msgspec.Struct, frozen=True, gc=False):
    """One round that was verified in full, on which calibration from serving logs is fitted (spec 3)."""

    confidence_logits: tuple[float, ...]
    """z_1..z_γ before any temperature."""
    verify_len: Count
    accept_len: Count
    """Accepted drafts, without the bonus token."""
    temperature: Seconds
    """The request's sampling temperature; 0 is greedy."""
    exactness: str = "coupled"


class LoadSample(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
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
    drafter_mismatches: Count = 0
    """Draft calls refused because the two ends have other weights or versions."""
    calibration: CalibrationBins | None = None
    """Sent now and then, since it is the largest part."""
    step_cost: StepCost | None = None
    """Sent when it has changed noticeably, not with each sample."""

    @property
    def tokens_wasted(self) -> int:
        """Drafted tokens that were verified and rejected."""
        return max(0, self.tokens_verified - self.tokens_accepted)


class DrafterRoute(msgspec.Struct, frozen=True, gc=False):
    """One drafter that a verifier may assign requests to."""

    replica: str
    endpoint: str
    weight: Fraction
    """Share of the new requests that should go there."""


class VerifyPolicy(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
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
    drift: float = 0.0
    """Gap between predicted and observed acceptance, last measured."""
    drafters: tuple[DrafterRoute, ...] = ()


class SizingDecision(msgspec.Struct, frozen=True, gc=False):
    """What the autoscaling policy wants of one deployment, and why."""

    model: str
    role: Role
    current: Count
    """Replicas now."""
    wanted: Count
    """Replicas wanted, before Serve's bounds and delays."""
    reason: str


# --- Data plane: verifier, drafter and prefill worker, on ZeroMQ -------------------------------------------
# Both ends are of one deployment and one version; a call that says otherwise is refused. A message is a
# header of one of these types and a frame with the rows of features it announces: bf16, row-major.

PROTOCOL_VERSION = 1
MAX_FRAME_BYTES = 1 << 26
FeatureDtype = Literal["bf16"]
RequestKey = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
Position = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Epoch = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class DraftEntry(msgspec.Struct, frozen=True, array_like=True):
    """One request of a draft call. Its anchor stands at base_position + rows."""

    key: RequestKey
    """Unique within the verifier."""
    base_position: Position
    """Absolute position of its first feature row."""
    rows: Annotated[int, msgspec.Meta(ge=0, le=1 << 16)]
    """Feature rows it brings, taken from the frame in the order of entries."""
    anchor_token_id: TokenId
    draft_len: Annotated[int, msgspec.Meta(ge=0, le=64)]
    """γ'; 0 only feeds the context."""
    fresh: bool = False
    """The slot starts anew at base_position, whatever it held."""


class DraftRequest(msgspec.Struct, frozen=True, array_like=True, tag="draft"):
    """Verifier to drafter, once a step for all of its requests that this drafter has."""

    version: int
    verifier: RequestKey
    """Unique for each start of a worker."""
    epoch: Epoch
    """Rises with each call of the verifier; the reply repeats it, and a reply to an older call is stale."""
    fingerprint: str
    """Of target and drafter, as `fingerprint` in drafter/wire.py computes it."""
    width: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
    """d, numbers in a feature row."""
    dtype: FeatureDtype
    entries: list[DraftEntry]
    finished: list[RequestKey]
    """Keys whose slots may be freed."""


class DraftAnswer(msgspec.Struct, frozen=True, array_like=True):
    """The drafter's answer for one entry."""

    draft_token_ids: list[TokenId]
    confidence_logits: list[float]
    """z_1..z_γ', one for each drafted token."""
    missing_from: Position | None = None
    """First position whose feature the drafter lacks; nothing was drafted then."""


class DraftProposal(msgspec.Struct, frozen=True, array_like=True, tag="proposal"):
    """Drafter to verifier: answers in the order of the call's entries."""

    epoch: Epoch
    answers: list[DraftAnswer]
    compute_ms: float
    """Time the drafter spent on the batch this call was part of; the rest of the round trip is transport."""


class Refusal(msgspec.Struct, frozen=True, array_like=True, tag="refusal"):
    """The call was not served."""

    epoch: Epoch
    reason: Literal["busy", "fingerprint", "version", "malformed"]
    detail: str = ""


class FetchFeatures(msgspec.Struct, frozen=True, array_like=True, tag="fetch"):
    """Verifier to prefill worker: the last rows of one prompt, once."""

    version: int
    handoff: RequestKey
    """Made by the server, in both engines' extra_args."""
    fingerprint: str


class FeatureRun(msgspec.Struct, frozen=True, array_like=True, tag="features"):
    """Prefill worker to verifier; the rows are in the frame behind it."""

    handoff: RequestKey
    base_position: Position
    rows: Annotated[int, msgspec.Meta(ge=0, le=1 << 16)]
    """0: unknown, expired or fetched before."""
    width: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
    dtype: FeatureDtype = "bf16"


class TargetControl(msgspec.Struct, frozen=True, omit_defaults=True):
    """Replica to its engine's workers: what changes at run time. Fields that are None stay as they are."""

    mode: Literal["fixed_len", "fixed_tau", "tau", "throughput", "tau+throughput"] | None = None
    tau: Fraction | None = None
    """Threshold of the modes that follow the load."""
    fixed_tau: Fraction | None = None
    """Threshold of mode fixed_tau."""
    fixed_len: Count | None = None
    """Verify length of mode fixed_len."""
    min_verify_len: Count | None = None
    """Drafts verified at least, in mode tau."""
    full_round_share: Fraction | None = None
    """Share of rounds verified in full."""
    max_verify_len: Count | None = None
    """Most drafts verified per request and step; 0 switches drafting off."""
    drafters: tuple[DrafterRoute, ...] | None = None
    step_cost: StepCost | None = None
    """What replicas alike have measured; the engine's own profile goes on from there."""
    calibration: bytes | None = None
    """A `decoding.calibration.CalibrationTable` in JSON, in place of the one beside the checkpoint."""


class SpeculationSetting(msgspec.Struct, frozen=True, omit_defaults=True):
    """Operator to verifier replicas: what overrides configuration and policy until it is taken back."""

    mode: Literal["off", "fixed_len", "fixed_tau", "tau", "throughput", "tau+throughput"] | None = None
    """None: as configured; off: plain decoding, while context features are kept for the next mode."""
    tau: Fraction | None = None
    """Threshold in every mode that has one; None: fixed_tau as configured, else from the load."""
    fixed_len: Count | None = None
    """Verify length of mode fixed_len; None: as configured."""
