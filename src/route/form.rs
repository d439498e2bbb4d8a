//! Reads the field `model` of a `multipart/form-data` body while it streams by.
//!
//! What any other parser might read differently is unreadable here, so that no second reading of a body
//! reaches a model that its key may not serve: bare line feeds before a boundary, text before the first or
//! after the last, a field given twice, a field with a file name, a part whose name is not plain.

use http::HeaderMap;
use http::header::CONTENT_TYPE;
use memchr::memmem;

use super::scan::Scan;
use crate::model::ModelName;

/// The largest head of a part; a longer one makes the body unreadable.
const MAX_HEAD: usize = 8192;
/// The longest boundary (RFC 2046, section 5.1.1).
const MAX_BOUNDARY: usize = 70;

/// A streaming look for the field. Feed every byte in order, then ask for [`FormScan::end`].
#[derive(Debug)]
pub struct FormScan {
    /// `--` and the boundary.
    delimiter: Vec<u8>,
    /// The name of the field.
    field: String,
    state: State,
    /// What came and is not judged yet: at most a head, or a delimiter's length and little more.
    held: Vec<u8>,
    /// The value, while its part is read.
    value: Vec<u8>,
    model: Option<ModelName>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// At the very start: the first delimiter must come.
    Start,
    /// Behind a delimiter: a line's end and a part, or `--` and the end.
    Behind,
    /// In the head of a part.
    Head,
    /// In a part's content; `true`: it is the field's.
    Content(bool),
    /// Behind the last delimiter.
    Done,
    /// Unreadable.
    Broken,
}

impl FormScan {
    /// For a body of that type; `None` where it is no form, or names no sound boundary.
    pub fn of(headers: &HeaderMap, field: &str) -> Option<Self> {
        let mut types = headers.get_all(CONTENT_TYPE).iter();
        let (text, None) = (types.next()?.to_str().ok()?, types.next()) else { return None };
        let (kind, parameters) = text.split_once(';')?;
        if !kind.trim().eq_ignore_ascii_case("multipart/form-data") {
            return None;
        }
        let boundary = boundary(parameters)?;
        Some(Self {
            delimiter: format!("--{boundary}").into_bytes(),
            field: field.to_owned(),
            state: State::Start,
            held: Vec::new(),
            value: Vec::new(),
            model: None,
        })
    }

    /// Reads on. Once [`Scan::Unreadable`], always so.
    pub fn feed(&mut self, bytes: &[u8]) -> Scan {
        // In pieces, so that what is held stays small however large a chunk is.
        for piece in bytes.chunks(MAX_HEAD) {
            if matches!(self.state, State::Broken) {
                break;
            }
            self.held.extend_from_slice(piece);
            while self.step() {}
        }
        match (&self.model, self.state) {
            (_, State::Broken) => Scan::Unreadable,
            (Some(model), _) => Scan::Model(model.clone()),
            (None, _) => Scan::Unsure,
        }
    }

    /// The last word, at the end of the body.
    pub fn end(self) -> Scan {
        match (self.state, self.model) {
            (State::Done, Some(model)) if self.held.is_empty() => Scan::Model(model),
            (State::Done, None) if self.held.is_empty() => Scan::Absent,
            _ => Scan::Unreadable,
        }
    }

    /// Takes what can be judged of what is held; false when more is needed.
    fn step(&mut self) -> bool {
        let before = (self.held.len(), self.state);
        match self.state {
            State::Start => {
                if self.held.len() >= self.delimiter.len() {
                    self.state =
                        if self.held.starts_with(&self.delimiter) { State::Behind } else { State::Broken };
                    self.held.drain(..self.delimiter.len());
                }
            }
            State::Behind => match self.held.get(..2) {
                Some(b"\r\n") => self.go_behind(2, State::Head),
                Some(b"--") => self.go_behind(2, State::Done),
                Some(_) => self.state = State::Broken,
                None => {}
            },
            State::Head => self.head(),
            State::Content(of_field) => self.content(of_field),
            // One line's end may follow.
            State::Done if self.held.starts_with(b"\r\n") => {
                self.held.drain(..2);
                if !self.held.is_empty() {
                    self.state = State::Broken;
                }
            }
            State::Done if self.held.len() > 2 => self.state = State::Broken,
            State::Done | State::Broken => {}
        }
        if self.state == State::Broken {
            self.held.clear();
        }
        before != (self.held.len(), self.state)
    }

