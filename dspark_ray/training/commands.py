"""`dspark-ray train | regenerate | evaluate | calibrate`; heavy libraries are imported inside them."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import click
import yaml

_EXISTING = click.Path(exists=True, path_type=Path)
_FOLDER = click.Path(file_okay=False, path_type=Path)


def _target(_ctx: click.Context, _param: click.Parameter, value: str) -> Path:
    from dspark_ray.training.config import target_folder

    return target_folder(value)


_TARGET = click.option(
    "--target", required=True, callback=_target, help="A folder, a Hugging Face id, or demo:smollm2."
)


@click.command()
@click.argument("config_file", metavar="CONFIG", type=_EXISTING)
@click.option("--set", "overrides", multiple=True, metavar="NAME=VALUE", help="Override a field of CONFIG.")
@click.option("--device", default=None, help="Torch device, e.g. cuda.")
@click.option("--dry-run", is_flag=True, help="Print the resolved configuration and stop.")
def train(config_file: Path, overrides: tuple[str, ...], device: str | None, dry_run: bool) -> None:
    """Train a drafter as CONFIG (TOML or YAML) says; a run that was stopped goes on where it was.

    Data parallel: `torchrun --nproc-per-node N --no-python dspark-ray train CONFIG`.
    """
    from dspark_ray.training.config import load_train_config

    if device is not None:
        overrides = (*overrides, f"device={device}")
    config = load_train_config(config_file, overrides)
    if dry_run:
        click.echo(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
        return
    from dspark_ray.training.plots import plot_run
    from dspark_ray.training.trainer import run_training

    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    run_training(config, rank=rank, world=world)
    if rank == 0:
        plot_run(config.run_dir)
    if world > 1:
        # A thread of gloo that lets go of its last tensor while the interpreter shuts down aborts the process.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


@click.command()
@_TARGET
@click.option("--prompts", type=_EXISTING, default=None, help="JSON lines with `messages` or `prompt`.")
@click.option("--invent", type=int, default=0, help="Also let the target invent this many user turns.")
@click.option("--user-template", default="{prompt}", show_default=True, help="Wraps the last user turn.")
@click.option(
    "--output", type=click.Path(path_type=Path), required=True, help="Token JSON lines to append to."
)
@click.option(
    "--temperature", "temperatures", type=float, multiple=True, default=(0.0, 0.7), show_default=True
)
@click.option("--limit", type=int, default=None, help="Most answers to make in this call.")
@click.option("--max-new-tokens", type=int, default=256, show_default=True)
@click.option("--max-prompt-tokens", type=int, default=512, show_default=True)
@click.option("--batch-size", type=int, default=48, show_default=True)
@click.option("--dtype", default="bfloat16", show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
def regenerate(
    target: Path,
    prompts: Path | None,
    invent: int,
    user_template: str,
    output: Path,
    temperatures: tuple[float, ...],
    limit: int | None,
    max_new_tokens: int,
    max_prompt_tokens: int,
    batch_size: int,
    dtype: str,
    seed: int,
) -> None:
    """Have the target answer prompts, at temperatures that take turns. A killed call goes on where it was."""
    from itertools import chain, islice

    from rich.progress import Progress
    from transformers import AutoTokenizer

    from dspark_ray.training import regenerate as making

    if prompts is None and not invent:
        raise click.UsageError("name --prompts, --invent or both")
    tokenizer = AutoTokenizer.from_pretrained(target, local_files_only=True)
    engine = making.start_engine(
        target,
        max_model_len=max_prompt_tokens + max_new_tokens,
        batch_size=batch_size,
        dtype=dtype,
        seed=seed,
    )
    sources: Any = making.read_prompts(prompts, user_template) if prompts else ()
    if invent:
        texts = making.invent_prompts(engine, tokenizer, invent, max_prompt_tokens)
        own = (([{"role": "user", "content": text}], {"source": "invented"}) for text in texts)
        sources = chain(sources, own)
    done = making.finished_keys(output)
    jobs = list(islice(making.plan(sources, temperatures, tokenizer, done, max_prompt_tokens), limit))
    with output.open("a", encoding="utf-8") as file, Progress() as progress:
        bar = progress.add_task(f"answers ({len(done)} were done)", total=len(jobs))
        several = 4 * batch_size  # handed over at once: the engine is only at the end of them not full
        for start in range(0, len(jobs), several):
            batch = jobs[start : start + several]
            for record in making.answer(engine, batch, max_new_tokens, seed):
                file.write(json.dumps(record) + "\n")
            file.flush()
            progress.advance(bar, len(batch))


def _measuring(command: Any) -> Any:
    """Options that evaluate and calibrate share."""
    for option in reversed(
        (
            _TARGET,
            click.option(
                "--drafter", type=_EXISTING, required=True, help="Directory of the draft checkpoint."
            ),
            click.option("--dataset", type=_EXISTING, default=None, help="JSON lines of prompts."),
            click.option("--skip", type=int, default=0, help="Leading prompts to leave out."),
            click.option("--limit", type=int, default=None, help="Most prompts."),
            click.option("--temperature", type=float, default=0.0, show_default=True),
            click.option("--max-new-tokens", type=int, default=192, show_default=True),
            click.option("--batch-size", type=int, default=16, show_default=True),
            click.option("--draft-len", type=int, default=None, help="γ', at most the checkpoint's γ."),
            click.option("--window", type=int, default=None, help="Context rows that the drafter keeps."),
            click.option("--dtype", default="bfloat16", show_default=True),
            click.option("--seed", type=int, default=0, show_default=True),
            click.option("--plots", type=_FOLDER, default=None, help="Folder for PNG plots."),
        )
    ):
        command = option(command)
    return command


def _rounds(
    target: Path, drafter: Path, dataset: Path, skip: int, limit: int | None, options: dict[str, Any]
) -> Any:
    from rich.console import Console
    from rich.progress import Progress
    from transformers import AutoTokenizer

    from dspark_ray.training.evaluate import collect_rounds, read_prompt_ids

    tokenizer = AutoTokenizer.from_pretrained(target, local_files_only=True)
    prompts = read_prompt_ids(dataset, tokenizer, skip, limit)
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task(dataset.name, total=len(prompts))
        return collect_rounds(
            target, drafter, prompts, **options, progress=lambda count: progress.advance(bar, count)
        )


@click.command()
@_measuring
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def evaluate(
    target: Path,
    drafter: Path,
    dataset: Path | None,
    skip: int,
    limit: int | None,
    plots: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Decode prompts speculatively and report how well the drafter did.

    Drafts are argmax; acceptance is exact match with the target's own choice, at any temperature.
    """
    from dspark_ray.training.evaluate import calibration_of, measure, plot_measures

    if dataset is None:
        raise click.UsageError("--dataset is needed")
    rounds = _rounds(target, drafter, dataset, skip, limit, options)
    scaling = calibration_of(drafter, options["temperature"], rounds.confidence_logits.shape[1])
    figures = measure(rounds, scaling)
    if plots is not None:
        plot_measures(rounds, scaling, dataset.stem, plots)
    report = {
        "dataset": dataset.name,
        "prompts": len(rounds.outputs),
        "temperature": options["temperature"],
        "calibrated": scaling is not None,
        **figures,
    }
    if as_json:
        click.echo(json.dumps(report))
        return
    for name, value in report.items():
        if name != "thresholds":
            click.echo(f"{name:24} {value}")
    click.echo("threshold  verified  accept_len  acceptance")
    for row in report["thresholds"]:
        click.echo(f"{row['tau']:9}  {row['verified']:8}  {row['accept_len']:10}  {row['acceptance']:10}")


