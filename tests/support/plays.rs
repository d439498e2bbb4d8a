//! What real providers say, as far as SDKs look at it.

use serde_json::{Value, json};

use super::provider::{Play, Seen};

/// An error in OpenAI's shape.
pub fn openai_error(kind: &str, code: &str, message: &str) -> Value {
    json!({"error": {"message": message, "type": kind, "param": null, "code": code}})
}

/// An error in Anthropic's shape.
pub fn anthropic_error(kind: &str, message: &str) -> Value {
    json!({"type": "error", "error": {"type": kind, "message": message}, "request_id": "req_1"})
}

/// OpenAI's refusal of a key that makes too many requests.
pub fn rate_limited(retry_after: &str) -> Play {
    let error = openai_error("requests", "rate_limit_exceeded", "Rate limit reached for requests");
    Play::json_with(429, &[("retry-after", retry_after), ("x-request-id", "req-429")], &error)
}

/// OpenAI's refusal of a key that it does not know.
pub fn invalid_key() -> Play {
    let message = "Incorrect API key provided. You can find your API key in your account settings.";
    Play::json(401, &openai_error("invalid_request_error", "invalid_api_key", message))
}

/// What OpenAI says when the organization in a header is not the key's.
pub fn wrong_organization() -> Play {
    let message = "No such organization: org-other.";
    Play::json(401, &openai_error("invalid_request_error", "mismatched_organization", message))
}

/// A double that answers what the SDKs ask of OpenAI: models, and chat whole or in a stream.
pub fn openai(seen: &Seen) -> Play {
    let path = seen.path();
    if path.ends_with("/models") {
        return Play::json(
            200,
            &json!({"object": "list", "data": [
                {"id": "gpt-4o-mini", "object": "model", "created": 1, "owned_by": "openai"}]}),
        );
    }
    if !path.ends_with("/chat/completions") {
        return Play::json(404, &openai_error("invalid_request_error", "unknown_url", "Unknown request URL"));
    }
    let asked = seen.json();
    let base = |object: &str, choice: Value| json!({"id": "chatcmpl-1", "object": object, "created": 1, "model": asked["model"], "choices": [choice]});
    if asked["stream"] == true {
        let mut play = Play::sse();
        for word in ["Hello", ", ", "world"] {
            let delta =
                json!({"index": 0, "delta": {"role": "assistant", "content": word}, "finish_reason": null});
            play = play.event(&base("chat.completion.chunk", delta).to_string());
        }
        let end = json!({"index": 0, "delta": {}, "finish_reason": "stop"});
        return play.event(&base("chat.completion.chunk", end).to_string()).done();
    }
    let message = json!({"role": "assistant", "content": "Hello, world"});
    let mut answer =
        base("chat.completion", json!({"index": 0, "message": message, "finish_reason": "stop"}));
    answer["usage"] = json!({"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3});
    Play::json(200, &answer)
}

/// A double that answers what the SDKs ask of Anthropic: messages, whole or in a stream.
pub fn anthropic(seen: &Seen) -> Play {
    if !seen.path().ends_with("/v1/messages") {
        return Play::json(404, &anthropic_error("not_found_error", "Not Found"));
    }
    let asked = seen.json();
    let message = |content: Value, stop: Value| {
        json!({"id": "msg_1", "type": "message", "role": "assistant", "model": asked["model"],
            "content": content, "stop_reason": stop, "stop_sequence": null,
            "usage": {"input_tokens": 1, "output_tokens": 2}})
    };
    if asked["stream"] == true {
        let mut play = Play::sse();
        let start = json!({"type": "message_start", "message": message(json!([]), Value::Null)});
        let block =
            json!({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}});
        let mut events = vec![start, block];
        for word in ["Hello", ", ", "world"] {
            events.push(json!({"type": "content_block_delta", "index": 0,
                "delta": {"type": "text_delta", "text": word}}));
        }
        events.push(json!({"type": "content_block_stop", "index": 0}));
        events.push(
            json!({"type": "message_delta", "delta": {"stop_reason": "end_turn", "stop_sequence": null},
            "usage": {"output_tokens": 2}}),
        );
        events.push(json!({"type": "message_stop"}));
        for event in events {
            let name = event["type"].as_str().unwrap();
            play = play.chunk(&format!("event: {name}\ndata: {event}\n\n"));
        }
        return play.last_chunk();
    }
    Play::json(200, &message(json!([{"type": "text", "text": "Hello, world"}]), json!("end_turn")))
}
