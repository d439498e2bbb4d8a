//! Several lessors on one shared store, and clients that keep them busy.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokio::sync::Mutex;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::client::{Door, Stream, send_on};
use super::lessor::{Home, Key, Lessor, Setup, chat};
use super::oracle::Window;
use super::provider::{Play, Provider};
use super::{eventually_within, ms};

pub const TTL: Duration = Duration::from_secs(3);
pub const HEARTBEAT: Duration = Duration::from_secs(1);
pub const CAP: usize = 2;
pub const KEYS: [&str; 3] = ["k1", "k2", "k3"];
pub const CLIENTS: usize = 60;
pub const LOAD: Duration = Duration::from_secs(60);
/// How soon a sidecar that goes on after a stop must have cut what it may not use any more.
const AFTER_CONT: Duration = ms(200);
/// How late a renewal may be on a loaded machine.
const LATE: Duration = ms(150);

/// A sidecar of the fleet.
pub fn setup(provider: &Provider, url: &str) -> Setup {
    let setup = Setup::openai(provider)
        .set("store.url", &format!("{url:?}"))
        .set("lease.ttl", "\"3s\"")
        .set("lease.heartbeat", "\"1s\"")
        .set("queue.max_wait", "\"5s\"");
    KEYS.iter().fold(setup, |setup, key| setup.key(Key::new(key).cap(u32::try_from(CAP).unwrap())))
}

/// Streams of 50 to 450 ms, and now and then one that outlives a lease's life.
pub async fn provider() -> Provider {
    Provider::plain(|seen| {
        let length = match seen.number % 25 {
            0 => ms(4500),
            n => ms(50 + 16 * u64::try_from(n).unwrap()),
        };
        Play::sse().event("one").wait(length).event("two").done()
    })
    .await
}

/// After all is over, every slot can be had again: by the store's count and by the provider's.
pub async fn nothing_is_leaked(member: &Member, provider: &Provider) {
    let lessor = member.lessor.lock().await;
    eventually_within(ms(2500), "it is ready again", async || {
        (lessor.admin("/readyz").await.status == 200).then_some(())
    })
    .await;
    eventually_within(TTL + HEARTBEAT * 3, "all slots come back", async || {
        for key in KEYS {
            if lessor.in_use(key).await != 0 {
                return None;
            }
        }
        Some(())
    })
    .await;
    let before = provider.count();
    let mut streams = Vec::new();
    for number in 0..KEYS.len() * CAP {
        // A store that has just lost its data lends nothing for one TTL; the first is served when that is over.
        let wait = if number == 0 { format!("{}ms", (TTL + HEARTBEAT).as_millis()) } else { "0s".to_owned() };
        let mut stream = lessor.open(chat("gpt-4o-mini").header("x-lessor-max-wait", &wait)).await;
        assert_eq!(stream.status, 200, "a slot is leaked");
        stream.read_to("one").await;
        streams.push(stream);
    }
    assert_eq!(provider.count(), before + KEYS.len() * CAP);
}

/// Prints what became of the load, and checks that every request came to an end.
pub fn show(tally: &Tally) {
    eprintln!(
        "served {}, refused {} {:?}, cut {}, unreachable {}, hung {}",
        tally.served.load(Ordering::Relaxed),
        tally.refused.load(Ordering::Relaxed),
        tally.codes.lock().unwrap(),
        tally.cut.load(Ordering::Relaxed),
        tally.unreachable.load(Ordering::Relaxed),
        tally.hung.load(Ordering::Relaxed),
    );
    assert_eq!(tally.hung.load(Ordering::Relaxed), 0, "every request ends as served or refused");
    assert!(tally.served.load(Ordering::Relaxed) > 100, "the load went on");
}

/// Stops a member for two TTLs; when others may use what it still does.
pub async fn stands_still(member: &Member) -> Window {
    member.stop().await;
    let at = Instant::now();
    tokio::time::sleep(TTL * 2).await;
    member.go_on().await;
    // Its leases end one TTL after their last renewal, which was up to a heartbeat before the stop.
    let (from, to) = (at + TTL - HEARTBEAT - LATE, Instant::now() + AFTER_CONT);
    Window { why: "a sidecar stood still".into(), from, to }
}

/// The longest that a request of the load may take: it waits for a key, streams, and is over.
const HANGS: Duration = Duration::from_secs(20);

/// What became of the load's requests.
#[derive(Debug, Default)]
pub struct Tally {
    /// Served whole.
    pub served: AtomicU64,
    /// Refused by lessor with an error of its own.
    pub refused: AtomicU64,
    /// Begun, and cut: a lost lease, or a sidecar that was killed.
    pub cut: AtomicU64,
    /// Not even begun: no sidecar there.
    pub unreachable: AtomicU64,
    /// Neither served nor refused in the time.
    pub hung: AtomicU64,
    /// Refusals by their code.
    pub codes: std::sync::Mutex<std::collections::BTreeMap<String, u64>>,
}

