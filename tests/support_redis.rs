//! What the tests of the shared store stand on does what it says.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::pedantic, missing_docs, unreachable_pub)]

mod support;

use std::io::ErrorKind;
use std::time::{Duration, Instant};

use support::fault::FaultProxy;
use support::redis::{Cluster, Connection, Redis, Reply, Sentinels};
use support::{NEVER, eventually, ms, within};

/// Long enough for any answer on loopback to have come.
const SILENCE: Duration = ms(150);

/// A server, and a proxy before it with one open connection.
async fn behind_a_proxy() -> (Redis, FaultProxy, Connection) {
    let redis = Redis::start().await;
    let proxy = FaultProxy::start(redis.addr()).await;
    let mut connection = Connection::open(proxy.addr()).await.unwrap();
    assert_eq!(incr(&mut connection).await, 1);
    (redis, proxy, connection)
}

async fn incr(connection: &mut Connection) -> Reply {
    within(NEVER, "an answer", connection.call(&["INCR", "n"])).await.unwrap()
}

async fn comes_to(redis: &Redis, n: &str) {
    let probe = async || (redis.command(&["GET", "n"]).await == n).then_some(());
    redis.eventually(&format!("n is {n}"), NEVER, probe).await;
}

/// Fails if the connection says anything for a while; a reply that is late stays unread.
async fn is_silent(connection: &mut Connection) {
    let heard = tokio::time::timeout(SILENCE, connection.reply()).await;
    assert!(heard.is_err(), "{heard:?}");
}

/// How a connection ended.
async fn end(connection: &mut Connection) -> ErrorKind {
    within(NEVER, "the connection ends", connection.reply()).await.unwrap_err().kind()
}

/// Whether the server's port still has somebody.
async fn answers(proxy: &FaultProxy) -> bool {
    Connection::open(proxy.addr()).await.unwrap().call(&["PING"]).await.is_ok_and(|pong| pong == "PONG")
}

#[tokio::test]
async fn a_server_answers_on_its_port_and_is_gone_when_dropped() {
    let redis = Redis::start().await;
    assert_eq!(redis.command(&["PING"]).await, "PONG");
    assert_eq!(redis.url(), format!("redis://127.0.0.1:{}", redis.port()));
    assert_eq!(redis.ask(&["NONSENSE"]).await.unwrap_err().split('\'').next(), Some("ERR unknown command "));
    assert_eq!(redis.ask(&["SCRIPT", "EXISTS", "none"]).await, Ok(Reply::List(vec![Reply::Int(0)])));
    let (addr, pid) = (redis.addr(), redis.pid());
    drop(redis);
    assert!(Connection::open(addr).await.is_err());
    assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists());
}

#[tokio::test]
async fn the_wrong_server_on_a_port_is_never_taken_for_ones_own() {
    let all = (0..8).map(|_| tokio::spawn(Redis::start()));
    let mut ports = Vec::new();
    let mut servers = Vec::new();
    for starting in all {
        let redis = starting.await.unwrap();
        assert_eq!(redis.info("process_id").await, redis.pid().to_string());
        ports.push(redis.port());
        servers.push(redis);
    }
    ports.sort_unstable();
    ports.dedup();
    assert_eq!(ports.len(), 8);
}

#[tokio::test]
async fn a_builder_says_password_users_settings_arguments_and_socket() {
    let builder = Redis::builder().password("guessed").acl_user("reader", "on >read ~a:* +get");
    let builder = builder.config("maxmemory-policy", "noeviction").args(["--maxmemory", "64mb"]);
    let redis = builder.unixsocket().start().await;
    let mut plain = Connection::open(redis.addr()).await.unwrap();
    let Reply::Error(why) = plain.call(&["PING"]).await.unwrap() else { panic!("no password asked") };
    assert!(why.starts_with("NOAUTH"), "{why}");
    assert_eq!(plain.call(&["AUTH", "guessed"]).await.unwrap(), "OK");
    assert_eq!(plain.call(&["AUTH", "reader", "read"]).await.unwrap(), "OK");
    assert_eq!(plain.call(&["GET", "a:1"]).await.unwrap(), Reply::Nil);
    let Reply::Error(why) = plain.call(&["GET", "b:1"]).await.unwrap() else { panic!("no rule held") };
    assert!(why.starts_with("NOPERM"), "{why}");
    let memory = redis.command(&["CONFIG", "GET", "maxmemory"]).await;
    assert_eq!(memory.texts(), ["maxmemory", "67108864"]);
    assert!(tokio::net::UnixStream::connect(redis.socket()).await.is_ok());
    // The harness's own user is not the default one, which may go.
    redis.command(&["ACL", "SETUSER", "default", "off"]).await;
    assert_eq!(redis.command(&["PING"]).await, "PONG");
}

