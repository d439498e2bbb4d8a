//! The sections with one value a field, each by its own function.

use std::time::Duration;

use ipnet::IpNet;
use toml::de::DeValue;

use super::defaults;
use super::tree::{Field, Page, Table};
use super::values::{self, SOCKET_MODE};
use super::{
    Address, Alpn, LeaseConfig, Limits, Listen, OnLost, ProxyConfig, QueueConfig, Ranking, RetryConfig,
    RetryOn, ShutdownConfig, Strategy, Timeouts, WebSocketConfig, Weights,
};

/// `[listen]`; `anybody` where no app has a token, so that none can be told apart over TCP.
pub(super) fn listen(page: &Page<'_>, listen: &Table<'_>, anybody: bool) -> Listen {
    let fields = match listen.get("proxy") {
        Some(field) => field.items().unwrap_or_else(|| vec![field]),
        None => Vec::new(),
    };
    if let Some(field) = listen.get("proxy").filter(|_| fields.is_empty()) {
        field.wrong::<()>("must name at least one address");
    }
    let mut proxy: Vec<Address> = Vec::new();
    for field in &fields {
        let Some(address) = address(field) else { continue };
        if let Address::Tcp(at) = address
            && anybody
            && !values::is_loopback(at.ip())
        {
            page.refuse(
                &field.at,
                format!(
                    "{} is {at}, which other machines may reach: add [apps.NAME] with \
                     token = {{ env = \"NAME_TOKEN\" }}, or listen on 127.0.0.1",
                    field.path
                ),
            );
        }
        if let Some(other) = proxy.iter().find(|other| values::collide(other, &address)) {
            page.refuse(
                &field.at,
                format!("{} is {address}, but {other} is listened on already", field.path),
            );
        }
        proxy.push(address);
    }
    if listen.get("proxy").is_none() {
        proxy.push(defaults::proxy_address());
    }
    let mut admin = defaults::admin_address();
    let field = listen.get("admin");
    if let Some(field) = &field {
        match address(field) {
            Some(Address::Unix(..)) => {
                field.wrong::<()>("must be TCP: the admin's Unix socket is made by itself");
            }
            Some(address) => admin = address,
            None => {}
        }
    }
    if let Some(other) = proxy.iter().find(|other| values::collide(other, &admin)) {
        let (at, said) = match (&field, fields.first()) {
            (Some(field), _) => (&field.at, format!("listen.admin is {admin}")),
            (None, Some(first)) => (&first.at, format!("listen.admin is {admin} (the default)")),
            (None, None) => (&listen.at, format!("listen.admin is {admin}")),
        };
        page.refuse(at, format!("{said}, must differ from listen.proxy ({other})"));
    }
    Listen {
        proxy,
        admin,
        hosts: all(listen, "hosts", values::host, "must be a host name without scheme, port or path"),
        allow_origins: all(
            listen,
            "allow_origins",
            values::origin,
            "must be an origin such as \"https://app.example\"",
        ),
        response_headers: listen.flag("response_headers", true),
    }
}

/// Says what an admin listener without a token gives to other machines.
pub(super) fn warn_of_open_admin(page: &Page<'_>, admin: &Address, tokenless: bool) {
    if let Address::Tcp(at) = admin
        && tokenless
        && !values::is_loopback(at.ip())
    {
        page.warn(format!(
            "listen.admin is {at}, which other machines may reach: it serves health and metrics only, for \
             admin.token is not set"
        ));
    }
}

/// Reads each text of a list.
pub(super) fn all<T>(table: &Table<'_>, name: &str, read: impl Fn(&str) -> Option<T>, rule: &str) -> Vec<T> {
    let read = |field: Field<'_>| field.text().and_then(|text| read(text).or_else(|| field.wrong(rule)));
    table.texts(name).into_iter().filter_map(read).collect()
}

