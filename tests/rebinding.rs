//! A name whose address changes between a check and a use: each is resolved once, judged, and that very address
//! is dialled.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::pedantic, missing_docs, unreachable_pub)]

mod support;

use std::collections::HashMap;
use std::net::Ipv4Addr;
use std::sync::{Arc, Mutex};

use support::h2::H2;
use support::provider::ok;
use support::socket::{Far, ask_over, handshake};
use support::{Door, Key, Provider, Request, Setup, sandbox};
use tokio::net::UdpSocket;

/// What a name means, one entry a lookup; the last one stays.
type Zone = HashMap<&'static str, Vec<Vec<Ipv4Addr>>>;

/// A name server that changes its mind.
struct Names {
    asked: Arc<Mutex<HashMap<String, usize>>>,
}

impl Names {
    async fn start(zone: Zone) -> Self {
        let socket = UdpSocket::bind("127.0.0.1:53").await.unwrap();
        let asked: Arc<Mutex<HashMap<String, usize>>> = Arc::default();
        let counts = asked.clone();
        tokio::spawn(async move {
            let mut query = [0; 512];
            while let Ok((len, from)) = socket.recv_from(&mut query).await {
                let answer = answer(&query[..len], &zone, &mut counts.lock().unwrap());
                socket.send_to(&answer, from).await.unwrap();
            }
        });
        Self { asked }
    }

    /// How often its address was asked for.
    fn asked(&self, name: &str) -> usize {
        self.asked.lock().unwrap().get(name).copied().unwrap_or(0)
    }
}

/// An answer to one question (RFC 1035, section 4).
fn answer(query: &[u8], zone: &Zone, asked: &mut HashMap<String, usize>) -> Vec<u8> {
    let (mut at, mut labels) = (12, Vec::new());
    while query[at] > 0 {
        let end = at + 1 + usize::from(query[at]);
        labels.push(String::from_utf8_lossy(&query[at + 1..end]).into_owned());
        at = end;
    }
    let (name, kind, end) = (labels.join("."), query[at + 2], at + 5);
    let mut found = Vec::new();
    if kind == 1
        && let Some(turns) = zone.get(name.as_str())
    {
        let turn = asked.entry(name).or_default();
        found.clone_from(&turns[(*turn).min(turns.len() - 1)]);
        *turn += 1;
    }
    let mut said = query[..2].to_vec();
    said.extend([0x81, 0x80, 0, 1, 0, found.len() as u8, 0, 0, 0, 0]);
    said.extend(&query[12..end]);
    for address in found {
        // The question's name, type A, class IN, no life at all, four bytes.
        said.extend([0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 0, 0, 4]);
        said.extend(address.octets());
    }
    said
}

#[tokio::test]
async fn a_name_is_resolved_once_judged_and_that_address_is_dialled() {
    if !sandbox::inside("a_name_is_resolved_once_judged_and_that_address_is_dialled").await {
        return;
    }
    let (here, metadata) = (Ipv4Addr::LOCALHOST, Ipv4Addr::new(169, 254, 169, 254));
    let zone = HashMap::from([
        ("turns.example", vec![vec![here], vec![metadata]]),
        ("tunnel.example", vec![vec![here], vec![metadata]]),
        ("both.example", vec![vec![here, metadata]]),
        ("own.example", vec![vec![here]]),
        ("socket.example", vec![vec![here], vec![metadata]]),
        ("streams.example", vec![vec![here], vec![metadata]]),
        ("checked.example", vec![vec![here], vec![metadata]]),
        ("provider.example", vec![vec![here], vec![metadata]]),
    ]);
    let names = Names::start(zone).await;
    let origin = Provider::origin(|_| ok()).await;
    let provider = Provider::plain(|_| ok()).await;
    let lessor = Setup::new()
        .set("providers.openai.base_url", &format!("\"http://provider.example:{}\"", provider.addr().port()))
        .set("providers.openai.allow_plaintext", "true")
        .key(Key::new("a"))
        .start()
        .await;
    let port = origin.addr().port();
    let ask = async |name: &str| {
        let request = Request::get(&format!("http://{name}:{port}/")).header("connection", "close");
        lessor.ask(request).await
    };

    // A second look-up would have led to the machine's own credentials.
    let answer = ask("turns.example").await;
    assert_eq!((answer.status, names.asked("turns.example")), (200, 1), "{}", answer.text());
    // By now the connection may be kept: nothing is resolved, or what is found is refused.
    let port_of_none = support::free_port();
    let answer = lessor.ask(Request::get(&format!("http://turns.example:{port_of_none}/"))).await;
    answer.is_error(403, "destination_denied");
    ask("both.example").await.is_error(403, "destination_denied");

    let tunnel = async |authority: String| {
        let mut raw = lessor.raw().await;
        raw.write(format!("CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n\r\n")).await;
        raw.answer().await.0
    };
    assert_eq!((tunnel(format!("tunnel.example:{port}")).await, names.asked("tunnel.example")), (200, 1));
    assert_eq!(tunnel(format!("tunnel.example:{port}")).await, 403);
    assert_eq!(tunnel(format!("both.example:{port}")).await, 403);

    // A name that leads to lessor itself is allowed until the port is known.
    let Door::Tcp(admin) = lessor.admin_door() else { unreachable!() };
    let Door::Tcp(proxy) = lessor.door() else { unreachable!() };
    for port in [admin.port(), proxy.port()] {
        let answer = lessor.get(&format!("http://own.example:{port}/healthz")).await;
        answer.is_error(403, "destination_denied");
        assert!(answer.text().contains("its own listener"), "{}", answer.text());
        assert_eq!(tunnel(format!("own.example:{port}")).await, 403);
    }

    // A WebSocket's way is the same.
    let mut far = Far::plain().await;
    let socket = async |port: u16| {
        let host = format!("socket.example:{port}");
        ask_over(lessor.raw().await.0, &handshake(&format!("http://{host}/"), &host, "")).await
    };
    let near = socket(far.port()).await;
    let _peer = far.agreed().await;
    assert_eq!((near.answered().await.status(), names.asked("socket.example")), (101, 1));
    let refused = socket(far.port()).await.answered().await;
    assert_eq!((refused.status(), refused.header("x-lessor-error")), (403, "destination_denied"));

    // And a stream's of HTTP/2.
    let h2 = H2::to(&lessor).await;
    let asked = |port: u16| Request::get(&format!("http://streams.example:{port}/")).header("x-mine", "1");
    assert_eq!((h2.ask(asked(port)).await.status, names.asked("streams.example")), (200, 1));
    h2.ask(asked(port_of_none)).await.is_error(403, "destination_denied");

    // A provider's host is the configuration's; it is resolved once all the same.
    let answer = lessor.get("/openai/v1/models").await;
    assert_eq!((answer.status, names.asked("provider.example")), (200, 1), "{}", answer.text());
    assert_eq!(provider.keys_seen(), ["sk-a"]);
    assert_eq!(origin.count(), 2, "only the first request by each name came through");

    // Nor does lessor's own check of a key look twice.
    let url = format!("\"http://checked.example:{}\"", provider.addr().port());
    let setup = Setup::new().set("providers.openai.base_url", &url).key(Key::new("a"));
    let lessor = setup.set("providers.openai.allow_plaintext", "true").start().await;
    let checked = lessor.admin_post("/v1/keys/openai/a/check").await;
    assert_eq!((checked.status, names.asked("checked.example")), (200, 1), "{}", checked.text());
}
