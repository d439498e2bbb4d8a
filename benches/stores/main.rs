//! What one acquire and release cost in each store, and what they cost Redis.
//!
//! `cargo bench --bench stores` starts a Redis of its own. Each line: the store, the keys of the pool, the
//! leases in flight, µs of wall time, of this process' CPU and of Redis' CPU per lease. Two numbers after `--`
//! ask for one number of keys, and of leases in flight, alone.
#![allow(clippy::unwrap_used, clippy::print_stdout, missing_docs)]

mod leasing;

use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use leasing::{Shape, measure};
use lessor::config::{HostPort, RedisConfig, Topology};
use lessor::store::Store;
use lessor::store::memory::MemoryStore;
use lessor::store::redis::RedisStore;

const TIME: Duration = Duration::from_secs(2);

struct Server(Child, u16);

impl Server {
    fn start() -> Self {
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let child = Command::new("redis-server")
            .args(["--port", &port.to_string(), "--save", "", "--appendonly", "no", "--bind", "127.0.0.1"])
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        while std::net::TcpStream::connect(("127.0.0.1", port)).is_err() {
            std::thread::sleep(Duration::from_millis(5));
        }
        Self(child, port)
    }

    fn cpu(&self) -> f64 {
        cpu_of(&format!("/proc/{}/stat", self.0.id()))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What a process has had so far, in µs.
fn cpu_of(stat: &str) -> f64 {
    let text = std::fs::read_to_string(stat).unwrap();
    let fields: Vec<&str> = text.rsplit_once(')').unwrap().1.split_whitespace().collect();
    (fields[11].parse::<f64>().unwrap() + fields[12].parse::<f64>().unwrap()) * 1e4
}

fn main() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let server = Server::start();
    let at = RedisConfig::plain(Topology::Single(HostPort { host: "127.0.0.1".into(), port: server.1 }));
    println!("store   keys  in flight   leases/s   µs wall   µs CPU   µs Redis CPU");
    let asked: Vec<usize> = std::env::args().filter_map(|word| word.parse().ok()).collect();
    let is_asked = |at: usize, number: &usize| asked.get(at).is_none_or(|asked| asked == number);
    for keys in [1, 20, 200].into_iter().filter(|keys| is_asked(0, keys)) {
        for in_flight in [1, 16, 64].into_iter().filter(|count| is_asked(1, count)) {
            let shape = Shape { keys, in_flight, time: TIME };
            let memory: Arc<dyn Store> = Arc::new(MemoryStore::new());
            runtime.block_on(print("memory", memory, &shape, || f64::NAN));
            let prefix = format!("bench-{keys}-{in_flight}");
            let redis = runtime.block_on(RedisStore::open(&at, &prefix)).unwrap();
            runtime.block_on(print("redis", Arc::new(redis), &shape, || server.cpu()));
        }
    }
}

async fn print(name: &str, store: Arc<dyn Store>, shape: &Shape, server: impl Fn() -> f64) {
    let cost = measure(store, shape, || cpu_of("/proc/self/stat"), server).await.unwrap();
    println!(
        "{name:<7} {:>4}  {:>9}   {:>8.0}   {:>7.1}   {:>6.1}   {:>12.1}",
        shape.keys,
        shape.in_flight,
        cost.per_second,
        1e6 / cost.per_second,
        cost.own,
        cost.server,
    );
}
