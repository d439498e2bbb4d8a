//! A TCP proxy that does what networks do on a bad day: delay, cut, reset, lose bytes one way or both,
//! trickle, and move an address to another server. Each fault may begin and end while connections are
//! open, and holds for them and for new ones.
//!
//! What a fault swallows is lost for good. TCP would repeat it, so a stream with a hole in it is one
//! that no network makes: [`FaultProxy::heal`] therefore resets every connection that lost something.
//! Buffers are bounded: a side that does not read slows the other, as it would without a proxy.

use std::collections::HashMap;
use std::future::pending;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use bytes::Bytes;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::{NEVER, eventually, free_port, within};

/// Bytes read at once, and reads that may wait for their delivery on each way of a connection.
const READ: usize = 16 * 1024;
const WAITING: usize = 64;

/// The two ways through the proxy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    ToServer = 0,
    ToClient = 1,
}

/// How a connection ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Fin,
    Reset,
}

/// What holds now.
#[derive(Debug, Clone)]
struct Rules {
    target: SocketAddr,
    delay: Duration,
    dropping: [bool; 2],
    hole: bool,
    trickle: Option<(usize, Duration)>,
}

impl Rules {
    fn none(target: SocketAddr) -> Self {
        Self { target, delay: Duration::ZERO, dropping: [false; 2], hole: false, trickle: None }
    }

    fn drops(&self, way: Way) -> bool {
        self.hole || self.dropping[way as usize]
    }
}

struct Live {
    end: watch::Sender<Option<End>>,
    lossy: Arc<AtomicBool>,
    task: JoinHandle<()>,
}

struct Shared {
    rules: watch::Sender<Rules>,
    live: Mutex<HashMap<u64, Live>>,
    /// How many more bytes reach clients before the connection that would carry the next one is cut.
    budget: Mutex<Option<u64>>,
    /// The request whose reply is to be lost.
    needle: Mutex<Option<Vec<u8>>>,
    accepted: AtomicU64,
    carried: [AtomicU64; 2],
    lost: [AtomicU64; 2],
}

/// The proxy. Gone with all its connections when dropped.
pub struct FaultProxy {
    addr: SocketAddr,
    shared: Arc<Shared>,
    accepting: Mutex<Option<JoinHandle<()>>>,
}

impl Drop for FaultProxy {
    fn drop(&mut self) {
        self.accepting.lock().unwrap().take().inspect(JoinHandle::abort);
        self.shared.live().values().for_each(|live| live.task.abort());
    }
}

impl FaultProxy {
    /// A proxy to `target` on a free port of loopback, without any fault yet.
    pub async fn start(target: SocketAddr) -> Self {
        let shared = Arc::new(Shared {
            rules: watch::channel(Rules::none(target)).0,
            live: Mutex::default(),
            budget: Mutex::default(),
            needle: Mutex::default(),
            accepted: AtomicU64::new(0),
            carried: Default::default(),
            lost: Default::default(),
        });
        // A port that no outgoing connection is given, for a cut gives it up and a heal takes it back.
        let listener = eventually("a port for the fault proxy", async || {
            TcpListener::bind(("127.0.0.1", free_port())).await.ok()
        });
        let listener = listener.await;
        let addr = listener.local_addr().unwrap();
        let accepting = tokio::spawn(accept(listener, Arc::clone(&shared)));
        Self { addr, shared, accepting: Mutex::new(Some(accepting)) }
    }

    /// Where it listens.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Whatever arrives from now on is this late, each way.
    pub fn delay(&self, each_way: Duration) {
        self.shared.rules.send_modify(|rules| rules.delay = each_way);
    }

    /// At most so many bytes pass in each `every`, each way of each connection.
    pub fn trickle(&self, bytes: usize, every: Duration) {
        assert!(bytes > 0, "a trickle of nothing is a black hole");
        self.shared.rules.send_modify(|rules| rules.trickle = Some((bytes, every)));
    }

    /// Nothing reaches the server any more, not even the client's end; its own words still arrive.
    pub fn drop_to_server(&self) {
        self.shared.rules.send_modify(|rules| rules.dropping[Way::ToServer as usize] = true);
    }

    /// Nothing reaches the client any more, not even the server's end; the server hears and obeys.
    pub fn drop_to_client(&self) {
        self.shared.rules.send_modify(|rules| rules.dropping[Way::ToClient as usize] = true);
    }

