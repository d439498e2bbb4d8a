"""Asks once, without retries, and prints the error as the SDK shows it."""

import json

import openai

try:
    openai.OpenAI(max_retries=0).chat.completions.create(
        model="gpt-4o-mini", messages=[{"role": "user", "content": "Hello"}]
    )
except openai.APIStatusError as error:
    print(json.dumps({"kind": type(error).__name__, "code": error.code, "message": str(error)}))
