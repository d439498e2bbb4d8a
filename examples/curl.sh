#!/usr/bin/env bash
# The three lines of a shell user: a whole answer, a streamed one, and the same through HTTP_PROXY. No key in any.
set -euo pipefail
lessor=${LESSOR:-http://127.0.0.1:8321}
ask='{"model": "gpt-4o-mini", "stream": true, "messages": [{"role": "user", "content": "Hello"}]}'

curl --silent --show-error --fail-with-body "$lessor/openai/v1/models"
curl --silent --show-error --fail-with-body --no-buffer "$lessor/openai/v1/chat/completions" \
    --header 'content-type: application/json' --data "$ask"
curl --silent --show-error --fail-with-body --proxy "$lessor" http://api.openai.com/v1/models
