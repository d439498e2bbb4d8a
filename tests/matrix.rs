//! One table for all: three ways in, HTTP/1.1 and HTTP/2, and what may happen on each. A cell passes, or the
//! table says why there can be none.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::pedantic, missing_docs, unreachable_pub)]
#![allow(clippy::print_stderr)] // the table is shown

mod support;

use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::json;
use support::client::{fed, patterned, send_on};
use support::h2::H2;
use support::provider::ok;
use support::socket::{Far, Frame, ask_inside, ask_over, handshake};
use support::tunnel::{connect, tls};
use support::{
    Answer, Cut, Gate, Key, Lessor, NEVER, Play, Provider, Raw, Request, Setup, Stream, eventually,
    eventually_within, ms, within,
};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};

const GIB: u64 = 1 << 30;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    BaseUrl,
    Forward,
    Connect,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Http {
    One,
    Two,
}

/// One column of the table: how the client comes in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Column {
    way: Way,
    http: Http,
}

const COLUMNS: [Column; 6] = [
    Column { way: Way::BaseUrl, http: Http::One },
    Column { way: Way::BaseUrl, http: Http::Two },
    Column { way: Way::Forward, http: Http::One },
    Column { way: Way::Forward, http: Http::Two },
    Column { way: Way::Connect, http: Http::One },
    Column { way: Way::Connect, http: Http::Two },
];

/// What became of a cell.
enum Cell {
    Passed,
    /// It cannot be, for this reason.
    Impossible(&'static str),
}

type Row = for<'w> fn(&'w World, Column) -> Pin<Box<dyn Future<Output = Cell> + 'w>>;

/// Every row of the table, with what it proves.
const ROWS: [(&str, Row); 11] = [
    ("plain", |world, column| Box::pin(plain(world, column))),
    ("SSE", |world, column| Box::pin(events(world, column))),
    ("1 GiB up", |world, column| Box::pin(up(world, column))),
    ("1 GiB down", |world, column| Box::pin(down(world, column))),
    ("WebSocket", |world, column| Box::pin(websocket(world, column))),
    ("trailers", |world, column| Box::pin(trailers(world, column))),
    ("100-continue", |world, column| Box::pin(continues(world, column))),
    ("early response", |world, column| Box::pin(early(world, column))),
    ("cut upstream", |world, column| Box::pin(cut(world, column))),
    ("echo of the key", |world, column| Box::pin(echo(world, column))),
    ("client gone", |world, column| Box::pin(gone(world, column))),
];

#[tokio::test]
async fn every_way_in_carries_everything_alike() {
    tokio::task::LocalSet::new().run_until(all_cells()).await;
}

async fn all_cells() {
    let world = Rc::new(World::start().await);
    let (mut table, mut failed) = (String::new(), Vec::new());
    for (name, row) in ROWS {
        let begun = Instant::now();
        let cells = COLUMNS.map(|column| {
            let world = world.clone();
            tokio::task::spawn_local(async move { row(&world, column).await })
        });
        for (column, cell) in COLUMNS.into_iter().zip(cells) {
            let said = match cell.await {
                Ok(Cell::Passed) => "ok".to_owned(),
                Ok(Cell::Impossible(why)) => format!("cannot be: {why}"),
                Err(panic) => {
                    failed.push(format!("{name} by {column:?}: {panic}"));
                    "FAILED".to_owned()
                }
            };
            table.push_str(&format!("{name:15} {:8?} {:4?} {said}\n", column.way, column.http));
        }
        table.push_str(&format!("{name:15} took {:?}\n", begun.elapsed()));
        world.lessor.is_free_within_a_second("a").await;
    }
    eprintln!("{table}");
    let peak = world.lessor.peak_kib();
    eprintln!("at most {peak} KiB were in use at once");
    assert!(failed.is_empty(), "{failed:#?}");
    assert!(peak < 160 << 10, "{peak} KiB were in use at once");
    eventually("the provider is left alone", async || (world.provider.open() == 0).then_some(())).await;
}

/// What all cells share: a provider that plays by the path, and one lessor.
struct World {
    provider: Provider,
    lessor: Lessor,
    /// Opened by the cell of this path, one a step.
    gates: Arc<dyn Fn(&str) -> Gate + Send + Sync>,
}

