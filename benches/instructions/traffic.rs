//! The provider that lessor stands before, and the client that asks it: one request after the other, for what is
//! counted must not depend on what comes first.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::Result;

/// How long one answer may take under Valgrind.
const PATIENCE: Duration = Duration::from_secs(30);
/// The size of a usual request's body.
const BODY: usize = 1024;
const CHAT: &str = r#"{"id":"chatcmpl-bench0123456789","object":"chat.completion","created":1700000000,"model":"gpt-4o-mini","choices":[{"index":0,"message":{"role":"assistant","content":"The quick brown fox jumps over the lazy dog while the five boxing wizards jump quickly, and pack my box with five dozen liquor jugs; sphinx of black quartz, judge my vow."},"logprobs":null,"finish_reason":"stop"}],"usage":{"prompt_tokens":12,"completion_tokens":64,"total_tokens":76}}"#;
const EVENT: &str = "data: {\"id\":\"chatcmpl-bench\",\"object\":\"chat.completion.chunk\",\"created\":1700000000,\
                     \"model\":\"gpt-4o-mini\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\" word\"},\
                     \"finish_reason\":null}]}\n\n";

/// What is sent.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Traffic {
    /// So many requests, each answered whole.
    Requests(u64),
    /// One request, answered by so many events, each of which is sent when the one before it has come.
    Events(u64),
}

impl Traffic {
    /// Sends it all to lessor.
    pub(crate) fn send(self, port: u16, upstream: &Upstream) -> Result<()> {
        let mut io = BufReader::new(connected(TcpStream::connect(("127.0.0.1", port))?)?);
        match self {
            Self::Requests(count) => {
                for _ in 0..count {
                    io.get_mut().write_all(&request("/openai/v1/chat/completions"))?;
                    let answer = Head::read(&mut io)?.ok_or("no answer")?;
                    if !answer.first.contains(" 200 ") {
                        return Err(answer.first.into());
                    }
                    io.read_exact(&mut vec![0; answer.length])?;
                }
            }
            Self::Events(count) => {
                let path = format!("/openai/v1/chat/completions?events={count}");
                io.get_mut().write_all(&request(&path))?;
                upstream.more.send(())?;
                Head::read(&mut io)?;
                for _ in 1..count {
                    chunk(&mut io)?;
                    upstream.more.send(())?;
                }
                while chunk(&mut io)? > 0 {}
            }
        }
        Ok(())
    }
}

/// Reads one chunk; its size.
fn chunk(io: &mut BufReader<TcpStream>) -> Result<usize> {
    let mut size = String::new();
    io.read_line(&mut size)?;
    let size = usize::from_str_radix(size.trim(), 16).map_err(|_| "a stream that is no stream of chunks")?;
    io.read_exact(&mut vec![0; size + 2])?;
    Ok(size)
}

/// A chat request of 1 KiB with its model at the end, where lessor must read everything.
fn request(path: &str) -> Vec<u8> {
    let (start, end) =
        (r#"{"messages":[{"role":"user","content":""#, r#""}],"temperature":0.7,"model":"gpt-4o-mini"}"#);
    let words = "word ".repeat(BODY);
    format!(
        "POST {path} HTTP/1.1\r\nhost: localhost\r\naccept: application/json\r\ncontent-type: application/json\r\n\
         user-agent: OpenAI/Python 1.99.0\r\nauthorization: Bearer sk-placeholder\r\ncontent-length: {BODY}\r\n\r\n\
         {start}{}{end}",
        &words[..BODY - start.len() - end.len()]
    )
    .into_bytes()
}

fn connected(stream: TcpStream) -> Result<TcpStream> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    Ok(stream)
}

/// As much of a head as is needed here.
struct Head {
    first: String,
    length: usize,
}

impl Head {
    /// `None` where the connection has ended.
    fn read(io: &mut BufReader<TcpStream>) -> Result<Option<Self>> {
        let mut first = String::new();
        if io.read_line(&mut first)? == 0 {
            return Ok(None);
        }
        let mut length = 0;
        loop {
            let mut line = String::new();
            if io.read_line(&mut line)? <= 2 {
                return Ok(Some(Self { first, length }));
            }
            if let Some((name, value)) = line.split_once(':')
                && name.eq_ignore_ascii_case("content-length")
            {
                length = value.trim().parse()?;
            }
        }
    }
}

/// The provider.
pub(crate) struct Upstream {
    pub(crate) port: u16,
    /// Has one more event sent.
    more: Sender<()>,
}

impl Upstream {
    /// Serves on a port of loopback for as long as this program runs.
    pub(crate) fn start() -> Result<Self> {
        let listener = TcpListener::bind(("127.0.0.1", 0))?;
        let (more, events) = channel();
        let (port, events) = (listener.local_addr()?.port(), Arc::new(Mutex::new(events)));
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let events = events.clone();
                // Ends when lessor closes the connection, in good order or not.
                std::thread::spawn(move || connected(stream).and_then(|stream| serve(stream, &events)));
            }
        });
        Ok(Self { port, more })
    }
}

fn serve(stream: TcpStream, events: &Mutex<Receiver<()>>) -> Result<()> {
    let mut io = BufReader::new(stream);
    while let Some(head) = Head::read(&mut io)? {
        io.read_exact(&mut vec![0; head.length])?;
        let count: Option<u64> =
            head.first.split_once("?events=").and_then(|(_, count)| count.split(' ').next()?.parse().ok());
        let Some(count) = count else {
            let length = CHAT.len();
            let answer = format!(
                "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{CHAT}"
            );
            io.get_mut().write_all(answer.as_bytes())?;
            continue;
        };
        let events = events.lock().map_err(|_| "another stream has failed")?;
        let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
        io.get_mut().write_all(head.as_bytes())?;
        for _ in 0..count {
            events.recv()?;
            io.get_mut().write_all(format!("{:x}\r\n{EVENT}\r\n", EVENT.len()).as_bytes())?;
        }
        io.get_mut().write_all(b"0\r\n\r\n")?;
    }
    Ok(())
}
