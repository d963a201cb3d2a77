"""The one exception tree.

DSparkError
├── ConfigError              a configuration cannot work; raised at start-up, names the field
│   ├── CheckpointError      a draft checkpoint is unreadable or does not fit its target
│   └── ExactnessError       two settings together would change what the model says
├── ProtocolError            a peer sent something malformed, stale or unauthorised
├── DrafterUnavailableError  no drafter answered in time; costs speed, never an answer
└── RequestError             the client's request cannot be served; carries its HTTP status
"""


class DSparkError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(DSparkError):
    """A configuration that cannot work. The message names the field and says what to do."""


class CheckpointError(ConfigError):
    """A draft checkpoint that cannot be read or does not fit its target."""


class ExactnessError(ConfigError):
    """A combination of settings under which speculation would bias the output (spec section 4)."""


class ProtocolError(DSparkError):
    """A message between replicas that is malformed, stale, too large or from a stranger."""


class DrafterUnavailableError(DSparkError):
    """A drafter is busy, late or gone. The step goes on without drafts."""


class RequestError(DSparkError):
    """A client request that cannot be served.

    Attributes:
        status: HTTP status code to answer with.
        code: OpenAI-style machine-readable code, or None.
        param: the offending request field, or None.
        retry_after_s: when to try again, for the Retry-After header, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s
