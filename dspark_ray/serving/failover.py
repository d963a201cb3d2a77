"""Answers that outlive the verifier they began on.

A verifier says `Accepted` at once, then its answer, and a heartbeat when it has nothing else to say. A verifier
that dies, or is silent for too long, is asked nothing more and listened to no longer (its stream is closed, so
nothing it may still say can reach the client), and another one is asked: from the beginning where the client
has got nothing yet, else to continue (see `dspark_ray.serving.continuation`).
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from vllm.v1.engine.exceptions import EngineDeadError

from dspark_ray.config import FailoverConfig
from dspark_ray.errors import DSparkError, ProtocolError, RequestError
from dspark_ray.serving.continuation import DONE, Transcript
from dspark_ray.serving.openai_errors import RETRY_AFTER_S
from dspark_ray.serving.streams import HEARTBEAT

logger = logging.getLogger(__name__)

HEARTBEATS_PER_SILENCE = 4
FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 4.0


@dataclass(frozen=True)
class Accepted:
    """A verifier has the request in hand."""

    target: str
    """Identifies its weights: an answer does not go on with another model's."""


class VerifierSilentError(DSparkError):
    """A verifier gives no sign of life, or no more of its answer."""


LOST = (RayActorError, EngineDeadError, VerifierSilentError)
NONE_FREE = (BackPressureError, DeploymentUnavailableError)
Ask = Callable[[Any], AsyncGenerator[Any]]
"""Sends a request to some verifier; closing the iterator cancels it there."""


class Answer:
    """One request's answer, whatever happens to the verifiers that give it.

    Args:
        ask: sends the request to some verifier.
        body: the request.
        not_continuable: what keeps its stream from being continued; None where nothing does.
        config: bounds.
        note: told the outcome of each loss: restarted, continued or given_up.
        clock: monotonic seconds.
        sleep: waits some seconds.
    """

    def __init__(
        self,
        ask: Ask,
        body: Any,
        not_continuable: str | None,
        config: FailoverConfig,
        note: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ):
        self._ask = ask
        self._body = body
        self._not_continuable = not_continuable
        self._config = config
        self._note = note
        self._clock = clock
        self._sleep = sleep
        self._transcript: Transcript | None = None
        if body.stream and not_continuable is None:
            self._transcript = Transcript(keep_token_ids=bool(body.return_token_ids))
        self._begun = False
        self._accepted = False
        self._target: str | None = None
        self._losses = 0
        self._retrying_until_s: float | None = None
        self._pause_s = 0.0

    async def parts(self) -> AsyncGenerator[Any]:
        """What the client gets: one response object, or strings of whole events.

        Raises:
            RequestError: the answer's verifier was lost, and it could not be continued.
            Exception: whatever else a verifier raises.
        """
        while True:
            request = self._body if self._transcript is None else self._transcript.request(self._body)
            self._accepted = False
            try:
                async with contextlib.aclosing(self._attempt(request)) as parts:
                    async for part in parts:
                        self._begun = True
                        self._retrying_until_s, self._pause_s = None, 0.0
                        yield part
                return
            except (*LOST, *NONE_FREE, RayTaskError, ProtocolError) as error:
                said = self._transcript
                if said is not None and said.finished and (said.closed or not _wants_usage(self._body)):
                    if not said.closed:
                        yield f"{DONE}\n\n"  # all that is missing
                    return
                self._judge(error)
            await self._sleep(self._pause_s)
            self._pause_s = min(max(2 * self._pause_s, FIRST_PAUSE_S), LONGEST_PAUSE_S)

    async def _attempt(self, request: Any) -> AsyncGenerator[Any]:
        """One verifier's answer, without what the client has already got of it."""
        if self._transcript is not None:
            self._transcript.begin_again()
        async with contextlib.aclosing(self._ask(request)) as parts:
            while True:
                # Until a verifier has it, a request may wait in a queue for as long as it takes. An interrupted
                # one does not rely on that: it might wait for the very replica that hangs.
                listening = self._accepted or self._retrying_until_s is not None
                try:
                    async with asyncio.timeout(self._config.silence_s if listening else None):
                        part = await anext(parts, None)
                except TimeoutError:
                    raise VerifierSilentError(f"silent for {self._config.silence_s:g} s") from None
                if part is None:
                    if self._transcript is not None and not self._transcript.closed:
                        raise VerifierSilentError("ended in the middle of its answer")
                    return
                self._accepted = True
                if isinstance(part, Accepted):
                    self._check_target(part.target)
                elif self._transcript is not None and isinstance(part, str):
                    if part := self._transcript.relay(part):
                        yield part
                elif part != HEARTBEAT:
                    yield part

    def _check_target(self, target: str) -> None:
        if self._begun and self._target not in (None, target):
            raise ProtocolError("its weights have been replaced meanwhile")
        self._target = target

    def _judge(self, error: Exception) -> None:
        """Return if another verifier is to be asked, else raise what the client is to see."""
        cause = error.cause if isinstance(error, RayTaskError) else error
        retrying = self._retrying_until_s is not None
        if not isinstance(cause, (*LOST, *NONE_FREE, ProtocolError) if retrying else LOST):
            raise error
        if self._accepted and isinstance(cause, LOST):
            self._losses += 1
        if self._retrying_until_s is None:
            self._retrying_until_s = self._clock() + self._config.wait_s
        reason = self._reason_to_give_up(cause)
        if reason or not retrying:
            logger.warning(
                "request %s has no verifier (%s: %s), %s",
                self._body.request_id,
                type(cause).__name__,
                str(cause).partition("\n")[0],
                f"and is given up: {reason}" if reason else "and asks another",
            )
        if reason is None:
            if not retrying:
                self._note("continued" if self._begun else "restarted")
            return
        self._note("given_up")
        raise RequestError(
            f"The replica that served this request has been lost, and the answer cannot be continued ({reason}). "
            "Send the request again.",
            status=503,
            code="replica_died",
            retry_after_s=RETRY_AFTER_S,
        ) from error

    def _reason_to_give_up(self, cause: Any) -> str | None:
        if isinstance(cause, ProtocolError):
            return str(cause)
        if self._begun and self._transcript is None:
            return self._not_continuable or "it is complete"
        if self._transcript is not None and self._transcript.finished:
            return "only its usage is missing"
        if self._losses > self._config.takeovers:
            return "it has lost several verifiers"
        if self._retrying_until_s is not None and self._clock() >= self._retrying_until_s:
            return "no other verifier has become free"
        return None


def _wants_usage(body: Any) -> bool:
    return body.stream_options is not None and bool(body.stream_options.include_usage)
