//! What the pool promises, of a host on a real socket.

use std::task::{Context, Waker};

use http::header::HOST;
use http_body_util::BodyExt as _;
use rustls::RootCertStore;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream, UnixStream};

use super::super::dial::{Denied, Dialer, Reach};
use super::super::{Upstreams, connector, tls};
use super::*;
use crate::config::load_str;
use crate::model::ProviderName;

const OK: &str = "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok";

/// Bounds what should come at once.
async fn soon<T>(coming: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(20), coming).await.expect("it comes")
}

/// A host, and who connects to it.
struct Host {
    listener: TcpListener,
    pools: Pools,
}

impl Host {
    async fn start(scheme: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let base = format!("{scheme}://{}/v1", listener.local_addr().unwrap()).parse().unwrap();
        let bound = Duration::from_secs(20);
        let tls = tls::client_config(&RootCertStore::empty(), None).unwrap();
        let connector = connector(Dialer::new(Reach::Configured, bound), tls, bound);
        Self { listener, pools: Pools::new(connector, Some(&base)) }
    }

    fn pool(&self) -> &Arc<Pool> {
        self.pools.first.as_ref().unwrap()
    }

    fn send(&self, path: &str) -> Sending {
        let mut request = Request::new(ReplayBody::empty());
        let at = Uri::builder().scheme(self.pool().scheme.clone()).authority(self.pool().authority.clone());
        *request.uri_mut() = at.path_and_query(path).build().unwrap();
        request.headers_mut().insert(HOST, "api.example".parse().unwrap());
        self.pools.send(request, Instant::now())
    }

    async fn accept(&self) -> Peer {
        Peer(soon(self.listener.accept()).await.unwrap().0)
    }

    /// A connection of its own, that nobody uses.
    async fn dial(&self) -> (Line, Peer) {
        let (line, peer) = tokio::join!(self.pool().clone().dial(), self.accept());
        (line.ok().unwrap(), peer)
    }

    /// The host's end of a connection that is kept.
    async fn kept(&self) -> Peer {
        let before = self.idle();
        let (line, peer) = self.dial().await;
        self.pool().put(line);
        self.has_idle(before + 1).await;
        peer
    }

    fn idle(&self) -> usize {
        locked(&self.pool().state).idle.len()
    }

    async fn has_idle(&self, count: usize) {
        soon(async {
            while self.idle() != count {
                tokio::task::yield_now().await;
            }
        })
        .await;
    }
}

/// The host's end of a connection.
struct Peer(TcpStream);

impl Peer {
    /// The next request's head.
    async fn head(&mut self) -> String {
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            head.push(char::from(soon(self.0.read_u8()).await.unwrap()));
        }
        head
    }

    async fn say(&mut self, text: &str) {
        self.0.write_all(text.as_bytes()).await.unwrap();
    }

    async fn answers(&mut self, path: &str, text: &str) {
        let head = self.head().await;
        assert!(head.starts_with(&format!("GET {path} HTTP/1.1\r\n")), "{head}");
        self.say(text).await;
    }

    /// Waits until lessor has closed it.
    async fn ends(&mut self) {
        let _ = soon(self.0.read_to_end(&mut Vec::new())).await;
    }
}

async fn whole(answer: Result<Response<Incoming>, Failed>) -> String {
    let body = soon(answer.unwrap().into_body().collect()).await.unwrap().to_bytes();
    String::from_utf8(body.to_vec()).unwrap()
}

#[tokio::test]
async fn a_connection_whose_answer_was_read_whole_carries_the_next_request_in_origin_form() {
    let host = Host::start("http").await;
    let (answer, mut peer) = tokio::join!(host.send("/one?a=b"), async {
        let mut peer = host.accept().await;
        assert_eq!(peer.head().await, "GET /one?a=b HTTP/1.1\r\nhost: api.example\r\n\r\n");
        peer.say(OK).await;
        peer
    });
    assert_eq!(whole(answer).await, "ok");
    host.has_idle(1).await;
    let (answer, ()) = tokio::join!(host.send("/two"), peer.answers("/two", OK));
    assert_eq!(whole(answer).await, "ok");
}

#[tokio::test]
async fn the_connection_that_came_back_last_goes_out_first() {
    let host = Host::start("http").await;
    let (_first, mut last) = (host.kept().await, host.kept().await);
    let (answer, ()) = tokio::join!(host.send("/"), last.answers("/", OK));
    assert_eq!(whole(answer).await, "ok");
}

