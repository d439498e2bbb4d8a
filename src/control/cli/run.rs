//! `lessor run`: what it says over the configuration.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use crate::config::{Address, Overrides};
use crate::model::{PoolName, ProviderName};

pub(super) const EXAMPLES: &str = "\
Each option counts in place of the configuration's value, now and after each reload, and without a file, too.

Examples:
  OPENAI_API_KEY=sk-… lessor run
  lessor run --config config/lessor.toml
  lessor run --config config/lessor.toml --proxy 127.0.0.1:9321 --default-pool batch --upstreams openai,anthropic

As a Kubernetes sidecar: probes and metrics on the pod's address, the CA's files where the apps can read them, and
on SIGTERM it serves on until the apps' connections are gone:
  lessor run --config /etc/lessor/lessor.toml --admin-ip \"$POD_IP\" --ca-dir /run/lessor/ca --grace 25s --linger 1s

Where nothing tells it that a Job's container has ended, that container says so at its end:
  lessor run --config /etc/lessor/lessor.toml --admin-ip \"$POD_IP\" --grace 25s --linger 5s --quit
  curl -X POST http://127.0.0.1:8322/quit
";

/// `lessor run …`.
#[derive(Debug, Clone, Default, Args)]
pub struct Run {
    /// Listen here for clients (listen.proxy): an IP address and port, or unix:/PATH.
    #[arg(long, value_name = "ADDR", value_parser = Overrides::address)]
    proxy: Option<Address>,
    /// The address of the admin listener, whose port stays (listen.admin): the pod's, so that probes and Prometheus
    /// reach it. Off loopback it serves health and metrics alone, unless admin.token is set.
    #[arg(long, value_name = "IP", value_parser = Overrides::ip)]
    admin_ip: Option<IpAddr>,
    /// Write the CA's files here, for all users to read: ca.pem, ca-bundle.pem, ca-bundle.p12, wgetrc. They are there
    /// before /healthz says so, and stay when lessor ends.
    #[arg(long, value_name = "DIR")]
    ca_dir: Option<PathBuf>,
    /// The pool of requests that name none; an app that may not use it has its own first one.
    #[arg(long, value_name = "NAME")]
    default_pool: Option<PoolName>,
    /// Lend keys of these providers alone: names with commas in between.
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = Overrides::upstream)]
    upstreams: Vec<ProviderName>,
    /// The longest time from SIGTERM to the end (shutdown.grace); below the orchestrator's own grace.
    #[arg(long, value_name = "TIME", value_parser = Overrides::duration)]
    grace: Option<Duration>,
    /// After SIGTERM go on serving, new connections too, until no client has been connected for so long
    /// (shutdown.linger).
    #[arg(long, value_name = "TIME", value_parser = Overrides::duration)]
    linger: Option<Duration>,
    /// Let `POST /quit`, from this machine alone, do what SIGTERM does. The admin API is then served on 127.0.0.1, too.
    #[arg(long)]
    quit: bool,
}

impl Run {
    /// What it says over the configuration.
    pub fn overrides(&self) -> Overrides {
        let Self { proxy, admin_ip, ca_dir, default_pool, upstreams, grace, linger, quit } = self.clone();
        Overrides { proxy, admin_ip, ca_dir, default_pool, upstreams, grace, linger, quit }
    }
}
