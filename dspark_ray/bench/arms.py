"""What is compared: arms, each a server, a model and a way to speculate; and the load that is offered to them."""

from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from dspark_ray.config import FrozenModel
from dspark_ray.errors import ConfigError

Mode = Literal["configured", "off", "fixed_len", "fixed_tau", "tau", "throughput", "tau+throughput"]


class Arm(FrozenModel):
    """One side of the comparison."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9+._-]*$")
    """What tables and plots call it."""
    url: str = Field(pattern=r"^https?://")
    """Of the OpenAI API, with /v1."""
    model: str = ""
    """Model id; the server's first model when empty."""
    mode: Mode | None = None
    """Verify mode that is set before each of its turns. None: a server that we only talk HTTP with."""
    tau: float | None = Field(default=None, ge=0, le=1)
    """Threshold, in modes that have one."""
    verify_len: int | None = Field(default=None, ge=0)
    """Verified drafts, in mode fixed_len."""

    @model_validator(mode="after")
    def _settings_need_a_mode(self) -> "Arm":
        if self.mode is None and (self.tau is not None or self.verify_len is not None):
            raise ValueError("tau and verify_len need a mode")
        return self


class Offer(FrozenModel):
    """A load: so many streams at a time, each followed by the next, or arrivals at a rate."""

    streams: int | None = Field(default=None, ge=1)
    """Closed loop: requests under way at any time."""
    rate_per_s: float | None = Field(default=None, gt=0)
    """Open loop: Poisson arrivals a second."""
    requests: int = Field(ge=1)
    """Requests of one turn."""

    @model_validator(mode="after")
    def _one_kind(self) -> "Offer":
        if (self.streams is None) == (self.rate_per_s is None):
            raise ValueError("either streams or rate_per_s")
        return self

    @property
    def label(self) -> str:
        """In words."""
        if self.streams is None:
            return f"{self.rate_per_s:g} requests/s"
        return f"{self.streams} stream{'s' if self.streams > 1 else ''}"


def parse_arm(text: str, url: str) -> Arm:
    """An arm from ``name`` or ``name:key=value,...``.

    Args:
        text: as on the command line; keys are the fields of `Arm`.
        url: where the text names none.

    Raises:
        ConfigError: naming the arm and the field.
    """
    name, _, rest = text.partition(":")
    fields: dict[str, Any] = {"name": name, "url": url}
    for pair in filter(None, rest.split(",")):
        key, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"--arm {text}: {pair!r} is not key=value")
        fields[key.strip()] = value.strip()
    try:
        return Arm.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "arm"
        raise ConfigError(f"--arm {text}: {where}: {first['msg']}") from None


def turns(arms: list[Arm], rounds: int) -> list[tuple[int, Arm]]:
    """The order of play: (round, arm), each round beginning with another arm, so that none always leads."""
    return [(number, arms[(number + i) % len(arms)]) for number in range(rounds) for i in range(len(arms))]
