"""The store behind the control plane: samples, policies, the lease and pooled knowledge in Redis.

A synchronous API, called from one background thread per process and never from the token path. Each call is
one round trip and fails within the timeout of its client with one of `STORE_ERRORS`.

Keys, all under ``{prefix}:`` (the braces are a hash tag: one slot of a Redis Cluster):

========================  =================================================  ===========================
sample:<replica>          latest `LoadSample`                                sample lifetime, several times
replicas                  set of names that samples are looked up by         likewise
policies                  hash: replica → `VerifyPolicy`, route:<model> →    policy lifetime, several times
                          the model's `DrafterRoute` list
lease, epoch              who rules, in which epoch                          lease lifetime; a week
history:<model>           stream of samples                                  an hour, bounded length
rounds:<model>            stream of `RoundRecord`                            a week, bounded length
step-cost:<key>           `StepCost` per (model, device, engine config)      a week
calibration:<key>         calibration of a draft checkpoint                  a month
sizing                    hash: deployment → autoscaling decision, reason    a minute
========================  =================================================  ===========================
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
import redis

from dspark_ray.config import ControlConfig, TelemetryConfig
from dspark_ray.control import scripts
from dspark_ray.control.connection import Client, client_factory
from dspark_ray.control.knowledge import merge_step_costs
from dspark_ray.protocol import DrafterRoute, LoadSample, RoundRecord, SizingDecision, StepCost, VerifyPolicy

STORE_ERRORS = (redis.RedisError, OSError, msgspec.MsgspecError)
"""Redis is down or slow, or something in it is not ours: log, pause, go on."""
WEEK_S = 7 * 24 * 3600
MONTH_S = 30 * 24 * 3600
HOUR_S = 3600
KEEP = 4
"""Keys live this many times longer than what they hold, so that readers judge age by their own clock."""

_encode = msgspec.msgpack.Encoder().encode
_sample = msgspec.msgpack.Decoder(LoadSample)
_samples = msgspec.msgpack.Decoder(list[LoadSample])
_policy = msgspec.msgpack.Decoder(VerifyPolicy)
_routes = msgspec.msgpack.Decoder(tuple[DrafterRoute, ...])
_round = msgspec.msgpack.Decoder(RoundRecord)
_step_cost = msgspec.msgpack.Decoder(StepCost)
_sizing = msgspec.msgpack.Decoder(SizingDecision)
_raw_samples = msgspec.msgpack.Decoder(list[msgspec.Raw])


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to rule."""

    owner: str
    epoch: int