#[tokio::test]
async fn a_server_with_tls_answers_to_who_knows_its_ca_and_to_nobody_else() {
    let redis = Redis::builder().tls().start().await;
    let other = Redis::builder().tls().start().await;
    assert_eq!(redis.command(&["PING"]).await, "PONG"); // the harness knows it
    let ping = async |ca: Option<&std::path::Path>| {
        let root_cert = ca.map(|ca| std::fs::read(ca).unwrap());
        let certificates = redis::TlsCertificates { client_tls: None, root_cert };
        let client = redis::Client::build_with_tls(redis.url(), certificates)?;
        let mut connection = client.get_multiplexed_async_connection().await?;
        redis::cmd("PING").query_async::<String>(&mut connection).await
    };
    assert_eq!(ping(Some(&redis.ca_file())).await.unwrap(), "PONG");
    assert!(ping(Some(&other.ca_file())).await.is_err());
    assert!(ping(None).await.is_err());
    let mut plain = Connection::open(redis.addr()).await.unwrap();
    assert!(!matches!(within(NEVER, "an end", plain.call(&["PING"])).await, Ok(Reply::Text(_))));
}

#[tokio::test]
async fn a_restart_is_empty_or_brings_back_an_older_state() {
    let redis = Redis::start().await;
    redis.command(&["SET", "n", "old"]).await;
    let snapshot = redis.snapshot().await;
    redis.command(&["SET", "n", "new"]).await;
    let (port, pid) = (redis.port(), redis.pid());
    redis.restart_with(&snapshot).await;
    assert_eq!(redis.command(&["GET", "n"]).await, "old");
    redis.kill();
    assert!(!redis.is_up());
    assert!(redis.ask(&["PING"]).await.is_err());
    redis.restart_empty().await;
    assert_eq!(redis.command(&["GET", "n"]).await, Reply::Nil);
    assert_eq!(redis.port(), port);
    assert_ne!(redis.pid(), pid);
}

#[tokio::test]
async fn a_paused_server_is_silent_and_goes_on_where_it_was() {
    let (redis, _proxy, mut connection) = behind_a_proxy().await;
    redis.pause().await;
    assert!(!redis.is_up());
    connection.send(&["INCR", "n"]).await.unwrap();
    is_silent(&mut connection).await;
    redis.resume();
    assert_eq!(within(NEVER, "the late answer", connection.reply()).await.unwrap(), 2);
    redis.pause().await; // and a paused one is gone as well when dropped
}

#[tokio::test]
async fn flushed_scripts_are_unknown() {
    let redis = Redis::start().await;
    let sha = redis.command(&["SCRIPT", "LOAD", "return 7"]).await;
    assert_eq!(redis.command(&["EVALSHA", sha.text(), "0"]).await, 7);
    redis.flush_scripts().await;
    assert!(redis.ask(&["EVALSHA", sha.text(), "0"]).await.unwrap_err().starts_with("NOSCRIPT"));
}