    /// Nothing passes either way, and who connects is accepted, and hears nothing.
    pub fn black_hole(&self) {
        self.shared.rules.send_modify(|rules| rules.hole = true);
    }

    /// New connections go to another server, as after a change in DNS; open ones stay.
    pub fn retarget(&self, target: SocketAddr) {
        self.shared.rules.send_modify(|rules| rules.target = target);
    }

    /// After so many more bytes to clients, over all connections, the one that would carry the next byte
    /// is cut in its place. Once: with 0, the next reply is lost, after the server gave it.
    pub fn cut_after(&self, bytes_to_client: u64) {
        *self.shared.budget.lock().unwrap() = Some(bytes_to_client);
    }

    /// The next request that contains `needle` reaches the server, and its connection is cut in place of
    /// the next byte to the client. Once. A needle that two reads share is not seen.
    pub fn lose_reply_to(&self, needle: &[u8]) {
        *self.shared.needle.lock().unwrap() = Some(needle.to_vec());
    }

    /// Ends all connections in order, as an idle limit does; new ones are welcome.
    pub async fn close(&self) {
        self.end(End::Fin, |_| true).await;
    }

    /// Resets all connections; new ones are welcome.
    pub async fn reset(&self) {
        self.end(End::Reset, |_| true).await;
    }

    /// Ends all connections in order, and refuses new ones until healed.
    pub async fn cut(&self) {
        let accepting = self.accepting.lock().unwrap().take();
        if let Some(accepting) = accepting {
            accepting.abort();
            let _ = accepting.await;
        }
        self.close().await;
    }

    /// Ends every fault. Connections that lost something are reset; the target stays what it is.
    pub async fn heal(&self) {
        self.shared.rules.send_modify(|rules| *rules = Rules::none(rules.target));
        *self.shared.budget.lock().unwrap() = None;
        *self.shared.needle.lock().unwrap() = None;
        self.end(End::Reset, |live| live.lossy.load(SeqCst)).await;
        if self.accepting.lock().unwrap().is_none() {
            let what = format!("the fault proxy has {} again", self.addr);
            let listener = eventually(&what, async || TcpListener::bind(self.addr).await.ok()).await;
            let accepting = tokio::spawn(accept(listener, Arc::clone(&self.shared)));
            *self.accepting.lock().unwrap() = Some(accepting);
        }
    }

    /// How many connections were accepted so far.
    pub fn connections(&self) -> u64 {
        self.shared.accepted.load(SeqCst)
    }

    /// How many are open.
    pub fn open(&self) -> usize {
        self.shared.live().len()
    }

    /// Bytes that were passed on to the server.
    pub fn bytes_to_server(&self) -> u64 {
        self.shared.carried[Way::ToServer as usize].load(SeqCst)
    }

    /// Bytes that were passed on to clients.
    pub fn bytes_to_client(&self) -> u64 {
        self.shared.carried[Way::ToClient as usize].load(SeqCst)
    }

    /// Bytes for the server that were swallowed.
    pub fn lost_to_server(&self) -> u64 {
        self.shared.lost[Way::ToServer as usize].load(SeqCst)
    }

    /// Bytes for clients that were swallowed.
    pub fn lost_to_client(&self) -> u64 {
        self.shared.lost[Way::ToClient as usize].load(SeqCst)
    }

    async fn end(&self, how: End, which: impl Fn(&Live) -> bool) {
        let ending: Vec<Live> =
            self.shared.live().extract_if(|_, live| which(live)).map(|(_, it)| it).collect();
        for live in ending {
            live.end.send_replace(Some(how));
            let _ = within(NEVER, "a proxied connection ends", live.task).await;
        }
    }
}

async fn accept(listener: TcpListener, shared: Arc<Shared>) {
    loop {
        let Ok((client, _)) = listener.accept().await else {
            tokio::time::sleep(super::ms(5)).await; // no descriptor free: others end
            continue;
        };
        let number = shared.accepted.fetch_add(1, SeqCst);
        let (end, ending) = watch::channel(None);
        let lossy = Arc::new(AtomicBool::new(false));
        let mut live = shared.live(); // held, so that the task cannot take itself out before it is in
        let task = {
            let (shared, lossy) = (Arc::clone(&shared), Arc::clone(&lossy));
            tokio::spawn(async move {
                serve(client, &shared, &lossy, ending).await;
                shared.live().remove(&number);
            })
        };
        live.insert(number, Live { end, lossy, task });
    }
}

