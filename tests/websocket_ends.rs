//! One lease a socket: held as long as it is open, and back at once, whatever ends it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::pedantic, missing_docs, unreachable_pub)]

mod support;

use std::time::{Duration, Instant};

use support::lessor::field;
use support::socket::{
    BINARY, Far, Frame, PING, PONG, Peer, REALTIME, ask, ask_inside, ask_over, handshake, open,
};
use support::{Key, Lessor, NEVER, PatternCheck, Setup, eventually, ms, pattern, tunnel, within};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

const LONG: Duration = Duration::from_secs(20);

fn setup(far: &Far) -> Setup {
    far.setup().key(Key::new("a").cap(1))
}

/// The outcome in the one log line of the one request.
async fn outcome(lessor: &Lessor) -> String {
    let lines = eventually("the request's line in the log", async || {
        let lines = lessor.log_lines();
        let of_request: Vec<_> = lines
            .iter()
            .filter(|line| field(line, "message") == "request")
            .map(|l| field(l, "outcome"))
            .collect();
        (!of_request.is_empty()).then_some(of_request)
    })
    .await;
    assert_eq!(lines.len(), 1, "{lines:?}");
    lines[0].clone()
}

/// Both ends of a socket, the client's inside of TLS.
async fn open_in_tls(lessor: &Lessor, far: &mut Far) -> (Peer, Peer) {
    let raw = tunnel::connect(lessor, "api.openai.com:443").await;
    let stream = tunnel::tls(lessor, raw, "api.openai.com").await.unwrap();
    let near = ask_inside(stream, &handshake("/v1/realtime", "api.openai.com", "")).await;
    let provider = far.agreed().await;
    (near.answered().await, provider)
}

#[tokio::test]
async fn the_one_slot_is_a_sockets_as_long_as_it_is_open_and_the_next_one_waits_for_it() {
    let mut far = Far::plain().await;
    let lessor = setup(&far).start().await;
    let (near, _provider) = open(&lessor, &mut far).await;
    let full = ask(&lessor, REALTIME, "X-Lessor-Max-Wait: 0s\r\n").await.answered().await;
    assert_eq!((full.status(), full.header("x-lessor-error")), (429, "pool_exhausted"), "{}", full.head);
    let waiting = ask(&lessor, REALTIME, "").await;
    lessor.comes_to_queue(1).await;
    assert!(far.has_none());
    near.close().await;
    let mut next = far.agreed().await;
    let mut waiting = waiting.answered().await;
    assert_eq!(waiting.status(), 101);
    next.send(Frame::text("yours")).await;
    assert_eq!(waiting.frame().await, Frame::text("yours"));
}

#[tokio::test]
async fn a_client_that_leaves_while_it_waits_or_before_the_answer_frees_its_place_and_the_provider() {
    let mut far = Far::plain().await;
    let lessor = setup(&far).start().await;
    let (held, _provider) = open(&lessor, &mut far).await;
    let waiting = ask(&lessor, REALTIME, "").await;
    lessor.comes_to_queue(1).await;
    drop(waiting);
    lessor.comes_to_queue(0).await;
    drop(held);
    lessor.is_free_within_a_second("a").await;
    // Also with bytes behind the handshake, which hyper does not read past.
    let mut unanswered = ask(&lessor, REALTIME, "").await;
    unanswered.send(Frame::text("early").masked()).await;
    let mut provider = far.request().await;
    drop(unanswered);
    lessor.is_free_within_a_second("a").await;
    assert_eq!(within(ms(1000), "the provider sees it", provider.rest()).await.0, b"");
}

#[tokio::test]
async fn the_heartbeat_keeps_a_silent_socket_past_its_ttl() {
    let mut far = Far::plain().await;
    let lessor = setup(&far).set("lease.ttl", "\"2s\"").set("lease.heartbeat", "\"300ms\"").start().await;
    let (mut near, mut provider) = open(&lessor, &mut far).await;
    tokio::time::sleep(ms(4500)).await;
    assert_eq!(lessor.in_use("a").await, 1);
    provider.send(Frame::new(PING, "still there?")).await;
    assert_eq!(near.frame().await, Frame::new(PING, "still there?"));
    near.send(Frame::new(PONG, "still there?").masked()).await;
    assert_eq!(provider.frame().await, Frame::new(PONG, "still there?").masked());
    assert_eq!(lessor.metric("lessor_lease_lost_total").await, 0.0);
}

