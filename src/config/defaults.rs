//! What holds where the file says nothing.

use std::time::Duration;

use ipnet::IpNet;

use super::{Address, Alpn, LeaseConfig, Limits, Listen, OnLost, ProxyConfig};
use super::{
    QueueConfig, RetryConfig, RetryOn, ShutdownConfig, StoreConfig, StoreUrl, Timeouts, WebSocketConfig,
};

/// `[shutdown]`.
pub(super) const SHUTDOWN: ShutdownConfig =
    ShutdownConfig { grace: Duration::from_secs(30), linger: Duration::ZERO };

/// `[lease]`.
pub(super) const LEASE: LeaseConfig = LeaseConfig {
    ttl: Duration::from_secs(30),
    heartbeat: Duration::from_secs(10),
    on_lost: OnLost::Abort,
    max_duration: None,
};

/// `[queue]`.
pub(super) const QUEUE: QueueConfig = QueueConfig { max_wait: Duration::from_secs(10), max_waiting: 1024 };

/// `[retry]`.
pub(super) const RETRY: RetryConfig = RetryConfig {
    max_attempts: 3,
    max_body: 8 << 20,
    max_total: 256 << 20,
    on: RetryOn { overloaded: false, connection: false },
};

/// `[timeouts]`.
pub(super) const TIMEOUTS: Timeouts = Timeouts {
    connect: Duration::from_secs(5),
    first_byte: Duration::from_mins(10),
    idle: Duration::from_mins(10),
    body_idle: Duration::from_mins(1),
    header: Duration::from_secs(10),
    keep_alive: Duration::from_mins(2),
};

/// `[websocket]`.
pub(super) const WEBSOCKET: WebSocketConfig =
    WebSocketConfig { idle: Duration::from_mins(10), max_duration: None };

/// `[limits]`.
pub(super) const LIMITS: Limits =
    Limits { max_connections: 4096, max_header_bytes: 64 << 10, max_headers: 100, max_streams: 200 };

/// Uses of one key at once.
pub(super) const USES: u32 = 8;

/// Where cloud machines are told their own credentials.
pub(super) const DENY_NETS: &[&str] =
    &["169.254.0.0/16", "fe80::/10", "fd00:ec2::254/128", "100.100.100.200/32", "168.63.129.16/32"];

/// `listen.proxy`.
pub(super) fn proxy_address() -> Address {
    Address::Tcp(([127, 0, 0, 1], 8321).into())
}

/// `listen.admin`.
pub(super) fn admin_address() -> Address {
    Address::Tcp(([127, 0, 0, 1], 8322).into())
}

/// `[listen]`.
pub(super) fn listen() -> Listen {
    Listen {
        proxy: vec![proxy_address()],
        admin: admin_address(),
        hosts: Vec::new(),
        allow_origins: Vec::new(),
        response_headers: true,
    }
}

/// `[store]`.
pub(super) fn store() -> StoreConfig {
    StoreConfig { url: StoreUrl::Memory, prefix: "lessor".into() }
}

/// `[proxy]`.
pub(super) fn proxy() -> ProxyConfig {
    ProxyConfig { tunnel_other_hosts: true, deny_nets: deny_nets(), alpn: alpn() }
}

/// `proxy.alpn`: a client that is given HTTP/2 cannot open a WebSocket here.
pub(super) fn alpn() -> Vec<Alpn> {
    vec![Alpn::Http1]
}

/// `proxy.deny_nets`.
pub(super) fn deny_nets() -> Vec<IpNet> {
    DENY_NETS.iter().filter_map(|net| net.parse().ok()).collect()
}
