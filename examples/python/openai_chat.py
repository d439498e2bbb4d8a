# Streams a chat through lessor: run with OPENAI_BASE_URL=http://127.0.0.1:8321/openai/v1 OPENAI_API_KEY=placeholder
from openai import OpenAI

client = OpenAI()
stream = client.chat.completions.create(
    model="gpt-4o-mini", messages=[{"role": "user", "content": "Say hello."}], stream=True
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
