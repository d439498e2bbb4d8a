//! A private machine for tests of what uses fixed ports and real names: its own network, in which
//! lessor's usual ports are free, its own hosts file, in which a provider's name means loopback, and its own
//! name server, which is whoever answers on port 53 of loopback.
//!
//! Linux namespaces do it: as root, or as any user where the kernel lets users have namespaces.

use std::process::Command;
use std::time::Duration;

use super::lessor::run_within;

const INSIDE: &str = "LESSOR_TEST_SANDBOX";

/// Runs the test with this name once more, inside; `true` when this already is the inside.
pub async fn inside(test: &str) -> bool {
    if std::env::var_os(INSIDE).is_some() {
        return true;
    }
    let dir = tempfile::tempdir().unwrap();
    let hosts = dir.path().join("hosts");
    std::fs::write(&hosts, "127.0.0.1 localhost api.openai.com api.anthropic.com known.test unknown.test\n")
        .unwrap();
    let resolver = dir.path().join("resolv.conf");
    std::fs::write(&resolver, "nameserver 127.0.0.1\noptions timeout:1 attempts:1\n").unwrap();
    let script = "mount --bind \"$1\" /etc/hosts && mount --bind \"$2\" /etc/resolv.conf && ip link set lo up \
                  && exec \"$3\" --exact \"$4\" --nocapture";
    let mut command = Command::new("unshare");
    let root = rustix::process::geteuid().is_root();
    command.args(if root { &["--mount", "--net"][..] } else { &["--mount", "--net", "--map-root-user"] });
    command
        .args(["sh", "-c", script, "sh"])
        .arg(hosts)
        .arg(resolver)
        .arg(std::env::current_exe().unwrap())
        .arg(test);
    command.env(INSIDE, "1");
    let ran = run_within(Duration::from_secs(180), command).await;
    eprint!("{}", ran.stderr);
    let passed = ran.code == Some(0) && ran.stdout.contains("1 passed");
    assert!(passed, "inside the sandbox:\n{}", ran.stdout);
    false
}
