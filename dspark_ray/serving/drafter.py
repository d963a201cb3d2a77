"""The drafter pool of one model: Serve keeps the replicas, each replica keeps one drafting actor.

Serve does what it does for any deployment (lifecycle, health, scaling); draft calls never pass through it.
They go from a verifier's worker straight to the ZeroMQ socket of a `DrafterEngine`, a plain actor that
restarts on the same port when it dies, so that its verifiers reconnect by themselves and feed it again.
"""

import asyncio
import logging
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ray
from ray import serve

from dspark_ray.config import AppConfig, DrafterConfig, ModelConfig
from dspark_ray.errors import ConfigError, DrafterUnavailableError
from dspark_ray.hardware import cpu_computes_bf16, openmp_env
from dspark_ray.protocol import LoadSample, RoundRecord
from dspark_ray.serving.drafter_directory import NAMESPACE, engine_name
from dspark_ray.serving.live import LiveSettings
from dspark_ray.serving.model_folders import checkpoint_folder, target_folder
from dspark_ray.serving.names import LEAST_CPUS
from dspark_ray.serving.ports import free_port_range, peer_host
from dspark_ray.serving.telemetry import (
    ReplicaIdentity,
    device_kind,
    process_stats,
    report_forever,
    start_agent,
)

logger = logging.getLogger(__name__)

# A verifier has at most max_num_seqs entries in a call; below that, a few verifiers fit in one batch.
LEAST_BATCH = 64
WATCH_PERIOD_S = 1.0
HANG_AFTER_S = 10.0  # a busy machine keeps a healthy engine silent for more than 5
START_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class EnginePlan:
    """What a `DrafterEngine` is started with, and restarted with."""

    checkpoint: str
    target: str
    endpoint: str
    """ZeroMQ endpoint to bind."""
    window_tokens: int
    cache_mib: float
    max_batch: int
    threads: int
    batch_wait_s: float
    secret_env: str
    device: str


class DrafterEngine:
    """The actor that drafts: a `DraftRunner` behind a `DrafterService`, in a thread of its own.

    Args:
        plan: what to load and where to listen.

    Raises:
        ConfigError: the checkpoint cannot be read, does not fit the target, or its cache is too small.
    """

    def __init__(self, plan: EnginePlan):
        import torch  # only the actor drafts; the replica beside it stays light

        from dspark_ray.drafter.checkpoint import load_drafter
        from dspark_ray.drafter.fingerprint import fingerprint
        from dspark_ray.drafter.runner import DraftRunner
        from dspark_ray.drafter.service import DrafterService

        torch.set_num_threads(plan.threads)
        checkpoint, target = Path(plan.checkpoint), Path(plan.target)
        slow_bf16 = plan.device == "cpu" and not cpu_computes_bf16()
        dtype = torch.float32 if slow_bf16 else None  # else the checkpoint's own
        model = load_drafter(checkpoint, target=target, dtype=dtype, device=plan.device)
        self._runner = DraftRunner(
            model,
            cache_bytes=int(plan.cache_mib * 2**20),
            window=plan.window_tokens,
            max_batch=plan.max_batch,
            device=plan.device,
            dtype=model.dtype,
        )
        self._service = DrafterService(
            self._runner,
            fingerprint=fingerprint(checkpoint, target),
            width=model.config.hidden_size,
            max_batch=plan.max_batch,
            secret=os.environ.get(plan.secret_env) or None,
            bind=plan.endpoint,
            batch_wait_s=plan.batch_wait_s,
        )
        threading.Thread(target=self._serve, name="dspark-drafter", daemon=True).start()

    def _serve(self) -> None:
        try:
            self._service.run()
        except BaseException:
            logger.exception("the drafter's loop broke; its actor restarts")
            os._exit(1)

    def endpoint(self) -> str:
        """Where verifiers send their draft calls."""
        return self._service.endpoint

    def snapshot(self) -> dict[str, Any]:
        """Counters of the service, the use of its slots, and the seconds since its loop last came round."""
        return {
            **asdict(self._service.counters),
            "slots_used": self._runner.slots_in_use,
            "slots_total": self._runner.capacity,
            "silent_s": time.monotonic() - self._service.came_round_s,
            "pid": os.getpid(),
        }


