//! What must be known of a request's head that hyper does not tell, and lessor's words for the errors
//! that hyper answers by itself.

/// Looks for a `content-length` line in a head as it is read.
///
/// hyper drops the length silently where `transfer-encoding` came first, yet a request with both is a
/// smuggling attempt (RFC 9112, section 6.1) that must be refused, not repaired.
#[derive(Debug)]
pub(super) struct HeadScan {
    line: Line,
    /// A line with something in it has been seen: the next empty one ends the head.
    begun: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Line {
    /// So many bytes of the line equal the name so far.
    Matches(usize),
    /// This line is another.
    Other,
    /// The head is over.
    Over,
}

const NAME: &[u8] = b"content-length";

impl Default for HeadScan {
    fn default() -> Self {
        Self { line: Line::Matches(0), begun: false }
    }
}

impl HeadScan {
    /// Reads on; true when the name was completed within `bytes`.
    pub(super) fn feed(&mut self, bytes: &[u8]) -> bool {
        let mut found = false;
        let mut rest = bytes;
        loop {
            match self.line {
                Line::Over => return found,
                Line::Other => match memchr::memchr(b'\n', rest) {
                    Some(end) => {
                        rest = &rest[end + 1..];
                        self.line = Line::Matches(0);
                    }
                    None => return found,
                },
                Line::Matches(done) => {
                    let Some(&byte) = rest.first() else { return found };
                    if done == 0 && matches!(byte, b'\r' | b'\n') {
                        rest = &rest[1..];
                        if byte == b'\n' && self.begun {
                            self.line = Line::Over;
                        }
                        continue;
                    }
                    self.begun = true;
                    let more = rest.len().min(NAME.len() - done);
                    // Most lines differ in their first byte.
                    if byte.to_ascii_lowercase() != NAME[done]
                        || !rest[..more].eq_ignore_ascii_case(&NAME[done..done + more])
                    {
                        // Nothing is passed over: the line's end may be among what was looked at.
                        self.line = Line::Other;
                        continue;
                    }
                    rest = &rest[more..];
                    self.line = Line::Matches(done + more);
                    if done + more == NAME.len() {
                        found = true;
                        self.line = Line::Other;
                    }
                }
            }
        }
    }
}

/// If `bytes` is one of hyper's bare error answers, the same status in lessor's words.
pub(super) fn own_error_answer(bytes: &[u8]) -> Option<Vec<u8>> {
    let status = bytes.strip_prefix(b"HTTP/1.1 ")?.get(..3)?;
    // To the byte what hyper writes, so that no provider's answer is taken for it.
    let end = memchr::memchr(b'\n', bytes)?;
    if &bytes[end + 1..] != b"connection: close\r\ncontent-length: 0\r\n\r\n" {
        return None;
    }
    let (line, code, kind, message) = match status {
        b"400" => {
            ("400 Bad Request", "bad_request", "http_request_error", "the request is not valid HTTP/1.1")
        }
        b"414" => {
            ("414 URI Too Long", "header_too_large", "http_request_error", "the request target is too long")
        }
        b"431" => (
            "431 Request Header Fields Too Large",
            "header_too_large",
            "http_request_error",
            "the request head is larger than limits.max_header_bytes or has more lines than limits.max_headers",
        ),
        b"505" => (
            "505 HTTP Version Not Supported",
            "bad_request",
            "http_request_error",
            "this listener speaks HTTP/1.1",
        ),
        _ => return None,
    };
    Some(raw_error(line, code, kind, message))
}

/// The answer to a head that did not come in time.
pub(super) fn too_slow() -> Vec<u8> {
    raw_error(
        "408 Request Timeout",
        "request_timeout",
        "connection_read_timeout",
        "the request head did not come within timeouts.header",
    )
}

/// An answer in OpenAI's error shape: before a head is read, no provider is known.
fn raw_error(line: &str, code: &str, kind: &str, message: &str) -> Vec<u8> {
    let body = format!(
        r#"{{"error":{{"message":"lessor: {message}","type":"lessor_error","code":"{code}","param":null}}}}"#
    );
    format!(
        "HTTP/1.1 {line}\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\
         x-lessor-error: {code}\r\nproxy-status: lessor; error={kind}\r\nx-should-retry: false\r\n\r\n{body}",
        body.len()
    )
    .into_bytes()
}

#[cfg(test)]
mod tests {
    use super::HeadScan;

    fn seen(chunks: &[&str]) -> bool {
        let mut scan = HeadScan::default();
        chunks.iter().map(|chunk| scan.feed(chunk.as_bytes())).fold(false, |all, each| all | each)
    }

    #[test]
    fn a_length_line_is_seen_in_any_case_and_across_reads() {
        assert!(seen(&["POST / HTTP/1.1\r\nContent-Length: 5\r\n\r\n"]));
        assert!(seen(&["POST / HTTP/1.1\r\nHost: x\r\nCONT", "ENT-len", "gth: 5\r\n\r\n"]));
        assert!(seen(&["\r\nPOST / HTTP/1.1\ncontent-length: 5\n\n"]));
    }

    #[test]
    fn what_stands_in_the_body_or_in_another_name_is_no_length_line() {
        assert!(!seen(&["POST / HTTP/1.1\r\nHost: x\r\n\r\nContent-Length: 5\r\n"]));
        assert!(!seen(&["POST / HTTP/1.1\r\nX-Content-Length: 5\r\n\r\n"]));
        assert!(!seen(&["POST / HTTP/1.1\r\nHost: content-length\r\n\r", "\ncontent-length: 1\r\n"]));
    }
}
