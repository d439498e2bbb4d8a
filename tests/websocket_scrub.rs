//! A key that a provider echoes over a WebSocket never reaches the client, and all else comes as it was
//! sent, when it was sent.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::pedantic, missing_docs, unreachable_pub)]

mod support;

use std::time::Instant;

use support::socket::{
    BINARY, CLOSE, CONTINUATION, Far, Frame, PING, PONG, Peer, REALTIME, TEXT, ask, open, open_with,
};
use support::{Key, Lessor, Setup, eventually, ms, within};

const SECRET: &str = "sk-CANARY-7f3a9c51e2Zq";

fn setup(far: &Far) -> Setup {
    far.setup().key(Key::new("a").cap(1).secret(SECRET))
}

fn stars(text: &str) -> String {
    text.replace(SECRET, &"*".repeat(SECRET.len()))
}

/// Payloads of these frames, with the secret masked but for the three bytes that may be out before it is
/// known for one.
#[track_caller]
fn assert_masked(came: &str, sent: &str) {
    let masked = stars(sent);
    assert_eq!(came.len(), masked.len(), "{came:?}");
    let early = came.bytes().zip(masked.bytes()).filter(|(came, masked)| came != masked).count();
    assert!(early <= 3 && !came.contains(&SECRET[..4]), "{came:?}");
}

async fn seen(near: &mut Peer, frames: usize) -> Vec<Frame> {
    let mut all = Vec::new();
    for _ in 0..frames {
        all.push(near.frame().await);
    }
    all
}

fn text_of(frames: &[Frame]) -> String {
    let data = frames.iter().filter(|frame| frame.opcode < 8);
    String::from_utf8(data.flat_map(|frame| frame.payload.clone()).collect()).unwrap()
}

#[tokio::test]
async fn the_key_is_masked_in_the_101s_headers_in_text_in_binary_and_in_close_reasons() {
    for mut far in [Far::plain().await, Far::tls().await] {
        let lessor = setup(&far).start().await;
        let says = format!("X-Echo: Bearer {SECRET}\r\nAuthorization: Bearer {SECRET}\r\n");
        let (mut near, mut provider) = open_with(&lessor, &mut far, "", &says).await;
        assert_eq!(provider.header("authorization"), format!("Bearer {SECRET}"));
        assert_eq!(near.header("x-echo"), stars(&format!("Bearer {SECRET}")));
        assert!(!near.head.contains(SECRET), "{}", near.head);
        for opcode in [TEXT, BINARY] {
            let text = format!("{{\"before\":\"{SECRET}\"}} after");
            provider.send(Frame::new(opcode, &text)).await;
            let came = near.frame().await;
            assert_eq!((came.opcode, came.fin), (opcode, true));
            assert_masked(std::str::from_utf8(&came.payload).unwrap(), &text);
        }
        for opcode in [PING, PONG] {
            provider.send(Frame::new(opcode, SECRET)).await;
            assert_eq!(near.frame().await, Frame::new(opcode, stars(SECRET)));
        }
        provider.send(Frame::close(4001, &format!("bad key {SECRET}"))).await;
        assert_eq!(near.frame().await, Frame::close(4001, &stars(&format!("bad key {SECRET}"))));
        let name = "lessor_scrubbed_total{provider=\"openai\",where=\"websocket\"}";
        assert_eq!(lessor.metric(name).await, 5.0);
        assert!(!lessor.log().contains(SECRET));
    }
}

#[tokio::test]
async fn split_at_every_byte_over_fragments_and_writes_with_control_frames_between_it_stays_masked() {
    let mut far = Far::plain().await;
    let lessor = setup(&far).start().await;
    let (mut near, mut provider) = open(&lessor, &mut far).await;
    let text = format!("<{SECRET}>");
    for cut in 0..=text.len() {
        for ping in [false, true] {
            let mut frames = vec![Frame::text(&text[..cut]).part()];
            frames.extend(ping.then(|| Frame::new(PING, "between")));
            frames.push(Frame::new(CONTINUATION, &text[cut..]));
            for frame in &frames {
                // In two writes, cut in the frame's middle.
                let bytes = frame.bytes();
                provider.write(&bytes[..bytes.len() / 2]).await;
                provider.write(&bytes[bytes.len() / 2..]).await;
            }
            let came = within(ms(5000), "the message", seen(&mut near, frames.len())).await;
            let shape = |all: &[Frame]| -> Vec<_> {
                all.iter().map(|frame| (frame.opcode, frame.fin, frame.payload.len())).collect()
            };
            assert_eq!(shape(&came), shape(&frames));
            assert_masked(&text_of(&came), &text);
        }
    }
    // Byte by byte, each in a fragment and a packet of its own.
    for (at, byte) in SECRET.bytes().enumerate() {
        let frame = Frame::new(if at == 0 { TEXT } else { CONTINUATION }, [byte]);
        let frame = if at + 1 < SECRET.len() { frame.part() } else { frame };
        provider.send(frame).await;
    }
    let came = within(ms(5000), "the message", seen(&mut near, SECRET.len())).await;
    assert_masked(&text_of(&came), SECRET);
}

