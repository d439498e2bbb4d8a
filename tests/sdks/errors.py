"""Makes the calls that a file of JSON lists, and prints each one's error as its SDK raises it.

A call: {"sdk": "openai" | "anthropic", "base_url", "key", "model", "path" (a POST to it instead of a chat), "headers",
"retries", "proxy"}.
"""

import json
import sys
import time

import anthropic
import openai


def client_of(call):
    module = openai if call["sdk"] == "openai" else anthropic
    kind = module.OpenAI if call["sdk"] == "openai" else module.Anthropic
    http = {"http_client": module.DefaultHttpxClient(proxy=call["proxy"])} if call.get("proxy") else {}
    key = call.get("key", "placeholder")
    return module, kind(base_url=call["base_url"], api_key=key, max_retries=call.get("retries", 0), **http)


def make(call):
    module, client = client_of(call)
    more = {"extra_headers": call.get("headers", {})}
    ask = {"model": call.get("model", "m"), "messages": [{"role": "user", "content": "Hello"}]}
    begun = time.monotonic()
    try:
        if call.get("path"):
            client.post(call["path"], cast_to=object, body={}, options={"headers": call.get("headers", {})})
        elif call["sdk"] == "openai":
            client.chat.completions.create(**ask, **more)
        else:
            client.messages.create(**ask, max_tokens=16, **more)
        said = {"kind": None}
    except module.APIStatusError as error:
        said = {
            "kind": type(error).__name__,
            "status": error.status_code,
            "message": str(error),
            "code": getattr(error, "code", None),
            "lessor": error.response.headers.get("x-lessor-error"),
        }
    return {**said, "seconds": time.monotonic() - begun}


with open(sys.argv[1]) as calls:
    print(json.dumps([make(call) for call in json.load(calls)]))