#[tokio::test]
async fn a_revoked_lease_cuts_both_sides_and_neither_takes_it_for_an_end() {
    for tls in [false, true] {
        let mut far = if tls { Far::tls().await } else { Far::plain().await };
        let setup = setup(&far).set("lease.ttl", "\"2s\"").set("lease.heartbeat", "\"500ms\"");
        let lessor = setup.start().await;
        let (mut near, mut provider) =
            if tls { open_in_tls(&lessor, &mut far).await } else { open(&lessor, &mut far).await };
        let lease = near.header("x-lessor-lease").to_owned();
        provider.send(Frame::text("half").part()).await;
        near.frame().await;
        lessor.cli(&["leases", "revoke", &lease]).await.ok();
        within(ms(2500), "both are cut", async { (near.is_cut().await, provider.is_cut().await) }).await;
        lessor.is_free_within_a_second("a").await;
        assert_eq!(outcome(&lessor).await, "lease_revoked");
        assert_eq!(lessor.status("a").await, "available");
    }
}

#[tokio::test]
async fn a_lease_and_a_socket_live_no_longer_than_the_user_allows() {
    for (name, said) in [("lease.max_duration", "lease_lost"), ("websocket.max_duration", "too_long")] {
        let mut far = Far::plain().await;
        let lessor = setup(&far).set(name, "\"1s\"").start().await;
        let (mut near, mut provider) = open(&lessor, &mut far).await;
        let begun = Instant::now();
        // Busy or not.
        while begun.elapsed() < ms(600) {
            provider.send(Frame::text("on and on")).await;
            near.frame().await;
            tokio::time::sleep(ms(50)).await;
        }
        within(ms(1500), "both are cut", async { (near.is_cut().await, provider.is_cut().await) }).await;
        assert!(begun.elapsed() > ms(800), "{:?}", begun.elapsed());
        lessor.is_free_within_a_second("a").await;
        assert_eq!(outcome(&lessor).await, said);
    }
}

#[tokio::test]
async fn a_socket_on_which_no_byte_moves_is_cut_and_a_ping_is_enough_to_keep_it() {
    let mut far = Far::plain().await;
    let lessor = setup(&far).set("websocket.idle", "\"700ms\"").start().await;
    let (mut near, mut provider) = open(&lessor, &mut far).await;
    for round in 0..6 {
        tokio::time::sleep(ms(300)).await;
        if round % 2 == 0 {
            provider.send(Frame::new(PING, "")).await;
            near.frame().await;
        } else {
            near.send(Frame::new(PONG, "").masked()).await;
            provider.frame().await;
        }
    }
    within(ms(1500), "both are cut", async { (near.is_cut().await, provider.is_cut().await) }).await;
    lessor.is_free_within_a_second("a").await;
    assert_eq!(outcome(&lessor).await, "upstream_idle");
}

#[tokio::test]
async fn a_client_that_takes_nothing_is_cut_in_time_and_the_provider_is_not_called_idle() {
    let mut far = Far::plain().await;
    let lessor = setup(&far).set("websocket.idle", "\"1s\"").start().await;
    let (mut near, mut provider) = open(&lessor, &mut far).await;
    let sent = provider.flood(&Frame::new(BINARY, vec![7; 60_000]).bytes(), ms(500)).await;
    assert!(sent > 60_000, "{sent}");
    within(ms(3000), "the provider is cut", provider.is_cut()).await;
    within(ms(3000), "the client is cut", near.is_cut()).await;
    lessor.is_free_within_a_second("a").await;
    assert_eq!(outcome(&lessor).await, "cancelled");
}