class DrafterServer:
    """One replica of the pool: starts its engine on its own node, watches it, reports for it.

    Args:
        model: the model whose drafter this is.
        config: of the application.
    """

    async def __init__(self, model: ModelConfig, config: AppConfig):
        context = serve.get_replica_context()
        self._secret_env = config.security.secret_env
        self._settings = LiveSettings(config, model)
        self._name = engine_name(context.app_name, model.id, context.replica_id.unique_id)
        self._generation = 0
        self._replacing = asyncio.Lock()
        self._restarts = 0
        await self._start_engine()
        self._identity = ReplicaIdentity.of_this_replica("drafter", model.id, device_kind(model.drafter))
        agent = start_agent(config.control, config.telemetry)
        self._tasks = [
            asyncio.create_task(self._watch_forever()),
            asyncio.create_task(report_forever(agent, self._collect, config.telemetry.sample_interval_s)),
        ]

    async def _start_engine(self) -> None:
        """Start the engine of the drafter that is configured now, and wait until it answers."""
        model = self._settings.model
        role = model.drafter
        self._plan = engine_plan(model, self._secret_env)
        self._generation += 1  # the name of one that has just been killed may still be taken
        # Owned by this replica: it dies with it, and Ray restarts it when it dies alone.
        self._engine = (
            ray.remote(DrafterEngine)
            .options(
                name=f"{self._name}.{self._generation}",
                namespace=NAMESPACE,
                max_restarts=-1,
                max_concurrency=2,
                num_cpus=role.cpus,
                num_gpus=role.gpus,
                resources=role.resources,
                runtime_env={"env_vars": engine_env(model)},
            )
            .remote(self._plan)
        )
        self._snapshot: dict[str, Any] = await asyncio.wait_for(
            self._engine.snapshot.remote(), START_TIMEOUT_S
        )
        self._heard_s = time.monotonic()

    async def reconfigure(self, user_config: Any) -> None:
        """Serve's call when the deployment's user_config has changed; see `dspark_ray.config.LiveConfig`."""
        async with self._replacing:
            before = self._settings.model
            if not self._settings.accept(user_config) or self._settings.model.drafter == before.drafter:
                return
            ray.kill(self._engine, no_restart=True)
            try:
                await self._start_engine()
            except (ray.exceptions.RayError, TimeoutError, ConfigError) as error:
                logger.error("drafter %s is not taken over: %s", self._settings.model.drafter.source, error)
                ray.kill(self._engine, no_restart=True)
                self._settings.keep_drafter_of(before)
                await self._start_engine()

    async def _watch_forever(self) -> None:
        """Read the engine's counters; one that hangs is killed, and Ray starts it anew."""
        while True:
            await asyncio.sleep(WATCH_PERIOD_S)
            async with self._replacing:
                await self._watch()

    async def _watch(self) -> None:
        try:
            snapshot = await asyncio.wait_for(self._engine.snapshot.remote(), HANG_AFTER_S)
        except TimeoutError:
            self._restart("does not answer")
            return
        except ray.exceptions.RayError:
            return  # it is restarting; check_health bounds how long that may take
        self._snapshot, self._heard_s = snapshot, time.monotonic()
        if snapshot["silent_s"] > HANG_AFTER_S:
            self._restart("no longer serves its socket")

    def _restart(self, reason: str) -> None:
        logger.warning("drafter %s: its engine %s and is started anew", self._identity.replica, reason)
        self._restarts += 1
        ray.kill(self._engine, no_restart=False)

    async def check_health(self) -> None:
        """Serve's question; the replica is replaced when its engine stays away.

        Raises:
            DrafterUnavailableError: nothing heard from the engine for too long.
        """
        silent_s = time.monotonic() - self._heard_s
        if silent_s > START_TIMEOUT_S:
            raise DrafterUnavailableError(f"the engine has been silent for {silent_s:.0f} s")

    async def _collect(self, _policy: Any) -> tuple[LoadSample, Sequence[RoundRecord]]:
        snapshot = self._snapshot
        sample = self._identity.sample(
            endpoint=self._plan.endpoint,
            requests_waiting=snapshot["queued"],
            requests_running=snapshot["slots_used"],
            slots_used=snapshot["slots_used"],
            slots_total=snapshot["slots_total"],
            step_time_s=snapshot["compute_ms"] / 1e3,
            tokens_drafted=snapshot["tokens_drafted"],
            draft_calls=snapshot["calls"],
            deadline_misses=snapshot["late"],
        )
        return sample, ()

    async def stats(self) -> dict[str, Any]:
        """The engine's counters, at most a second old, where it listens, and how often it was restarted."""
        engine = {**self._snapshot, "engine_pid": self._snapshot["pid"]}
        return {**engine, **process_stats(), "endpoint": self._plan.endpoint, "restarts": self._restarts}


def engine_plan(model: ModelConfig, secret_env: str) -> EnginePlan:
    """What the drafter of a model is started with on this node.

    Raises:
        ConfigError: target or drafter is not on this node, or there is no secret and the cluster has several.
    """
    drafter = model.drafter
    return EnginePlan(
        checkpoint=str(checkpoint_folder(model)),
        target=str(target_folder(model)),
        endpoint=f"tcp://{peer_host(secret_env)}:{free_port_range()}",
        window_tokens=drafter.window_tokens,
        cache_mib=drafter.cache_mib,
        max_batch=max(model.target.max_num_seqs, LEAST_BATCH),
        threads=drafter.threads,
        batch_wait_s=drafter.batch_wait_ms / 1e3,
        secret_env=secret_env,
        device="cuda" if drafter.gpus else "cpu",
    )


def drafter_bundle(role: DrafterConfig) -> dict[str, float]:
    """What one replica of the pool reserves, for its drafting actor."""
    bundle = {"CPU": max(role.cpus, LEAST_CPUS), "GPU": role.gpus, **role.resources}
    if role.accelerator_type:
        bundle[f"accelerator_type:{role.accelerator_type}"] = 0.001
    return {name: amount for name, amount in bundle.items() if amount}


def engine_env(model: ModelConfig) -> dict[str, str]:
    """Environment of the drafting actor; the role's own entries win."""
    env = {"OMP_NUM_THREADS": str(model.drafter.threads)}
    if model.drafter.gpus == 0:
        env |= openmp_env()
    return env | model.drafter.env
