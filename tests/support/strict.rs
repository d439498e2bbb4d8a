//! HTTP/1.1 read as strictly as RFC 9112 allows, by nothing that lessor uses: what is not plainly one
//! message with one meaning is an error here, so that two readers can never differ about it.

/// A request as it stands in the bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    pub method: String,
    pub target: String,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
    pub trailers: Vec<(String, String)>,
}

/// An answer as it stands in the bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Response {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
    pub trailers: Vec<(String, String)>,
}

/// What a beginning of bytes is.
#[derive(Debug, PartialEq, Eq)]
pub enum Read<T> {
    /// One message, and how many bytes it has.
    Whole(T, usize),
    /// The beginning of one.
    Part,
    /// None, and why.
    Bad(String),
}

type Fields = Vec<(String, String)>;

/// All values of a field.
pub fn all<'a>(fields: &'a [(String, String)], name: &str) -> Vec<&'a str> {
    fields.iter().filter(|(other, _)| other.eq_ignore_ascii_case(name)).map(|(_, value)| &value[..]).collect()
}

enum Stop {
    Part,
    Bad(String),
}

impl<T> From<Result<(T, usize), Stop>> for Read<T> {
    fn from(read: Result<(T, usize), Stop>) -> Self {
        match read {
            Ok((message, len)) => Self::Whole(message, len),
            Err(Stop::Part) => Self::Part,
            Err(Stop::Bad(why)) => Self::Bad(why),
        }
    }
}

fn bad<T>(why: impl Into<String>) -> Result<T, Stop> {
    Err(Stop::Bad(why.into()))
}

struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    /// Up to the next CRLF; no other CR, LF, NUL or control character may come before.
    fn line(&mut self) -> Result<String, Stop> {
        let rest = &self.bytes[self.at..];
        for (n, &byte) in rest.iter().enumerate() {
            match byte {
                b'\r' => match rest.get(n + 1) {
                    None => return Err(Stop::Part),
                    Some(b'\n') => {
                        self.at += n + 2;
                        return Ok(String::from_utf8_lossy(&rest[..n]).into_owned());
                    }
                    Some(_) => return bad("a bare CR"),
                },
                b'\n' => return bad("a bare LF"),
                b'\t' | 0x20..=0x7e | 0x80.. => {}
                _ => return bad(format!("a control character {byte:#x}")),
            }
        }
        Err(Stop::Part)
    }

    fn take(&mut self, len: usize) -> Result<&'a [u8], Stop> {
        let part = self.bytes.get(self.at..self.at + len).ok_or(Stop::Part)?;
        self.at += len;
        Ok(part)
    }

    fn fields(&mut self) -> Result<Fields, Stop> {
        let mut fields = Vec::new();
        loop {
            let line = self.line()?;
            if line.is_empty() {
                return Ok(fields);
            }
            let Some((name, value)) = line.split_once(':') else { return bad(format!("no field: {line:?}")) };
            if name.is_empty() || !name.bytes().all(is_token) {
                return bad(format!("no field's name: {name:?}"));
            }
            fields.push((name.to_owned(), value.trim_matches([' ', '\t']).to_owned()));
        }
    }

    /// A body in chunks, without extensions, which no one needs.
    fn chunks(&mut self) -> Result<(Vec<u8>, Fields), Stop> {
        let mut body = Vec::new();
        loop {
            let size = self.line()?;
            if size.is_empty() || size.len() > 8 || !size.bytes().all(|byte| byte.is_ascii_hexdigit()) {
                return bad(format!("no chunk's size: {size:?}"));
            }
            match usize::from_str_radix(&size, 16).unwrap() {
                0 => return Ok((body, self.fields()?)),
                len => body.extend_from_slice(self.take(len)?),
            }
            if self.take(2)? != b"\r\n" {
                return bad("no line end after a chunk");
            }
        }
    }

    /// A body by what the head says of its length; `None` where it says nothing.
    fn body(&mut self, headers: &Fields) -> Result<Option<(Vec<u8>, Fields)>, Stop> {
        match (&all(headers, "content-length")[..], &all(headers, "transfer-encoding")[..]) {
            ([], []) => Ok(None),
            ([length], []) if !length.is_empty() && length.bytes().all(|byte| byte.is_ascii_digit()) => {
                let length = length.parse().or_else(|_| bad("a length too large"))?;
                Ok(Some((self.take(length)?.to_vec(), Vec::new())))
            }
            ([], [coding]) if coding.eq_ignore_ascii_case("chunked") => self.chunks().map(Some),
            (lengths, codings) => bad(format!("lengths {lengths:?} and codings {codings:?}")),
        }
    }
}

fn is_token(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte)
}

/// Reads the request that `bytes` begin with.
pub fn request(bytes: &[u8]) -> Read<Request> {
    let mut cursor = Cursor { bytes, at: 0 };
    let mut read = || {
        let line = cursor.line()?;
        let parts: Vec<&str> = line.split(' ').collect();
        let [method, target, "HTTP/1.1"] = parts[..] else {
            return bad(format!("no request line: {line:?}"));
        };
        if method.is_empty() || !method.bytes().all(is_token) {
            return bad(format!("no method: {method:?}"));
        }
        if !target.starts_with('/') || target.contains(['#', '\t']) {
            return bad(format!("no target in origin form: {target:?}"));
        }
        let headers = cursor.fields()?;
        if all(&headers, "host").len() != 1 {
            return bad("not one Host");
        }
        let (body, trailers) = cursor.body(&headers)?.unwrap_or_default();
        let (method, target) = (method.to_owned(), target.to_owned());
        Ok((Request { method, target, headers, body, trailers }, cursor.at))
    };
    read().into()
}

/// Reads the answer to a request of `method` that `bytes` begin with; `closed`: no more come.
pub fn response(bytes: &[u8], method: &str, closed: bool) -> Read<Response> {
    let mut cursor = Cursor { bytes, at: 0 };
    let mut read = || {
        let line = cursor.line()?;
        let parts: Vec<&str> = line.splitn(3, ' ').collect();
        let ["HTTP/1.1" | "HTTP/1.0", status, _reason] = parts[..] else {
            return bad(format!("no status line: {line:?}"));
        };
        let status: u16 = match status.parse() {
            Ok(status) if (100..=999).contains(&status) => status,
            _ => return bad(format!("no status: {status:?}")),
        };
        let headers = cursor.fields()?;
        let none = method == "HEAD" || matches!(status, 100..=199 | 204 | 304);
        let (body, trailers) = match none {
            true => Default::default(),
            false => match cursor.body(&headers)? {
                Some(body) => body,
                // Up to the connection's end.
                None if closed => (cursor.take(bytes.len() - cursor.at)?.to_vec(), Vec::new()),
                None => return Err(Stop::Part),
            },
        };
        Ok((Response { status, headers, body, trailers }, cursor.at))
    };
    read().into()
}

/// All answers that `bytes` are, to a connection's end, to requests of these methods (GET, behind the last),
/// without interim ones; and whether a part of one is left.
pub fn responses(mut bytes: &[u8], methods: &[&str]) -> Result<(Vec<Response>, bool), String> {
    let mut all = Vec::new();
    while !bytes.is_empty() {
        match response(bytes, methods.get(all.len()).unwrap_or(&"GET"), true) {
            Read::Whole(answer, len) => {
                bytes = &bytes[len..];
                if answer.status >= 200 {
                    all.push(answer);
                }
            }
            Read::Part => return Ok((all, true)),
            Read::Bad(why) => return Err(format!("{why} in {:?}", String::from_utf8_lossy(bytes))),
        }
    }
    Ok((all, false))
}