#[tokio::test]
async fn however_the_client_ends_the_key_is_free_within_a_second_and_the_provider_hears_of_it() {
    for how in ["close", "half-close", "reset", "close with bytes unread", "reset behind bytes nobody takes"]
    {
        for tls in [false, true] {
            let mut far = if tls { Far::tls().await } else { Far::plain().await };
            let lessor = setup(&far).start().await;
            let (mut near, mut provider) =
                if tls { open_in_tls(&lessor, &mut far).await } else { open(&lessor, &mut far).await };
            near.send(Frame::text("last words").masked()).await;
            match how {
                "close" => near.close().await,
                "half-close" => {
                    near.half_close().await;
                    std::mem::forget(near);
                }
                "reset" => near.reset(),
                "close with bytes unread" => {
                    provider.send(Frame::text("unread")).await;
                    eventually("it is on its way", async || {
                        tokio::time::sleep(ms(100)).await;
                        Some(())
                    })
                    .await;
                    drop(near);
                }
                _ => {
                    near.flood(&Frame::new(BINARY, vec![0; 60_000]).masked().bytes(), ms(300)).await;
                    near.reset();
                }
            }
            let begun = Instant::now();
            lessor.is_free_within_a_second("a").await;
            assert!(begun.elapsed() < ms(1000), "{how}: {:?}", begun.elapsed());
            if !how.starts_with("reset") {
                assert_eq!(provider.frame().await, Frame::text("last words").masked(), "{how}");
            }
            within(NEVER, "the provider sees the end", provider.rest()).await;
            assert_eq!(outcome(&lessor).await, "cancelled", "{how}");
        }
    }
}

#[tokio::test]
async fn a_close_frame_sent_with_the_end_still_reaches_the_provider() {
    for tls in [false, true] {
        let mut far = if tls { Far::tls().await } else { Far::plain().await };
        let lessor = setup(&far).start().await;
        let (mut near, mut provider) = open(&lessor, &mut far).await;
        near.send(Frame::close(1001, "going away").masked()).await;
        near.close().await;
        assert_eq!(provider.frame().await, Frame::close(1001, "going away").masked());
        assert_eq!(provider.rest().await, (Vec::new(), true));
        lessor.is_free_within_a_second("a").await;
    }
}

#[tokio::test]
async fn however_the_provider_ends_the_key_is_free_within_a_second_and_the_client_hears_of_it() {
    for how in ["close", "close mid frame", "truncate", "reset", "half-close", "goodbye"] {
        for tls in [false, true] {
            let mut far = if tls { Far::tls().await } else { Far::plain().await };
            let lessor = setup(&far).start().await;
            let (mut near, mut provider) =
                if tls { open_in_tls(&lessor, &mut far).await } else { open(&lessor, &mut far).await };
            provider.send(Frame::text("last words")).await;
            assert_eq!(near.frame().await, Frame::text("last words"), "{how}");
            let mut rest = Vec::new();
            match how {
                "close" => provider.close().await,
                "close mid frame" => {
                    rest = Frame::text("cut he").bytes();
                    rest[1] += 2;
                    provider.write(&rest).await;
                    provider.close().await;
                }
                "truncate" => drop(provider),
                "reset" => provider.reset(),
                "half-close" => {
                    provider.half_close().await;
                    std::mem::forget(provider);
                }
                _ => {
                    rest = Frame::close(1000, "bye").bytes();
                    provider.write(&rest).await;
                    drop(provider);
                }
            }
            let begun = Instant::now();
            lessor.is_free_within_a_second("a").await;
            assert!(begun.elapsed() < ms(1000), "{how}: {:?}", begun.elapsed());
            let (seen, in_order) = within(NEVER, "the client sees the end", near.rest()).await;
            assert_eq!(seen, rest, "{how}");
            // What breaks off without a farewell is not shown as one that ended.
            let broken = how == "reset" || (how == "truncate" && tls);
            assert_eq!(in_order, !broken, "{how}, TLS: {tls}");
            near.close().await;
            let expected = if how == "goodbye" { "success" } else { "upstream_broke" };
            assert_eq!(outcome(&lessor).await, expected, "{how}");
        }
    }
}