impl World {
    async fn start() -> Self {
        let made = std::sync::Mutex::new(std::collections::HashMap::<String, Gate>::new());
        let gates: Arc<dyn Fn(&str) -> Gate + Send + Sync> =
            Arc::new(move |name| made.lock().unwrap().entry(name.to_owned()).or_default().clone());
        let of_play = gates.clone();
        let provider = Provider::builder()
            .plain()
            .before_body(|seen| {
                let refused = Play::json(413, &json!({"error": {"message": "too large"}}));
                let early = || Play::new().read_at_least(1024).then(refused.clone());
                seen.path().contains("/early/").then(early)
            })
            .start(move |seen| play(seen, &*of_play))
            .await;
        let lessor = Setup::openai(&provider)
            .key(Key::new("a").secret("sk-a-secret-of-the-matrix").cap(64))
            .set("proxy.alpn", "[\"h2\", \"http/1.1\"]")
            .start()
            .await;
        Self { provider, lessor, gates }
    }

    /// The request of this path at the provider.
    async fn seen(&self, path: &str) -> support::Seen {
        let at_provider = async || self.provider.seen().into_iter().find(|seen| seen.target.contains(path));
        eventually("the request at the provider", at_provider).await
    }

    /// Waits until the request of this path is over at the provider.
    async fn is_over(&self, path: &str) {
        let over = async || self.provider.seen().iter().any(|it| it.target.contains(path) && it.over());
        eventually_within(ms(1500), "its end at the provider", async || over().await.then_some(())).await;
    }
}

fn play(seen: &support::Seen, gates: &dyn Fn(&str) -> Gate) -> Play {
    let parts: Vec<&str> = seen.path().split('/').collect();
    let name = format!("/{}/{}", parts[2], parts.get(3).unwrap_or(&""));
    match parts[2] {
        "sse" => (0..5)
            .fold(Play::sse(), |play, n| play.until(&gates(&format!("{name}/{n}"))).event(&n.to_string()))
            .done(),
        "down" => Play::new().head(200, &[("content-length", &GIB.to_string())]).flood(GIB),
        "trailers" => Play::new()
            .head(200, &[("transfer-encoding", "chunked"), ("trailer", "x-sum")])
            .chunk("body")
            .bytes("0\r\nx-sum: 42\r\n\r\n"),
        "cut-length" => {
            let head = [("content-length", "100")];
            Play::new().head(200, &head).bytes("part").until(&gates(&name)).cut(Cut::Close)
        }
        "cut-chunk" => Play::sse().event("part").until(&gates(&name)).cut(Cut::Close),
        "cut-reset" => Play::sse().event("part").until(&gates(&name)).cut(Cut::Reset),
        "cut-head" => Play::new().cut(Cut::Close),
        "echo" => {
            let head = [("x-echo", seen.key()), ("transfer-encoding", "chunked"), ("trailer", "x-end")];
            let (first, second) = seen.key().split_at(9);
            let end = format!("0\r\nx-end: {}\r\nauthorization: x\r\n\r\n", seen.key());
            Play::new().head(200, &head).chunk(first).chunk(second).bytes(end)
        }
        "gone" => Play::sse().event("part").silence(),
        "gone-head" => Play::new().silence(),
        _ => ok(),
    }
}

/// A socket, with TLS on it or not.
trait Io: AsyncRead + AsyncWrite + Unpin + Send {}
impl<T: AsyncRead + AsyncWrite + Unpin + Send> Io for T {}

impl Column {
    /// A path of this cell's own, relative to the provider.
    fn path(self, row: &str) -> String {
        format!("/v1/{row}/{:?}-{:?}", self.way, self.http)
    }

    /// The same as the client asks for it.
    fn target(self, row: &str) -> String {
        let path = self.path(row);
        match self.way {
            Way::BaseUrl => format!("/openai{path}"),
            Way::Forward => format!("http://api.openai.com{path}"),
            Way::Connect => path,
        }
    }

    fn host(self, world: &World) -> String {
        match self.way {
            Way::BaseUrl => world.lessor.authority(),
            Way::Forward | Way::Connect => "api.openai.com".into(),
        }
    }

    /// A connection on which HTTP/1.1 is spoken.
    async fn wire(self, world: &World) -> Box<dyn Io> {
        match self.way {
            Way::BaseUrl | Way::Forward => Box::new(Raw::connect(world.lessor.door()).await.0),
            Way::Connect => {
                let raw = connect(&world.lessor, "api.openai.com:443").await;
                Box::new(tls(&world.lessor, raw, "api.openai.com").await.unwrap())
            }
        }
    }

    /// Sends `request` on a connection of its own.
    async fn open(self, world: &World, request: Request) -> Line {
        self.try_open(world, request).await.unwrap()
    }

