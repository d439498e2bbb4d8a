//! Real WebSocket clients, and a suite of cases that tells what WebSocket peers do.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::pedantic, missing_docs, unreachable_pub)]

mod support;

use std::process::Command;
use std::time::Duration;

use serde_json::{Value, json};
use support::lessor::{run, run_within};
use support::sdk::{node, python, python_path, root};
use support::socket::{CLOSE, Far, Frame, PING, PONG, Peer, TEXT};
use support::{Key, Lessor, Setup, free_port};
use tokio::task::JoinHandle;

const SECRET: &str = "sk-CANARY-7f3a9c51e2Zq";

/// A double of OpenAI's realtime socket, at whose `n` sockets one session each is talked through; the heads
/// of their handshakes.
fn realtime(mut far: Far, n: usize) -> JoinHandle<Vec<String>> {
    tokio::spawn(async move {
        let mut heads = Vec::new();
        for _ in 0..n {
            let mut peer = far.request().await;
            assert_eq!(peer.headers("authorization"), [format!("Bearer {SECRET}")], "{}", peer.head);
            assert!(!peer.head.contains("placeholder"), "{}", peer.head);
            let chosen = peer.header("sec-websocket-protocol").split(',').next().unwrap().to_owned();
            let says = format!("Sec-WebSocket-Protocol: {chosen}\r\n");
            peer.agree(if chosen.is_empty() { "" } else { &says }).await;
            session(&mut peer).await;
            heads.push(peer.head.clone());
            peer.close().await;
        }
        heads
    })
}

async fn session(peer: &mut Peer) {
    let event = |kind: &str| json!({"type": kind, "event_id": "event_1", "session": {"type": "realtime"}});
    peer.send(Frame::text(event("session.created").to_string())).await;
    loop {
        let frame = peer.frame().await;
        assert!(frame.mask.is_some(), "a client masks");
        match frame.opcode {
            TEXT => {
                let asked: Value = serde_json::from_slice(&frame.payload).unwrap();
                assert_eq!(asked["type"], "session.update");
                peer.send(Frame::text(event("session.updated").to_string())).await;
            }
            PING => peer.send(Frame::new(PONG, frame.payload)).await,
            CLOSE => return peer.send(Frame::new(CLOSE, frame.payload)).await,
            PONG => {}
            other => panic!("opcode {other}"),
        }
    }
}

async fn start(far: &Far) -> Lessor {
    // Offered or not, HTTP/2 is none of theirs.
    let setup = far.setup().set("proxy.alpn", "[\"h2\", \"http/1.1\"]");
    setup.key(Key::new("a").cap(1).secret(SECRET)).start().await
}