impl Shared {
    fn live(&self) -> MutexGuard<'_, HashMap<u64, Live>> {
        self.live.lock().unwrap()
    }
}

async fn serve(
    mut client: TcpStream,
    shared: &Shared,
    lossy: &AtomicBool,
    mut ending: watch::Receiver<Option<End>>,
) {
    let _ = client.set_nodelay(true);
    let ended = async { ending.wait_for(Option::is_some).await.map_or(End::Fin, |end| end.unwrap()) };
    tokio::pin!(ended);
    let (hole, target) = {
        let rules = shared.rules.borrow();
        if rules.hole {
            lossy.store(true, SeqCst); // for its first packet already was
        }
        (rules.hole, rules.target)
    };
    if hole {
        let how = tokio::select! {
            how = &mut ended => how,
            () = swallow(&mut client, &shared.lost[Way::ToServer as usize]) => End::Fin,
        };
        return finish(&mut client, how).await;
    }
    let server = tokio::select! {
        how = &mut ended => return finish(&mut client, how).await,
        server = TcpStream::connect(target) => server,
    };
    let Ok(mut server) = server else {
        return finish(&mut client, End::Reset).await;
    };
    let _ = server.set_nodelay(true);
    let how = {
        let (from_client, to_client) = client.split();
        let (from_server, to_server) = server.split();
        let reply = watch::channel(Fate::Passes).0;
        let lane = |way| Lane { way, shared, lossy, reply: &reply };
        let there = lane(Way::ToServer).carry(from_client, to_server);
        let back = lane(Way::ToClient).carry(from_server, to_client);
        tokio::select! {
            how = &mut ended => how,
            both = async { tokio::try_join!(there, back) } => both.err().unwrap_or(End::Fin),
        }
    };
    tokio::join!(finish(&mut client, how), finish(&mut server, how));
}

/// Reads and forgets, without end.
async fn swallow(client: &mut TcpStream, lost: &AtomicU64) {
    let mut buffer = vec![0; READ];
    while let Ok(n @ 1..) = client.read(&mut buffer).await {
        lost.fetch_add(n as u64, SeqCst);
    }
    pending().await
}

async fn finish(socket: &mut TcpStream, how: End) {
    if how == End::Reset {
        let _ = socket2::SockRef::from(&*socket).set_linger(Some(Duration::ZERO));
        return;
    }
    let mut buffer = vec![0; READ];
    while let Ok(1..) = socket.try_read(&mut buffer) {} // for what is unread turns a FIN into a reset
    let _ = socket.shutdown().await;
}

/// What a side sent.
enum Sent {
    Bytes(Bytes),
    Fin,
    Reset,
}

/// What becomes of the next byte to the client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Passes,
    Held,
    Lost,
}

/// One way of one connection.
#[derive(Clone)]
struct Lane<'a> {
    way: Way,
    shared: &'a Shared,
    lossy: &'a AtomicBool,
    reply: &'a watch::Sender<Fate>,
}

