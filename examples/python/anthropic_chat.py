# Streams a message through lessor: run with ANTHROPIC_BASE_URL=http://127.0.0.1:8321/anthropic ANTHROPIC_API_KEY=placeholder
from anthropic import Anthropic

client = Anthropic()
with client.messages.stream(
    model="claude-sonnet-4-5", max_tokens=100, messages=[{"role": "user", "content": "Say hello."}]
) as stream:
    for text in stream.text_stream:
        print(text, end="", flush=True)
print()
