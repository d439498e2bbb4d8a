"""Asks for models and a chat, whole and streamed, sync and async, with what the environment says."""

import asyncio
import json

from openai import AsyncOpenAI, OpenAI

ASK = {"model": "gpt-4o-mini", "messages": [{"role": "user", "content": "Hello"}]}


def text(chunk):
    return chunk.choices[0].delta.content or ""


def sync():
    client = OpenAI()
    models = [model.id for model in client.models.list()]
    whole = client.chat.completions.create(**ASK).choices[0].message.content
    streamed = [text(chunk) for chunk in client.chat.completions.create(**ASK, stream=True)]
    return {"models": models, "whole": whole, "streamed": "".join(streamed), "parts": len(streamed)}


async def asynchronous():
    client = AsyncOpenAI()
    whole = (await client.chat.completions.create(**ASK)).choices[0].message.content
    stream = await client.chat.completions.create(**ASK, stream=True)
    streamed = [text(chunk) async for chunk in stream]
    return {"whole": whole, "streamed": "".join(streamed), "parts": len(streamed)}


print(json.dumps({"sync": sync(), "async": asyncio.run(asynchronous())}))