#[tokio::test]
async fn an_answer_that_is_read_later_gives_its_connection_back_then() {
    let host = Host::start("http").await;
    let mut peer = host.kept().await;
    let half = "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\no";
    let (answer, ()) = tokio::join!(host.send("/"), peer.answers("/", half));
    assert_eq!(host.idle(), 0);
    let (body, ()) = tokio::join!(whole(answer), peer.say("k"));
    assert_eq!(body, "ok");
    host.has_idle(1).await;
}

#[tokio::test]
async fn no_more_than_so_many_idle_connections_are_kept() {
    let host = Host::start("http").await;
    let mut peers = Vec::new();
    for _ in 0..SIZE {
        peers.push(host.kept().await);
    }
    let (line, mut peer) = host.dial().await;
    host.pool().put(line);
    peer.ends().await;
    assert_eq!(host.idle(), SIZE);
}

#[tokio::test]
async fn an_idle_connection_is_closed_in_time_though_no_request_comes() {
    let host = Host::start("http").await;
    let mut peer = host.kept().await;
    tokio::time::pause(); // from here on, waiting is no work, and the clock jumps
    let begun = Instant::now();
    let mut nothing = Vec::new();
    let ending = peer.0.read_to_end(&mut nothing);
    tokio::time::timeout(IDLE * 2, ending).await.expect("it is closed").unwrap();
    assert!(begun.elapsed() <= IDLE + Duration::from_secs(1), "{:?}", begun.elapsed());
    assert!(locked(&host.pool().state).sweeper.is_none(), "it looks on though nothing is left");
}

#[tokio::test]
async fn one_that_is_too_old_is_not_taken_though_nobody_has_swept_it_yet() {
    let host = Host::start("http").await;
    let mut peer = host.kept().await;
    assert!(host.pool().take(Instant::now() + IDLE).is_err());
    peer.ends().await;
}

#[tokio::test]
async fn an_idle_connection_that_the_host_closes_is_out_at_once() {
    let host = Host::start("http").await;
    drop(host.kept().await);
    host.has_idle(0).await;
}

#[tokio::test]
async fn a_request_that_finds_its_connection_closed_goes_by_a_new_one_once() {
    let host = Host::start("http").await;
    let peer = host.kept().await;
    // Both become known at once, and this test goes on before the connection's task does.
    let (mut near, mut far) = UnixStream::pair().unwrap();
    far.write_u8(0).await.unwrap();
    drop(peer);
    near.read_u8().await.unwrap();
    assert_eq!(host.idle(), 1, "the connection was found closed before the request");
    let (answer, mut peer) = tokio::join!(host.send("/"), async {
        let mut peer = host.accept().await;
        peer.answers("/", OK).await;
        peer
    });
    assert_eq!(whole(answer).await, "ok");
    host.has_idle(1).await;
    // Nothing came twice.
    let (answer, ()) = tokio::join!(host.send("/next"), peer.answers("/next", OK));
    assert_eq!(whole(answer).await, "ok");
}

#[tokio::test]
async fn a_request_that_went_out_is_not_sent_again() {
    let host = Host::start("http").await;
    let mut kept = host.kept().await;
    let (answer, ()) = tokio::join!(host.send("/"), async {
        kept.head().await;
        drop(kept);
    });
    assert!(matches!(answer, Err(Failed::Send(_))), "{answer:?}");
    let (answer, ()) = tokio::join!(host.send("/"), async {
        drop(host.accept().await);
    });
    assert!(matches!(answer, Err(Failed::Send(_))), "{answer:?}");
    let (answer, ()) = tokio::join!(host.send("/next"), async {
        host.accept().await.answers("/next", OK).await;
    });
    assert_eq!(whole(answer).await, "ok");
}