/// A sidecar that is killed and started again; the load follows it to its new port.
pub struct Member {
    setup: Setup,
    home: Arc<Home>,
    pub lessor: Mutex<Lessor>,
    door: std::sync::Mutex<Option<Door>>,
    /// What its earlier lives logged.
    said: std::sync::Mutex<String>,
}

impl Drop for Member {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("--- its earlier lives said ---\n{}", self.said.lock().unwrap());
        }
    }
}

impl Member {
    pub async fn start(setup: Setup) -> Arc<Self> {
        let home = Arc::new(Home::default());
        let mut lessor = setup.clone().spawn_in(Arc::clone(&home));
        lessor.listening().await;
        let door = std::sync::Mutex::new(Some(lessor.door().clone()));
        Arc::new(Self { setup, home, lessor: Mutex::new(lessor), door, said: std::sync::Mutex::default() })
    }

    pub fn door(&self) -> Option<Door> {
        self.door.lock().unwrap().clone()
    }

    /// Kills it as a crash would.
    pub async fn crash(&self) {
        *self.door.lock().unwrap() = None;
        let mut lessor = self.lessor.lock().await;
        lessor.crash();
        self.said.lock().unwrap().push_str(&lessor.log());
    }

    pub async fn restart(&self) {
        let mut lessor = self.setup.clone().spawn_in(Arc::clone(&self.home));
        lessor.listening().await;
        *self.door.lock().unwrap() = Some(lessor.door().clone());
        *self.lessor.lock().await = lessor;
    }

    pub async fn stop(&self) {
        self.lessor.lock().await.signal(rustix::process::Signal::STOP);
    }

    pub async fn go_on(&self) {
        self.lessor.lock().await.signal(rustix::process::Signal::CONT);
    }
}

/// Clients that ask without end.
pub struct Load {
    pub tally: Arc<Tally>,
    over: Arc<AtomicBool>,
    tasks: Vec<JoinHandle<()>>,
}

impl Load {
    /// `clients` of them, spread over the members.
    pub fn start(members: &[Arc<Member>], clients: usize) -> Self {
        let (tally, over) = (Arc::new(Tally::default()), Arc::new(AtomicBool::new(false)));
        let tasks = (0..clients)
            .map(|n| {
                let member = Arc::clone(&members[n % members.len()]);
                let (tally, over) = (Arc::clone(&tally), Arc::clone(&over));
                tokio::spawn(async move {
                    while !over.load(Ordering::Relaxed) {
                        ask(&member, &tally).await;
                    }
                })
            })
            .collect();
        Self { tally, over, tasks }
    }

    /// Lets every request come to its end.
    pub async fn end(self) -> Arc<Tally> {
        self.over.store(true, Ordering::Relaxed);
        for task in self.tasks {
            timeout(HANGS * 2, task).await.expect("a client of the load ends").unwrap();
        }
        self.tally
    }
}

/// `None` where the sidecar is not there, or dies first.
async fn open(door: &Door) -> Option<Stream> {
    let Door::Tcp(at) = door else { unreachable!("members listen on TCP") };
    let socket = tokio::net::TcpStream::connect(at).await.ok()?;
    send_on(socket, &door.host(), chat("gpt-4o-mini")).await.ok()
}

async fn ask(member: &Member, tally: &Tally) {
    let Some(door) = member.door() else {
        tokio::time::sleep(Duration::from_millis(20)).await; // its sidecar is down
        return;
    };
    let began = Instant::now();
    let asking = async {
        let Some(stream) = open(&door).await else {
            tally.unreachable.fetch_add(1, Ordering::Relaxed);
            return false;
        };
        let (status, code) = (stream.status, stream.header("x-lessor-error").to_owned());
        match stream.end().await {
            Ok(()) if status == 200 => tally.served.fetch_add(1, Ordering::Relaxed),
            Ok(()) => {
                if code != "store_unavailable" && code != "pool_exhausted" {
                    eprintln!("refused by {}: {code}", door.host());
                }
                *tally.codes.lock().unwrap().entry(format!("{status} {code}")).or_default() += 1;
                tally.refused.fetch_add(1, Ordering::Relaxed)
            }
            Err(_) => tally.cut.fetch_add(1, Ordering::Relaxed),
        };
        status == 200
    };
    // A stopped sidecar answers when it goes on.
    match timeout(HANGS, asking).await {
        Ok(true) => {}
        // Who is refused at once asks again soon, not at once.
        Ok(false) if began.elapsed() < Duration::from_millis(20) => {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(false) => {}
        Err(_) => {
            tally.hung.fetch_add(1, Ordering::Relaxed);
        }
    }
}
