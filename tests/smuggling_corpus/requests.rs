//! Requests, what must come of each, and the ways in that it makes sense by.
//!
//! lessor closes the connection behind its own 400 and 501, so nothing behind such a request is ever read.

use super::Expect::{Broken, Declined, Last, Refused, Served};
use super::{BASE, Case, EVERY, INSIDE, PROXY};

/// Content-Length.
pub const LENGTHS: &[Case] = &[
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        Refused(400, "bad_request"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
        Refused(400, "bad_request"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nContent-Length: 0\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        Refused(400, "bad_request"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked\r\nContent-Length: 0\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        Refused(400, "bad_request"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\ncontent-length: 5\r\nTRANSFER-ENCODING: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        Refused(400, "bad_request"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        Refused(400, "bad_request"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nContent-Length: 6\r\nContent-Length: 5\r\n\r\nhello!",
        Refused(400, "bad_request"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nContent-Length: 5, 5\r\n\r\nhello",
        Refused(400, "bad_request"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nContent-Length: 5, 6\r\n\r\nhello",
        Refused(400, "bad_request"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nContent-Length: +5\r\n\r\nhello",
        Refused(400, "bad_request"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nContent-Length: -5\r\n\r\nhello",
        Refused(400, "bad_request"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nContent-Length: 0x5\r\n\r\nhello",
        Refused(400, "bad_request"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nContent-Length: 5 5\r\n\r\nhello",
        Refused(400, "bad_request"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nContent-Length: 5;5\r\n\r\nhello",
        Refused(400, "bad_request"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nContent-Length: 5.0\r\n\r\nhello",
        Refused(400, "bad_request"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nContent-Length: 1e1\r\n\r\nhello",
        Refused(400, "bad_request"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nContent-Length: five\r\n\r\nhello",
        Refused(400, "bad_request"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nContent-Length: \r\n\r\nhello",
        Refused(400, "bad_request"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nContent-Length: \u{ff15}\r\n\r\nhello",
        Refused(400, "bad_request"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nContent-Length: 99999999999999999999\r\n\r\nhello",
        Refused(400, "bad_request"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nContent-Length: 5\0\r\n\r\nhello",
        Refused(400, "bad_request"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nContent-Length: 5\x0b\r\n\r\nhello",
        Refused(400, "bad_request"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nContent-Length : 5\r\n\r\nhello",
        Refused(400, "bad_request"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nContent-Length\t: 5\r\n\r\nhello",
        Refused(400, "bad_request"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nContent-Length:\r\n 5\r\n\r\nhello",
        Refused(400, "bad_request"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nX: y\r\n Content-Length: 5\r\n\r\nhello",
        Refused(400, "bad_request"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nContent-Length: 5\r\nContent-Length: 5\r\n\r\nhello",
        Served("POST", "/v1/x", "hello"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nContent-Length: 05\r\n\r\nhello",
        Served("POST", "/v1/x", "hello"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nContent-Length:5\r\n\r\nhello",
        Served("POST", "/v1/x", "hello"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nContent-Length: \t 5 \t\r\n\r\nhello",
        Served("POST", "/v1/x", "hello"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nCONTENT-LENGTH: 5\r\n\r\nhello",
        Served("POST", "/v1/x", "hello"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nContent-Length: 0\r\n\r\n",
        Served("POST", "/v1/x", ""),
        EVERY,
    ),
    Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\n\r\n", Served("POST", "/v1/x", ""), EVERY),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nContent_Length: 7\r\nContent-Length: 5\r\n\r\nhello",
        Served("POST", "/v1/x", "hello"),
        EVERY,
    ),
    Case(
        "GET @/v1/x HTTP/1.1\r\nHost: {H}\r\nContent-Length: 5\r\n\r\nhello",
        Served("GET", "/v1/x", "hello"),
        EVERY,
    ),
    Case(
        "DELETE @/v1/x HTTP/1.1\r\nHost: {H}\r\nContent-Length: 5\r\n\r\nhello",
        Served("DELETE", "/v1/x", "hello"),
        EVERY,
    ),
    Case(
        "HEAD @/v1/x HTTP/1.1\r\nHost: {H}\r\nContent-Length: 5\r\n\r\nhello",
        Served("HEAD", "/v1/x", "hello"),
        EVERY,
    ),
];

/// Transfer-Encoding.
pub const CODINGS: &[Case] = &[
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        Refused(501, "upgrade_unsupported"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
        Refused(501, "upgrade_unsupported"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: ,chunked\r\n\r\n0\r\n\r\n",
        Refused(501, "upgrade_unsupported"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked,\r\n\r\n0\r\n\r\n",
        Refused(400, "bad_request"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n",
        Refused(400, "bad_request"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n",
        Refused(400, "bad_request"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: gzip\r\n\r\n0\r\n\r\n",
        Refused(400, "bad_request"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        Refused(400, "bad_request"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunkedx\r\n\r\n0\r\n\r\n",
        Refused(400, "bad_request"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked;q=1\r\n\r\n0\r\n\r\n",
        Refused(400, "bad_request"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked; foo=bar\r\n\r\n0\r\n\r\n",
        Refused(400, "bad_request"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: \"chunked\"\r\n\r\n0\r\n\r\n",
        Refused(400, "bad_request"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chun ked\r\n\r\n0\r\n\r\n",
        Refused(400, "bad_request"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: cow\r\n\r\n0\r\n\r\n",
        Refused(400, "bad_request"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked,identity\r\n\r\n0\r\n\r\n",
        Refused(400, "bad_request"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        Refused(501, "upgrade_unsupported"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        Refused(501, "upgrade_unsupported"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n",
        Refused(400, "bad_request"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: \r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        Refused(501, "upgrade_unsupported"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
        Refused(400, "bad_request"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding\t: chunked\r\n\r\n0\r\n\r\n",
        Refused(400, "bad_request"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n",
        Refused(400, "bad_request"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
        Refused(400, "bad_request"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked\0\r\n\r\n0\r\n\r\n",
        Refused(400, "bad_request"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked\rX: y\r\n\r\n0\r\n\r\n",
        Refused(400, "bad_request"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nX: y\n Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        Refused(400, "bad_request"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer Encoding: chunked\r\n\r\n0\r\n\r\n",
        Refused(400, "bad_request"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\n Transfer-Encoding: chunked\r\nHost: {H}\r\n\r\n0\r\n\r\n",
        Refused(400, "bad_request"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.0\r\nHost: {H}\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        Refused(400, "bad_request"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        Served("POST", "/v1/x", "hello"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\ntransfer-encoding:CHUNKED\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        Served("POST", "/v1/x", "hello"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: \tchunked\t \r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        Served("POST", "/v1/x", "hello"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        Served("POST", "/v1/x", ""),
        EVERY,
    ),
    Case(
        "GET @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        Served("GET", "/v1/x", "hello"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer_Encoding: chunked\r\nContent-Length: 5\r\n\r\nhello",
        Served("POST", "/v1/x", "hello"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nX-Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\nhello",
        Served("POST", "/v1/x", "hello"),
        EVERY,
    ),
];

/// Chunks and trailers.
pub const CHUNKS: &[Case] = &[
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked\r\n\r\n5;ext=1\r\nhello\r\n0\r\n\r\n",
        Served("POST", "/v1/x", "hello"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked\r\n\r\n5;ext=\"a b\"\r\nhello\r\n0;last\r\n\r\n",
        Served("POST", "/v1/x", "hello"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked\r\n\r\n5 ;ext\r\nhello\r\n0\r\n\r\n",
        Served("POST", "/v1/x", "hello"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked\r\n\r\n0005\r\nhello\r\n000\r\n\r\n",
        Served("POST", "/v1/x", "hello"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked\r\n\r\nA\r\n0123456789\r\n0\r\n\r\n",
        Served("POST", "/v1/x", "0123456789"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nh\r\n4\r\nello\r\n0\r\n\r\n",
        Served("POST", "/v1/x", "hello"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nX-Plain: 1\r\n\r\n",
        Served("POST", "/v1/x", "hello"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nAuthorization: Bearer mine\r\n\r\n",
        Served("POST", "/v1/x", "hello"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTrailer: Authorization, X-Api-Key\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nAuthorization: Bearer mine\r\nX-Api-Key: k\r\n\r\n",
        Served("POST", "/v1/x", "hello"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nContent-Length: 50\r\n\r\n",
        Served("POST", "/v1/x", "hello"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTrailer: Transfer-Encoding, Host\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nTransfer-Encoding: chunked\r\nHost: evil.example\r\n\r\n",
        Served("POST", "/v1/x", "hello"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTrailer: X-Lessor-Key\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nX-Lessor-Key: b\r\n\r\n",
        Served("POST", "/v1/x", "hello"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked\r\n\r\n0x5\r\nhello\r\n0\r\n\r\n",
        Broken(400, "bad_request"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked\r\n\r\n+5\r\nhello\r\n0\r\n\r\n",
        Broken(400, "bad_request"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\nhello\r\n0\r\n\r\n",
        Broken(400, "bad_request"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked\r\n\r\n5g\r\nhello\r\n0\r\n\r\n",
        Broken(400, "bad_request"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked\r\n\r\n 5\r\nhello\r\n0\r\n\r\n",
        Broken(400, "bad_request"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked\r\n\r\n\r\nhello\r\n0\r\n\r\n",
        Broken(400, "bad_request"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked\r\n\r\n5\nhello\r\n0\r\n\r\n",
        Broken(400, "bad_request"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked\r\n\r\n5\rhello\r\n0\r\n\r\n",
        Broken(400, "bad_request"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked\r\n\r\n5;a\nb\r\nhello\r\n0\r\n\r\n",
        Broken(400, "bad_request"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked\r\n\r\n5;a\rb\r\nhello\r\n0\r\n\r\n",
        Broken(400, "bad_request"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello0\r\n\r\n",
        Broken(400, "bad_request"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\n0\r\n\r\n",
        Broken(400, "bad_request"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhelloworld\r\n0\r\n\r\n",
        Broken(400, "bad_request"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked\r\n\r\n6\r\nhello\r\n0\r\n\r\n",
        Broken(400, "bad_request"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\nhello\r\n0\r\n\r\n",
        Broken(400, "bad_request"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked\r\n\r\n10000000000000005\r\nhello\r\n0\r\n\r\n",
        Broken(400, "bad_request"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nX : y\r\n\r\n",
        Broken(400, "bad_request"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nno field\r\n\r\n",
        Broken(400, "bad_request"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nX: a\0b\r\n\r\n",
        Broken(400, "bad_request"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\n\n",
        Broken(400, "bad_request"),
        EVERY,
    ),
    // hyper takes all behind the LF for trailers, to the next empty line, and drops it: the request behind is
    // never made, here or at the provider.
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\n",
        Last("POST", "/v1/x", "hello"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked\r\n\r\n5;<long>\r\nhello\r\n0\r\n\r\n",
        Broken(400, "bad_request"),
        EVERY,
    ),
];

/// Request line, Host, fields.
pub const HEADS: &[Case] = &[
    Case("GET @/v1/x HTTP/1.1\r\n\r\n", Refused(400, "bad_request"), EVERY),
    Case("GET @/v1/x HTTP/1.1\r\nHost: {H}\r\nHost: {H}\r\n\r\n", Refused(400, "bad_request"), EVERY),
    Case(
        "GET @/v1/x HTTP/1.1\r\nHost: {H}\r\nHost: evil.example\r\n\r\n",
        Refused(400, "bad_request"),
        EVERY,
    ),
    Case(
        "GET @/v1/x HTTP/1.1\r\nHost: evil.example\r\nHost: {H}\r\n\r\n",
        Refused(400, "bad_request"),
        EVERY,
    ),
    Case("GET @/v1/x HTTP/1.1\r\nHost: evil.example\r\n\r\n", Declined(403, "origin_denied"), BASE),
    Case("GET @/v1/x HTTP/1.1\r\nHost: evil.example\r\n\r\n", Served("GET", "/v1/x", ""), PROXY),
    Case("GET @/v1/x HTTP/1.1\r\nHost: evil.example\r\n\r\n", Declined(421, "misdirected"), INSIDE),
    Case("GET @/v1/x HTTP/1.1\r\nHost: \r\n\r\n", Declined(403, "origin_denied"), BASE),
    Case("GET @/v1/x HTTP/1.1\r\nHost: \r\n\r\n", Declined(421, "misdirected"), INSIDE),
    Case("GET @/v1/x HTTP/1.1\r\nHost: {H}, evil.example\r\n\r\n", Declined(403, "origin_denied"), BASE),
    Case("GET @/v1/x HTTP/1.1\r\nHost: {H}, evil.example\r\n\r\n", Declined(421, "misdirected"), INSIDE),
    Case("GET @/v1/x HTTP/1.1\r\nHost: user:pw\u{40}{H}\r\n\r\n", Declined(403, "origin_denied"), BASE),
    Case("GET @/v1/x HTTP/1.1\r\nHost: {H}/path\r\n\r\n", Declined(403, "origin_denied"), BASE),
    Case("GET @/v1/x HTTP/1.1\r\nHost: {H}/path\r\n\r\n", Declined(421, "misdirected"), INSIDE),
    Case("GET @/v1/x HTTP/1.1\r\nHost: {H}\x0b\r\n\r\n", Refused(400, "bad_request"), EVERY),
    Case("GET @/v1/x HTTP/1.1\r\nHost : {H}\r\n\r\n", Refused(400, "bad_request"), EVERY),
    Case("GET @/v1/x HTTP/1.1\r\nHost:\r\n {H}\r\n\r\n", Refused(400, "bad_request"), EVERY),
    Case("GET @/v1/x HTTP/1.1\r\nHost: {H}\r\nX : y\r\n\r\n", Refused(400, "bad_request"), EVERY),
    Case("GET @/v1/x HTTP/1.1\r\nHost: {H}\r\nX: a\r\n folded\r\n\r\n", Refused(400, "bad_request"), EVERY),
    Case("GET @/v1/x HTTP/1.1\r\nHost: {H}\r\nX: a\r\n\tfolded\r\n\r\n", Refused(400, "bad_request"), EVERY),
    Case("GET @/v1/x HTTP/1.1\r\n folded: first\r\nHost: {H}\r\n\r\n", Refused(400, "bad_request"), EVERY),
    Case("GET @/v1/x HTTP/1.1\r\nHost: {H}\r\nX: a\0b\r\n\r\n", Refused(400, "bad_request"), EVERY),
    Case("GET @/v1/x HTTP/1.1\r\nHost: {H}\r\nX\0: a\r\n\r\n", Refused(400, "bad_request"), EVERY),
    Case("GET @/v1/x HTTP/1.1\r\nHost: {H}\r\nX: a\rb\r\n\r\n", Refused(400, "bad_request"), EVERY),
    Case("GET @/v1/x HTTP/1.1\r\nHost: {H}\r\nX: a\r\rGET /\r\n\r\n", Refused(400, "bad_request"), EVERY),
    Case("GET @/v1/x HTTP/1.1\r\nHost: {H}\r\nno colon\r\n\r\n", Refused(400, "bad_request"), EVERY),
    Case("GET @/v1/x HTTP/1.1\r\nHost: {H}\r\n: empty\r\n\r\n", Refused(400, "bad_request"), EVERY),
    Case("GET @/v1/x HTTP/1.1\r\nHost: {H}\r\nX(: y\r\n\r\n", Refused(400, "bad_request"), EVERY),
    Case("GET @/v1/x HTTP/1.1\r\nHost: {H}\r\nX\u{80}: y\r\n\r\n", Refused(400, "bad_request"), EVERY),
    Case("GET @/v1/x HTTP/1.1\r\nHost: {H}\r\nX y: z\r\n\r\n", Refused(400, "bad_request"), EVERY),
    Case("GET @/v1/x HTTP/1.1\r\nHost: {H}\r\nX: \x7f\r\n\r\n", Refused(400, "bad_request"), EVERY),
    Case("GET @/v1/x HTTP/1.1\r\nHost: {H}\r\nX: a\u{80}b\r\n\r\n", Served("GET", "/v1/x", ""), EVERY),
    Case("GET @/v1/x HTTP/1.1\r\nHost: {H}\r\nX:\r\nY: \t \r\n\r\n", Served("GET", "/v1/x", ""), EVERY),
    Case("GET @/v1/x HTTP/1.1\nHost: {H}\n\n", Served("GET", "/v1/x", ""), EVERY),
    Case("GET @/v1/x HTTP/1.1\r\nHost: {H}\r\nX: y\n\n", Served("GET", "/v1/x", ""), EVERY),
    Case("\r\n\r\nGET @/v1/x HTTP/1.1\r\nHost: {H}\r\n\r\n", Served("GET", "/v1/x", ""), EVERY),
    Case("GET  @/v1/x HTTP/1.1\r\nHost: {H}\r\n\r\n", Refused(400, "bad_request"), EVERY),
    Case("GET @/v1/x  HTTP/1.1\r\nHost: {H}\r\n\r\n", Refused(400, "bad_request"), EVERY),
    Case("GET\t@/v1/x\tHTTP/1.1\r\nHost: {H}\r\n\r\n", Refused(400, "bad_request"), EVERY),
    Case("GET @/v1/x HTTP/1.1 \r\nHost: {H}\r\n\r\n", Refused(400, "bad_request"), EVERY),
    Case(" GET @/v1/x HTTP/1.1\r\nHost: {H}\r\n\r\n", Refused(400, "bad_request"), EVERY),
    Case("GET @/v1/x\r\nHost: {H}\r\n\r\n", Refused(400, "bad_request"), EVERY),
    Case("GET @/v1/x HTTP/0.9\r\nHost: {H}\r\n\r\n", Refused(400, "bad_request"), EVERY),
    Case("GET @/v1/x HTTP/1.2\r\nHost: {H}\r\n\r\n", Refused(400, "bad_request"), EVERY),
    Case("GET @/v1/x HTTP/1.10\r\nHost: {H}\r\n\r\n", Refused(400, "bad_request"), EVERY),
    Case("GET @/v1/x HTTP/2.0\r\nHost: {H}\r\n\r\n", Refused(400, "bad_request"), EVERY),
    Case("GET @/v1/x http/1.1\r\nHost: {H}\r\n\r\n", Refused(400, "bad_request"), EVERY),
    Case("GET @/v1/x HTTP/1,1\r\nHost: {H}\r\n\r\n", Refused(400, "bad_request"), EVERY),
    Case("GET @/v1/x HTTP/1.1\rX: y\r\nHost: {H}\r\n\r\n", Refused(400, "bad_request"), EVERY),
    Case("GET @/v1/x HTTP/1.0\r\nHost: {H}\r\n\r\n", Last("GET", "/v1/x", ""), EVERY),
    Case(
        "POST @/v1/x HTTP/1.0\r\nHost: {H}\r\nContent-Length: 5\r\n\r\nhello",
        Last("POST", "/v1/x", "hello"),
        EVERY,
    ),
    Case(
        "GET @/v1/x HTTP/1.1\r\nHost: {H}\r\nX-Long: <long>\r\n\r\n",
        Refused(431, "header_too_large"),
        EVERY,
    ),
    Case("GET @/v1/x HTTP/1.1\r\nHost: {H}\r\n<many>\r\n", Refused(431, "header_too_large"), EVERY),
    Case("GET @/v1/<long> HTTP/1.1\r\nHost: {H}\r\n\r\n", Refused(431, "header_too_large"), EVERY),
];

/// Methods and targets.
pub const TARGETS: &[Case] = &[
    Case("CONNECT [api.openai.com]:80 HTTP/1.1\r\nHost: x\r\n\r\n", Refused(400, "bad_request"), BASE),
    Case("CONNECT [::1].evil.example:80 HTTP/1.1\r\nHost: x\r\n\r\n", Refused(400, "bad_request"), BASE),
    Case("CONNECT .:80 HTTP/1.1\r\nHost: x\r\n\r\n", Refused(400, "bad_request"), BASE),
    Case("GET http://[api.openai.com]/v1/x HTTP/1.1\r\nHost: x\r\n\r\n", Refused(400, "bad_request"), PROXY),
    Case(
        "GET http://[::1]api.openai.com/v1/x HTTP/1.1\r\nHost: x\r\n\r\n",
        Refused(400, "bad_request"),
        PROXY,
    ),
    Case("GET http://./v1/x HTTP/1.1\r\nHost: x\r\n\r\n", Refused(400, "bad_request"), PROXY),
    Case("GET @/v1/x HTTP/1.1\r\nHost: [api.openai.com]\r\n\r\n", Declined(421, "misdirected"), INSIDE),
    Case("GET @/v1/x HTTP/1.1\r\nHost: [127.0.0.1]\r\n\r\n", Declined(403, "origin_denied"), BASE),
    Case("OPTIONS * HTTP/1.1\r\nHost: {H}\r\n\r\n", Declined(404, "unknown_provider"), BASE),
    Case("OPTIONS * HTTP/1.1\r\nHost: {H}\r\n\r\n", Refused(400, "bad_request"), INSIDE),
    Case("OPTIONS @/v1/x HTTP/1.1\r\nHost: {H}\r\n\r\n", Served("OPTIONS", "/v1/x", ""), EVERY),
    Case("GET //evil.example/v1/x HTTP/1.1\r\nHost: {H}\r\n\r\n", Declined(404, "unknown_provider"), BASE),
    Case(
        "GET //evil.example/v1/x HTTP/1.1\r\nHost: {H}\r\n\r\n",
        Served("GET", "//evil.example/v1/x", ""),
        INSIDE,
    ),
    Case(
        "GET @//evil.example/v1/x HTTP/1.1\r\nHost: {H}\r\n\r\n",
        Served("GET", "//evil.example/v1/x", ""),
        EVERY,
    ),
    Case("GET /\\\\evil.example/v1/x HTTP/1.1\r\nHost: {H}\r\n\r\n", Declined(404, "unknown_provider"), BASE),
    Case(
        "GET /\\\\evil.example/v1/x HTTP/1.1\r\nHost: {H}\r\n\r\n",
        Served("GET", "/\\\\evil.example/v1/x", ""),
        INSIDE,
    ),
    Case("GET @/v1/x#fragment HTTP/1.1\r\nHost: {H}\r\n\r\n", Served("GET", "/v1/x", ""), EVERY),
    Case("GET @/v1/x?a=b#c?key=d HTTP/1.1\r\nHost: {H}\r\n\r\n", Served("GET", "/v1/x?a=b", ""), EVERY),
    Case("GET @/v1/a b HTTP/1.1\r\nHost: {H}\r\n\r\n", Refused(400, "bad_request"), EVERY),
    Case("GET @/v1/a\0b HTTP/1.1\r\nHost: {H}\r\n\r\n", Refused(400, "bad_request"), EVERY),
    Case("GET @/v1/a\tb HTTP/1.1\r\nHost: {H}\r\n\r\n", Refused(400, "bad_request"), EVERY),
    Case("GET @/v1/a%00b HTTP/1.1\r\nHost: {H}\r\n\r\n", Served("GET", "/v1/a%00b", ""), EVERY),
    Case(
        "GET @/v1/a%0d%0aHost:%20evil HTTP/1.1\r\nHost: {H}\r\n\r\n",
        Served("GET", "/v1/a%0d%0aHost:%20evil", ""),
        EVERY,
    ),
    Case("GET @/v1/%zz% HTTP/1.1\r\nHost: {H}\r\n\r\n", Served("GET", "/v1/%zz%", ""), EVERY),
    Case("GET @/v1/../x HTTP/1.1\r\nHost: {H}\r\n\r\n", Refused(400, "bad_request"), EVERY),
    Case("GET @/v1/%2e%2E%2fx HTTP/1.1\r\nHost: {H}\r\n\r\n", Refused(400, "bad_request"), EVERY),
    Case("GET @/v1/.%2e;p/x HTTP/1.1\r\nHost: {H}\r\n\r\n", Refused(400, "bad_request"), EVERY),
    Case(
        "GET @/v1/x?key=mine&a=1&%6bey=two HTTP/1.1\r\nHost: {H}\r\n\r\n",
        Served("GET", "/v1/x?a=1", ""),
        EVERY,
    ),
    Case(
        "GET @/v1/x?a=%0d%0aX:y&? HTTP/1.1\r\nHost: {H}\r\n\r\n",
        Served("GET", "/v1/x?a=%0d%0aX:y&?", ""),
        EVERY,
    ),
    Case(
        "GET http://user:pw\u{40}api.openai.com/v1/x HTTP/1.1\r\nHost: {H}\r\n\r\n",
        Refused(400, "bad_request"),
        PROXY,
    ),
    Case(
        "GET http://api.openai.com\u{40}evil.example/v1/x HTTP/1.1\r\nHost: {H}\r\n\r\n",
        Refused(400, "bad_request"),
        PROXY,
    ),
    Case("GET HTTP://API.OpenAI.com/v1/x HTTP/1.1\r\nHost: {H}\r\n\r\n", Served("GET", "/v1/x", ""), PROXY),
    Case("GET http://api.openai.com./v1/x HTTP/1.1\r\nHost: {H}\r\n\r\n", Served("GET", "/v1/x", ""), PROXY),
    Case("GET http://api.openai.com HTTP/1.1\r\nHost: {H}\r\n\r\n", Served("GET", "/", ""), PROXY),
    Case("GET http://api.openai.com?a=1 HTTP/1.1\r\nHost: {H}\r\n\r\n", Served("GET", "/?a=1", ""), PROXY),
    Case(
        "GET http://api.openai.com:99999/v1/x HTTP/1.1\r\nHost: {H}\r\n\r\n",
        Refused(400, "bad_request"),
        PROXY,
    ),
    Case(
        "GET http://api.openai.com:8080/v1/x HTTP/1.1\r\nHost: {H}\r\n\r\n",
        Declined(403, "destination_denied"),
        PROXY,
    ),
    Case("GET ftp://api.openai.com/v1/x HTTP/1.1\r\nHost: {H}\r\n\r\n", Refused(400, "bad_request"), PROXY),
    Case("GET https://api.openai.com/v1/x HTTP/1.1\r\nHost: {H}\r\n\r\n", Served("GET", "/v1/x", ""), PROXY),
    Case("GET http:/api.openai.com/v1/x HTTP/1.1\r\nHost: {H}\r\n\r\n", Refused(400, "bad_request"), PROXY),
    Case("GET http:///v1/x HTTP/1.1\r\nHost: {H}\r\n\r\n", Refused(400, "bad_request"), PROXY),
    Case("GET http://evil.example/v1/x HTTP/1.1\r\nHost: {H}\r\n\r\n", Declined(421, "misdirected"), INSIDE),
    Case("GET api.openai.com/v1/x HTTP/1.1\r\nHost: {H}\r\n\r\n", Refused(400, "bad_request"), EVERY),
    Case("get @/v1/x HTTP/1.1\r\nHost: {H}\r\n\r\n", Served("get", "/v1/x", ""), EVERY),
    Case("PROPFIND @/v1/x HTTP/1.1\r\nHost: {H}\r\n\r\n", Served("PROPFIND", "/v1/x", ""), EVERY),
    Case("M-SEARCH @/v1/x HTTP/1.1\r\nHost: {H}\r\n\r\n", Served("M-SEARCH", "/v1/x", ""), EVERY),
    Case("G(T @/v1/x HTTP/1.1\r\nHost: {H}\r\n\r\n", Refused(400, "bad_request"), EVERY),
    Case("GET\0 @/v1/x HTTP/1.1\r\nHost: {H}\r\n\r\n", Refused(400, "bad_request"), EVERY),
    Case("TRACE @/v1/x HTTP/1.1\r\nHost: {H}\r\n\r\n", Declined(405, "method_denied"), EVERY),
    Case(
        "TRACE @/v1/x HTTP/1.1\r\nHost: {H}\r\nContent-Length: 5\r\n\r\nhello",
        Declined(405, "method_denied"),
        EVERY,
    ),
    Case(
        "CONNECT api.openai.com:80 HTTP/1.1\r\nHost: api.openai.com:80\r\n\r\n",
        Refused(405, "method_denied"),
        INSIDE,
    ),
    Case("CONNECT 127.0.0.1:1 HTTP/1.1\r\nHost: 127.0.0.1:1\r\n\r\n", Refused(405, "method_denied"), INSIDE),
    Case("CONNECT api.openai.com HTTP/1.1\r\nHost: x\r\n\r\n", Refused(400, "bad_request"), BASE),
    Case("CONNECT api.openai.com:0 HTTP/1.1\r\nHost: x\r\n\r\n", Refused(400, "bad_request"), BASE),
    Case("CONNECT u\u{40}api.openai.com:80 HTTP/1.1\r\nHost: x\r\n\r\n", Refused(400, "bad_request"), BASE),
    Case("CONNECT /v1/x HTTP/1.1\r\nHost: {H}\r\n\r\n", Refused(400, "bad_request"), BASE),
    Case("CONNECT /v1/x HTTP/1.1\r\nHost: {H}\r\n\r\n", Refused(405, "method_denied"), INSIDE),
    Case("CONNECT http://api.openai.com/ HTTP/1.1\r\nHost: {H}\r\n\r\n", Refused(400, "bad_request"), BASE),
];

/// What ends here, and credentials.
pub const FIELDS: &[Case] = &[
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nConnection: authorization\r\nAuthorization: Bearer mine\r\nX-Y: z\r\nContent-Length: 5\r\n\r\nhello",
        Served("POST", "/v1/x", "hello"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nConnection: host\r\nAuthorization: Bearer mine\r\nX-Y: z\r\nContent-Length: 5\r\n\r\nhello",
        Served("POST", "/v1/x", "hello"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nConnection: content-length\r\nAuthorization: Bearer mine\r\nX-Y: z\r\nContent-Length: 5\r\n\r\nhello",
        Served("POST", "/v1/x", "hello"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nConnection: transfer-encoding\r\nAuthorization: Bearer mine\r\nX-Y: z\r\nContent-Length: 5\r\n\r\nhello",
        Served("POST", "/v1/x", "hello"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nConnection: x-api-key\r\nAuthorization: Bearer mine\r\nX-Y: z\r\nContent-Length: 5\r\n\r\nhello",
        Served("POST", "/v1/x", "hello"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nConnection: close, authorization\r\nAuthorization: Bearer mine\r\nX-Y: z\r\nContent-Length: 5\r\n\r\nhello",
        Last("POST", "/v1/x", "hello"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nConnection: Authorization, Host\r\nAuthorization: Bearer mine\r\nX-Y: z\r\nContent-Length: 5\r\n\r\nhello",
        Served("POST", "/v1/x", "hello"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nConnection: keep-alive, x-lessor-key\r\nAuthorization: Bearer mine\r\nX-Y: z\r\nContent-Length: 5\r\n\r\nhello",
        Served("POST", "/v1/x", "hello"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nConnection: te, trailer\r\nAuthorization: Bearer mine\r\nX-Y: z\r\nContent-Length: 5\r\n\r\nhello",
        Served("POST", "/v1/x", "hello"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nConnection: proxy-authorization\r\nAuthorization: Bearer mine\r\nX-Y: z\r\nContent-Length: 5\r\n\r\nhello",
        Served("POST", "/v1/x", "hello"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nConnection: x-y, ,,\r\nAuthorization: Bearer mine\r\nX-Y: z\r\nContent-Length: 5\r\n\r\nhello",
        Served("POST", "/v1/x", "hello"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nConnection: transfer-encoding\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        Served("POST", "/v1/x", "hello"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nConnection: content-length, transfer-encoding\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        Served("POST", "/v1/x", "hello"),
        EVERY,
    ),
    Case(
        "GET @/v1/x HTTP/1.1\r\nHost: {H}\r\nAuthorization: Bearer one\r\nAuthorization: Bearer two\r\n\r\n",
        Served("GET", "/v1/x", ""),
        EVERY,
    ),
    Case(
        "GET @/v1/x HTTP/1.1\r\nHost: {H}\r\nAuthorization: Bearer one\r\nX-Api-Key: two\r\nApi-Key: three\r\nX-Goog-Api-Key: four\r\nxi-api-key: five\r\n\r\n",
        Served("GET", "/v1/x", ""),
        EVERY,
    ),
    Case(
        "GET @/v1/x HTTP/1.1\r\nHost: {H}\r\nAUTHORIZATION: \r\nProxy-Authorization: Basic b25lOnR3bw==\r\n\r\n",
        Served("GET", "/v1/x", ""),
        EVERY,
    ),
    Case(
        "GET @/v1/x HTTP/1.1\r\nHost: {H}\r\nProxy-Connection: keep-alive\r\nKeep-Alive: timeout=5\r\nTE: trailers, gzip\r\n\r\n",
        Served("GET", "/v1/x", ""),
        EVERY,
    ),
    Case(
        "GET @/v1/x HTTP/1.1\r\nHost: {H}\r\nX-Lessor-Anything: 1\r\nX-Lessor-Max-Wait: 1s\r\n\r\n",
        Served("GET", "/v1/x", ""),
        EVERY,
    ),
    Case(
        "GET @/v1/x HTTP/1.1\r\nHost: {H}\r\nX-Lessor-Key: a\r\nX-Lessor-Key: b\r\n\r\n",
        Refused(400, "bad_request"),
        EVERY,
    ),
    Case(
        "GET @/v1/x HTTP/1.1\r\nHost: {H}\r\nForwarded: host=evil.example\r\nX-Forwarded-Host: evil.example\r\nX-Original-URL: /evil\r\nX-HTTP-Method-Override: DELETE\r\n\r\n",
        Served("GET", "/v1/x", ""),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\nhello",
        Served("POST", "/v1/x", "hello"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nExpect: 100-continue\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        Served("POST", "/v1/x", "hello"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nExpect: 100-Continue, x\r\nContent-Length: 5\r\n\r\nhello",
        Served("POST", "/v1/x", "hello"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nExpect: 200-ok\r\nContent-Length: 5\r\n\r\nhello",
        Served("POST", "/v1/x", "hello"),
        EVERY,
    ),
    Case(
        "GET @/v1/x HTTP/1.1\r\nHost: {H}\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n\r\n",
        Served("GET", "/v1/x", ""),
        EVERY,
    ),
    Case(
        "GET @/v1/x HTTP/1.1\r\nHost: {H}\r\nConnection: upgrade\r\nUpgrade: h2c, websocket\r\n\r\n",
        Refused(501, "upgrade_unsupported"),
        EVERY,
    ),
    Case(
        "GET @/v1/x HTTP/1.1\r\nHost: {H}\r\nConnection: UPGRADE\r\nUpgrade: foo/2\r\n\r\n",
        Refused(501, "upgrade_unsupported"),
        EVERY,
    ),
    Case(
        "POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nConnection: upgrade\r\nUpgrade: h2c\r\nContent-Length: 5\r\n\r\nhello",
        Served("POST", "/v1/x", "hello"),
        EVERY,
    ),
    Case("GET @/v1/x HTTP/1.1\r\nHost: {H}\r\nUpgrade: h2c\r\n\r\n", Served("GET", "/v1/x", ""), EVERY),
    Case(
        "GET @/v1/x HTTP/1.1\r\nHost: {H}\r\nConnection: upgrade\r\n\r\n",
        Served("GET", "/v1/x", ""),
        EVERY,
    ),
    Case("GET @/v1/x HTTP/1.1\r\nHost: {H}\r\nConnection: close\r\n\r\n", Last("GET", "/v1/x", ""), EVERY),
    Case(
        "GET @/v1/x HTTP/1.1\r\nHost: {H}\r\nConnection: keep-alive\r\nConnection: CLOSE\r\n\r\n",
        Last("GET", "/v1/x", ""),
        EVERY,
    ),
];
