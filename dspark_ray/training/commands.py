"""`dspark-ray train | regenerate | evaluate | calibrate`. Heavy libraries are imported inside the commands."""

import os
from pathlib import Path

import click
import yaml

_EXISTING = click.Path(exists=True, path_type=Path)


@click.command()
@click.argument("config_file", metavar="CONFIG", type=_EXISTING)
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="NAME=VALUE",
    help="Override a field, e.g. optimizer.lr=1e-3.",
)
@click.option("--device", default=None, help="Torch device, e.g. cuda.")
@click.option("--dry-run", is_flag=True, help="Print the resolved configuration and stop.")
def train(config_file: Path, overrides: tuple[str, ...], device: str | None, dry_run: bool) -> None:
    """Train a drafter as CONFIG (TOML or YAML) says; a run that was stopped goes on where it was.

    Data parallel: `torchrun --nproc-per-node N --no-python dspark-ray train CONFIG`.
    """
    from dspark_ray.training.config import load_train_config  # noqa: PLC0415

    if device is not None:
        overrides = (*overrides, f"device={device}")
    config = load_train_config(config_file, overrides)
    if dry_run:
        click.echo(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
        return
    from dspark_ray.training.trainer import run_training  # noqa: PLC0415

    run_training(config, rank=int(os.environ.get("RANK", "0")), world=int(os.environ.get("WORLD_SIZE", "1")))
