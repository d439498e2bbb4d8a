//! What checks decide, of a provider on a real socket and at a pace that a test can wait for.

use std::sync::atomic::{AtomicU16, AtomicUsize, Ordering};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

use super::*;
use crate::config::load_str;
use crate::forward::dial::Denied;
use crate::metrics::Metrics;
use crate::model::{FencingToken, LeaseId, Outcome, OwnerId};
use crate::store::memory::MemoryStore;
use crate::store::{Report, SyncKeys, SyncMode};

/// Answers every request with the status that is set.
#[derive(Default)]
struct Double {
    status: AtomicU16,
    asked: AtomicUsize,
}

impl Double {
    async fn start(status: u16) -> (Arc<Self>, u16) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let this = Arc::new(Self { status: AtomicU16::new(status), asked: AtomicUsize::new(0) });
        let double = this.clone();
        tokio::spawn(async move {
            loop {
                let (mut stream, _) = listener.accept().await.unwrap();
                let mut head = [0; 4096];
                if stream.read(&mut head).await.unwrap() == 0 {
                    continue;
                }
                double.asked.fetch_add(1, Ordering::SeqCst);
                let status = double.status.load(Ordering::SeqCst);
                let answer = format!("HTTP/1.1 {status} X\r\nconnection: close\r\ncontent-length: 0\r\n\r\n");
                stream.write_all(answer.as_bytes()).await.unwrap();
            }
        });
        (this, port)
    }

    fn now_says(&self, status: u16) {
        self.status.store(status, Ordering::SeqCst);
    }

    fn asked(&self) -> usize {
        self.asked.load(Ordering::SeqCst)
    }
}

struct Bench {
    double: Arc<Double>,
    store: Arc<MemoryStore>,
    checks: Checks,
    provider: ProviderName,
    key: KeyId,
}

/// Long enough for nothing to happen in it by chance.
const NEVER: Duration = Duration::from_hours(1);

impl Bench {
    async fn start(status: u16, pace: Pace) -> Self {
        let (double, port) = Double::start(status).await;
        let text = format!(
            "[providers.openai]\nbase_url = \"http://127.0.0.1:{port}\"\n\
             [[keys]]\nid = \"a\"\nprovider = \"openai\"\nsecret = {{ env = \"A\" }}\n"
        );
        let config = load_str(&text, "lessor.toml", &|_| Some("sk-secret-of-a".into())).unwrap();
        let ring = Arc::new(Ring::new(&config));
        let denied = Denied { nets: Vec::new(), own: Vec::new(), loopback: false };
        let no_roots = Vec::new();
        let upstreams =
            Upstreams::new(config.providers.values(), config.timeouts, denied, None, &no_roots).unwrap();
        let store = Arc::new(MemoryStore::new());
        let leases = Leases::new(store.clone(), config.lease, config.queue, OwnerId::fresh(), Metrics::new());
        let (provider, key) = (ProviderName::parse("openai").unwrap(), KeyId::parse("a").unwrap());
        let keys = ring.of("openai").unwrap().keys.iter().map(RingKey::settings).collect();
        let sync =
            SyncKeys { provider: provider.clone(), owner: OwnerId::fresh(), keys, mode: SyncMode::Replace };
        store.sync_keys(sync).await.unwrap();
        let checks = Checks::paced(pace, ring, Arc::new(upstreams), store.clone(), leases);
        Self { double, store, checks, provider, key }
    }

    fn doubt(&self) {
        self.checks.in_background(self.provider.clone(), self.key.clone());
    }

    async fn view(&self) -> (KeyStatus, Option<String>) {
        let seen = self.store.snapshot(self.provider.clone()).await.unwrap();
        (seen.keys[0].status, seen.keys[0].reason.clone())
    }

    async fn becomes(&self, status: KeyStatus) {
        let looking = async {
            while self.view().await.0 != status {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), looking).await.unwrap();
    }
}

#[tokio::test]
async fn one_refused_check_rests_the_key_and_a_good_one_after_it_brings_it_back() {
    let pace = Pace { pause: NEVER, second: Duration::from_millis(300), again: NEVER };
    let bench = Bench::start(401, pace).await;
    bench.doubt();
    bench.becomes(KeyStatus::Cooldown).await;
    assert_eq!((bench.double.asked(), bench.view().await.1.as_deref()), (1, Some(BY_CHECK)));
    bench.double.now_says(200);
    bench.becomes(KeyStatus::Available).await;
    assert_eq!(bench.double.asked(), 2);
}

#[tokio::test]
async fn two_refused_checks_make_a_key_invalid_and_it_comes_back_when_it_is_taken_again() {
    let pace = Pace { pause: NEVER, second: Duration::from_millis(100), again: Duration::from_millis(100) };
    let bench = Bench::start(401, pace).await;
    bench.doubt();
    bench.becomes(KeyStatus::Invalid).await;
    assert_eq!((bench.double.asked(), bench.view().await.1.as_deref()), (2, Some(BY_CHECK)));
    let stop = CancellationToken::new();
    let again = tokio::spawn(bench.checks.clone().check_again(stop.clone()));
    bench.double.now_says(200);
    bench.becomes(KeyStatus::Available).await;
    stop.cancel();
    again.await.unwrap();
}

#[tokio::test]
async fn a_key_that_a_code_proved_bad_is_not_checked_again() {
    let pace = Pace { pause: NEVER, second: NEVER, again: Duration::from_millis(20) };
    let bench = Bench::start(200, pace).await;
    let fingerprint = bench.checks.0.ring.of("openai").unwrap().keys[0].fingerprint.unwrap();
    let report = Report {
        provider: bench.provider.clone(),
        key: bench.key.clone(),
        group: None,
        lease: LeaseId::fresh(),
        token: FencingToken(1),
        fingerprint,
        model: None,
        outcome: Outcome::plain(Class::Invalid, Some(401)), // proven
    };
    bench.store.report(report).await.unwrap();
    assert_eq!(bench.view().await, (KeyStatus::Invalid, Some("invalid".into())));
    let rounds = bench.checks.clone().check_again(CancellationToken::new());
    tokio::time::timeout(Duration::from_millis(300), rounds).await.unwrap_err();
    assert_eq!((bench.double.asked(), bench.view().await.0), (0, KeyStatus::Invalid));
}

#[tokio::test]
async fn a_good_check_is_believed_for_the_pause_and_a_doubt_of_before_is_checked_at_its_end() {
    let pace = Pace { pause: Duration::from_millis(300), second: NEVER, again: NEVER };
    let bench = Bench::start(500, pace).await;
    let good = || {
        let keys = bench.checks.0.ring.of("openai").unwrap();
        bench.checks.found_good(&bench.provider, &keys.keys[0])
    };
    bench.doubt();
    let asked = async |times| {
        while bench.double.asked() < times {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), asked(1)).await.unwrap();
    assert!(!good(), "nothing was learned");
    bench.double.now_says(200);
    bench.doubt();
    bench.doubt();
    tokio::time::timeout(Duration::from_secs(20), asked(2)).await.unwrap();
    let believed = async {
        while !good() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        while good() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), believed).await.unwrap();
    tokio::time::sleep(Duration::from_millis(600)).await; // two pauses in which nothing may happen
    assert_eq!(bench.double.asked(), 2, "two doubts in one pause are one check");
}
