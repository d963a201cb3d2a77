"""Clients that tests with and without keys share."""

from typing import Any

import httpx


def langchain_says(base_url: str, api_key: str, model: str) -> tuple[Any, Any]:
    """LangChain's answer to a greeting, at once and streamed, each as one message."""
    from langchain_openai import ChatOpenAI

    with httpx.Client() as client:
        chat = ChatOpenAI(
            base_url=base_url, api_key=api_key, model=model, temperature=0, max_tokens=6, max_retries=0,
            timeout=60, http_client=client, stream_usage=True,
        )  # fmt: skip
        whole = chat.invoke("Hello")
        chunks = list(chat.stream("Hello"))
    streamed = chunks[0]
    for chunk in chunks[1:]:
        streamed += chunk
    return whole, streamed
