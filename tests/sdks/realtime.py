"""Talks over OpenAI's realtime socket, sync and async, with what the environment says."""

import asyncio
import json

from openai import AsyncOpenAI, OpenAI

SESSION = {"type": "realtime", "instructions": "Be brief."}


def sync():
    with OpenAI().realtime.connect(model="gpt-realtime") as connection:
        first = connection.recv()
        connection.session.update(session=SESSION)
        return [first.type, connection.recv().type]


async def asynchronous():
    async with AsyncOpenAI().realtime.connect(model="gpt-realtime") as connection:
        first = await connection.recv()
        await connection.session.update(session=SESSION)
        return [first.type, (await connection.recv()).type]


print(json.dumps({"sync": sync(), "async": asyncio.run(asynchronous())}))
