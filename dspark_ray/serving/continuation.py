"""How a streamed answer outlives its verifier: what was said, how to ask another one to go on, what to leave out.

The ingress keeps the ids of all tokens that it has passed on. Another verifier gets the same request together
with these ids. Its engine takes them as given and goes on from there, while its OpenAI layer writes the whole
answer again, from the first token (see `dspark_ray.serving.replay`). So stop strings, characters that span
tokens, parsers, text offsets and usage need no care here: the repeated part is compared with what the client
has, and left out. Pure functions and state; no I/O.
"""

import re
from typing import Any

import msgspec

from dspark_ray.config import ModelConfig
from dspark_ray.errors import ProtocolError

EMITTED_KEY = "dspark_emitted_token_ids"
"""Among a request's vllm_xargs, where no client may set it: the tokens of the answer that the client has."""
DONE = "data: [DONE]"
TEXTS = ("content", "reasoning", "reasoning_content", "text")
"""Where the deltas of chats and completions carry what they say."""
_EVENT = re.compile(r"data: (\{.*)", re.DOTALL)


def why_not_continuable(body: Any, model: ModelConfig) -> str | None:
    """What keeps a stream from being continued exactly; None where nothing does.

    Everything here depends on how the answer began in a way that does not survive as a longer prompt.

    Args:
        body: a ChatCompletionRequest or CompletionRequest.
        model: whose engines answer.
    """
    prompt = getattr(body, "prompt", None)
    response_format = body.response_format
    tools = getattr(body, "tools", None)
    reasons = {
        "it has several answers": (body.n or 1) > 1 or body.use_beam_search,
        "it has several prompts": isinstance(prompt, list)
        and len(prompt) > 1
        and not isinstance(prompt[0], int),
        "its prompt is not text": getattr(body, "prompt_embeds", None) is not None,
        "it repeats its prompt": bool(body.echo) or body.prompt_logprobs is not None,
        "of presence_penalty or frequency_penalty": bool(body.presence_penalty or body.frequency_penalty),
        "of bad_words": bool(body.bad_words),
        "of repetition_detection": body.repetition_detection is not None,
        "of thinking_token_budget": body.thinking_token_budget is not None,
        "of logprob_token_ids": bool(body.logprob_token_ids),
        "of structured output": body.structured_outputs is not None
        or (response_format is not None and response_format.type != "text"),
        "of tools": bool(tools) and body.tool_choice != "none",
        "its reasoning is hidden": not getattr(body, "include_reasoning", True),
        "of vllm_xargs": bool(body.vllm_xargs),
        "of the engine's logits_processors": bool(model.target.engine.get("logits_processors")),
        "its seed is not kept by this model's sampler": body.seed is not None
        and body.temperature != 0
        and not _seeds_can_be_advanced(model),
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def _seeds_can_be_advanced(model: ModelConfig) -> bool:
    """Whether one draw a token is made, and by a worker of ours."""
    if model.drafter.placement == "none":
        return model.verifier.gpus == 0  # GPU engines without a drafter run vLLM's own worker
    return model.drafter.placement in ("remote", "colocated") and model.exactness == "coupled"


class Transcript:
    """What one stream has said to its client, and the filter through which it says it.

    Args:
        keep_token_ids: whether the client itself asked for token ids.
    """

    def __init__(self, *, keep_token_ids: bool):
        self._keep_token_ids = keep_token_ids
        self.token_ids: list[int] = []
        """Of the answer, as far as it was passed on."""
        self.finished = False
        """Whether the client has got a finish_reason."""
        self.closed = False
        """Whether the client has got the final event."""
        self._head: dict[str, Any] = {}
        self._said: dict[str, list[str]] = {}
        self._repeating = False
        self._ids_ahead = 0
        self._text_ahead: dict[str, str] = {}

    def request(self, body: Any) -> Any:
        """The request that makes a verifier say everything from the beginning, the known tokens as given."""
        update: dict[str, Any] = {"return_token_ids": True}
        if self.token_ids:
            update["vllm_xargs"] = {EMITTED_KEY: list(self.token_ids)}
        return body.model_copy(update=update)

    def begin_again(self) -> None:
        """The next event comes from another verifier, which begins at the beginning."""
        self._repeating = bool(self._head)
        self._ids_ahead = len(self.token_ids)
        self._text_ahead = {name: "".join(parts) for name, parts in self._said.items()}

    def relay(self, events: str) -> str:
        """What the client gets of some whole events: nothing that it has got before; empty if that is all.

        Raises:
            ProtocolError: the new verifier repeats something else than the client has got.
        """
        return "".join(self._relay(event) for event in events.split("\n\n") if event)

    def _relay(self, event: str) -> str:
        found = _EVENT.match(event)
        if found is None:
            self.closed |= event == DONE
            return f"{event}\n\n"
        chunk = msgspec.json.decode(found[1])
        if "error" in chunk:
            return f"{event}\n\n"
        if not self._head:
            self._head = {name: chunk[name] for name in ("id", "created") if name in chunk}
        chunk |= self._head
        choices = chunk.get("choices") or []
        news = [self._take(choice) for choice in choices]
        if self._repeating and choices and not any(news):
            return ""
        for holder in (chunk, *choices):
            if "prompt_token_ids" in holder and (self._repeating or not self._keep_token_ids):
                holder["prompt_token_ids"] = None
        return f"data: {msgspec.json.encode(chunk).decode()}\n\n"

    def _take(self, choice: dict[str, Any]) -> bool:
        """Note a choice, cut off what the client has of it, and say whether anything is left."""
        ids = choice.get("token_ids") or []
        repeated = min(len(ids), self._ids_ahead)
        begin = len(self.token_ids) - self._ids_ahead
        _same(ids[:repeated], self.token_ids[begin : begin + repeated])
        self._ids_ahead -= repeated
        fresh = ids[repeated:]
        self.token_ids += fresh
        if "token_ids" in choice:
            choice["token_ids"] = fresh if self._keep_token_ids else None
        speech = choice.get("delta", choice)
        new_text = [self._take_text(speech, name) for name in TEXTS if isinstance(speech.get(name), str)]
        finishes = choice.get("finish_reason") is not None
        if fresh or finishes:
            _same((self._ids_ahead, "".join(self._text_ahead.values())), (0, ""))
        logprobs = choice.get("logprobs") or {}
        logprobs.update({name: each[repeated:] for name, each in logprobs.items() if isinstance(each, list)})
        if self._repeating:
            speech.pop("role", None)
        self.finished |= finishes
        return finishes or bool(fresh) or any(new_text)

    def _take_text(self, speech: dict[str, Any], name: str) -> bool:
        text, ahead = speech[name], self._text_ahead.get(name, "")
        repeated = min(len(text), len(ahead))
        _same(text[:repeated], ahead[:repeated])
        self._text_ahead[name] = ahead[repeated:]
        speech[name] = text[repeated:]
        self._said.setdefault(name, []).append(speech[name])
        return bool(speech[name])


def _same(repeated: Any, known: Any) -> None:
    if repeated != known:
        raise ProtocolError("the verifier that continues an answer repeats it otherwise than it began")
