# Asks for one address with each of Python's usual clients; prints one JSON line a client.
import json, ssl, sys, urllib.error, urllib.request

url, name, value = sys.argv[1:4]


def by_urllib(strict):
    context = ssl.create_default_context()
    if strict:
        context.verify_flags |= ssl.VERIFY_X509_STRICT
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler(), urllib.request.HTTPSHandler(context=context)
    )
    try:
        return opener.open(urllib.request.Request(url, headers={name: value}), timeout=8).headers
    except urllib.error.HTTPError as answer:
        return answer.headers


def by_library(library):
    return __import__(library).get(url, headers={name: value}, timeout=8).headers


ways = {
    "python ssl": lambda: by_urllib(False),
    "python ssl, strict": lambda: by_urllib(True),
    "python requests": lambda: by_library("requests"),
    "python httpx": lambda: by_library("httpx"),
}
for way, ask in ways.items():
    said = {"way": way, "version": sys.version.split()[0]}
    try:
        said["code"] = ask().get("x-lessor-error") or ""
    except ModuleNotFoundError:
        said["absent"] = True
    except Exception as error:
        said["error"] = f"{type(error).__name__}: {error}"
    print(json.dumps(said), flush=True)
