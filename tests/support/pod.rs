//! A pod on a private machine: a sidecar as the injector makes it, and apps of another user beside it.
//!
//! What Kubernetes does is done here with what it does it with. The sidecar has its own mounts: its root filesystem is
//! read-only, the secret's volume is there for it alone, with files that everybody may read, as its user is not their
//! owner; two volumes are root's and open to all. It has no HOME, no capability, and a umask that leaves others nothing.
//! Process ids and the network are shared with the apps: the second as in a pod, the first to the sidecar's disfavour.
//!
//! Where the tests are not run as root there is one user only. Then apps are that user, too, and what another one could
//! read is told by modes.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

use super::lessor::{Home, Lessor, Ran, run};
use super::{Answer, Door, Request, client, sandbox, within};

/// The pod's addresses, as nobody else here has them.
pub const IP: &str = "10.77.0.5";
pub const IP6: &str = "fd00:77::5";
/// The sidecar's user and the app's, where there can be two.
const SIDECAR: u32 = 65532;
const APP: u32 = 10001;

/// `$1` is the pod's directory, `$2` the binary, `$3` the user or nothing; then what is run.
const START: &str = r#"set -e
dir="$1" binary="$2" user="$3"; shift 3
mount --make-rprivate /
mount --bind "$dir/node/secret" "$dir/etc"
mount --bind "$binary" "$dir/lessor"
mount --bind "$dir/ca" "$dir/ca"
mount --bind "$dir/private" "$dir/private"
while read -r _ at _; do
  case "$at" in
    "$dir/ca"|"$dir/private"|/proc|/proc/*|/sys|/sys/*|/dev|/dev/pts) ;;
    *) mount -o remount,bind,ro "$at" ;;
  esac
done < /proc/self/mounts
cd /
umask 077
set -- env -i "XDG_RUNTIME_DIR=$dir/private" "$dir/lessor" "$@"
[ -z "$user" ] || set -- setpriv --reuid "$user" --regid "$user" --clear-groups --no-new-privs --inh-caps=-all --bounding-set=-all "$@"
exec "$@"
"#;

/// Runs the test with this name once more on a private machine that has a pod's addresses; `true` when this already is
/// it.
pub async fn inside(test: &str) -> bool {
    if !sandbox::inside(test).await {
        return false;
    }
    for (address, bits) in [(IP, 32), (IP6, 128)] {
        let mut command = Command::new("ip");
        command.args(["addr", "add", &format!("{address}/{bits}"), "dev", "lo"]);
        run(command).await.ok();
    }
    true
}

/// Whether this user may make processes of other users.
pub fn has_users() -> bool {
    let map = std::fs::read_to_string("/proc/self/uid_map").unwrap();
    let known: u64 = map.lines().filter_map(|line| line.split_whitespace().nth(2)?.parse::<u64>().ok()).sum();
    rustix::process::geteuid().is_root() && known > u64::from(SIDECAR)
}

/// A pod without a sidecar yet.
#[derive(Debug)]
pub struct Pod {
    home: Arc<Home>,
}

impl Pod {
    /// One whose secret has this configuration and these files.
    pub fn new(toml: &str, secrets: &[(&str, &str)]) -> Self {
        let pod = Self { home: Arc::default() };
        for (dir, mode) in [("", 0o755), ("node", 0o700), ("node/secret", 0o755), ("etc", 0o755)] {
            pod.make_dir(dir, mode);
        }
        for volume in ["ca", "private"] {
            pod.make_dir(volume, 0o777);
        }
        std::fs::write(pod.path("lessor"), "").unwrap(); // for the binary to be mounted on
        pod.set("lessor.toml", &toml.replace("$etc", &pod.path("etc").display().to_string()));
        for (name, text) in secrets {
            pod.set(name, text);
        }
        pod
    }

    /// Puts this into the secret, as Kubernetes would: whole, for all to read.
    pub fn set(&self, name: &str, text: &str) {
        let (path, new) = (self.path("node/secret").join(name), self.path("node").join("new"));
        std::fs::write(&new, text).unwrap();
        mode(&new, 0o444);
        std::fs::rename(new, path).unwrap();
    }

    fn make_dir(&self, name: &str, bits: u32) {
        let path = self.path(name);
        let _ = std::fs::create_dir(&path);
        mode(&path, bits);
    }

    /// A path of the pod: `ca`, `private`, `etc`.
    pub fn path(&self, name: &str) -> PathBuf {
        self.home.path().join(name)
    }

    /// Starts the sidecar with what the injector gives it, and `more`.
    pub fn sidecar(&self, ip: &str, more: &[&str]) -> Lessor {
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", START, "sh"]).arg(self.home.path());
        command.arg(env!("CARGO_BIN_EXE_lessor"));
        command.arg(if has_users() { SIDECAR.to_string() } else { String::new() });
        command.arg("run").arg(format!("--config={}", self.path("etc/lessor.toml").display()));
        command.args(["--proxy=127.0.0.1:8321", &format!("--admin-ip={ip}")]);
        command.arg(format!("--ca-dir={}", self.path("ca").display())).args(more).stdin(Stdio::null());
        Lessor::of(Arc::clone(&self.home), command)
    }

    /// Runs a command as an app of the pod: of another user, without the secret's volume.
    pub async fn app(&self, program: &str, args: &[&str]) -> Ran {
        let mut command = Command::new("setpriv");
        if has_users() {
            let user = APP.to_string();
            command.args(["--reuid", &user, "--regid", &user, "--clear-groups"]);
        }
        command.args(["--no-new-privs", program]).args(args);
        run(command).await
    }

    /// The same with the mounts of `sidecar`: what only they keep from it.
    pub async fn app_with_the_mounts_of(&self, sidecar: &Lessor, program: &str, args: &[&str]) -> Ran {
        run(with_the_mounts_of(sidecar, APP, program, args)).await
    }

    /// Runs `lessor` in the sidecar, as `kubectl exec` would.
    pub async fn exec(&self, sidecar: &Lessor, args: &[&str]) -> Ran {
        let binary = self.path("lessor").display().to_string();
        let mut command = with_the_mounts_of(sidecar, SIDECAR, &binary, args);
        command.env_clear().env("XDG_RUNTIME_DIR", self.path("private"));
        command.env("PATH", std::env::var_os("PATH").unwrap_or_default());
        run(command).await
    }
}

fn with_the_mounts_of(sidecar: &Lessor, user: u32, program: &str, args: &[&str]) -> Command {
    let mut command = Command::new("nsenter");
    command.arg(format!("--mount=/proc/{}/ns/mnt", sidecar.pid()));
    if has_users() {
        let user = user.to_string();
        command.args(["setpriv", "--reuid", &user, "--regid", &user, "--clear-groups"]);
    }
    command.arg(program).args(args);
    command
}

fn mode(path: &Path, bits: u32) {
    use std::os::unix::fs::PermissionsExt as _;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(bits)).unwrap();
}

/// A TCP door.
pub fn door(at: &str) -> Door {
    Door::Tcp(at.parse().unwrap())
}

/// Asks, where somebody may not listen yet, or no more.
pub async fn ask(door: &Door, request: Request) -> Option<Answer> {
    let Door::Tcp(at) = door else { panic!("{door:?} is no TCP door") };
    let asking = async {
        let socket = tokio::net::TcpStream::connect(at).await.ok()?;
        client::send_on(socket, &door.host(), request).await.ok()?.whole().await.ok()
    };
    within(super::NEVER, "an answer or none", asking).await
}