    async fn try_open(self, world: &World, request: Request) -> Result<Line, hyper::Error> {
        match self.http {
            Http::One => {
                let wire = self.wire(world).await;
                let stream = send_on(wire, &self.host(world), request).await?;
                Ok(Line { stream, _h2: None })
            }
            Http::Two => {
                let h2 = match self.way {
                    Way::BaseUrl | Way::Forward => H2::to(&world.lessor).await,
                    Way::Connect => H2::inside(&world.lessor, "api.openai.com").await,
                };
                Ok(Line { stream: h2.open(request).await?, _h2: Some(h2) })
            }
        }
    }
}

/// An answer under way, and the connection that it comes on.
struct Line {
    stream: Stream,
    _h2: Option<H2>,
}

impl Line {
    async fn whole(self) -> Result<Answer, hyper::Error> {
        self.stream.whole().await
    }
}

async fn plain(world: &World, column: Column) -> Cell {
    let request = Request::post(&column.target("plain"), &json!({"model": "gpt-4o-mini", "n": 1}));
    let request = request.header("authorization", "Bearer placeholder").header("x-mine", "kept");
    let answer = column.open(world, request).await.whole().await.unwrap();
    assert_eq!((answer.status, answer.header("x-lessor-key")), (200, "a"), "{}", answer.text());
    let seen = world.seen(&column.path("plain")).await;
    assert_eq!((seen.key(), seen.credentials), ("sk-a-secret-of-the-matrix", 1));
    assert_eq!((seen.json()["n"].as_u64(), seen.header("x-mine")), (Some(1), "kept"));
    Cell::Passed
}

/// Each event is here before the next one is sent.
async fn events(world: &World, column: Column) -> Cell {
    let mut line = column.open(world, Request::get(&column.target("sse"))).await;
    assert_eq!(line.stream.header("content-type"), "text/event-stream");
    let name = format!("/sse/{:?}-{:?}", column.way, column.http);
    for n in 0..5 {
        (world.gates)(&format!("{name}/{n}")).open();
        line.stream.read_to(&format!("data: {n}\n\n")).await;
    }
    let rest = line.whole().await.unwrap();
    assert!(rest.text().ends_with("data: [DONE]\n\n") || rest.text().is_empty(), "{}", rest.text());
    Cell::Passed
}

async fn up(world: &World, column: Column) -> Cell {
    let request = Request::new("POST", &column.target("up")).body(patterned(GIB));
    let sending = column.open(world, request);
    let line = within(Duration::from_secs(240), "1 GiB up", sending).await;
    assert_eq!(line.whole().await.unwrap().status, 200);
    let seen = world.seen(&column.path("up")).await;
    assert_eq!((seen.body_len, seen.body_is_pattern, seen.body_complete), (GIB, true, true));
    Cell::Passed
}

async fn down(world: &World, column: Column) -> Cell {
    let line = column.open(world, Request::get(&column.target("down"))).await;
    let Line { stream, _h2 } = line;
    assert_eq!(stream.pattern_len().await, GIB);
    Cell::Passed
}

async fn trailers(world: &World, column: Column) -> Cell {
    let (sender, body) = fed();
    drop(sender);
    let request = Request::new("POST", &column.target("trailers")).header("te", "trailers").body(body);
    let answer = column.open(world, request).await.whole().await.unwrap();
    assert_eq!(answer.text(), "body");
    assert_eq!(answer.trailers.expect("trailers came through")["x-sum"], "42");
    assert_eq!(world.seen(&column.path("trailers")).await.header("te"), "trailers");
    Cell::Passed
}

/// Who waits for `100 Continue` is told to go on once a key is there, and not before.
async fn continues(world: &World, column: Column) -> Cell {
    if column.http == Http::Two {
        return Cell::Impossible(
            "hyper sends no interim answer on HTTP/2; clients of it do not wait for one",
        );
    }
    let mut wire = column.wire(world).await;
    let (target, host) = (column.target("continue"), column.host(world));
    let head = format!(
        "POST {target} HTTP/1.1\r\nHost: {host}\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n"
    );
    wire.write_all(head.as_bytes()).await.unwrap();
    let said = read_to(&mut wire, "\r\n\r\n").await;
    assert!(said.starts_with("HTTP/1.1 100 "), "{said}");
    wire.write_all(b"hello").await.unwrap();
    let said = read_to(&mut wire, "\r\n\r\n").await;
    assert!(said.starts_with("HTTP/1.1 200 "), "{said}");
    let seen = world.seen(&column.path("continue")).await;
    assert_eq!((seen.body.as_slice(), seen.header("expect")), (&b"hello"[..], ""));
    Cell::Passed
}

