"""API keys and what each may still ask for.

Keys are held as SHA-256 digests only, and every comparison looks at all of them. Counting is by process: with
several ingress replicas each of them grants a key its limits.
"""

import hashlib
import hmac
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml
from pydantic import Field, ValidationError

from dspark_ray.config import FrozenModel, KeyLimits, SecurityConfig
from dspark_ray.errors import ConfigError, RequestError

logger = logging.getLogger(__name__)

MIN_KEY_CHARS = 16
FILE_CHECK_INTERVAL_S = 2.0
SLOT_RETRY_AFTER_S = 1.0


class ApiKeyEntry(FrozenModel):
    """One key of the key file."""

    name: str = Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")
    """Who holds the key; what logs call it."""
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    """Lower-case hex SHA-256 of the key."""
    models: tuple[str, ...] | None = None
    """Model ids the key may use; all when unset."""
    limits: KeyLimits | None = None
    """Its own limits; security.key_limits when unset."""


class ApiKeyFile(FrozenModel):
    """The key file: a list of entries under ``keys``."""

    keys: tuple[ApiKeyEntry, ...]
    """All keys; none admits nobody."""


@dataclass
class TokenBucket:
    """A rate limit. Time is seconds of whatever clock the caller passes in."""

    rate_per_s: float
    capacity: int
    tokens: float
    updated_s: float

    def wait_s(self, now_s: float) -> float:
        """Take one token and return 0, or take none and return the seconds until there is one."""
        self.tokens = min(self.capacity, self.tokens + max(0.0, now_s - self.updated_s) * self.rate_per_s)
        self.updated_s = now_s
        if self.tokens >= 1.0:
            self.tokens -= 1.0
            return 0.0
        return (1.0 - self.tokens) / self.rate_per_s


@dataclass
class Principal:
    """Whoever holds a key, and what they have under way in this process."""

    name: str
    models: frozenset[str] | None
    limits: KeyLimits
    bucket: TokenBucket | None
    ongoing: int = 0

    def may_use(self, model_id: str) -> bool:
        """Whether the key's allow-list admits the model."""
        return self.models is None or model_id in self.models

    def enter(self, now_s: float) -> None:
        """Count one more request under way.

        Raises:
            RequestError: 429, with the time to wait; nothing was counted.
        """
        slots = self.limits.concurrent_requests
        if slots is not None and self.ongoing >= slots:
            raise RequestError(
                f"{slots} requests are under way already, the most allowed at once; wait for one to finish.",
                status=429,
                code="concurrency_limit_exceeded",
                retry_after_s=SLOT_RETRY_AFTER_S,
            )
        wait_s = self.bucket.wait_s(now_s) if self.bucket else 0.0
        if wait_s > 0:
            raise RequestError(
                f"The rate limit of {self.limits.requests_per_minute:g} requests per minute is reached.",
                status=429,
                code="rate_limit_exceeded",
                retry_after_s=wait_s,
            )
        self.ongoing += 1

    def leave(self) -> None:
        """Count one request less."""
        self.ongoing -= 1

    def adopt(self, other: "Principal") -> None:
        """Take over another's name, models and limits; requests under way stay counted here."""
        self.name, self.models, self.limits, self.bucket = (
            other.name,
            other.models,
            other.limits,
            other.bucket,
        )


def _new_bucket(limits: KeyLimits, now_s: float) -> TokenBucket | None:
    if limits.requests_per_minute is None:
        return None
    return TokenBucket(limits.requests_per_minute / 60.0, limits.burst_requests, limits.burst_requests, now_s)


