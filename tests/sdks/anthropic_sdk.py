"""Asks for a message, whole and streamed, sync and async, with what the environment says."""

import asyncio
import json

from anthropic import Anthropic, AsyncAnthropic

ASK = {"model": "claude-test", "max_tokens": 16, "messages": [{"role": "user", "content": "Hello"}]}


def sync():
    client = Anthropic()
    whole = client.messages.create(**ASK).content[0].text
    with client.messages.stream(**ASK) as stream:
        streamed = list(stream.text_stream)
    return {"whole": whole, "streamed": "".join(streamed), "parts": len(streamed)}


async def asynchronous():
    client = AsyncAnthropic()
    whole = (await client.messages.create(**ASK)).content[0].text
    async with client.messages.stream(**ASK) as stream:
        streamed = [text async for text in stream.text_stream]
    return {"whole": whole, "streamed": "".join(streamed), "parts": len(streamed)}


print(json.dumps({"sync": sync(), "async": asyncio.run(asynchronous())}))