/// A refusal that comes while the upload runs reaches the client whole.
async fn early(world: &World, column: Column) -> Cell {
    let request = Request::new("POST", &column.target("early")).body(patterned(100 << 20));
    let answer = column.open(world, request).await.whole().await.unwrap();
    assert_eq!((answer.status, answer.json()["error"]["message"].as_str()), (413, Some("too large")));
    world.is_over(&column.path("early")).await;
    assert!(world.seen(&column.path("early")).await.body_len < 64 << 20, "the upload was not stopped");
    Cell::Passed
}

/// However an answer breaks off, it does not look whole. It breaks once its part is here: a break that comes with
/// the head may overtake it on HTTP/2, where a reset throws away what is not written yet.
async fn cut(world: &World, column: Column) -> Cell {
    for row in ["cut-length", "cut-chunk", "cut-reset"] {
        let mut line = column.open(world, Request::get(&column.target(row))).await;
        assert_eq!(line.stream.status, 200);
        line.stream.read_to("part").await;
        (world.gates)(&format!("/{row}/{:?}-{:?}", column.way, column.http)).open();
        assert!(line.whole().await.is_err(), "{row} looks whole");
    }
    let request = Request::new("POST", &column.target("cut-head"));
    let answer = column.open(world, request).await.whole().await.unwrap();
    answer.is_error(502, "upstream_unreachable");
    Cell::Passed
}

/// A key that the provider sends back is masked in head, body and trailers.
async fn echo(world: &World, column: Column) -> Cell {
    let (sender, body) = fed();
    drop(sender);
    let request = Request::new("POST", &column.target("echo")).header("te", "trailers").body(body);
    let answer = column.open(world, request).await.whole().await.unwrap();
    let stars = "*".repeat(world.seen(&column.path("echo")).await.key().len());
    assert_eq!((answer.header("x-echo"), answer.text()), (&*stars, stars.clone()));
    let trailers = answer.trailers.expect("trailers came through");
    assert_eq!(
        (trailers["x-end"].to_str().unwrap(), trailers.contains_key("authorization")),
        (&*stars, false)
    );
    Cell::Passed
}

/// A client that leaves ends its request at the provider within a second.
async fn gone(world: &World, column: Column) -> Cell {
    let mut line = column.open(world, Request::get(&column.target("gone"))).await;
    line.stream.read_to("part").await;
    drop(line);
    world.is_over(&column.path("gone")).await;
    let path = column.path("gone-head");
    tokio::select! {
        _ = column.try_open(world, Request::get(&column.target("gone-head"))) => panic!("no answer was sent"),
        _ = world.seen(&path) => {}
    }
    world.is_over(&path).await;
    Cell::Passed
}

async fn read_to(wire: &mut Box<dyn Io>, mark: &str) -> String {
    let mut seen = Vec::new();
    let mut byte = [0; 1];
    while !seen.ends_with(mark.as_bytes()) {
        let read = within(NEVER, mark, wire.read(&mut byte)).await;
        assert_eq!(read.unwrap(), 1, "ended after {:?}", String::from_utf8_lossy(&seen));
        seen.push(byte[0]);
    }
    String::from_utf8_lossy(&seen).into_owned()
}

/// Frames go both ways while one lease is held, and the key comes back with the end.
async fn websocket(_: &World, column: Column) -> Cell {
    if column.http == Http::Two {
        return Cell::Impossible("extended CONNECT is not offered, so clients open WebSockets over HTTP/1.1");
    }
    let mut far = Far::plain().await;
    let offered = "[\"h2\", \"http/1.1\"]";
    let lessor = far.setup().key(Key::new("a")).set("proxy.alpn", offered).start().await;
    let to = |target: &str, host: &str| handshake(target, host, "");
    let near = match column.way {
        Way::BaseUrl => ask_over(lessor.raw().await.0, &to("/openai/v1/realtime", &lessor.authority())).await,
        Way::Forward => {
            let head = to("http://api.openai.com/v1/realtime", "api.openai.com");
            ask_over(lessor.raw().await.0, &head).await
        }
        Way::Connect => {
            let raw = connect(&lessor, "api.openai.com:443").await;
            let stream = tls(&lessor, raw, "api.openai.com").await.unwrap();
            ask_inside(stream, &to("/v1/realtime", "api.openai.com")).await
        }
    };
    let mut provider = far.agreed().await;
    assert_eq!(provider.headers("authorization"), ["Bearer sk-a"]);
    let mut near = near.answered().await;
    near.send(Frame::text("ping").masked()).await;
    assert_eq!(provider.frame().await, Frame::text("ping").masked());
    provider.send(Frame::text("pong")).await;
    assert_eq!(near.frame().await, Frame::text("pong"));
    assert_eq!(lessor.in_use("a").await, 1);
    near.close().await;
    lessor.is_free_within_a_second("a").await;
    Cell::Passed
}
