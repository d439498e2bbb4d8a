"""One HTTP client of Python, named first, asks for each address after it with what the environment says.

Prints a line for each: `answered ADDRESS BODY` or `failed ADDRESS REASON`.
"""

import asyncio
import os
import socket
import ssl
import sys
from http.client import HTTPResponse
from urllib.parse import urlsplit


def by_requests(url):
    import requests

    answer = requests.get(url, timeout=20)
    answer.raise_for_status()
    return answer.text


def by_urllib(url):
    from urllib.request import urlopen

    return urlopen(url, timeout=20).read().decode()


def by_httpx(url):
    import httpx

    return httpx.get(url, timeout=20).raise_for_status().text


def by_httpx_async(url):
    import httpx

    async def ask():
        async with httpx.AsyncClient(timeout=20) as client:
            return (await client.get(url)).raise_for_status().text

    return asyncio.run(ask())


def by_aiohttp(url):
    import aiohttp

    async def ask():
        async with aiohttp.ClientSession(trust_env=True, raise_for_status=True) as client:
            async with client.get(url) as answer:
                return await answer.text()

    return asyncio.run(ask())


def by_boto3(url):
    """S3 is asked for the last two steps of the path: a bucket, and a key in it."""
    import boto3
    from botocore import UNSIGNED
    from botocore.config import Config

    base, bucket, key = url.rsplit("/", 2)
    config = Config(
        s3={"addressing_style": "path"},
        signature_version=UNSIGNED,
        retries={"total_max_attempts": 1},
        connect_timeout=20,
        read_timeout=20,
    )
    client = boto3.client("s3", endpoint_url=base, region_name="us-east-1", config=config)
    return client.get_object(Bucket=bucket, Key=key)["Body"].read().decode()


def by_bare_connect(url):
    """As the oldest do: CONNECT of HTTP/1.0, without Host, on a socket of one's own."""
    at, proxy = urlsplit(url), urlsplit(os.environ["HTTPS_PROXY"])
    with socket.create_connection((proxy.hostname, proxy.port), timeout=20) as raw:
        raw.sendall(f"CONNECT {at.hostname}:{at.port or 443} HTTP/1.0\r\n\r\n".encode())
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += raw.recv(1) or sys.exit("the proxy closed")
        if head.split(b" ")[1] != b"200":
            raise OSError(head.decode())
        with ssl.create_default_context().wrap_socket(raw, server_hostname=at.hostname) as tls:
            request = f"GET {at.path} HTTP/1.1\r\nHost: {at.netloc}\r\nConnection: close\r\n\r\n"
            tls.sendall(request.encode())
            answer = HTTPResponse(tls)
            answer.begin()
            if answer.status != 200:
                raise OSError(f"{answer.status} {answer.read()}")
            return answer.read().decode()


def by_openai(url):
    """An empty address is the environment's."""
    import openai

    client = openai.OpenAI(base_url=url.removesuffix("/models") or None, max_retries=0, timeout=20)
    return client.models.list().model_dump_json()


def by_anthropic(url):
    import anthropic

    client = anthropic.Anthropic(base_url=url.removesuffix("/v1/messages") or None, max_retries=0, timeout=20)
    said = [{"role": "user", "content": "Hello"}]
    return client.messages.create(model="claude-test", max_tokens=16, messages=said).model_dump_json()


def reason(error):
    """What is said, and what is said of its cause: SDKs hide a refused certificate behind theirs."""
    said = []
    while error and len(said) < 8:
        said.append(f"{type(error).__name__}: {error}")
        error = error.__cause__ or error.__context__
    return " <- ".join(said)


ask = globals()["by_" + sys.argv[1]]
for url in sys.argv[2:]:
    try:
        result, text = "answered", ask(url)
    except Exception as error:
        result, text = "failed", reason(error)
    print(result, url or "-", " ".join(text.split()), flush=True)