@click.command()
@_measuring
@click.option("--from-logs", default=None, metavar="SOURCE", help="Redis URL of a deployment, or JSON lines.")
@click.option("--model", default=None, help="Model id in the deployment, with a Redis URL.")
@click.option("--share", is_flag=True, help="With a Redis URL: its verifiers use the result at once.")
def calibrate(
    target: Path,
    drafter: Path,
    dataset: Path | None,
    skip: int,
    limit: int | None,
    plots: Path | None,
    from_logs: str | None,
    model: str | None,
    share: bool,
    **options: Any,
) -> None:
    """Fit the drafter's confidences and write sts.json beside its weights.

    With --dataset: on half of the prompts, reporting the error on the other half. With --from-logs: on rounds
    that verifiers verified in full while serving.
    """
    from dspark_ray.control.knowledge import calibration_key
    from dspark_ray.training import calibrate as fitting

    if (dataset is None) == (from_logs is None):
        raise click.UsageError("name either --dataset or --from-logs")
    if share and (from_logs is None or "://" not in from_logs):
        raise click.UsageError("--share needs --from-logs with the deployment's Redis URL")
    key = calibration_key(drafter)  # as the deployment knows this checkpoint: before anything is written
    if from_logs is not None:
        records = fitting.read_logs(from_logs, model)
        fitted = fitting.fit_logs(records, dataset=f"serving logs, {len(records)} rounds")
    else:
        rounds = _rounds(target, drafter, dataset, skip, limit, options)
        fit_on, report_on = fitting.split_rounds(rounds, options["seed"])
        one = fitting.fit_rounds(fit_on, temperature=options["temperature"], dataset=dataset.name)
        before, after = fitting.held_out_error(report_on, one.scaling)
        click.echo(f"held-out ECE by position: {before} -> {after}, mean {sum(after) / len(after):.4f}")
        if plots is not None:
            from dspark_ray.training.evaluate import plot_measures

            plot_measures(report_on, one.scaling, dataset.stem, plots)
        fitted = [one]
    table = fitting.store(drafter, fitted)
    if share:
        fitting.share(from_logs, key, table)
    for entry in fitted:
        click.echo(
            f"{entry.exactness}, {entry.temperature_bucket}, block {entry.block_size}: "
            f"T = {[round(t, 3) for t in entry.temperatures]}, "
            f"offsets {[round(o, 3) for o in entry.scaling.offsets]} from {entry.sample_count} rounds"
        )