impl Lane<'_> {
    /// Carries until the sender's end is passed on; an error is how the whole connection ends.
    async fn carry(self, from: ReadHalf<'_>, to: WriteHalf<'_>) -> Result<(), End> {
        let (queue, waiting) = mpsc::channel(WAITING);
        let reading = async {
            read(from, queue).await;
            Ok(())
        };
        tokio::try_join!(reading, self.deliver(waiting, to)).map(|_| ())
    }

    async fn deliver(
        &self,
        mut waiting: mpsc::Receiver<(Instant, Sent)>,
        mut to: WriteHalf<'_>,
    ) -> Result<(), End> {
        let mut rules = self.shared.rules.subscribe();
        while let Some((since, sent)) = waiting.recv().await {
            loop {
                let due = since + rules.borrow_and_update().delay;
                tokio::select! {
                    () = tokio::time::sleep_until(due) => break,
                    _ = rules.changed() => {}
                }
            }
            if self.loses(&rules.borrow(), &sent) {
                continue;
            }
            match sent {
                Sent::Bytes(bytes) => self.put(bytes, &mut to, &mut rules).await?,
                Sent::Fin => {
                    let _ = to.shutdown().await;
                    return Ok(());
                }
                Sent::Reset => return Err(End::Reset),
            }
        }
        pending().await // the sender's end was lost, so this side learns of none
    }

    async fn put(
        &self,
        mut bytes: Bytes,
        to: &mut WriteHalf<'_>,
        rules: &mut watch::Receiver<Rules>,
    ) -> Result<(), End> {
        let marked = self.way == Way::ToServer && self.is_marked(&bytes);
        while !bytes.is_empty() {
            let trickle = {
                let rules = rules.borrow_and_update();
                if self.loses(&rules, &Sent::Bytes(bytes.clone())) {
                    return Ok(());
                }
                rules.trickle
            };
            if self.way == Way::ToClient {
                let _ = self.reply.subscribe().wait_for(|fate| *fate != Fate::Held).await;
            }
            let part = bytes.len().min(trickle.map_or(usize::MAX, |(part, _)| part));
            let part = self.allowed(part)?;
            let written = tokio::select! {
                written = to.write(&bytes[..part]) => written,
                _ = rules.changed() => continue,
            };
            let Ok(n) = written else {
                // The news that nobody is there goes the other way, and may be lost on it.
                let way = if self.way == Way::ToServer { Way::ToClient } else { Way::ToServer };
                if (Self { way, ..self.clone() }).loses(&rules.borrow(), &Sent::Reset) {
                    return Ok(());
                }
                return Err(End::Reset);
            };
            self.shared.carried[self.way as usize].fetch_add(n as u64, SeqCst);
            if self.way == Way::ToClient
                && let Some(left) = self.shared.budget.lock().unwrap().as_mut()
            {
                *left = left.saturating_sub(n as u64);
            }
            let _ = bytes.split_to(n);
            if let Some((_, every)) = trickle {
                tokio::select! {
                    () = tokio::time::sleep(every) => {}
                    _ = rules.changed() => {}
                }
            }
        }
        if marked {
            self.reply.send_replace(Fate::Lost);
        }
        Ok(())
    }

    /// Whether this is the request whose reply is to be lost. Until it is on its way whole, no reply passes.
    fn is_marked(&self, bytes: &[u8]) -> bool {
        let mut needle = self.shared.needle.lock().unwrap();
        let marked = needle.as_deref().is_some_and(|needle| memchr::memmem::find(bytes, needle).is_some());
        if marked {
            *needle = None;
            self.reply.send_replace(Fate::Held);
        }
        marked
    }

    /// How much of `part` may pass before a cut that was asked for.
    fn allowed(&self, part: usize) -> Result<usize, End> {
        if self.way == Way::ToServer {
            return Ok(part);
        }
        if *self.reply.borrow() == Fate::Lost {
            return Err(End::Fin);
        }
        let mut budget = self.shared.budget.lock().unwrap();
        match *budget {
            Some(0) => {
                *budget = None;
                Err(End::Fin)
            }
            Some(left) => Ok(part.min(usize::try_from(left).unwrap_or(usize::MAX))),
            None => Ok(part),
        }
    }

    /// Loses this if the rules say so. Called under the rules' lock, so that a heal sees either no loss or
    /// the mark of it.
    fn loses(&self, rules: &Rules, sent: &Sent) -> bool {
        let loses = rules.drops(self.way);
        if loses {
            self.lossy.store(true, SeqCst);
            if let Sent::Bytes(bytes) = sent {
                self.shared.lost[self.way as usize].fetch_add(bytes.len() as u64, SeqCst);
            }
        }
        loses
    }
}

async fn read(mut from: ReadHalf<'_>, queue: mpsc::Sender<(Instant, Sent)>) {
    let mut buffer = vec![0; READ];
    loop {
        let sent = match from.read(&mut buffer).await {
            Ok(0) => Sent::Fin,
            Ok(n) => Sent::Bytes(Bytes::copy_from_slice(&buffer[..n])),
            Err(_) => Sent::Reset,
        };
        let last = !matches!(sent, Sent::Bytes(_));
        if queue.send((Instant::now(), sent)).await.is_err() || last {
            return;
        }
    }
}