#[tokio::test]
async fn who_dials_takes_a_connection_that_comes_back_meanwhile_and_the_dialled_one_is_kept() {
    let host = Host::start("http").await;
    let (line, mut back) = host.dial().await;
    let mut sending = host.send("/");
    assert!(sending.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    host.pool().put(line);
    let (answer, ()) = tokio::join!(sending, back.answers("/", OK));
    assert_eq!(whole(answer).await, "ok");
    let _dialled = host.accept().await;
    host.has_idle(2).await;
}

#[tokio::test]
async fn who_leaves_while_dialling_leaves_nothing_behind() {
    let host = Host::start("https").await;
    let sending = host.send("/");
    let mut peer = tokio::select! {
        answer = sending => panic!("an answer without a TLS handshake: {answer:?}"),
        peer = host.accept() => peer,
    };
    peer.ends().await;
    assert!(locked(&host.pool().state).waiting.iter().all(oneshot::Sender::is_closed));
}

#[tokio::test]
async fn those_who_left_the_queue_do_not_fill_it() {
    let host = Host::start("http").await;
    for _ in 0..SIZE * 2 {
        assert!(host.pool().take(Instant::now()).is_err());
    }
    assert!(locked(&host.pool().state).waiting.len() <= SIZE);
    // And nobody who left is given a connection.
    let _peer = host.kept().await;
}

#[tokio::test]
async fn who_leaves_before_the_answer_or_in_its_middle_closes_the_connection() {
    let host = Host::start("http").await;
    let mut peer = host.kept().await;
    tokio::select! {
        answer = host.send("/") => panic!("{answer:?}"),
        _ = peer.head() => {}
    }
    peer.ends().await;
    let mut peer = host.kept().await;
    let half = "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\no";
    let (answer, ()) = tokio::join!(host.send("/"), peer.answers("/", half));
    drop(answer.unwrap());
    peer.ends().await;
    assert_eq!(host.idle(), 0);
}

#[tokio::test]
async fn what_a_host_says_beyond_its_answer_ends_the_connection() {
    let host = Host::start("http").await;
    let mut peer = host.kept().await;
    let more = format!("{OK}HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\npoison");
    let (answer, ()) = tokio::join!(host.send("/"), peer.answers("/", &more));
    assert_eq!(whole(answer).await, "ok");
    peer.ends().await;
    host.has_idle(0).await;
}

#[tokio::test]
async fn a_pool_that_goes_closes_its_idle_connections_and_lets_an_answer_end() {
    let host = Host::start("http").await;
    let (mut used, mut idle) = (host.kept().await, host.kept().await);
    let half = "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\no";
    let (answer, ()) = tokio::join!(host.send("/"), idle.answers("/", half));
    drop(host);
    used.ends().await;
    let (body, ()) = tokio::join!(whole(answer), idle.say("k"));
    assert_eq!(body, "ok");
    idle.ends().await;
}

#[tokio::test]
async fn hosts_share_no_connections_and_are_bounded() {
    let host = Host::start("http").await;
    let at =
        |n: usize| host.pools.other(&Scheme::HTTP, &Authority::try_from(format!("h{n}.example")).unwrap());
    let (one, mut peers) = (at(1), Vec::new());
    assert!(Arc::ptr_eq(&one, &at(1)) && !Arc::ptr_eq(&one, &at(2)));
    assert!(!Arc::ptr_eq(&one, &host.pools.other(&Scheme::HTTPS, &one.authority)));
    let (line, peer) = host.dial().await;
    peers.push(peer);
    one.put(line);
    for n in 2..HOSTS * 2 {
        at(n);
    }
    assert!(Arc::ptr_eq(&one, &at(1)), "one that keeps connections went for those that keep none");
    for n in 2..HOSTS + 2 {
        let (line, peer) = host.dial().await;
        peers.push(peer);
        at(n).put(line);
    }
    assert!(locked(&host.pools.others).len() <= HOSTS);
    drop(one);
    peers[0].ends().await;
}

#[test]
fn connections_to_a_provider_that_did_not_change_outlive_a_reload() {
    let load = |two: &str| {
        let provider = |name, at| format!("[providers.{name}]\nbase_url = \"http://127.0.0.1:{at}\"\n");
        let text = provider("openai", "1") + &provider("anthropic", two);
        load_str(&text, "lessor.toml", &|_| None).unwrap()
    };
    let upstreams = |two: &str, before: Option<&Upstreams>| {
        let (config, denied) = (load(two), Denied { nets: Vec::new(), own: Vec::new(), loopback: false });
        Upstreams::new(config.providers.values(), config.timeouts, denied, before, &Vec::new()).unwrap()
    };
    let before = upstreams("2", None);
    let after = upstreams("3", Some(&before));
    let same = |name: &str| {
        let name = ProviderName::parse(name).unwrap();
        Arc::ptr_eq(&before.providers[&name].1, &after.providers[&name].1)
    };
    assert!(same("openai") && !same("anthropic"));
}