#[tokio::test]
async fn nothing_waits_but_what_may_be_the_key_and_that_no_longer_than_its_message() {
    let mut far = Far::plain().await;
    let lessor = setup(&far).start().await;
    let (mut near, mut provider) = open(&lessor, &mut far).await;
    let begun = Instant::now();
    // Whole messages and fragments, each seen before the next is sent.
    for frame in [
        Frame::text("whole"),
        Frame::text("a message that ends in sk-CANARY"),
        Frame::text("part").part(),
        Frame::new(PING, "between"),
        Frame::new(CONTINUATION, " more").part(),
        Frame::new(CONTINUATION, "the end, sk-CAN"),
    ] {
        provider.send(frame.clone()).await;
        assert_eq!(near.frame().await, frame);
    }
    // A head and a payload that come in drips.
    let slow = Frame::new(BINARY, vec![9; 300]).bytes();
    for byte in &slow {
        provider.write([*byte]).await;
    }
    assert_eq!(near.read_exact(slow.len()).await, slow);
    assert!(begun.elapsed() < ms(2000), "{:?}", begun.elapsed());
    // What looks like the key's beginning at a fragment's end holds back what is behind it, until more comes.
    provider.send(Frame::text("now sk-CAN").part()).await;
    provider.send(Frame::new(PING, "waits")).await;
    assert_eq!(near.read_exact(2 + 4).await, b"\x01\x0anow ");
    near.finds_nothing().await;
    provider.send(Frame::new(CONTINUATION, "ada")).await;
    assert_eq!(near.read_exact(6).await, b"sk-CAN");
    assert_eq!(near.frame().await, Frame::new(PING, "waits"));
    assert_eq!(near.frame().await, Frame::new(CONTINUATION, "ada"));
}

