"""What a running replica takes over from its deployment's ``user_config``, without a restart.

Serve gives every replica the new ``user_config`` of an ordinary ``serve deploy``, and ends a replica that refuses it.
So nothing here raises: a configuration that cannot work is logged, and the last good one stays in force. Loads neither
vllm nor torch: a drafter replica starts with it.
"""

import logging
from pathlib import Path
from typing import Any, Protocol

from dspark_ray.config import (
    AppConfig,
    ControlConfig,
    LiveConfig,
    ModelConfig,
    SchedulingConfig,
    overlaid,
    parse_live_config,
)
from dspark_ray.errors import ConfigError
from dspark_ray.serving.model_folders import checkpoint_folder

logger = logging.getLogger(__name__)


class LiveSettings:
    """The configuration of one replica as it is now.

    Args:
        config: of the application, as started.
        model: served by the replica; None for an ingress.
    """

    def __init__(self, config: AppConfig, model: ModelConfig | None = None):
        self._config = config
        self._started = model
        self.control: ControlConfig = config.control
        """Bounds in force."""
        self._model = model

    @property
    def model(self) -> ModelConfig:
        """The replica's model, with scheduling and drafter as they are now."""
        if self._model is None:
            raise ValueError("an ingress has no model")
        return self._model

    def accept(self, user_config: Any) -> bool:
        """Take a ``user_config`` over; false, and nothing changes, where it cannot work."""
        try:
            live = parse_live_config(user_config, self._config)
            model = self._started and live_model(self._started, live)
        except ConfigError as error:
            logger.error("user_config is not taken over, the last good one stays in force: %s", error)
            return False
        self.control = overlaid(self._config.control, live.control)
        self._model = model
        return True

    def keep_drafter_of(self, model: ModelConfig) -> None:
        """Go back to another model's drafter: the new one could not be used."""
        self._model = self.model.model_copy(update={"drafter": model.drafter})


def live_model(model: ModelConfig, live: LiveConfig) -> ModelConfig:
    """A model as a ``user_config`` has it.

    Raises:
        ConfigError: its drafter is not on this node.
    """
    drafter = model.drafter
    if live.drafter_source is not None and drafter.placement in ("remote", "colocated"):
        drafter = overlaid(drafter, {"source": live.drafter_source})
    changed = model.model_copy(
        update={"drafter": drafter, "scheduling": overlaid(model.scheduling, live.scheduling)}
    )
    if drafter != model.drafter:
        checkpoint_folder(changed)
    return changed


class EngineReport(Protocol):
    """`dspark_ray.serving.engine_report.EngineReport`, as far as it is told."""

    def configure(self, control: ControlConfig, scheduling: SchedulingConfig) -> None:
        """Follow changed bounds and modes."""

    async def swap_drafter(self, checkpoint: Path) -> None:
        """Draft with another checkpoint, or raise a ConfigError."""


async def reconfigure_engine(settings: LiveSettings, report: EngineReport, user_config: Any) -> bool:
    """Have an engine replica follow a ``user_config``.

    Returns:
        Whether its drafter has been replaced.
    """
    before = settings.model
    if not settings.accept(user_config):
        return False
    report.configure(settings.control, settings.model.scheduling)
    if settings.model.drafter.source == before.drafter.source:
        return False
    folder = checkpoint_folder(settings.model)
    try:
        await report.swap_drafter(folder)
    except ConfigError as error:
        settings.keep_drafter_of(before)
        logger.error("drafter %s is not taken over: %s", folder, error)
        return False
    logger.warning("drafter %s replaces %s", folder, before.drafter.source)
    return True