fn address(field: &Field<'_>) -> Option<Address> {
    if let DeValue::String(text) = field.value {
        return values::address(text).map_err(|rule| field.wrong::<()>(&rule)).ok();
    }
    if !field.value.is_table() {
        return field
            .wrong("must be an address such as \"127.0.0.1:8321\" or \"unix:/run/lessor/proxy.sock\"");
    }
    let table = field.table("listen.proxy")?;
    let path = table.need("path")?;
    let bare = path.text()?;
    let bare = bare.strip_prefix("unix:").unwrap_or(bare);
    let socket = values::socket_path(bare).map_err(|rule| path.wrong::<()>(&rule)).ok()?;
    let mode = match table.get("mode") {
        Some(mode) => {
            let read = match mode.value {
                DeValue::Integer(n) if n.radix() == 8 => u32::from_str_radix(n.as_str(), 8).ok(),
                DeValue::String(text) => u32::from_str_radix(text.trim_start_matches("0o"), 8).ok(),
                _ => None,
            };
            // A decimal 660 is 0o1224: nobody means that.
            read.filter(|mode| *mode <= 0o777)
                .or_else(|| mode.wrong("must be octal, such as 0o660 or \"0660\""))?
        }
        None => SOCKET_MODE,
    };
    Some(Address::Unix(socket, mode))
}

/// `[lease]`.
pub(super) fn lease(page: &Page<'_>, lease: &Table<'_>) -> LeaseConfig {
    let ttl = lease.duration("ttl", defaults::LEASE.ttl, Duration::from_secs(1));
    // A shorter TTL alone must do: three renewals fit into the default, and so into any other.
    let own = LeaseConfig { ttl: ttl.value, ..defaults::LEASE };
    let most = own.longest_heartbeat();
    let third = (ttl.value / 3).min(own.heartbeat).min(most);
    let heartbeat = lease.duration("heartbeat", third, Duration::from_millis(100));
    let max = max_duration(lease);
    let read = LeaseConfig {
        ttl: ttl.value,
        heartbeat: heartbeat.value,
        on_lost: lease.word("on_lost", &[("abort", OnLost::Abort), ("finish", OnLost::Finish)]),
        max_duration: max,
    };
    // A TTL that was refused says nothing about the heartbeat.
    let ttl_is_sound = ttl.at.is_some() || lease.get("ttl").is_none();
    if let Some(at) = heartbeat.at.as_ref().filter(|_| ttl_is_sound) {
        let (beat, ttl) = (values::spell(read.heartbeat), values::spell(read.ttl));
        let at_most = values::spell(most);
        if read.heartbeat >= read.ttl {
            let problem =
                format!("lease.heartbeat is {beat}, must be below lease.ttl ({ttl}), at most {at_most}");
            page.refuse(at, problem);
        } else if read.heartbeat > most {
            let problem = format!(
                "lease.heartbeat is {beat}, must be at most {at_most}: lease.ttl ({ttl}) less the margin ({}) \
                 in which a renewal must have come, and less the time that its call may take",
                values::spell(read.margin())
            );
            page.refuse(at, problem);
        }
    }
    read
}

/// The bound of a whole life, where one is set.
fn max_duration(table: &Table<'_>) -> Option<Duration> {
    let second = Duration::from_secs(1);
    table.get("max_duration").map(|_| table.duration("max_duration", second, second).value)
}

/// `[websocket]`.
pub(super) fn websocket(websocket: &Table<'_>) -> WebSocketConfig {
    let idle = websocket.duration("idle", defaults::WEBSOCKET.idle, Duration::from_millis(1)).value;
    WebSocketConfig { idle, max_duration: max_duration(websocket) }
}

/// `[shutdown]`.
pub(super) fn shutdown(page: &Page<'_>, shutdown: &Table<'_>) -> ShutdownConfig {
    let grace = shutdown.duration("grace", defaults::SHUTDOWN.grace, Duration::ZERO).value;
    let linger = shutdown.duration("linger", defaults::SHUTDOWN.linger, Duration::ZERO);
    if let Some(at) = linger.at.filter(|_| linger.value > grace) {
        let (is, most) = (values::spell(linger.value), values::spell(grace));
        page.refuse(&at, format!("shutdown.linger is {is}, must be at most shutdown.grace ({most})"));
    }
    ShutdownConfig { grace, linger: linger.value }
}

/// `[queue]`.
pub(super) fn queue(queue: &Table<'_>) -> QueueConfig {
    QueueConfig {
        max_wait: queue.duration("max_wait", defaults::QUEUE.max_wait, Duration::ZERO).value,
        max_waiting: count(queue, "max_waiting", defaults::QUEUE.max_waiting, 0),
    }
}

/// A number of things, at most a million: more is a slip, and each may cost memory.
fn count(table: &Table<'_>, name: &str, default: usize, least: u32) -> usize {
    // The defaults are far below `u32::MAX`, and a u32 fits a usize wherever this runs.
    let default = u32::try_from(default).unwrap_or(u32::MAX);
    usize::try_from(table.count(name, default, least..=1_000_000)).unwrap_or(usize::MAX)
}