#[tokio::test]
async fn a_key_is_free_when_the_provider_ended_though_the_client_has_yet_to_read_it() {
    let mut far = Far::plain().await;
    let lessor = setup(&far).start().await;
    let (mut near, mut provider) = open(&lessor, &mut far).await;
    let message = Frame::new(BINARY, vec![7; 100_000]).bytes();
    let sent = provider.flood(&message, ms(500)).await;
    assert!(sent > 100_000, "{sent}");
    drop(provider);
    // Its end lies behind what fills the window, until some of that is taken.
    let read = near.read_exact(usize::try_from(sent).unwrap() / 2).await.len();
    lessor.is_free_within_a_second("a").await;
    let (seen, in_order) = within(LONG, "the rest", near.rest()).await;
    assert_eq!(((read + seen.len()) as u64, in_order), (sent, true));
}

#[tokio::test]
async fn a_key_is_free_when_the_provider_broke_off_behind_what_the_client_does_not_take() {
    for tls in [false, true] {
        let mut far = if tls { Far::tls().await } else { Far::plain().await };
        let lessor = setup(&far).start().await;
        let (mut near, mut provider) = open(&lessor, &mut far).await;
        let sent = provider.flood(&Frame::new(BINARY, vec![7; 100_000]).bytes(), ms(500)).await;
        assert!(sent > 100_000, "{sent}");
        provider.reset();
        lessor.is_free_within_a_second("a").await;
        let (seen, in_order) = within(LONG, "the rest", near.rest()).await;
        assert!(!in_order && (seen.len() as u64) < sent, "{} of {sent}, in order: {in_order}", seen.len());
        assert_eq!(outcome(&lessor).await, "upstream_broke");
    }
}

#[tokio::test]
async fn a_drain_lets_sockets_run_up_to_the_grace_and_then_cuts_them() {
    let mut far = Far::plain().await;
    let mut lessor = setup(&far).set("shutdown.grace", "\"2s\"").start().await;
    let (mut near, mut provider) = open(&lessor, &mut far).await;
    lessor.sigterm();
    let begun = Instant::now();
    let door = lessor.door().clone();
    let support::Door::Tcp(at) = door else { unreachable!() };
    eventually("nobody new", async || tokio::net::TcpStream::connect(at).await.is_err().then_some(())).await;
    provider.send(Frame::text("go on")).await;
    assert_eq!(near.frame().await, Frame::text("go on"));
    within(ms(4000), "both are cut", async { (near.is_cut().await, provider.is_cut().await) }).await;
    assert!(begun.elapsed() > ms(1800), "{:?}", begun.elapsed());
    assert_eq!(lessor.ends_within(LONG).await.code(), Some(0));
}

#[tokio::test]
async fn a_drain_ends_early_when_the_last_socket_does() {
    let mut far = Far::plain().await;
    let mut lessor = setup(&far).start().await;
    let (near, _provider) = open(&lessor, &mut far).await;
    lessor.sigterm();
    tokio::time::sleep(ms(300)).await;
    let begun = Instant::now();
    near.close().await;
    assert_eq!(lessor.ends_within(LONG).await.code(), Some(0));
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
}

#[tokio::test]
async fn sockets_count_as_connections() {
    let mut far = Far::plain().await;
    let lessor = far.setup().key(Key::new("a").cap(8)).set("limits.max_connections", "2").start().await;
    let (one, _far_one) = open(&lessor, &mut far).await;
    let (_two, _far_two) = open(&lessor, &mut far).await;
    let third = ask(&lessor, REALTIME, "").await;
    tokio::time::sleep(ms(200)).await;
    assert!(far.has_none(), "the third waits for a place");
    one.close().await;
    let _far_three = far.agreed().await;
    assert_eq!(third.answered().await.status(), 101);
}