class KeyStore:
    """The deployment's keys: from an environment variable, a file, or both.

    With neither configured everybody is one anonymous principal under ``security.key_limits``. The file is
    looked at again every `FILE_CHECK_INTERVAL_S`: a changed one takes effect without a restart (running
    counts of unchanged keys stay), and a broken one leaves the last good keys in force.

    Raises:
        ConfigError: keys are asked for but the variable or the file holds none that are usable.
    """

    def __init__(self, security: SecurityConfig, environ: Mapping[str, str], clock: Callable[[], float]):
        self._security = security
        self._clock = clock
        self._file = Path(security.api_keys_file) if security.api_keys_file else None
        self._stamp = self._file_stamp()
        self._checked_s = clock()
        self._from_environ = self._read_environ(environ)
        self._principals: dict[bytes, tuple[ApiKeyEntry, Principal]] = {}
        self._anonymous: Principal | None = None
        if security.api_keys_env is None and self._file is None:
            self._anonymous = Principal(
                "anonymous", None, security.key_limits, _new_bucket(security.key_limits, clock())
            )
        else:
            self._install((*self._from_environ, *self._read_file()))

    def authenticate(self, authorization: bytes | None) -> Principal:
        """Return whose key the Authorization header carries.

        Raises:
            RequestError: 401, when keys are asked for and this is none of them.
        """
        if self._anonymous is not None:
            return self._anonymous
        self._refresh()
        scheme, _, token = (authorization or b"").partition(b" ")
        if scheme.lower() != b"bearer" or not token.strip():
            raise RequestError(
                "No API key: send one as 'Authorization: Bearer KEY'.", status=401, code="missing_api_key"
            )
        presented = hashlib.sha256(token.strip()).digest()
        found = None
        for digest, (_, principal) in self._principals.items():
            if hmac.compare_digest(digest, presented):
                found = principal
        if found is None:
            raise RequestError("Incorrect API key.", status=401, code="invalid_api_key")
        return found

    def _read_environ(self, environ: Mapping[str, str]) -> tuple[ApiKeyEntry, ...]:
        name = self._security.api_keys_env
        if name is None:
            return ()
        keys = [key.strip() for key in environ.get(name, "").split(",") if key.strip()]
        if not keys:
            raise ConfigError(
                f"security.api_keys_env: the variable {name} is unset or empty; put API keys in it"
            )
        if any(len(key) < MIN_KEY_CHARS for key in keys):
            raise ConfigError(
                f"security.api_keys_env: {name} holds a key shorter than {MIN_KEY_CHARS} characters"
            )
        digests = [hashlib.sha256(key.encode()).hexdigest() for key in keys]
        return tuple(ApiKeyEntry(name=f"env-{digest[:8]}", sha256=digest) for digest in digests)

    def _read_file(self) -> tuple[ApiKeyEntry, ...]:
        if self._file is None:
            return ()
        try:
            entries = ApiKeyFile.model_validate(yaml.safe_load(self._file.read_text())).keys
        except OSError as error:
            raise ConfigError(f"security.api_keys_file: {self._file}: {error.strerror}") from None
        except yaml.YAMLError:
            raise ConfigError(f"security.api_keys_file: {self._file} is not YAML") from None
        except ValidationError as error:
            # Its own text would quote the input, and someone may have put a key where its hash belongs.
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"])) or "the document"
            raise ConfigError(f"security.api_keys_file: {self._file}: {place}: {first['msg']}") from None
        return entries

    def _file_stamp(self) -> tuple[int, int] | None:
        if self._file is None:
            return None
        try:
            stat = self._file.stat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_size

    def _refresh(self) -> None:
        now_s = self._clock()
        if self._file is None or now_s - self._checked_s < FILE_CHECK_INTERVAL_S:
            return
        self._checked_s = now_s
        stamp = self._file_stamp()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._install((*self._from_environ, *self._read_file()))
        except ConfigError as error:
            logger.error("API keys not reloaded, the last good ones stay in force: %s", error)
        else:
            logger.info("API keys reloaded: %d", len(self._principals))

    def _install(self, entries: tuple[ApiKeyEntry, ...]) -> None:
        digests = [bytes.fromhex(entry.sha256) for entry in entries]
        if len(set(digests)) != len(digests):
            twice = next(
                entry.name for entry, d in zip(entries, digests, strict=True) if digests.count(d) > 1
            )
            raise ConfigError(f"security.api_keys_file: {twice}: the same key is listed twice")
        principals: dict[bytes, tuple[ApiKeyEntry, Principal]] = {}
        for digest, entry in zip(digests, entries, strict=True):
            known = self._principals.get(digest)
            if known and known[0] == entry:
                principals[digest] = known
                continue
            limits = entry.limits or self._security.key_limits
            models = None if entry.models is None else frozenset(entry.models)
            fresh = Principal(entry.name, models, limits, _new_bucket(limits, self._clock()))
            if known:
                # Requests under way give their slots back to the object that they took them from.
                known[1].adopt(fresh)
            principals[digest] = (entry, known[1] if known else fresh)
        self._principals = principals