#[tokio::test]
async fn of_what_no_server_may_send_the_client_sees_one_frame_and_nothing_behind_it() {
    for (foreign, head) in [
        (vec![0x81, 0x80 | 5, 1, 2, 3, 4, 5, 6, 7, 8, 9], 2),
        (vec![0x83, 3, b'a', b'b', b'c'], 5),
        ([&[0x89, 126, 1, 0][..], &[b'.'; 256]].concat(), 4 + 256),
        // To the byte what the HTTP library answers to a bad request by itself, as the frame it reads as.
        (
            [&b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"[..], &[b'.'; 86]]
                .concat()[..86]
                .to_vec(),
            86,
        ),
    ] {
        let mut far = Far::plain().await;
        let lessor = setup(&far).start().await;
        let (mut near, mut provider) = open(&lessor, &mut far).await;
        provider.send(Frame::text("good")).await;
        assert_eq!(near.frame().await, Frame::text("good"));
        provider.write(&foreign).await;
        assert_eq!(near.read_exact(head).await, foreign[..head]);
        provider.send(Frame::text(&SECRET[..20]).part()).await;
        provider.send(Frame::new(CONTINUATION, &SECRET[20..])).await;
        // What the client says of it still reaches the provider.
        near.send(Frame::close(1002, "").masked()).await;
        assert_eq!(provider.frame().await, Frame::close(1002, "").masked());
        provider.close().await;
        assert_eq!(near.rest().await, (Vec::new(), true));
    }
}

#[tokio::test]
async fn a_key_in_frames_whose_lengths_are_longer_than_they_need_be_is_masked() {
    let mut far = Far::plain().await;
    let lessor = setup(&far).start().await;
    let (mut near, mut provider) = open(&lessor, &mut far).await;
    let spelt = |first: u8, text: &str| [&[first, 126, 0, text.len() as u8][..], text.as_bytes()].concat();
    provider.write(spelt(0x01, &SECRET[..20])).await;
    provider.write(spelt(0x80, &SECRET[20..])).await;
    let came = near.read_exact(8 + SECRET.len()).await;
    let text = [&came[4..24], &came[28..]].concat();
    assert_eq!(text, vec![b'*'; SECRET.len()], "{}", String::from_utf8_lossy(&came));
}

/// A handshake's offer of extensions, as the provider sees it, and a packed message that echoes the key.
async fn packed(lessor: &Lessor, far: &mut Far) -> (String, Vec<u8>) {
    let offer = "Sec-WebSocket-Extensions: permessage-deflate; client_max_window_bits\r\n";
    let agreed = "Sec-WebSocket-Extensions: permessage-deflate\r\n";
    let near = ask(lessor, REALTIME, offer).await;
    let mut provider = far.request().await;
    let offered = provider.header("sec-websocket-extensions").to_owned();
    provider.agree(if offered.is_empty() { "" } else { agreed }).await;
    let mut near = near.answered().await;
    assert_eq!(
        near.header("sec-websocket-extensions"),
        if offered.is_empty() { "" } else { "permessage-deflate" }
    );
    // Not really packed: what matters is what is taken for it.
    provider.send(Frame::text(SECRET).rsv(4)).await;
    (offered, near.frame().await.payload)
}

#[tokio::test]
async fn packed_messages_pass_as_they_are_or_are_not_offered_as_the_user_says() {
    let mut far = Far::plain().await;
    let lessor = setup(&far).start().await;
    let (offered, came) = packed(&lessor, &mut far).await;
    assert_eq!(offered, "permessage-deflate; client_max_window_bits");
    assert_eq!(came, SECRET.as_bytes());
    let packing = lessor;
    let lessor = setup(&far).set("scrub.compressed", "\"decode\"").start().await;
    let (offered, came) = packed(&lessor, &mut far).await;
    assert_eq!(offered, "");
    assert_eq!(came, stars(SECRET).as_bytes());
    // What no client offered is not agreed on, whatever a provider says.
    let agrees = "Sec-WebSocket-Extensions: permessage-deflate\r\n";
    let (mut near, mut provider) = open_with(&packing, &mut far, "", agrees).await;
    provider.send(Frame::text(SECRET).rsv(4)).await;
    assert_eq!(near.frame().await.payload, stars(SECRET).as_bytes());
}

#[tokio::test]
async fn scrub_says_where_and_a_short_secret_is_masked_in_the_head_alone() {
    for (scrub, secret, in_head) in
        [("headers", SECRET, true), ("off", SECRET, false), ("on", "sk-short", true)]
    {
        let mut far = Far::plain().await;
        let setup = far.setup().key(Key::new("a").secret(secret));
        let lessor = setup.set("providers.openai.scrub", &format!("{scrub:?}")).start().await;
        let says = format!("X-Echo: {secret}\r\n");
        let (mut near, mut provider) = open_with(&lessor, &mut far, "", &says).await;
        assert_eq!(near.header("x-echo") != secret, in_head, "{scrub}");
        provider.send(Frame::text(secret)).await;
        assert_eq!(near.frame().await, Frame::text(secret), "{scrub}");
        provider.send(Frame::new(CLOSE, secret)).await;
        assert_eq!(near.frame().await, Frame::new(CLOSE, secret), "{scrub}");
    }
}

#[tokio::test]
async fn what_the_client_sends_is_not_looked_into() {
    let mut far = Far::plain().await;
    let lessor = setup(&far).start().await;
    let (mut near, mut provider) = open(&lessor, &mut far).await;
    near.send(Frame::text(SECRET).masked()).await;
    assert_eq!(provider.frame().await, Frame::text(SECRET).masked());
    near.write(SECRET).await;
    assert_eq!(provider.read_exact(SECRET.len()).await, SECRET.as_bytes());
}

#[tokio::test]
async fn no_secret_is_in_any_log_of_a_socket_at_the_finest_level() {
    let mut far = Far::plain().await;
    let lessor = setup(&far).env("RUST_LOG", "trace").start().await;
    let placeholder = "openai-insecure-api-key.placeholder-of-app";
    let lines = format!("Sec-WebSocket-Protocol: {placeholder}\r\n");
    let (near, mut provider) = open_with(&lessor, &mut far, &lines, "").await;
    provider.send(Frame::text(SECRET)).await;
    near.close().await;
    eventually("the request is told", async || lessor.log().contains("\"request\"").then_some(())).await;
    assert!(!lessor.log().contains(SECRET));
}