    fn go_behind(&mut self, bytes: usize, state: State) {
        self.held.drain(..bytes);
        self.state = state;
    }

    fn head(&mut self) {
        let Some(end) = memmem::find(&self.held, b"\r\n\r\n") else {
            if self.held.len() > MAX_HEAD {
                self.state = State::Broken;
            }
            return;
        };
        let name = std::str::from_utf8(&self.held[..end]).ok().and_then(part_name);
        self.state = match name {
            Some((name, is_file)) if name == self.field => {
                // A second one must not slip past, and a file is no name.
                if is_file || self.model.is_some() { State::Broken } else { State::Content(true) }
            }
            Some(_) => State::Content(false),
            None => State::Broken,
        };
        self.value.clear();
        // The line's end before a delimiter may be the head's own, where a part is empty.
        self.held.drain(..end + 2);
    }

    fn content(&mut self, of_field: bool) {
        let Some(at) = memmem::find(&self.held, &self.delimiter) else {
            // The end of what is held may be the beginning of a delimiter, with its line's end before it.
            let sure = self.held.len().saturating_sub(self.delimiter.len() + 1);
            self.keep(of_field, sure);
            return;
        };
        if self.held[..at].ends_with(b"\r\n") {
            self.keep(of_field, at - 2);
            if self.state == State::Broken {
                return;
            }
            self.go_behind(2 + self.delimiter.len(), State::Behind);
            if of_field {
                self.model = self.name();
                if self.model.is_none() {
                    self.state = State::Broken;
                }
            }
        } else {
            // A delimiter to some parsers, content to others; no client chooses a boundary that occurs.
            self.state = State::Broken;
        }
    }

    /// Takes so many bytes of content.
    fn keep(&mut self, of_field: bool, bytes: usize) {
        if of_field {
            self.value.extend_from_slice(&self.held[..bytes]);
            // The line's end behind the head is still before it.
            if self.value.len() > ModelName::MAX + 2 {
                self.state = State::Broken;
            }
        }
        self.held.drain(..bytes);
    }

    /// The value, where it is a name on one line.
    fn name(&self) -> Option<ModelName> {
        let text = std::str::from_utf8(self.value.strip_prefix(b"\r\n")?).ok()?;
        let plain = text.trim() == text && !text.contains(char::is_control);
        plain.then(|| ModelName::new(text)).flatten()
    }
}

/// The boundary among a content type's parameters, given once.
fn boundary(parameters: &str) -> Option<String> {
    let mut found = None;
    for (name, value) in parsed_parameters(parameters)? {
        if name == "boundary" && found.replace(value).is_some() {
            return None;
        }
    }
    let allowed = |b: u8| b.is_ascii_alphanumeric() || b"'()+_,-./:=? ".contains(&b);
    found.filter(|text| {
        (1..=MAX_BOUNDARY).contains(&text.len()) && text.bytes().all(allowed) && !text.ends_with(' ')
    })
}

/// The name of a part, and whether it is a file; `None` where parsers may disagree.
fn part_name(head: &str) -> Option<(String, bool)> {
    let mut disposition = None;
    for line in head.split("\r\n").filter(|line| !line.is_empty()) {
        let (name, value) = line.split_once(':')?;
        let token = |b: u8| b.is_ascii_alphanumeric() || b == b'-';
        if name.is_empty() || !name.bytes().all(token) || value.contains(['\r', '\n', '\0']) {
            return None;
        }
        if name.eq_ignore_ascii_case("content-disposition") && disposition.replace(value).is_some() {
            return None;
        }
        // What is encoded once more reads differently to who decodes it.
        if name.eq_ignore_ascii_case("content-transfer-encoding")
            && !["7bit", "8bit", "binary"].iter().any(|plain| value.trim().eq_ignore_ascii_case(plain))
        {
            return None;
        }
    }
    let (kind, parameters) = disposition?.split_once(';')?;
    if !kind.trim().eq_ignore_ascii_case("form-data") {
        return None;
    }
    let (mut name, mut is_file) = (None, false);
    for (key, value) in parsed_parameters(parameters)? {
        match key.as_str() {
            "name" if name.is_none() => name = Some(value),
            "name" | "name*" => return None,
            "filename" | "filename*" => is_file = true,
            _ => {}
        }
    }
    Some((name?, is_file))
}