#[tokio::test]
async fn monitor_dump_slow_log_and_counts_show_what_was_done() {
    let redis = Redis::builder().config("slowlog-log-slower-than", "0").start().await;
    let monitor = redis.monitor().await;
    redis.command(&["SET", "text", "canary-1"]).await;
    redis.command(&["HSET", "hash", "field", "canary-2"]).await;
    redis.command(&["ZADD", "zset", "7", "canary-3"]).await;
    redis.command(&["RPUSH", "list", "canary-4"]).await;
    redis.command(&["SADD", "set", "canary-5"]).await;
    redis.command(&["XADD", "stream", "*", "field", "canary-6"]).await;
    redis.command(&["EVAL", "return redis.call('GET', KEYS[1])", "1", "canary-7"]).await;
    let lines = monitor.lines().await.join("\n");
    let (dump, slowlog) = (redis.dump().await, redis.slowlog().await);
    for n in 1..=6 {
        let canary = format!("canary-{n}");
        assert!(lines.contains(&canary), "{canary} in {lines}");
        assert!(dump.contains(&canary), "{canary} in {dump}");
        assert!(slowlog.contains(&canary), "{canary} in {slowlog}");
    }
    assert!(lines.contains("lua] \"GET\" \"canary-7\""), "{lines}");
    assert!(!lines.contains("mark-") && !lines.contains("harness-only"), "{lines}");
    assert!(dump.lines().any(|line| line == "zset zset -1 canary-3 7"), "{dump}");
    assert_eq!(redis.calls("eval").await, 1);
    assert_eq!(redis.calls("evalsha").await, 0);
}

#[tokio::test]
async fn a_healthy_proxy_passes_everything_both_ways() {
    let (redis, proxy, mut connection) = behind_a_proxy().await;
    let large = "x".repeat(3 << 20);
    assert_eq!(connection.call(&["SET", "large", &large]).await.unwrap(), "OK");
    assert_eq!(connection.call(&["GET", "large"]).await.unwrap().text(), large);
    assert_eq!((proxy.connections(), proxy.open()), (1, 1));
    assert!(proxy.bytes_to_server() > 3 << 20 && proxy.bytes_to_client() > 3 << 20);
    assert_eq!((proxy.lost_to_server(), proxy.lost_to_client()), (0, 0));
    drop(connection);
    eventually("the proxy passes the client's end on", async || (proxy.open() == 0).then_some(())).await;
    let mut connection = Connection::open(proxy.addr()).await.unwrap();
    incr(&mut connection).await;
    redis.kill();
    assert_eq!(end(&mut connection).await, ErrorKind::UnexpectedEof);
}

#[tokio::test]
async fn a_delay_holds_each_way_for_open_connections_too_and_does_not_add_up() {
    let (_redis, proxy, mut connection) = behind_a_proxy().await;
    proxy.delay(ms(60));
    let begun = Instant::now();
    for _ in 0..10 {
        connection.send(&["INCR", "n"]).await.unwrap();
    }
    for n in 2..12 {
        assert_eq!(within(NEVER, "an answer", connection.reply()).await.unwrap(), n);
    }
    let took = begun.elapsed();
    assert!(took >= ms(120) && took < ms(600), "{took:?}");
    proxy.delay(NEVER);
    connection.send(&["INCR", "n"]).await.unwrap();
    is_silent(&mut connection).await;
    proxy.heal().await; // what is late was not lost, and comes at once
    assert_eq!(within(ms(1000), "the answer", connection.reply()).await.unwrap(), 12);
}

#[tokio::test]
async fn a_trickle_passes_so_many_bytes_at_a_time() {
    let (_redis, proxy, mut connection) = behind_a_proxy().await;
    proxy.trickle(8, ms(10));
    let begun = Instant::now();
    let echo = within(NEVER, "an echo", connection.call(&["ECHO", &"x".repeat(56)])).await.unwrap();
    assert_eq!(echo.text().len(), 56);
    let took = begun.elapsed();
    assert!(took >= ms(120), "{took:?}"); // 70 and more bytes each way
    proxy.heal().await;
    assert_eq!(incr(&mut connection).await, 2);
}

#[tokio::test]
async fn a_cut_ends_all_in_order_and_refuses_until_healed() {
    let (_redis, proxy, mut connection) = behind_a_proxy().await;
    proxy.cut().await;
    assert_eq!(end(&mut connection).await, ErrorKind::UnexpectedEof);
    assert_eq!(proxy.open(), 0);
    let refused = Connection::open(proxy.addr()).await.err().map(|why| why.kind());
    assert_eq!(refused, Some(ErrorKind::ConnectionRefused));
    proxy.heal().await;
    assert!(answers(&proxy).await);
}

