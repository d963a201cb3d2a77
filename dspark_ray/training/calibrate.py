"""Fitting a drafter's confidences and storing the result beside the checkpoint (dspark-spec section 3)."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from dspark_ray.config import ControlConfig, TelemetryConfig
from dspark_ray.decoding.calibration import (
    Calibration,
    CalibrationTable,
    Scaling,
    expected_calibration_error,
    fit_calibration,
    survivals,
    temperature_bucket,
)
from dspark_ray.errors import ConfigError
from dspark_ray.protocol import RoundRecord
from dspark_ray.training.evaluate import accepted_prefixes
from dspark_ray.training.regenerate import open_text
from dspark_ray.training.rounds import Rounds


def split_rounds(rounds: Rounds, seed: int) -> tuple[Rounds, Rounds]:
    """Two halves that share no request: one to fit on, one to report on."""
    requests = np.unique(rounds.request)
    first = np.random.default_rng(seed).permutation(requests)[: (len(requests) + 1) // 2]
    chosen = np.isin(rounds.request, first)
    return _rows(rounds, chosen), _rows(rounds, ~chosen)


def fit_rounds(rounds: Rounds, *, temperature: float, dataset: str) -> Calibration:
    """Temperatures from rounds that were verified in full under exact matching (the coupled rule)."""
    draft_len = rounds.confidence_logits.shape[1]
    return fit_calibration(
        rounds.confidence_logits,
        np.full(len(rounds.accept_len), draft_len),
        rounds.accept_len,
        exactness="coupled",
        temperature=temperature,
        dataset=dataset,
    )


def fit_logs(records: Sequence[RoundRecord], *, dataset: str) -> list[Calibration]:
    """One calibration for each (exactness, temperature bucket, block size) in a verifier's logs.

    Args:
        records: rounds that the verifier verified in full, whatever their kind.
        dataset: where they came from.

    Raises:
        ConfigError: there is no record.
    """
    if not records:
        raise ConfigError("the log holds no round: raise scheduling.full_round_share and serve some requests")
    kinds: dict[tuple[str, str, int], list[RoundRecord]] = {}
    for record in records:
        kind = (record.exactness, temperature_bucket(record.temperature), len(record.confidence_logits))
        kinds.setdefault(kind, []).append(record)
    return [
        fit_calibration(
            [r.confidence_logits for r in group],
            [r.verify_len for r in group],
            [r.accept_len for r in group],
            exactness=group[0].exactness,
            temperature=group[0].temperature,
            dataset=dataset,
        )
        for group in kinds.values()
    ]


def read_logs(source: str, model: str | None, count: int = 20_000) -> list[RoundRecord]:
    """Rounds that verifiers logged.

    Args:
        source: a deployment's Redis URL, or a file of `RoundRecord` JSON lines.
        model: the model's id in the deployment; needed with a URL.
        count: most rounds, the latest ones.

    Raises:
        ConfigError: a URL without a model, or a line that is no record.
    """
    if "://" not in source:
        try:
            return [msgspec.json.decode(line, type=RoundRecord) for line in open_text(Path(source))][-count:]
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigError(f"--from-logs {source}: {error}") from error
    if model is None:
        raise ConfigError("--from-logs with a Redis URL needs --model, the model's id in the deployment")
    from dspark_ray.control.telemetry import TelemetryStore

    return TelemetryStore(source, TelemetryConfig(), ControlConfig()).rounds(model, count)


def share(url: str, key: str, table: CalibrationTable) -> None:
    """Hand a calibration to the verifiers of a deployment, those that run and those that will start.

    Args:
        url: the deployment's Redis.
        key: `control.knowledge.calibration_key` of the checkpoint as the deployment has it.
        table: replaces the one beside the checkpoint.
    """
    from dspark_ray.control.telemetry import TelemetryStore

    store = TelemetryStore(url, TelemetryConfig(), ControlConfig())
    store.share_calibration(key, table.model_dump_json().encode())


def held_out_error(rounds: Rounds, scaling: Scaling) -> tuple[list[float], list[float]]:
    """ECE of the survivals at each position before and after, on rounds that were not fitted on."""
    outcome = accepted_prefixes(rounds)

    def errors(predicted: np.ndarray) -> list[float]:
        return [
            round(expected_calibration_error(predicted[:, k], outcome[:, k]), 4)
            for k in range(outcome.shape[1])
        ]

    return errors(survivals(rounds.confidence_logits)), errors(survivals(rounds.confidence_logits, scaling))


def store(folder: Path, fitted: Sequence[Calibration]) -> CalibrationTable:
    """Put calibrations beside a checkpoint; each replaces the one of its kind, others stay."""
    existing = CalibrationTable.load(folder)

    def kind(entry: Calibration) -> tuple[str, str, int]:
        return entry.exactness, entry.temperature_bucket, entry.block_size

    fresh = {kind(entry) for entry in fitted}
    kept = [entry for entry in existing.entries if kind(entry) not in fresh] if existing else []
    table = CalibrationTable(entries=[*kept, *fitted])
    table.save(folder)
    return table


def _rows(rounds: Rounds, chosen: np.ndarray) -> Rounds:
    return Rounds(
        rounds.confidence_logits[chosen],
        rounds.accept_len[chosen],
        rounds.emitted[chosen],
        rounds.request[chosen],
        rounds.outputs,
    )