/// `key=value; key="value"`, keys in lower case; `None` where anything is not plain. A backslash is refused
/// save in file names: some take it for an escape, some for itself.
fn parsed_parameters(text: &str) -> Option<Vec<(String, String)>> {
    let mut all = Vec::new();
    let mut rest = text.trim();
    while !rest.is_empty() {
        let (key, tail) = rest.split_once('=')?;
        let key = key.trim().to_ascii_lowercase();
        let (value, tail) = match tail.strip_prefix('"') {
            Some(quoted) => {
                let end = quoted.find('"')?;
                (&quoted[..end], &quoted[end + 1..])
            }
            None => tail.split_at(tail.find(';').unwrap_or(tail.len())),
        };
        let sound = !key.is_empty() && !key.contains([' ', '"', ';', '\\']);
        let plain = !value.contains('\\') && (key == "filename" || !value.contains('%'));
        if !sound || !(plain || key.starts_with("filename")) {
            return None;
        }
        all.push((key, value.trim().to_owned()));
        rest = tail.trim_start();
        if !rest.is_empty() {
            rest = rest.strip_prefix(';')?.trim_start();
        }
    }
    Some(all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn scan_of(kind: &str) -> Option<FormScan> {
        let headers = [(CONTENT_TYPE, kind.parse().unwrap())].into_iter().collect();
        FormScan::of(&headers, "model")
    }

    fn whole(body: &[u8]) -> Scan {
        let mut scan = scan_of("multipart/form-data; boundary=XX").unwrap();
        scan.feed(body);
        scan.end()
    }

    fn model(name: &str) -> Scan {
        Scan::Model(ModelName::new(name).unwrap())
    }

    /// A part of a form: its head, and its content.
    fn part(head: &str, content: &[u8]) -> Vec<u8> {
        [format!("--XX\r\n{head}\r\n\r\n").as_bytes(), content, b"\r\n"].concat()
    }

    fn field(name: &str, value: &str) -> Vec<u8> {
        part(&format!("Content-Disposition: form-data; name=\"{name}\""), value.as_bytes())
    }

    fn form(parts: &[Vec<u8>]) -> Vec<u8> {
        [parts.concat(), b"--XX--\r\n".to_vec()].concat()
    }

    fn file(content: &[u8]) -> Vec<u8> {
        let head = "Content-Disposition: form-data; name=\"file\"; filename=\"a\\b;%22.wav\"\r\nContent-Type: audio/wav";
        part(head, content)
    }

    #[test]
    fn the_model_of_a_form_is_read_wherever_it_stands() {
        let sound = b"RIFF\r\n--X\r\n--Xx --xX\r\n\0\xff";
        for parts in [
            vec![field("model", "whisper-1"), file(sound)],
            vec![file(sound), field("model", "whisper-1")],
            vec![
                field("prompt", ""),
                field("model", "whisper-1"),
                field("Model", "x"),
                field("model[]", "x"),
            ],
            vec![part("content-disposition:form-data;name=model\r\ncontent-type: text/plain", b"whisper-1")],
        ] {
            assert_eq!(
                whole(&form(&parts)),
                model("whisper-1"),
                "{}",
                String::from_utf8_lossy(&form(&parts))
            );
        }
        assert_eq!(whole(&form(&[file(sound)])), Scan::Absent);
        assert_eq!(whole(&form(&[field("model", "a")])[..]), model("a"));
        assert_eq!(
            whole(form(&[field("model", "a")]).trim_ascii_end()),
            model("a"),
            "no line's end behind it"
        );
    }

    #[test]
    fn what_parsers_may_read_differently_is_unreadable() {
        let head = |line: &str| form(&[part(line, b"a")]);
        let after = |tail: &[u8]| [form(&[field("model", "a")]), tail.to_vec()].concat();
        for body in [
            form(&[field("model", "a"), field("model", "b")]),
            form(&[field("model", "a\r\nb")]),
            form(&[field("model", "")]),
            form(&[field("model", &"a".repeat(300))]),
            head("Content-Disposition: form-data; name=\"model\"; filename=\"x\""),
            head("Content-Disposition: form-data; name=\"model\"; name=\"x\""),
            head("Content-Disposition: form-data; name=\"x\"; name*=utf-8''model"),
            head("Content-Disposition: form-data; name=\"mod\\el\""),
            head("Content-Disposition: form-data; name=\"%6dodel\""),
            head("Content-Disposition: form-data"),
            head("Content-Disposition: attachment; name=\"model\""),
            head(
                "Content-Disposition: form-data; name=\"x\"\r\nContent-Disposition: form-data; name=\"model\"",
            ),
            head("Content-Disposition: form-data; name=\"model\"\r\nContent-Transfer-Encoding: base64"),
            head("Content-Disposition : form-data; name=\"model\""),
            head("Content-Disposition: form-data;\r\n name=\"model\""),
            head("Content-Disposition: form-data; name=\"x\"\nx: y"),
            [b"preamble\r\n".to_vec(), form(&[field("model", "a")])].concat(),
            after(&field("model", "b")),
            after(b"x"),
            form(&[file(b"x\n--XX\nContent-Disposition: form-data; name=\"model\"\n\nb")]),
            form(&[file(b"x\r\n--XXY\r\n")]),
            form(&[file(b"x --XX\r\n")]),
            field("model", "a"),
            Vec::new(),
            form(&[part(&format!("x: {}", "y".repeat(2 * MAX_HEAD)), b"")]),
        ] {
            let shown = String::from_utf8_lossy(&body[..body.len().min(200)]).into_owned();
            assert_eq!(whole(&body), Scan::Unreadable, "{shown}");
        }
    }

    #[test]
    fn a_boundary_is_read_from_the_type_and_a_doubtful_one_is_none() {
        for kind in
            ["multipart/form-data; boundary=\"a b\"", "Multipart/Form-Data;charset=utf-8;Boundary=-x'"]
        {
            assert!(scan_of(kind).is_some(), "{kind}");
        }
        for kind in [
            "multipart/form-data",
            "multipart/form-data; boundary=",
            "multipart/form-data; boundary=a; boundary=b",
            "multipart/form-data; boundary=\"a",
            "multipart/form-data; boundary=ä",
            "multipart/mixed; boundary=a",
            "application/json; boundary=a",
        ] {
            let Ok(value) = http::HeaderValue::from_bytes(kind.as_bytes()) else { continue };
            let headers = [(CONTENT_TYPE, value)].into_iter().collect();
            assert!(FormScan::of(&headers, "model").is_none(), "{kind}");
        }
    }

    #[test]
    fn little_is_held_of_a_large_file() {
        let mut scan = scan_of("multipart/form-data; boundary=XX").unwrap();
        scan.feed(b"--XX\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a\"\r\n\r\n");
        for _ in 0..100 {
            assert_eq!(scan.feed(&vec![b'-'; 50_000]), Scan::Unsure);
            assert!(scan.held.len() < 16 && scan.value.is_empty());
        }
        scan.feed(b"\r\n");
        scan.feed(&form(&[field("model", "a")]));
        assert_eq!(scan.end(), model("a"));
    }

    proptest! {
        #[test]
        fn cuts_change_nothing(content in proptest::collection::vec(any::<u8>(), 0..60), cuts in proptest::collection::vec(0_usize..300, 0..6)) {
            let body = form(&[file(&content), field("model", "whisper-1")]);
            let expected = whole(&body);
            let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(body.len())).collect();
            cuts.extend([0, body.len()]);
            cuts.sort_unstable();
            let mut scan = scan_of("multipart/form-data; boundary=XX").unwrap();
            for ends in cuts.windows(2) {
                scan.feed(&body[ends[0]..ends[1]]);
            }
            prop_assert_eq!(scan.end(), expected);
        }

        #[test]
        fn random_bytes_never_panic(parts in proptest::collection::vec("(--XX|--|\r\n|\n|Content-Disposition: form-data; name=\"model\"|a|\0){0,9}", 0..5)) {
            let mut scan = scan_of("multipart/form-data; boundary=XX").unwrap();
            for part in parts {
                scan.feed(part.as_bytes());
            }
            scan.end();
        }
    }
}
