"""The load engine: ``vllm bench serve``'s coroutine, one turn at a time.

It talks OpenAI's API with real streaming to any server. Called in this process, so that arms can take turns within
one run without starting anything in between.
"""

import contextlib
import io
import json
import math
import os
import urllib.request
import warnings
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from dspark_ray.bench.arms import Arm, Offer
from dspark_ray.errors import ConfigError


@dataclass(frozen=True)
class Answer:
    """What the client saw of one request."""

    ttft_s: float
    """From sending to the first token."""
    gaps_s: tuple[float, ...]
    """Between the events that followed; an event may carry several tokens."""
    output_tokens: int
    prompt_tokens: int
    error: str = ""
    text: str = ""
    started_s: float = 0.0
    """When it was sent, on the clock of its turn."""

    @property
    def events_s(self) -> tuple[float, ...]:
        """When its events came, on that clock."""
        return tuple(accumulate(self.gaps_s, initial=self.started_s + self.ttft_s))

    def tokens_until(self, when_s: float) -> float:
        """Tokens that had come by then; all events count alike."""
        events = self.events_s
        return self.output_tokens * bisect_right(events, when_s) / len(events)

    @property
    def token_s(self) -> float | None:
        """Mean seconds a token after the first one; None where there is only one."""
        return sum(self.gaps_s) / (self.output_tokens - 1) if self.output_tokens > 1 else None


@dataclass(frozen=True)
class Turn:
    """One load offered to one arm."""

    seconds: float
    answers: tuple[Answer, ...]
    draft_metrics: dict[str, float] = field(default_factory=dict)
    """``verified`` and ``accepted`` drafts and ``rounds``, where the server exports vLLM's metrics of them."""

    def busy_part(self) -> tuple[float, float]:
        """Tokens and seconds of a closed loop while all its streams were under way.

        From the first request to the first stream that finds none left: after that, how long the turn takes says how
        uneven the answers are, not how fast the server is. No tokens and seconds without an answer.
        """
        answers = [answer for answer in self.answers if not answer.error]
        if not answers:
            return 0.0, 0.0
        last_start = max(answer.started_s for answer in answers)
        end = min(last for answer in answers if (last := answer.events_s[-1]) >= last_start)
        tokens = sum(answer.tokens_until(end) for answer in answers)
        return tokens, end - min(answer.started_s for answer in answers)


class LoadEngine:
    """Offers loads.

    Args:
        prompts: taken in order, as often as needed.
        max_tokens: longest answer.
        temperature: of the requests.
        ignore_eos: whether vLLM is told to go on to max_tokens; other servers refuse that.

    Raises:
        ConfigError: vLLM is not installed.
    """

    def __init__(self, prompts: Sequence[str], *, max_tokens: int, temperature: float, ignore_eos: bool):
        try:
            from vllm.benchmarks import serve
            from vllm.benchmarks.datasets import SampleRequest
        except ImportError as error:
            raise ConfigError(f"the load comes from vLLM's benchmark, which is not there: {error}") from None
        self._vllm: Any = serve
        self._sample_request: Callable[..., Any] = SampleRequest
        self._prompts = prompts
        self._max_tokens = max_tokens
        self._temperature = temperature
        self._ignore_eos = ignore_eos

    async def offer(
        self, arm: Arm, offer: Offer, *, first: int, seed: int, max_tokens: int | None = None
    ) -> Turn:
        """Offer a load and wait for all its answers.

        Args:
            arm: to whom.
            offer: the load.
            first: index of the first prompt; the same for all arms of a round.
            seed: of the arrival times.
            max_tokens: longest answer of this turn, if shorter than usual.
        """
        import numpy as np

        requests = [
            self._sample_request(
                prompt=self._prompts[(first + i) % len(self._prompts)],
                prompt_len=0,  # the server says it
                expected_output_len=max_tokens or self._max_tokens,
            )
            for i in range(offer.requests)
        ]
        np.random.seed(seed)  # what the load engine draws from
        # Its own tables are not wanted; failed requests are counted here.
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings(action="ignore"):
            result = await self._vllm.benchmark(
                task_type=self._vllm.TaskType.GENERATION,
                endpoint_type="openai-chat",
                api_url=f"{arm.url.rstrip('/')}/chat/completions",
                base_url=_root(arm.url),
                model_id=arm.model,
                model_name=arm.model,
                tokenizer=None,
                input_requests=requests,
                logprobs=None,
                request_rate=math.inf if offer.rate_per_s is None else offer.rate_per_s,
                burstiness=1.0,  # Poisson
                disable_tqdm=True,
                num_warmups=0,
                profile=False,
                selected_percentile_metrics=[],
                selected_percentiles=[],
                ignore_eos=self._ignore_eos,
                goodput_config_dict={},
                max_concurrency=offer.streams,
                lora_modules=None,
                extra_headers=None,
                extra_body={"temperature": self._temperature},
                ready_check_timeout_sec=0,
            )
        return _turn(result)


def first_model(url: str) -> str:
    """The id of a server's first model.

    Raises:
        ConfigError: it does not say.
    """
    key = os.environ.get("OPENAI_API_KEY")
    request = urllib.request.Request(  # noqa: S310 - Arm.url is http or https
        f"{url.rstrip('/')}/models", headers={"Authorization": f"Bearer {key}"} if key else {}
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as response:  # noqa: S310
            return str(json.load(response)["data"][0]["id"])
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise ConfigError(f"{url}: no model could be read from /models: {error}") from None


def _root(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1")


def _turn(result: dict[str, Any]) -> Turn:
    """From the load engine's result to ours."""
    columns = ("ttfts", "itls", "output_lens", "input_lens", "errors", "generated_texts", "start_times")
    answers = tuple(
        Answer(
            ttft,
            tuple(gaps),
            tokens,
            prompt,
            error or ("" if tokens else "an answer without tokens"),
            text,
            started,
        )
        for ttft, gaps, tokens, prompt, error, text, started in zip(
            *(result[c] for c in columns), strict=True
        )
    )
    metrics = {}
    if "spec_decode_num_drafts" in result:
        metrics = {
            "rounds": result["spec_decode_num_drafts"],
            "verified": result["spec_decode_draft_tokens"],
            "accepted": result["spec_decode_accepted_tokens"],
        }
    return Turn(result["duration"], answers, metrics)