class TelemetryStore:
    """Redis as the control plane sees it.

    Args:
        url: see `connection.SCHEMES`. Nothing is sent before the first call.
        telemetry: prefix, lifetimes, bounds and the timeout of every call.
        control: lifetimes of policies and lease.

    Raises:
        ConfigError: the URL cannot be understood.
    """

    def __init__(self, url: str, telemetry: TelemetryConfig, control: ControlConfig) -> None:
        """A store that connects when it is first used, and again whenever it must."""
        self._connect = client_factory(url, telemetry.timeout_s)
        self._telemetry = telemetry
        self._prefix = f"{{{telemetry.key_prefix}}}:"
        self._sample_ms = int(telemetry.sample_lifetime_s * KEEP * 1000)
        self.configure(control)

    def configure(self, control: ControlConfig) -> None:
        """Follow changed lifetimes from the next call on."""
        self._policies_ms = int(control.policy_lifetime_s * KEEP * 1000)
        self._lease_ms = int(control.lease_lifetime_s * 1000)

    @cached_property
    def _redis(self) -> Client:
        # A cluster's client asks its nodes on construction: if that fails, the next call tries again.
        return self._connect()

    @cached_property
    def _scripts(self) -> dict[str, Any]:
        return {name: self._redis.register_script(text) for name, text in scripts.ALL.items()}

    def _run(self, script: str, keys: Sequence[str], args: Sequence[str | bytes | int]) -> Any:
        """Run a script by name; its text is sent again where the server has lost it."""
        return self._scripts[script](keys=[self._key(key) for key in keys], args=args)

    def _key(self, *parts: str) -> str:
        return self._prefix + ":".join(parts)

    # --- what replicas call

    def push(self, sample: LoadSample, rounds: Sequence[RoundRecord] = ()) -> VerifyPolicy | None:
        """Write a sample and read the replica's policy, in one round trip.

        Args:
            sample: the replica's latest.
            rounds: fully verified rounds since the last call, for calibration.

        Returns:
            The policy last published for the replica, with its model's drafters, whatever its age; None if
            there is none.
        """
        blob = _encode(sample)
        pipe = self._redis.pipeline(transaction=False)
        pipe.set(self._key("sample", sample.replica), blob, px=self._sample_ms)
        pipe.sadd(self._key("replicas"), sample.replica)
        pipe.pexpire(self._key("replicas"), self._sample_ms)
        if self._telemetry.history_samples:
            self._append(pipe, "history", sample.model, [blob], self._telemetry.history_samples, HOUR_S)
        if rounds and self._telemetry.calibration_rounds:
            blobs = [_encode(record) for record in rounds]
            self._append(pipe, "rounds", sample.model, blobs, self._telemetry.calibration_rounds, WEEK_S)
        pipe.hmget(self._key("policies"), sample.replica, f"route:{sample.model}")
        policy, routes = pipe.execute()[-1]
        if policy is None:
            return None
        return msgspec.structs.replace(
            _policy.decode(policy), drafters=_routes.decode(routes) if routes else ()
        )

    def _append(
        self, pipe: Client, kind: str, model: str, blobs: list[bytes], most: int, lifetime_s: int
    ) -> None:
        """Add to a bounded stream."""
        key = self._key(kind, model)
        for blob in blobs:
            pipe.xadd(key, {"v": blob}, maxlen=most, approximate=True)
        pipe.expire(key, lifetime_s)

    # --- what the cluster scheduler calls

    def acquire(self, owner: str, last_epoch: int = 0) -> Lease | None:
        """Try to become the ruling scheduler.

        Args:
            owner: unique for each start of a scheduler.
            last_epoch: the highest epoch this scheduler has ruled in.

        Returns:
            The lease with an epoch above all before it, or None while another scheduler rules.
        """
        epoch = self._run("acquire", ["lease", "epoch"], [owner, self._lease_ms, last_epoch])
        return None if epoch is None else Lease(owner, int(epoch))

    def publish(
        self,
        lease: Lease,
        policies: Mapping[str, VerifyPolicy],
        routes: Mapping[str, tuple[DrafterRoute, ...]],
        gone: Iterable[str] = (),
    ) -> bool:
        """Write policies and renew the lease, unless another scheduler rules by now.

        Returns:
            False if the lease is lost; nothing was written then.
        """
        deleted = list(gone)
        fields: list[str | bytes] = []
        for replica, policy in policies.items():
            fields += [replica, _encode(policy)]
        for model, drafters in routes.items():
            fields += [f"route:{model}", _encode(drafters)]
        head: list[str | int] = [lease.owner, lease.epoch, self._lease_ms, self._policies_ms, len(deleted)]
        return bool(self._run("publish", ["lease", "policies"], [*head, *deleted, *fields]))

    def release(self, lease: Lease) -> None:
        """Give the right to rule back, so that another scheduler need not wait."""
        self._run("release", ["lease"], [lease.owner])

    def samples(self) -> list[LoadSample]:
        """The latest sample of every replica; one that cannot be read (a stranger's) is left out."""
        blob = self._run("read_samples", ["replicas"], [self._key("sample", "")])
        try:
            return _samples.decode(blob)
        except msgspec.ValidationError:
            return [sample for raw in _raw_samples.decode(blob) if (sample := _readable(raw)) is not None]

    def policies(self) -> dict[str, VerifyPolicy]:
        """The policies last published, by replica, without drafters."""
        fields = self._redis.hgetall(self._key("policies"))
        return {
            name.decode(): _policy.decode(blob)
            for name, blob in fields.items()
            if not name.startswith(b"route:")
        }

    def routes(self) -> dict[str, tuple[DrafterRoute, ...]]:
        """The drafters last published, by model."""
        fields = self._redis.hgetall(self._key("policies"))
        return {
            name.decode().removeprefix("route:"): _routes.decode(blob)
            for name, blob in fields.items()
            if name.startswith(b"route:")
        }

    def lease(self) -> Lease | None:
        """Who rules; None for nobody."""
        owner, epoch = self._redis.hmget(self._key("lease"), "owner", "epoch")
        return None if owner is None else Lease(owner.decode(), int(epoch))

    # --- history and calibration

    def history(self, model: str, count: int) -> list[tuple[float, LoadSample]]:
        """The last samples of a model's replicas, oldest first, each with the server's time in seconds."""
        entries = self._redis.xrevrange(self._key("history", model), count=count)
        return [
            (int(entry.split(b"-")[0]) / 1000.0, _sample.decode(fields[b"v"]))
            for entry, fields in reversed(entries)
        ]

    def rounds(self, model: str, count: int) -> list[RoundRecord]:
        """The last fully verified rounds of a model, oldest first."""
        entries = self._redis.xrevrange(self._key("rounds", model), count=count)
        return [_round.decode(fields[b"v"]) for _, fields in reversed(entries)]

    # --- pooled knowledge

    def step_cost(self, key: str) -> StepCost | None:
        """The pooled step-cost curve of a (model, device kind, engine config); None if there is none.

        Args:
            key: from `knowledge.step_cost_key`.
        """
        blob = self._redis.get(self._key("step-cost", key))
        return None if blob is None else _step_cost.decode(blob)

    def pool_step_cost(self, key: str, measured: StepCost) -> StepCost:
        """Merge a replica's curve into the pooled one; of two at once one waits for its next turn."""
        pooled = self.step_cost(key)
        merged = measured if pooled is None else merge_step_costs(pooled, measured)
        self._redis.set(self._key("step-cost", key), _encode(merged), ex=WEEK_S)
        return merged

    def calibration(self, key: str) -> bytes | None:
        """The calibration shared under a `knowledge.calibration_key`; None if there is none."""
        blob: bytes | None = self._redis.get(self._key("calibration", key))
        return blob

    def share_calibration(self, key: str, table: bytes) -> None:
        """Share a `CalibrationTable` in JSON with the verifiers that run, and with those to come."""
        self._redis.set(self._key("calibration", key), table, ex=MONTH_S)

    # --- autoscaling decisions, for status and top

    def put_sizing(self, decisions: Mapping[str, SizingDecision]) -> None:
        """Remember what the autoscaling policy decided and why, by deployment."""
        if decisions:
            pipe = self._redis.pipeline(transaction=False)
            pipe.hset(self._key("sizing"), mapping={name: _encode(d) for name, d in decisions.items()})
            pipe.expire(self._key("sizing"), 60)
            pipe.execute()

    def sizing(self) -> dict[str, SizingDecision]:
        """The autoscaling policy's last decisions by deployment."""
        fields = self._redis.hgetall(self._key("sizing"))
        return {name.decode(): _sizing.decode(blob) for name, blob in fields.items()}


def _readable(raw: msgspec.Raw) -> LoadSample | None:
    try:
        return _sample.decode(raw)
    except msgspec.MsgspecError:
        return None
