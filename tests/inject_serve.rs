//! The webhook over TLS, as processes: under load, while certificates change, and against what is no review.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::pedantic, missing_docs, unreachable_pub)]

#[path = "inject_world/process.rs"]
mod process;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use http::{Request, StatusCode};
use http_body_util::{Full, StreamBody};
use process::{ApiServer, Injector, NAME, eventually, post, review};
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use rustls::pki_types::CertificateDer;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

/// A CA of somebody's.
struct Authority {
    issuer: Issuer<'static, KeyPair>,
    certificate: CertificateDer<'static>,
}

impl Authority {
    fn new() -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        let certificate = params.self_signed(&key).unwrap().der().clone();
        Self { issuer: Issuer::new(params, key), certificate }
    }

    /// A certificate and its key, PEM.
    fn issue(&self, until: std::time::SystemTime) -> (String, String) {
        let mut params = CertificateParams::new([NAME.to_owned()]).unwrap();
        params.not_after = until.into();
        let key = KeyPair::generate().unwrap();
        (params.signed_by(&key, &self.issuer).unwrap().pem(), key.serialize_pem())
    }
}

fn next_year() -> std::time::SystemTime {
    std::time::SystemTime::now() + Duration::from_secs(365 * 24 * 3600)
}

/// A directory as the kubelet mounts a Secret: links into a directory that is changed by one link.
struct Mounted(tempfile::TempDir, AtomicUsize);

impl Mounted {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        for name in ["tls.crt", "tls.key"] {
            std::os::unix::fs::symlink(Path::new("..data").join(name), dir.path().join(name)).unwrap();
        }
        Self(dir, AtomicUsize::new(0))
    }

    fn put(&self, (certificate, key): &(String, String)) {
        let version = format!("..{}", self.1.fetch_add(1, Ordering::SeqCst));
        let dir = self.0.path().join(&version);
        std::fs::create_dir(&dir).unwrap();
        std::fs::write(dir.join("tls.crt"), certificate).unwrap();
        std::fs::write(dir.join("tls.key"), key).unwrap();
        std::os::unix::fs::symlink(&version, self.0.path().join("..next")).unwrap();
        std::fs::rename(self.0.path().join("..next"), self.0.path().join("..data")).unwrap();
    }

    fn args(&self) -> Vec<String> {
        let file = |name| self.0.path().join(name).display().to_string();
        vec![format!("--tls-cert={}", file("tls.crt")), format!("--tls-key={}", file("tls.key"))]
    }
}

async fn shown(api: &ApiServer, injector: &Injector) -> Option<CertificateDer<'static>> {
    let stream = api.connect(injector.webhook).await.ok()?;
    stream.get_ref().1.peer_certificates()?.first().cloned()
}

