"""Talks over one socket with the plain client: what came first, what came back, how it was closed."""

import asyncio
import json
import sys

from websockets.asyncio.client import connect


async def main(url):
    async with connect(url, additional_headers={"Authorization": "Bearer placeholder"}) as socket:
        first = json.loads(await socket.recv())
        await socket.send(json.dumps({"type": "session.update"}))
        second = json.loads(await socket.recv())
        await socket.ping()
    print(json.dumps({"events": [first["type"], second["type"]], "code": socket.close_code}))


asyncio.run(main(sys.argv[1]))