#[tokio::test]
async fn a_close_and_a_reset_end_all_and_welcome_new_ones() {
    let (_redis, proxy, mut connection) = behind_a_proxy().await;
    proxy.close().await;
    assert_eq!(end(&mut connection).await, ErrorKind::UnexpectedEof);
    let mut connection = Connection::open(proxy.addr()).await.unwrap();
    incr(&mut connection).await;
    proxy.reset().await;
    assert_eq!(end(&mut connection).await, ErrorKind::ConnectionReset);
    assert!(answers(&proxy).await);
}

#[tokio::test]
async fn what_is_dropped_on_the_way_there_never_ran() {
    let (redis, proxy, mut connection) = behind_a_proxy().await;
    proxy.drop_to_server();
    connection.send(&["INCR", "n"]).await.unwrap();
    is_silent(&mut connection).await;
    assert!(proxy.lost_to_server() > 0);
    assert_eq!(redis.command(&["GET", "n"]).await, "1");
    proxy.heal().await; // and the connection with the hole in it is no more
    assert_eq!(end(&mut connection).await, ErrorKind::ConnectionReset);
    assert_eq!(redis.command(&["GET", "n"]).await, "1");
    assert!(answers(&proxy).await);
}

#[tokio::test]
async fn what_is_dropped_on_the_way_back_ran() {
    let (redis, proxy, mut connection) = behind_a_proxy().await;
    proxy.drop_to_client();
    connection.send(&["INCR", "n"]).await.unwrap();
    comes_to(&redis, "2").await;
    is_silent(&mut connection).await;
    assert!(proxy.lost_to_client() > 0 && proxy.lost_to_server() == 0);
    redis.kill(); // not even the server's end is heard
    is_silent(&mut connection).await;
    proxy.heal().await;
    assert_eq!(end(&mut connection).await, ErrorKind::ConnectionReset);
}

#[tokio::test]
async fn a_black_hole_takes_all_and_gives_nothing_and_spares_who_said_nothing() {
    let (redis, proxy, mut spoke) = behind_a_proxy().await;
    let mut kept_quiet = Connection::open(proxy.addr()).await.unwrap();
    assert_eq!(incr(&mut kept_quiet).await, 2);
    proxy.black_hole();
    spoke.send(&["INCR", "n"]).await.unwrap();
    let mut came_later = Connection::open(proxy.addr()).await.unwrap();
    came_later.send(&["INCR", "n"]).await.unwrap();
    tokio::join!(is_silent(&mut spoke), is_silent(&mut came_later));
    assert_eq!(redis.command(&["GET", "n"]).await, "2");
    proxy.heal().await;
    assert_eq!(end(&mut spoke).await, ErrorKind::ConnectionReset);
    assert_eq!(end(&mut came_later).await, ErrorKind::ConnectionReset);
    assert_eq!(incr(&mut kept_quiet).await, 3);
    assert_eq!(proxy.connections(), 3);
}

#[tokio::test]
async fn a_client_that_leaves_a_black_hole_stays_in_the_servers_eyes() {
    let (redis, proxy, connection) = behind_a_proxy().await;
    let clients = async || redis.info("connected_clients").await.parse::<u32>().unwrap() - 1;
    proxy.black_hole();
    drop(connection);
    tokio::time::sleep(SILENCE).await;
    assert_eq!((clients().await, proxy.open()), (1, 1));
    proxy.heal().await;
    eventually("the server hears of it", async || (clients().await == 0).then_some(())).await;
}