fn der(pair: &(String, String)) -> CertificateDer<'static> {
    use rustls::pki_types::pem::PemObject as _;
    CertificateDer::from_pem_slice(pair.0.as_bytes()).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn two_hundred_reviews_at_once_all_succeed_while_the_certificate_of_two_replicas_changes() {
    let (old, new) = (Authority::new(), Authority::new());
    let (first, second) = (old.issue(next_year()), new.issue(next_year()));
    let mounted = Mounted::new();
    mounted.put(&first);
    let replicas =
        Arc::new([Injector::start(&mounted.args(), &[]).await, Injector::start(&mounted.args(), &[]).await]);
    for replica in &*replicas {
        replica.ready().await;
    }
    // A caBundle holds both during a change.
    let api = ApiServer::trusting(&[old.certificate.clone(), new.certificate.clone()]);
    let (done, changed) = (Arc::<AtomicUsize>::default(), Arc::<AtomicUsize>::default());
    let askers = (0..200).map(|asker| {
        let (api, replicas) = (api.clone(), replicas.clone());
        let (done, changed) = (done.clone(), changed.clone());
        let api = if asker % 2 == 0 { api } else { api.by_http1() };
        tokio::spawn(async move {
            let mut asked = 0;
            // Until some came after the change, whoever is slow.
            while asked < 2 || changed.load(Ordering::SeqCst) == 0 {
                api.review(replicas[(asker + asked) % 2].webhook, &format!("{asker}-{asked}")).await?;
                asked += 1;
                done.fetch_add(1, Ordering::SeqCst);
            }
            Ok::<_, String>(asked)
        })
    });
    let askers: Vec<_> = askers.collect();
    eventually("some are answered", async || (done.load(Ordering::SeqCst) > 100).then_some(())).await;
    mounted.put(&second);
    for replica in &*replicas {
        eventually("the new one is shown", async || {
            (shown(&api, replica).await? == der(&second)).then_some(())
        })
        .await;
    }
    changed.store(1, Ordering::SeqCst);
    let mut asked = 0;
    for asker in askers {
        asked += asker.await.unwrap().unwrap();
    }
    assert_eq!(asked, done.load(Ordering::SeqCst));
    let said = replicas[0].page("/metrics").await.1;
    assert!(said.contains("lessor_inject_reviews_total{verdict=\"injected\"}"), "{said}");
    assert!(said.contains("lessor_inject_ready 1"), "{said}");
    // No key in anything that it says.
    for (pair, replica) in [(&first, &replicas[0]), (&second, &replicas[1])] {
        let line = pair.1.lines().nth(1).unwrap();
        assert!(!replica.log().contains(line) && !said.contains(line));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pair_that_is_none_is_not_taken_and_a_good_one_is_as_soon_as_it_is_there() {
    let authority = Authority::new();
    let (good, other) = (authority.issue(next_year()), authority.issue(next_year()));
    let over = authority.issue(std::time::SystemTime::now() - Duration::from_secs(60));
    let mounted = Mounted::new();
    // Nothing there yet: it waits, and says so.
    let injector = Injector::start(&mounted.args(), &[]).await;
    injector.not_ready("tls.crt cannot be read").await;
    assert_eq!(injector.page("/healthz").await.0, StatusCode::OK);
    mounted.put(&good);
    injector.ready().await;
    let api = ApiServer::trusting(std::slice::from_ref(&authority.certificate));
    // Each of these leaves what is served as it was.
    let mixed = (other.0.clone(), good.1.clone());
    let junk = ("no certificate".to_owned(), good.1.clone());
    let no_key = (other.0.clone(), "no key".to_owned());
    // PEM as it should be, around what is no certificate.
    let begins = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
    let broken = (format!("{}{begins}", other.0), other.1.clone());
    let long = (format!("{}{}", other.0, " ".repeat(1 << 20)), other.1.clone());
    for (bad, why) in [
        (&mixed, "is not the key of"),
        (&junk, "no readable PEM certificate"),
        (&no_key, "no readable PEM key"),
        (&broken, "its number 2 from above"),
        (&long, "is longer than 1048576 bytes"),
        (&over, "is not valid now"),
    ] {
        mounted.put(bad);
        eventually(why, async || injector.log().contains(why).then_some(())).await;
        assert_eq!(shown(&api, &injector).await, Some(der(&good)));
        assert_eq!(injector.page("/readyz").await.0, StatusCode::OK);
    }
    // What is no file is not waited for, through links either.
    for (which, name) in ["tls.crt", "tls.key"].into_iter().enumerate() {
        mounted.put(&good);
        let pipe = format!("pipe-{which}");
        let at = mounted.0.path().join(&pipe);
        let mode = rustix::fs::Mode::from_raw_mode(0o600);
        rustix::fs::mknodat(rustix::fs::CWD, &at, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        std::os::unix::fs::symlink(&pipe, mounted.0.path().join("next")).unwrap();
        std::fs::rename(mounted.0.path().join("next"), mounted.0.path().join(name)).unwrap();
        let why = format!("{name} is no regular file");
        eventually(&why, async || injector.log().contains(&why).then_some(())).await;
        assert_eq!(shown(&api, &injector).await, Some(der(&good)));
        std::os::unix::fs::symlink(Path::new("..data").join(name), mounted.0.path().join("next")).unwrap();
        std::fs::rename(mounted.0.path().join("next"), mounted.0.path().join(name)).unwrap();
    }
    assert!(!injector.log().contains("ends soon"), "{}", injector.log());
    // One that is near its end is served, and that is told.
    let late = authority.issue(std::time::SystemTime::now() + Duration::from_secs(600));
    mounted.put(&late);
    eventually("it is told", async || injector.log().contains("ends soon").then_some(())).await;
    assert_eq!(shown(&api, &injector).await, Some(der(&late)));
    mounted.put(&other);
    eventually("it is shown", async || (shown(&api, &injector).await? == der(&other)).then_some(())).await;
}

async fn one() -> (Injector, ApiServer, Mounted) {
    let authority = Authority::new();
    let mounted = Mounted::new();
    mounted.put(&authority.issue(next_year()));
    let injector = Injector::start(&mounted.args(), &[]).await;
    injector.ready().await;
    (injector, ApiServer::trusting(&[authority.certificate]), mounted)
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_no_review_gets_a_clear_answer() {
    let (injector, api, _mounted) = one().await;
    let ask = async |request: Request<Full<bytes::Bytes>>| api.send(injector.webhook, request).await.unwrap();
    let beta = review("u").replace("admission.k8s.io/v1", "admission.k8s.io/v1beta1");
    let deep = format!("{}{}", "[".repeat(40_000), "]".repeat(40_000));
    for (body, part) in [
        ("garbage".to_owned(), "cannot be read as an AdmissionReview"),
        (String::new(), "cannot be read as an AdmissionReview"),
        (deep, "cannot be read as an AdmissionReview"),
        ("{}".to_owned(), "admissionReviewVersions"),
        (beta, "admission.k8s.io/v1beta1 AdmissionReview; lessor reads admission.k8s.io/v1"),
        (review(""), "no request with a uid"),
    ] {
        let (status, said) = ask(post("/inject", body)).await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{said}");
        assert!(said.contains(part), "{part}: {said}");
    }
    let huge = vec![b' '; 3 * 1024 * 1024 + 1];
    let (status, said) = ask(post("/inject", huge)).await;
    assert_eq!(
        (status, said.contains("longer than 3 MiB; etcd")),
        (StatusCode::PAYLOAD_TOO_LARGE, true),
        "{said}"
    );
    let objects = format!("[{}]", ["{}"; 60_000].join(","));
    let (status, said) = ask(post("/inject", objects)).await;
    assert_eq!((status, said.contains("objects and lists")), (StatusCode::BAD_REQUEST, true), "{said}");
    let mut text = post("/inject", review("u"));
    text.headers_mut().insert("content-type", "text/plain".parse().unwrap());
    let (status, said) = ask(text).await;
    assert_eq!(
        (status, said.contains("application/json")),
        (StatusCode::UNSUPPORTED_MEDIA_TYPE, true),
        "{said}"
    );
    let (status, said) = ask(post("/", review("u"))).await;
    assert_eq!((status, said.contains("POST /inject")), (StatusCode::NOT_FOUND, true));
    let get = Request::get(format!("https://{NAME}/inject")).body(Full::default()).unwrap();
    assert_eq!(ask(get).await.0, StatusCode::METHOD_NOT_ALLOWED);
    // All that is counted, and the next review is answered.
    api.review(injector.webhook, "after").await.unwrap();
    let said = injector.page("/metrics").await.1;
    assert!(said.contains("lessor_inject_refused_total{status=\"400\"} 7"), "{said}");
    assert_eq!(injector.page("/nowhere").await.0, StatusCode::NOT_FOUND);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_without_a_length_is_cut_where_it_gets_too_long() {
    let (injector, api, _mounted) = one().await;
    let stream = hyper_util::rt::TokioIo::new(api.by_http1().connect(injector.webhook).await.unwrap());
    let (mut ask, connection) = hyper::client::conn::http1::handshake(stream).await.unwrap();
    tokio::spawn(connection);
    let piece = bytes::Bytes::from(vec![b' '; 64 * 1024]);
    let pieces =
        std::iter::repeat_with(move || Ok::<_, std::io::Error>(http_body::Frame::data(piece.clone())));
    let body = StreamBody::new(futures_util::stream::iter(pieces));
    let request = Request::post("/inject").header("host", NAME).header("content-type", "application/json");
    let answer = ask.send_request(request.body(body).unwrap()).await.unwrap();
    assert_eq!(answer.status(), StatusCode::PAYLOAD_TOO_LARGE);
}

#[tokio::test(flavor = "multi_thread")]
async fn peers_that_stand_still_are_let_go_and_hold_nobody_up() {
    let (injector, api, _mounted) = one().await;
    let mut silent = tokio::net::TcpStream::connect(injector.webhook).await.unwrap();
    let api = api.by_http1();
    let mut half_a_head = api.connect(injector.webhook).await.unwrap();
    half_a_head.write_all(b"POST /inject HTTP/1.1\r\nhost: x\r\n").await.unwrap();
    let mut half_a_body = api.connect(injector.webhook).await.unwrap();
    let head =
        "POST /inject HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{";
    half_a_body.write_all(head.as_bytes()).await.unwrap();
    api.review(injector.webhook, "meanwhile").await.unwrap();
    let wait = tokio::time::timeout(process::NEVER, async {
        let (mut nothing, mut none, mut late) = (Vec::new(), Vec::new(), [0; 12]);
        // How a connection is closed is the system's affair; that it is, is ours.
        let _ = silent.read_to_end(&mut nothing).await;
        let _ = half_a_head.read_to_end(&mut none).await;
        half_a_body.read_exact(&mut late).await.unwrap();
        (nothing, late)
    });
    let (nothing, late) = wait.await.unwrap();
    assert_eq!((nothing.len(), &late), (0, b"HTTP/1.1 408"));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_dearest_reviews_at_once_stay_below_the_memory_that_the_chart_gives() {
    let (injector, api, _mounted) = one().await;
    let spec = format!(
        r#"{{"a":[{}],"b":[{}],"containers":[{{"name":"{}"}}]}}"#,
        [r#"{"a":0}"#; 49_900].join(","),
        ["0"; 149_000].join(","),
        "a".repeat(1 << 20)
    );
    let body = review("dear").replace(r#"{"containers":[{"name":"app"}]}"#, &spec);
    assert!(body.len() > 1 << 20 && body.len() < 3 << 20, "{}", body.len());
    let asks = (0..12).map(|asker| {
        let (api, to) = (if asker % 2 == 0 { api.clone() } else { api.clone().by_http1() }, injector.webhook);
        let request = post("/inject", body.clone());
        tokio::spawn(async move { api.send(to, request).await.unwrap() })
    });
    for ask in asks.collect::<Vec<_>>() {
        let (status, said) = ask.await.unwrap();
        let good = status == StatusCode::OK && said.contains("\"uid\":\"dear\"");
        assert!(good || status == StatusCode::SERVICE_UNAVAILABLE, "{status}: {said}");
    }
    let most = injector.most_memory();
    assert!(most < 128, "{most} MiB");
    api.review(injector.webhook, "after").await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn it_is_not_ready_while_nobody_else_can_connect_and_is_again_once_they_can() {
    let (injector, api, _mounted) = one().await;
    let mut silent = Vec::new();
    for _ in 0..300 {
        silent.push(tokio::net::TcpStream::connect(injector.webhook).await.unwrap());
    }
    injector.not_ready("no place for another connection").await;
    drop(silent);
    injector.ready().await;
    api.review(injector.webhook, "after").await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn probes_are_answered_whatever_one_peer_holds_open() {
    let (injector, _, _mounted) = one().await;
    let of = async |last: u8| {
        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        socket.bind((std::net::Ipv4Addr::new(127, 0, 0, last), 0).into()).unwrap();
        socket.connect(injector.health).await.unwrap()
    };
    let mut silent = Vec::new();
    for _ in 0..520 {
        let mut stream = of(2).await;
        // Half a head, with nothing read; one that is beyond its share may be closed by now.
        let _ = stream.write_all(b"GET /metrics HTTP/1.1\r\nhost: x\r\n").await;
        silent.push(stream);
    }
    // Sooner than any of those is let go for its age.
    let soon = tokio::time::timeout(Duration::from_secs(5), injector.page("/readyz")).await;
    assert_eq!(soon.unwrap().0, StatusCode::OK);
    // One request a connection.
    let mut probe = of(3).await;
    probe.write_all(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
    let mut said = String::new();
    tokio::time::timeout(process::NEVER, probe.read_to_string(&mut said)).await.unwrap().unwrap();
    assert!(said.contains("connection: close") && said.ends_with("ok\n"), "{said}");
    // Each that stands still is let go, by its own bound.
    for stream in &mut silent {
        let mut rest = Vec::new();
        let _ = tokio::time::timeout(process::NEVER, stream.read_to_end(&mut rest)).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn term_lets_reviews_come_for_a_moment_and_finishes_those_under_way() {
    let authority = Authority::new();
    let mounted = Mounted::new();
    mounted.put(&authority.issue(next_year()));
    let args = [mounted.args(), vec!["--linger=2s".into()]].concat();
    let mut injector = Injector::start(&args, &[]).await;
    injector.ready().await;
    let api = ApiServer::trusting(&[authority.certificate]);
    let body = review("slow");
    let mut slow = api.clone().by_http1().connect(injector.webhook).await.unwrap();
    let head = format!(
        "POST /inject HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    slow.write_all(head.as_bytes()).await.unwrap();
    slow.write_all(&body.as_bytes()[..10]).await.unwrap();
    injector.terminate();
    injector.not_ready("it is stopping").await;
    api.review(injector.webhook, "late").await.unwrap();
    // Once nothing is accepted any more, what is under way is.
    eventually("it closes its door", async || {
        tokio::net::TcpStream::connect(injector.webhook).await.is_err().then_some(())
    })
    .await;
    slow.write_all(&body.as_bytes()[10..]).await.unwrap();
    let mut answer = Vec::new();
    let _ = slow.read_to_end(&mut answer).await;
    let answer = String::from_utf8_lossy(&answer);
    assert!(answer.starts_with("HTTP/1.1 200") && answer.contains("\"uid\":\"slow\""), "{answer}");
    assert_eq!(injector.ended().await.code(), Some(0));
}

#[tokio::test]
async fn without_a_certificate_it_says_what_is_missing() {
    let run = |args: &[&str]| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_lessor"));
        let done = command.arg("inject").args(args).env_clear().output().unwrap();
        (done.status.code(), String::from_utf8(done.stderr).unwrap())
    };
    let (code, said) = run(&[]);
    assert_eq!(code, Some(2));
    for part in ["--tls-cert", "--self-managed", "--review"] {
        assert!(said.contains(part), "{part}: {said}");
    }
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let at = taken.local_addr().unwrap().to_string();
    let args = ["--tls-cert=/x", "--tls-key=/y", "--health=127.0.0.1:0", "--listen"];
    let (code, said) = run(&[&args[..], &[&at]].concat());
    assert_eq!(code, Some(1));
    assert!(said.contains(&at) && said.contains("--listen"), "{said}");
}
