"""The ``dspark-ray`` command.

Each subcommand lives with the code it runs and is imported only when it is called, so that ``--help`` loads
neither torch nor vllm.
"""

import importlib
from pathlib import Path

import click
import yaml

from dspark_ray import __version__
from dspark_ray.config import load_serve_file
from dspark_ray.errors import DSparkError
from dspark_ray.sources import check_sources

# name: (module:attribute, one line of help)
LAZY_COMMANDS = {
    "fetch-demo": ("dspark_ray.serving.demo_model:fetch_demo_command", "Obtain the demo model."),
    "generate": ("dspark_ray.reference:generate_command", "Speculative decoding in one process."),
    "train": ("dspark_ray.training.commands:train", "Train a drafter."),
    "regenerate": ("dspark_ray.training.commands:regenerate", "Have the target answer training prompts."),
    "evaluate": ("dspark_ray.training.commands:evaluate", "Measure a drafter by real speculative decoding."),
    "status": ("dspark_ray.serving.status_commands:status", "Show load, tau, drafters and sizing once."),
    "top": ("dspark_ray.serving.status_commands:top", "Watch the cluster live."),
    "mode": ("dspark_ray.serving.speculation_mode:mode_command", "Change the verify mode while it runs."),
    "bench": ("dspark_ray.bench.commands:bench", "Measure a running server under load."),
    "calibrate": ("dspark_ray.training.commands:calibrate", "Fit a drafter's confidences."),
}


class LazyGroup(click.Group):
    """A click group that imports a subcommand when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of all subcommands, sorted."""
        return sorted([*super().list_commands(ctx), *LAZY_COMMANDS])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The subcommand of that name, imported now if it is a lazy one."""
        if cmd_name not in LAZY_COMMANDS:
            return super().get_command(ctx, cmd_name)
        module, _, attribute = LAZY_COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """List subcommands from the table, without importing them."""
        own = {name: command.get_short_help_str(80) for name, command in self.commands.items()}
        lazy = {name: text for name, (_, text) in LAZY_COMMANDS.items()}
        with formatter.section("Commands"):
            formatter.write_dl(sorted({**own, **lazy}.items()))

    def invoke(self, ctx: click.Context) -> object:
        """Run the subcommand; our own errors become one line and exit status 2."""
        try:
            return super().invoke(ctx)
        except DSparkError as error:
            raise click.UsageError(str(error)) from None


@click.group(cls=LazyGroup)
@click.version_option(__version__)
def main() -> None:
    """Serve LLMs faster by DSpark speculative decoding on Ray Serve."""


@main.group()
def config() -> None:
    """Look at configuration files."""


@config.command("show")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--dry-run", is_flag=True, help="Check the file and print only a summary line.")
def config_show(file: Path, dry_run: bool) -> None:
    """Print FILE, a Serve config, with every default resolved.

    The models that it names are looked for as at start-up, and each drafter is compared with its target.
    """
    apps = load_serve_file(file)
    for app in apps.values():
        check_sources(app)
    if dry_run:
        for name, app in apps.items():
            click.echo(
                f"{file}: application {name!r} is valid, models: {', '.join(m.id for m in app.models)}"
            )
        return
    click.echo(
        yaml.safe_dump({name: app.model_dump(mode="json") for name, app in apps.items()}, sort_keys=False)
    )
