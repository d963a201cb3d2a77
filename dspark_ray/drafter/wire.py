"""Draft calls on the wire: headers by msgspec, features as one bf16 frame, strangers kept out."""

import hashlib
import math
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
import torch
import zmq
import zmq.utils.z85
from torch import Tensor

from dspark_ray.errors import ProtocolError
from dspark_ray.protocol import (
    MAX_FRAME_BYTES,
    DraftProposal,
    DraftRequest,
    FeatureRun,
    FetchFeatures,
    Refusal,
)

Frames = list[bytes]
_Message = TypeVar("_Message", bound=msgspec.Struct)
_encoder = msgspec.msgpack.Encoder()
_call = msgspec.msgpack.Decoder(DraftRequest)
_reply: msgspec.msgpack.Decoder[DraftProposal | Refusal] = msgspec.msgpack.Decoder(DraftProposal | Refusal)
_fetch = msgspec.msgpack.Decoder(FetchFeatures)
_run: msgspec.msgpack.Decoder[FeatureRun | Refusal] = msgspec.msgpack.Decoder(FeatureRun | Refusal)


def encode_features(features: Sequence[Tensor]) -> bytes:
    """Concatenate feature rows, each [n, d], into one bf16 frame."""
    if not features:
        return b""
    rows = features[0] if len(features) == 1 else torch.cat(tuple(features))
    return rows.to("cpu", torch.bfloat16).contiguous().view(torch.uint8).numpy().tobytes()


def decode_features(frame: bytes, rows: int, width: int) -> Tensor:
    """Read a frame as [rows, width] bf16.

    Raises:
        ProtocolError: another size than announced.
    """
    if len(frame) != rows * width * 2:
        raise ProtocolError(f"feature frame of {len(frame)} bytes, {rows} rows of {width} bf16 announced")
    if not rows:
        return torch.empty(0, width, dtype=torch.bfloat16)
    return torch.frombuffer(bytearray(frame), dtype=torch.bfloat16).view(rows, width)


def encode(message: msgspec.Struct, frame: bytes = b"") -> Frames:
    """Header and feature frame of a message."""
    return [_encoder.encode(message), frame]


def decode_call(frames: Sequence[bytes]) -> tuple[DraftRequest, bytes]:
    """A draft call and its feature frame."""
    return _decode(_call, frames)


def decode_reply(frames: Sequence[bytes]) -> DraftProposal | Refusal:
    """The answer to a draft call."""
    return _decode(_reply, frames)[0]


def decode_fetch(frames: Sequence[bytes]) -> FetchFeatures:
    """A request for a prompt's features."""
    return _decode(_fetch, frames)[0]


def decode_run(frames: Sequence[bytes]) -> tuple[FeatureRun | Refusal, bytes]:
    """A prompt's features."""
    return _decode(_run, frames)


def _decode(decoder: "msgspec.msgpack.Decoder[_Message]", frames: Sequence[bytes]) -> tuple[_Message, bytes]:
    if len(frames) != 2 or sum(map(len, frames)) > MAX_FRAME_BYTES:
        raise ProtocolError(f"{len(frames)} frames of {sum(map(len, frames))} bytes")
    try:
        return decoder.decode(frames[0]), frames[1]
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"malformed message: {error}") from None


def check_proposal(proposal: DraftProposal, draft_lens: Sequence[int], vocab_size: int) -> None:
    """Hold a proposal against the call it answers, before a token of it is used.

    Args:
        proposal: as received.
        draft_lens: γ' of each entry of the call.
        vocab_size: drafted ids must lie below it.

    Raises:
        ProtocolError: naming what is wrong.
    """
    if len(proposal.answers) != len(draft_lens):
        raise ProtocolError(f"{len(proposal.answers)} answers to {len(draft_lens)} entries")
    for answer, draft_len in zip(proposal.answers, draft_lens, strict=True):
        if not len(answer.confidence_logits) == len(answer.draft_token_ids) <= draft_len:
            raise ProtocolError(
                f"{len(answer.draft_token_ids)} drafts with {len(answer.confidence_logits)} confidences, "
                f"{draft_len} were asked for"
            )
        if any(token >= vocab_size for token in answer.draft_token_ids):
            raise ProtocolError(f"drafted ids {answer.draft_token_ids} leave the vocabulary {vocab_size}")
        if not all(map(math.isfinite, answer.confidence_logits)):
            raise ProtocolError(f"confidences {answer.confidence_logits} are not numbers")


def _keys(secret: str) -> tuple[bytes, bytes]:
    """A CURVE key pair (public, secret) that everybody who knows the deployment's secret can compute."""
    private = zmq.utils.z85.encode(
        hashlib.blake2b(secret.encode(), digest_size=32, person=b"dspark-link").digest()
    )
    return zmq.curve_public(private), private


def check_bind(endpoint: str, secret: str | None) -> None:
    """Refuse to listen for draft calls or prompt features on a network without a secret.

    Raises:
        ConfigError: the endpoint is not on the loopback interface, and there is no secret.
    """
    if secret is None and not endpoint.startswith(("tcp://127.", "tcp://[::1]", "ipc://", "inproc://")):
        raise ConfigError(
            f"{endpoint} is open to the network without the deployment's secret: set DSPARK_SECRET (or what "
            "security.secret_env names) to the same value on every node, or listen on 127.0.0.1"
        )


def secure(socket: "zmq.Socket[Any]", secret: str | None, *, server: bool) -> None:
    """Encrypt a socket so that only holders of the deployment's secret can talk to it. Call before bind.

    Without a secret connections are open: `check_bind` keeps those off the network.
    """
    if secret is None:
        return
    public, private = _keys(secret)
    socket.curve_publickey, socket.curve_secretkey = public, private
    if server:
        socket.curve_server = True
    else:
        socket.curve_serverkey = public