#[tokio::test]
async fn a_cut_after_so_many_bytes_loses_just_the_reply() {
    let (redis, proxy, mut connection) = behind_a_proxy().await;
    proxy.cut_after(0);
    connection.send(&["INCR", "n"]).await.unwrap();
    assert_eq!(end(&mut connection).await, ErrorKind::UnexpectedEof);
    assert_eq!(redis.command(&["GET", "n"]).await, "2");
    let mut connection = Connection::open(proxy.addr()).await.unwrap(); // once only
    assert_eq!(incr(&mut connection).await, 3);
    proxy.cut_after(6); // `:4\r\n` and two bytes of the next
    assert_eq!(incr(&mut connection).await, 4);
    let before = proxy.bytes_to_client();
    connection.send(&["INCR", "n"]).await.unwrap();
    assert_eq!(end(&mut connection).await, ErrorKind::UnexpectedEof);
    assert_eq!(proxy.bytes_to_client(), before + 2);
    assert_eq!(redis.command(&["GET", "n"]).await, "5");
}

#[tokio::test]
async fn the_reply_to_one_request_is_lost_and_to_no_other() {
    let (redis, proxy, mut connection) = behind_a_proxy().await;
    proxy.lose_reply_to(b"special");
    assert_eq!(incr(&mut connection).await, 2);
    connection.send(&["INCR", "special"]).await.unwrap();
    assert_eq!(end(&mut connection).await, ErrorKind::UnexpectedEof);
    assert_eq!(redis.command(&["GET", "special"]).await, "1");
    let mut connection = Connection::open(proxy.addr()).await.unwrap();
    assert_eq!(connection.call(&["INCR", "special"]).await.unwrap(), 2);
    // Even when the next byte back belongs to an earlier request, the marked one arrives.
    proxy.delay(ms(30));
    proxy.lose_reply_to(b"marked");
    connection.send(&["INCR", "n"]).await.unwrap();
    connection.send(&["INCR", "marked"]).await.unwrap();
    while connection.reply().await.is_ok() {}
    comes_to(&redis, "3").await;
    assert_eq!(redis.command(&["GET", "marked"]).await, "1");
}

#[tokio::test]
async fn a_new_target_is_for_new_connections() {
    let (old, proxy, mut before) = behind_a_proxy().await;
    let new = Redis::start().await;
    new.command(&["SET", "n", "100"]).await;
    proxy.retarget(new.addr());
    let mut after = Connection::open(proxy.addr()).await.unwrap();
    assert_eq!(incr(&mut after).await, 101);
    assert_eq!(incr(&mut before).await, 2);
    proxy.heal().await; // a move is no fault
    assert_eq!(incr(&mut Connection::open(proxy.addr()).await.unwrap()).await, 102);
    new.kill();
    let mut late = Connection::open(proxy.addr()).await.unwrap();
    assert_eq!(end(&mut late).await, ErrorKind::ConnectionReset);
    assert_eq!(old.command(&["GET", "n"]).await, "2");
}

#[tokio::test]
async fn a_client_that_reads_nothing_makes_the_server_wait() {
    let (_redis, proxy, mut connection) = behind_a_proxy().await;
    let large = "x".repeat(32 << 20);
    connection.call(&["SET", "large", &large]).await.unwrap();
    let before = proxy.bytes_to_client();
    connection.send(&["GET", "large"]).await.unwrap();
    let passed = async || {
        let now = proxy.bytes_to_client();
        tokio::time::sleep(ms(50)).await;
        (now > before && proxy.bytes_to_client() == now).then_some(now - before)
    };
    let passed = eventually("the flow stops", passed).await;
    assert!(passed < 24 << 20, "{passed}");
    assert_eq!(within(NEVER, "the rest", connection.reply()).await.unwrap().text(), large);
}