#[tokio::test]
async fn a_slow_reader_slows_the_other_side_and_costs_no_memory() {
    let mut far = Far::plain().await;
    let lessor = setup(&far).start().await;
    let (mut near, mut provider) = open(&lessor, &mut far).await;
    let before = lessor.resident_kib();
    let message = Frame::new(BINARY, vec![7; 1 << 20]).bytes();
    let down = provider.flood(&message, ms(500)).await;
    let up = near.flood(&message, ms(500)).await;
    // What the kernel's buffers on the way take, and no more.
    assert!(down < 48 << 20 && up < 48 << 20, "{down} down, {up} up");
    let grown = lessor.resident_kib().saturating_sub(before);
    assert!(grown < 8 << 10, "{grown} KiB more");
}

#[tokio::test]
async fn sixty_four_mebibytes_go_through_unchanged_both_ways_in_constant_memory() {
    const LEN: usize = 64 << 20;
    let mut far = Far::plain().await;
    let lessor = setup(&far).start().await;
    let (mut near, mut provider) = open(&lessor, &mut far).await;
    let before = lessor.peak_kib();
    for from_provider in [true, false] {
        let (from, to) = if from_provider { (&mut provider, &mut near) } else { (&mut near, &mut provider) };
        let head = [&[0x82, 127][..], &(LEN as u64).to_be_bytes()].concat();
        let sending = async {
            from.write(&head).await;
            let mut at = 0;
            while at < LEN {
                let n = (LEN - at).min(251 * 1024);
                from.write(&pattern()[..n]).await;
                at += n;
            }
        };
        let reading = async {
            assert_eq!(to.read_exact(head.len()).await, head);
            let mut check = PatternCheck::default();
            while check.len < LEN as u64 {
                check.take(&to.read_some().await.unwrap());
            }
            assert!(check.len == LEN as u64 && !check.broken);
        };
        within(Duration::from_secs(60), "the transfer", async { tokio::join!(sending, reading) }).await;
    }
    let grown = lessor.peak_kib().saturating_sub(before);
    assert!(grown < 8 << 10, "{grown} KiB more");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flood_one_way_holds_up_neither_the_other_nor_the_look_at_who_has_left() {
    let mut far = Far::plain().await;
    let lessor = setup(&far).start().await;
    let (near, provider) = open(&lessor, &mut far).await;
    let (mut from_far, mut to_far) = provider.split();
    let (mut from_near, mut to_near) = near.split();
    let flooding = tokio::spawn(async move {
        let message = Frame::new(BINARY, vec![7; 60_000]).bytes();
        while to_far.write_all(&message).await.is_ok() {}
    });
    let taking = tokio::spawn(async move { tokio::io::copy(&mut from_near, &mut tokio::io::sink()).await });
    tokio::time::sleep(ms(200)).await;
    for _ in 0..10 {
        let ping = Frame::new(PING, "through?").masked().bytes();
        to_near.write_all(&ping).await.unwrap();
        let mut seen = vec![0; ping.len()];
        within(ms(1000), "a ping against the flood", from_far.read_exact(&mut seen)).await.unwrap();
        assert_eq!(seen, ping);
    }
    taking.abort();
    drop(to_near);
    lessor.is_free_within_a_second("a").await;
    flooding.await.unwrap();
}

#[tokio::test]
async fn a_revoked_app_loses_its_sockets_to_providers_and_to_other_hosts() {
    let (mut far, mut other) = (Far::plain().await, Far::plain().await);
    let lessor = setup(&far).start().await;
    let (mut near, mut provider) = open(&lessor, &mut far).await;
    let host = format!("127.0.0.1:{}", other.port());
    let elsewhere =
        ask_over(lessor.raw().await.0, &handshake(&format!("http://{host}/chat"), &host, "")).await;
    let mut peer = other.agreed().await;
    let mut elsewhere = elsewhere.answered().await;
    lessor.cli(&["apps", "revoke", "anonymous"]).await.ok();
    let all = async {
        (near.is_cut().await, provider.is_cut().await, elsewhere.is_cut().await, peer.is_cut().await)
    };
    within(ms(1000), "all are cut", all).await;
    lessor.is_free_within_a_second("a").await;
    let name = "lessor_requests_total{provider=\"openai\",mode=\"base_url\",outcome=\"app_revoked\"}";
    eventually("it is counted so", async || (lessor.metric(name).await as u32 == 1).then_some(())).await;
}