/// What a client finds in its environment: lessor's base URL; or lessor as a proxy, and its CA.
fn ways(lessor: &Lessor) -> [(String, Vec<(&'static str, String)>); 2] {
    let ca = lessor.admin_socket().with_extension("ca.pem").display().to_string();
    let proxy = vec![
        ("HTTPS_PROXY", lessor.url()),
        ("https_proxy", lessor.url()),
        ("SSL_CERT_FILE", ca.clone()),
        ("NODE_EXTRA_CA_CERTS", ca),
    ];
    let base = format!("{}/openai/v1/realtime", lessor.url().replacen("http", "ws", 1));
    [(base, Vec::new()), ("wss://api.openai.com/v1/realtime".into(), proxy)]
}

async fn says(mut command: Command, env: &[(&'static str, String)]) -> Value {
    command.envs(env.iter().map(|(name, value)| (name, value)));
    run(command).await.json()
}

#[tokio::test]
async fn the_openai_python_sdk_talks_over_realtime_by_base_url_and_through_the_proxy() {
    let far = Far::tls().await;
    let lessor = start(&far).await;
    let double = realtime(far, 4);
    for (url, mut env) in ways(&lessor) {
        let http = url.replacen("ws", "http", 1);
        env.push(("OPENAI_BASE_URL", http.trim_end_matches("/realtime").to_owned()));
        env.push(("OPENAI_API_KEY", "placeholder".into()));
        let said = says(python("tests/sdks/realtime.py"), &env).await;
        let events = json!(["session.created", "session.updated"]);
        assert_eq!(said, json!({"sync": events, "async": events}), "{url}");
    }
    for head in double.await.unwrap() {
        assert!(head.starts_with("GET /v1/realtime?model=gpt-realtime HTTP/1.1\r\n"), "{head}");
    }
    lessor.is_free_within_a_second("a").await;
}

#[tokio::test]
async fn the_python_websockets_client_talks_by_base_url_and_through_the_proxy() {
    let far = Far::tls().await;
    let lessor = start(&far).await;
    let double = realtime(far, 2);
    for (url, env) in ways(&lessor) {
        let mut command = python("tests/sdks/websocket.py");
        command.arg(&url);
        let said = says(command, &env).await;
        assert_eq!(said, json!({"events": ["session.created", "session.updated"], "code": 1000}), "{url}");
    }
    double.await.unwrap();
    lessor.is_free_within_a_second("a").await;
}

#[tokio::test]
async fn the_python_websockets_client_works_under_exec_with_nothing_set_and_trusts_others_as_before() {
    let name = "the_python_websockets_client_works_under_exec_with_nothing_set_and_trusts_others_as_before";
    if !support::sandbox::inside(name).await {
        return;
    }
    let (far, mut known, mut unknown) = (Far::tls().await, Far::tls().await, Far::tls().await);
    let setup = far.setup().set("proxy.alpn", "[\"h2\", \"http/1.1\"]");
    let system = known.ca_file().unwrap().display().to_string();
    let lessor = setup.key(Key::new("a").cap(1).secret(SECRET)).env("SSL_CERT_FILE", &system).start().await;
    let under_exec = |url: String| {
        let mut command = lessor.home().command();
        command.arg("exec").arg("--admin").arg(lessor.admin_socket()).arg("--").arg(python_path());
        command.arg(root().join("tests/sdks/websocket.py")).arg(url);
        command
    };
    let talked = json!({"events": ["session.created", "session.updated"], "code": 1000});
    let double = realtime(far, 1);
    let said = run(under_exec("wss://api.openai.com/v1/realtime".into())).await;
    assert_eq!(said.json(), talked, "{said:?}");
    double.await.unwrap();
    lessor.is_free_within_a_second("a").await;
    // Hosts that are not intercepted: one that the system trusts, and one that it does not.
    let elsewhere = |port: u16| format!("wss://api.anthropic.com:{port}/chat");
    let other = elsewhere(known.port());
    let serving = tokio::spawn(async move {
        let mut peer = known.agreed().await;
        session(&mut peer).await;
        peer.close().await;
    });
    let said = run(under_exec(other)).await;
    assert_eq!(said.json(), talked, "{said:?}");
    serving.await.unwrap();
    let said = run(under_exec(elsewhere(unknown.port()))).await;
    assert!(said.code == Some(1) && said.stderr.contains("CERTIFICATE_VERIFY_FAILED"), "{said:?}");
    assert!(unknown.has_none());
}

#[tokio::test]
async fn undicis_websocket_talks_as_a_browsers_code_does_by_base_url_and_through_the_proxy() {
    let far = Far::tls().await;
    let lessor = start(&far).await;
    let double = realtime(far, 2);
    for (url, env) in ways(&lessor) {
        let mut command = node("tests/sdks/websocket.mjs");
        command.arg(&url);
        let said = says(command, &env).await;
        let events = json!(["session.created", "session.updated"]);
        let expected = json!({"events": events, "code": 1000, "wasClean": true, "protocol": "realtime"});
        assert_eq!(said, expected, "{url}");
    }
    for head in double.await.unwrap() {
        assert!(head.to_ascii_lowercase().contains("sec-websocket-protocol: realtime\r\n"), "{head}");
    }
    lessor.is_free_within_a_second("a").await;
}

/// What the Autobahn cases say of a peer straight and through lessor.
async fn judged(side: &str) -> Value {
    let port = free_port();
    let setup = Setup::new().set("providers.openai.base_url", &format!("\"http://localhost:{port}\""));
    let lessor = setup.key(Key::new("a").cap(64).secret(SECRET)).start().await;
    let url = format!("{}/openai/", lessor.url().replacen("http", "ws", 1));
    let mut command = python("tests/sdks/conformance.py");
    command.args([side, &port.to_string(), &url]);
    let said = run_within(Duration::from_secs(240), command).await.json();
    lessor.is_free_within_a_second("a").await;
    said
}

fn assert_same(said: &Value) {
    let (direct, through) = (said["direct"].as_object().unwrap(), said["through"].as_object().unwrap());
    assert!(direct.len() > 240, "{} cases", direct.len());
    assert_eq!(direct.len(), through.len());
    let passed = direct.values().filter(|case| case[0] == "OK" && case[1] == "OK").count();
    assert!(passed > 230, "{passed} cases pass without lessor");
    for (case, result) in direct {
        assert_eq!(result, &through[case], "case {case}");
    }
}

#[tokio::test]
async fn the_autobahn_cases_find_a_server_the_same_behind_lessor() {
    assert_same(&judged("server").await);
}

#[tokio::test]
async fn the_autobahn_cases_find_a_client_the_same_behind_lessor() {
    assert_same(&judged("client").await);
}
