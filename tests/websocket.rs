//! WebSockets through lessor, in all ways in, from their handshake to their end.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::pedantic, missing_docs, unreachable_pub)]

mod support;

use support::socket::{
    BINARY, CLOSE, CONTINUATION, Far, Frame, KEY, PING, PONG, Peer, REALTIME, TEXT, accept, ask, ask_inside,
    ask_over, handshake, open, open_with,
};
use support::tunnel;
use support::{Key, Lessor, Setup, eventually, ms};

async fn start(far: &Far) -> Lessor {
    far.setup().key(Key::new("a").cap(1)).start().await
}

/// Bytes go both ways, whole.
async fn talk(near: &mut Peer, far: &mut Peer) {
    near.send(Frame::text("Hello").masked()).await;
    assert_eq!(far.frame().await, Frame::text("Hello").masked());
    far.send(Frame::new(BINARY, [0, 1, 2])).await;
    assert_eq!(near.frame().await, Frame::new(BINARY, [0, 1, 2]));
}

fn assert_handed_on(provider: &Peer, target: &str) {
    assert!(provider.head.starts_with(&format!("GET {target} HTTP/1.1\r\n")), "{}", provider.head);
    assert_eq!(provider.headers("authorization"), ["Bearer sk-a"], "{}", provider.head);
    assert_eq!(provider.headers("upgrade"), ["websocket"], "{}", provider.head);
    assert_eq!(provider.headers("connection"), ["Upgrade"], "{}", provider.head);
    assert_eq!(provider.headers("sec-websocket-key"), [KEY], "{}", provider.head);
    assert_eq!(provider.headers("sec-websocket-version"), ["13"], "{}", provider.head);
}

#[tokio::test]
async fn a_socket_opens_by_base_url_with_a_leased_key() {
    for mut far in [Far::plain().await, Far::tls().await] {
        let lessor = start(&far).await;
        let (mut near, mut provider) =
            open_with(&lessor, &mut far, "Authorization: Bearer placeholder\r\n", "").await;
        assert_handed_on(&provider, "/v1/realtime?model=gpt-realtime");
        assert_eq!(near.header("sec-websocket-accept"), accept(KEY));
        assert_eq!(near.headers("upgrade"), ["websocket"]);
        assert_eq!(near.headers("connection"), ["Upgrade"]);
        assert_eq!((near.header("x-lessor-key"), near.header("x-lessor-attempts")), ("a", "1"));
        talk(&mut near, &mut provider).await;
        assert_eq!(lessor.in_use("a").await, 1);
        provider.send(Frame::close(1000, "bye")).await;
        provider.close().await;
        assert_eq!(near.rest().await, (Frame::close(1000, "bye").bytes(), true));
        lessor.is_free_within_a_second("a").await;
    }
}
