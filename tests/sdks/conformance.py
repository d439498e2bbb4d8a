"""What the Autobahn cases say of two peers, straight and through lessor.

`server PORT URL`: serves an echo on PORT and runs the cases against it, and then against URL, which leads
there through lessor. `client PORT URL`: serves the cases on PORT, and lets an echoing client run them
straight, and then through lessor at URL. Prints both results.
"""

import asyncio
import json
import sys

from kosoku import FailureError, run_fuzzingclient, run_fuzzingserver
from websockets.asyncio.client import connect
from websockets.asyncio.server import serve
from websockets.exceptions import ConnectionClosed

# Many big messages, and many thousands of small ones, packed and not: some of them are enough.
LEFT_OUT = ["9.*", "12.*", "13.*"]
SOME = ["9.1.1", "9.1.3", "9.2.3", "9.3.1", "9.4.5", "9.5.2", "9.7.1", "12.1.1", "12.2.3", "13.3.1"]


def read(results):
    """By case: what was judged, and what came over the wire at the end. Whether a peer that fails a connection
    has echoed all that came before (OK) or not (NON-STRICT) depends on time alone."""
    return {
        case.case_id: [
            case.behavior.value.replace("NON-STRICT", "OK"),
            case.behavior_close.value,
            case.remote_close_code,
            case.remote_close_reason,
        ]
        for case in results
    }


async def echo(socket):
    try:
        async for message in socket:
            await socket.send(message)
    except ConnectionClosed:
        pass


async def judge(url, **cases):
    try:
        return read(await run_fuzzingclient(url, concurrency=4, **cases))
    except FailureError as failed:
        return read(failed.results)


async def all_of(url):
    return await judge(url, exclude_cases=LEFT_OUT) | await judge(url, cases=SOME)


async def server(port, url):
    async with serve(echo, "127.0.0.1", port, max_size=None):
        return {"direct": await all_of(f"ws://127.0.0.1:{port}/"), "through": await all_of(url)}


async def once(port, url):
    async with run_fuzzingserver(exclude_cases=LEFT_OUT, port=port) as cases:
        async with connect(f"{url}getCaseCount", max_size=None) as socket:
            count = int(await socket.recv())
        for case in range(1, count + 1):
            target = f"{url}runCase?case={case}&agent=client"
            async with connect(target, max_size=None, ping_interval=None) as socket:
                await echo(socket)
        async with connect(f"{url}updateReports?agent=client"):
            pass
        try:
            return read(await asyncio.wait_for(cases.get_result(), timeout=60))
        except FailureError as failed:
            return read(failed.results)


async def client(port, url):
    return {"direct": await once(port, f"ws://127.0.0.1:{port}/"), "through": await once(port, url)}


side = {"server": server, "client": client}[sys.argv[1]]
print(json.dumps(asyncio.run(side(int(sys.argv[2]), sys.argv[3]))))
