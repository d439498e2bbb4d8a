//! What is said where `store.url` leads to the wrong place: what it is, and what to change.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::pedantic, missing_docs, unreachable_pub)]

mod support;

use std::net::SocketAddr;

use lessor::config::{HostPort, RedisConfig, StoreUrl, Topology};
use lessor::model::Secret;
use lessor::store::Store as _;
use lessor::store::redis::RedisStore;
use support::redis::Redis;
use support::{NEVER, within};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

fn at(addr: SocketAddr) -> RedisConfig {
    RedisConfig::plain(Topology::Single(HostPort { host: addr.ip().to_string(), port: addr.port() }))
}

/// What opening the store, or else the first call, says.
async fn said(config: &RedisConfig, prefix: &str) -> String {
    let words = async {
        match RedisStore::open(config, prefix).await {
            Err(error) => error.to_string(),
            Ok(store) => store.ping().await.expect_err("the store works").to_string(),
        }
    };
    within(NEVER, "an error", words).await
}

/// A server that answers whatever comes with these bytes, and then closes where `close` says so.
async fn server(answer: &'static [u8], close: bool) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut socket, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut some = [0; 4096];
                while socket.read(&mut some).await.is_ok_and(|n| n > 0) {
                    if socket.write_all(answer).await.is_err() || close {
                        return;
                    }
                }
            });
        }
    });
    addr
}

#[tokio::test]
async fn a_server_that_is_no_redis_is_called_so() {
    for answer in [
        &b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"[..],
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"\x15\x03\x03\x00\x02\x02\x46",
    ] {
        let text = said(&at(server(answer, true).await), "lessor").await;
        assert!(text.contains("no Redis") && text.contains("store.url"), "{text}");
    }
}

#[tokio::test]
async fn a_redis_that_is_too_old_is_told_so() {
    for answer in [
        &b"-ERR unknown command `HELLO`, with args beginning with: `3`, \r\n"[..],
        b"-ERR unknown command 'HELLO'\r\n",
        b"-NOPROTO sorry this protocol version is not supported\r\n",
    ] {
        let text = said(&at(server(answer, false).await), "lessor").await;
        assert!(text.contains("Redis 6") && text.contains("RESP3"), "{text}");
    }
}

#[tokio::test]
async fn a_database_that_is_not_there_is_told_with_the_number_to_change() {
    let redis = Redis::start().await;
    let file = format!("[store]\nurl = \"redis://{}/99\"\n", redis.addr());
    let store = lessor::config::load_str(&file, "lessor.toml", &|_| None).unwrap().store;
    let StoreUrl::Redis(config) = store.url else { panic!("{store:?}") };
    let text = said(&config, "lessor").await;
    assert!(text.contains("/99") && text.contains("`databases`"), "{text}");
}

#[tokio::test]
async fn a_prefix_that_the_user_may_not_use_is_told_as_such() {
    let redis = Redis::start().await;
    let rights =
        ["ACL", "SETUSER", "fleet", "reset", "on", ">secret-word", "+@all", "~lessor:*", "&lessor:*"];
    redis.command(&rights).await;
    let (username, password) = (Some("fleet".into()), Some(Secret::new("secret-word".into())));
    let config = RedisConfig { username, password, ..at(redis.addr()) };
    let text = said(&config, "another").await;
    assert!(text.contains("store.prefix") && text.contains("~PREFIX:*"), "{text}");
    assert!(!text.contains("secret-word"), "{text}");
}