const STRATEGIES: &[(&str, Strategy)] = &[
    ("weighted", Strategy::Weighted),
    ("round_robin", Strategy::RoundRobin),
    ("least_in_flight", Strategy::LeastInFlight),
    ("fill_first", Strategy::FillFirst),
];

/// `[ranking]`.
pub(super) fn ranking(ranking: &Table<'_>) -> Ranking {
    let weight = |name, default| ranking.weight(name, default);
    let usual = Weights::DEFAULT;
    Ranking {
        strategy: ranking.word("strategy", STRATEGIES),
        weights: Weights {
            capacity: weight("capacity", usual.capacity),
            idle: weight("idle", usual.idle),
            success: weight("success", usual.success),
            error: weight("error", usual.error),
            rate_limit: weight("rate_limit", usual.rate_limit),
            cooldown: weight("cooldown", usual.cooldown),
            freshness: weight("freshness", usual.freshness),
            jitter: weight("jitter", usual.jitter),
        },
    }
}

/// `retry.on`.
fn retry_on(retry: &Table<'_>) -> RetryOn {
    let word = |text: &str| ["overloaded", "connection"].into_iter().find(|word| *word == text);
    let said = all(retry, "on", word, "must be \"overloaded\" or \"connection\"");
    RetryOn { overloaded: said.contains(&"overloaded"), connection: said.contains(&"connection") }
}

/// `[retry]`.
pub(super) fn retry(retry: &Table<'_>) -> RetryConfig {
    RetryConfig {
        max_attempts: retry.count("max_attempts", defaults::RETRY.max_attempts, 1..=100),
        max_body: retry.size("max_body", defaults::RETRY.max_body, 0),
        max_total: retry.size("max_total", defaults::RETRY.max_total, 0),
        on: retry_on(retry),
    }
}

/// `[timeouts]`.
pub(super) fn timeouts(timeouts: &Table<'_>) -> Timeouts {
    let read = |name, default| timeouts.duration(name, default, Duration::from_millis(1)).value;
    let default = defaults::TIMEOUTS;
    Timeouts {
        connect: read("connect", default.connect),
        first_byte: read("first_byte", default.first_byte),
        idle: read("idle", default.idle),
        body_idle: read("body_idle", default.body_idle),
        header: read("header", default.header),
        keep_alive: read("keep_alive", default.keep_alive),
    }
}

/// `[limits]`.
pub(super) fn limits(limits: &Table<'_>) -> Limits {
    let default = defaults::LIMITS;
    Limits {
        max_connections: count(limits, "max_connections", default.max_connections, 1),
        // The HTTP library's read buffer is never smaller.
        max_header_bytes: limits.size("max_header_bytes", default.max_header_bytes, 8 << 10),
        max_headers: count(limits, "max_headers", default.max_headers, 1),
        max_streams: limits.count("max_streams", default.max_streams, 1..=10_000),
    }
}

/// `proxy.alpn`.
fn alpn(proxy: &Table<'_>) -> Vec<Alpn> {
    let known = |text: &str| [Alpn::Http1, Alpn::Http2].into_iter().find(|alpn| alpn.as_str() == text);
    let read = all(proxy, "alpn", known, "must be \"http/1.1\" or \"h2\"");
    match proxy.get("alpn") {
        Some(field) if field.texts().is_empty() => {
            field.wrong::<()>("must name at least one of \"http/1.1\" and \"h2\"");
            defaults::alpn()
        }
        Some(_) => read,
        None => defaults::alpn(),
    }
}

/// `[proxy]`.
pub(super) fn proxy(proxy: &Table<'_>) -> ProxyConfig {
    let deny_nets = if proxy.get("deny_nets").is_some() {
        let net = |text: &str| {
            text.parse::<IpNet>().ok().or_else(|| Some(text.parse::<std::net::IpAddr>().ok()?.into()))
        };
        all(proxy, "deny_nets", net, "must be a network such as \"169.254.0.0/16\"")
    } else {
        defaults::deny_nets()
    };
    let tunnel_other_hosts = proxy.word("other_hosts", &[("tunnel", true), ("deny", false)]);
    ProxyConfig { tunnel_other_hosts, deny_nets, alpn: alpn(proxy) }
}