#[tokio::test]
async fn a_cluster_has_a_master_for_every_slot() {
    let cluster = Cluster::start(3).await;
    let masters: Vec<usize> = [
        cluster.node_of_slot(0).await,
        cluster.node_of_slot(8_000).await,
        cluster.node_of_slot(16_383).await,
    ]
    .into();
    assert_eq!(masters, [0, 1, 2]);
    let client = redis::cluster::ClusterClient::new(cluster.urls()).unwrap();
    let mut connection = client.get_async_connection().await.unwrap();
    for n in 0..100 {
        let key = format!("key-{n}");
        redis::cmd("SET").arg(&key).arg("there").exec_async(&mut connection).await.unwrap();
        let node = cluster.node_of_key(&key).await;
        assert_eq!(cluster.command_on(node, &["GET", &key]).await, "there");
    }
    assert_eq!(cluster.dump().await.lines().count(), 100);
    let elsewhere = (cluster.node_of_key("key-1").await + 1) % 3;
    let moved = cluster.node(elsewhere).ask(&["GET", "key-1"]).await.unwrap_err();
    assert!(moved.starts_with("MOVED"), "{moved}");
    // Behind a proxy, a node is found there by clients, and is still the same node.
    let proxy = FaultProxy::start(cluster.node(0).addr()).await;
    cluster.reach_through(0, &proxy).await;
    assert_eq!(cluster.node_of_slot(0).await, 0);
    let mut connection = client.get_async_connection().await.unwrap();
    let at_node_0 = async |key: &String| cluster.node_of_key(key).await == 0;
    let mut key = "key-0".to_owned();
    while !at_node_0(&key).await {
        key.push('+');
    }
    redis::cmd("SET").arg(&key).arg("through").exec_async(&mut connection).await.unwrap();
    assert_eq!(cluster.command_on(0, &["GET", &key]).await, "through");
    assert!(proxy.connections() > 0);
}

#[tokio::test]
async fn a_clusters_replica_takes_over_when_told_and_when_its_master_dies() {
    let cluster = Cluster::with_replicas(3, 1).await;
    let node = cluster.node_of_key("n").await;
    cluster.command_on(node, &["SET", "n", "7"]).await;
    let new = cluster.failover(node).await;
    assert_eq!(new, 3 + node);
    assert_eq!(cluster.node_of_key("n").await, new);
    assert_eq!(cluster.command_on(new, &["GET", "n"]).await, "7");
    cluster
        .node(node)
        .eventually("the old master follows", NEVER, async || {
            (cluster.node(node).info("master_link_status").await == "up").then_some(())
        })
        .await;
    cluster.kill(new);
    cluster.comes_to_be_master(node).await;
    assert_eq!(cluster.node_of_key("n").await, node);
    assert_eq!(cluster.command_on(node, &["GET", "n"]).await, "7");
    cluster.node(new).restart().await; // it keeps its place in the cluster
    assert_eq!(cluster.replica_of(node).await, new);
    cluster.comes_to_ok().await;
}

#[tokio::test]
async fn a_sentinel_makes_the_replica_the_primary_when_that_dies() {
    let group = Sentinels::start().await;
    assert_eq!(group.primary().await.port(), group.data()[0].port());
    assert_eq!(group.replica().await.role().await.unwrap(), "slave");
    let old = group.kill_primary().await;
    let new = group.wait_failover(old).await;
    assert_eq!(new.port(), group.data()[1].port());
    new.command(&["SET", "n", "7"]).await;
    old.restart().await;
    assert_eq!(old.command(&["PING"]).await, "PONG");
}

#[tokio::test]
async fn three_sentinels_agree_and_a_frozen_primary_wakes_up_deposed() {
    let group = Sentinels::with(3, |builder| builder).await;
    let old = group.pause_primary().await;
    let new = group.wait_failover(old).await;
    assert_ne!(new.port(), old.port());
    for sentinel in group.sentinels() {
        let at = sentinel.command(&["SENTINEL", "GET-MASTER-ADDR-BY-NAME", "primary"]).await;
        assert_eq!(at.texts()[1], new.port().to_string());
    }
    old.resume();
    assert_eq!(old.command(&["SET", "lost", "write"]).await, "OK");
    let deposed = async || (old.role().await? == "slave").then_some(());
    old.eventually("the old primary follows the new one", NEVER * 2, deposed).await;
    let gone = async || (old.ask(&["EXISTS", "lost"]).await.ok()? == 0).then_some(());
    old.eventually("what it took meanwhile is lost", NEVER, gone).await;
    let synced = async || (old.info("master_link_status").await == "up").then_some(());
    old.eventually("it is in sync", NEVER, synced).await;
    assert!(old.ask(&["SET", "lost", "again"]).await.unwrap_err().starts_with("READONLY"));
}
