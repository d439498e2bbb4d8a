//! The command line of `lessor inject`.

use std::io::Read as _;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, ValueEnum};
use serde_json::Value;

use super::mint::Terms;
use super::values::{self, Level, Mode, Quantity};
use super::{BadReview, Defaults, Request, Resources, answer, patched};
use crate::control::cli::{Exit, complain, print};
use crate::model::{PoolName, ProviderName};

/// The longest review that is read: etcd refuses an object above 1.5 MiB, and what is created comes alone.
pub(super) const LONGEST: usize = 3 * 1024 * 1024;
/// The image of this version.
const IMAGE: &str = concat!("lessor:", env!("CARGO_PKG_VERSION"));
/// The first Kubernetes with native sidecars switched on.
const NATIVE_SINCE: (u32, u32) = (1, 29);

/// What `--review` reads beside reviews.
const WHAT_TO_GIVE: &str =
    "give the Pod, or a workload's pod template (with \"kind\": \"Pod\" put into it), as JSON";

/// More of `--linger` is a slip.
const MOST_LINGER: Duration = Duration::from_mins(5);
/// What `--look-every` may be.
const LOOKS: (Duration, Duration) = (Duration::from_millis(20), Duration::from_mins(10));

/// The shortest life of a certificate, and the longest of a CA.
const LEAVES: (Duration, Duration) = (Duration::from_secs(6), Duration::from_hours(24 * 3650));

/// Whether sidecars are native.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Native {
    /// Unless the cluster is older than 1.29.
    Auto,
    /// Always.
    True,
    /// Never.
    False,
}

/// `lessor inject`.
#[derive(Debug, Args)]
pub struct Inject {
    /// Answer the AdmissionReview (or the Pod, as if it were created) in this file, `-` is standard input; serve
    /// nothing.
    #[arg(long, value_name = "FILE")]
    pub review: Option<PathBuf>,
    /// With --review: print the pod as it would become, in place of the answer.
    #[arg(long, requires = "review")]
    print_pod: bool,
    /// Where the webhook is served, by TLS, at /inject.
    #[arg(long, value_name = "ADDR", env = "LESSOR_INJECT_LISTEN", default_value = "0.0.0.0:8443")]
    pub listen: SocketAddr,
    /// Where /healthz, /readyz and /metrics are served.
    #[arg(long, value_name = "ADDR", env = "LESSOR_INJECT_HEALTH", default_value = "0.0.0.0:8080")]
    pub health: SocketAddr,
    /// How long reviews are still taken after SIGTERM, until API servers know that it goes.
    #[arg(long, value_name = "TIME", env = "LESSOR_INJECT_LINGER", default_value = "5s")]
    #[arg(value_parser = humantime::parse_duration)]
    linger: Duration,
    /// How often certificate files, or the cluster's API, are looked at.
    #[arg(long, value_name = "TIME", env = "LESSOR_INJECT_LOOK_EVERY", default_value = "5s")]
    #[arg(value_parser = humantime::parse_duration)]
    look_every: Duration,
    /// The certificate and key by which it is served.
    #[command(flatten)]
    pub certificate: Certificate,
    /// What pods get.
    #[command(flatten)]
    pub pods: Pods,
}

/// By which certificate the webhook is served.
#[derive(Debug, Args)]
#[command(next_help_heading = "Certificate")]
pub struct Certificate {
    /// The certificate and what stands behind it, in PEM; read again when it changes.
    #[arg(long, value_name = "FILE", env = "LESSOR_INJECT_TLS_CERT")]
    pub tls_cert: Option<PathBuf>,
    /// Its key, in PEM.
    #[arg(long, value_name = "FILE", env = "LESSOR_INJECT_TLS_KEY")]
    pub tls_key: Option<PathBuf>,
    /// Make and renew the certificate itself, in one Secret that all replicas share, and write its CA into the
    /// webhook configuration.
    #[arg(long, env = "LESSOR_INJECT_SELF_MANAGED", conflicts_with_all = ["tls_cert", "tls_key"])]
    pub self_managed: bool,
    /// The injector's own namespace, whose pods get no sidecar.
    #[arg(long, value_name = "NS", env = "LESSOR_INJECT_NAMESPACE", value_parser = values::object_name)]
    pub namespace: Option<String>,
    /// With --self-managed: the Service that the API server calls.
    #[arg(long, value_name = "NAME", env = "LESSOR_INJECT_SERVICE", value_parser = values::object_name)]
    pub service: Option<String>,
    /// With --self-managed: the Secret with the certificate.
    #[arg(long, value_name = "NAME", env = "LESSOR_INJECT_TLS_SECRET", value_parser = values::object_name)]
    pub tls_secret: Option<String>,
    /// With --self-managed: the MutatingWebhookConfiguration that names the Service.
    #[arg(long, value_name = "NAME", env = "LESSOR_INJECT_WEBHOOK_CONFIGURATION")]
    #[arg(value_parser = values::object_name)]
    pub webhook_configuration: Option<String>,
    /// With --self-managed: how long a CA lives; the next one is published at half of that.
    #[arg(long, value_name = "TIME", env = "LESSOR_INJECT_CA_LIFE", default_value = "365days")]
    #[arg(value_parser = humantime::parse_duration)]
    ca_life: Duration,
    /// With --self-managed: how long a certificate lives; it is renewed when a third of that is left.
    #[arg(long, value_name = "TIME", env = "LESSOR_INJECT_LEAF_LIFE", default_value = "7days")]
    #[arg(value_parser = humantime::parse_duration)]
    leaf_life: Duration,
    /// With --self-managed: where the service account's token and CA are.
    #[arg(long, value_name = "DIR", env = "LESSOR_INJECT_SERVICE_ACCOUNT")]
    #[arg(default_value = "/var/run/secrets/kubernetes.io/serviceaccount")]
    pub(super) service_account: PathBuf,
}

impl Certificate {
    /// The names that `--self-managed` needs.
    pub(super) fn names(&self) -> Result<[String; 4], String> {
        let needed = [
            ("--namespace", &self.namespace),
            ("--service", &self.service),
            ("--tls-secret", &self.tls_secret),
            ("--webhook-configuration", &self.webhook_configuration),
        ];
        let missing: Vec<_> =
            needed.iter().filter(|(_, value)| value.is_none()).map(|(flag, _)| *flag).collect();
        if !missing.is_empty() {
            return Err(format!("--self-managed needs {} too", missing.join(", ")));
        }
        Ok(needed.map(|(_, value)| value.clone().unwrap_or_default()))
    }

    /// How long what is made lives.
    pub(super) fn terms(&self) -> Result<Terms, String> {
        let terms = Terms { ca: self.ca_life, leaf: self.leaf_life };
        if terms.leaf < LEAVES.0 || terms.ca > LEAVES.1 || terms.leaf > terms.ca / 4 {
            return Err(format!(
                "--leaf-life must be at least {} and a quarter of --ca-life at most, and that {} at most",
                humantime::format_duration(LEAVES.0),
                humantime::format_duration(LEAVES.1)
            ));
        }
        Ok(terms)
    }
}

/// What pods get unless their annotations say otherwise.
#[derive(Debug, Args)]
#[command(next_help_heading = "Pods, unless their annotations say otherwise")]
pub struct Pods {
    /// The sidecar's image.
    #[arg(long, env = "LESSOR_INJECT_IMAGE", default_value = IMAGE, value_parser = values::image)]
    image: String,
    /// The Secret, in the pod's namespace, with lessor.toml and the files that it names.
    #[arg(long, env = "LESSOR_INJECT_SECRET", value_name = "NAME", default_value = "lessor")]
    #[arg(value_parser = values::object_name)]
    secret: String,
    /// Providers whose variables apps get.
    #[arg(long, env = "LESSOR_INJECT_UPSTREAMS", value_name = "LIST", value_delimiter = ',')]
    #[arg(default_value = "openai,anthropic", value_parser = values::provider)]
    upstreams: Vec<ProviderName>,
    /// How apps are taken through lessor: base-url, proxy or both.
    #[arg(long, env = "LESSOR_INJECT_MODE", default_value = "base-url")]
    mode: Mode,
    /// Native sidecars: first init container, with restartPolicy Always.
    #[arg(long, env = "LESSOR_INJECT_NATIVE", default_value = "auto")]
    native: Native,
    /// The cluster's version, such as 1.28, where the injector cannot ask for it.
    #[arg(long, env = "LESSOR_INJECT_CLUSTER_VERSION", value_name = "VERSION", value_parser = cluster_version)]
    cluster_version: Option<(u32, u32)>,
    /// CPU that the scheduler sets aside for the sidecar.
    #[arg(long, env = "LESSOR_INJECT_CPU_REQUEST", value_name = "AMOUNT", default_value = "50m")]
    #[arg(value_parser = values::cpu)]
    cpu_request: Quantity,
    /// CPU that it may use at most.
    #[arg(long, env = "LESSOR_INJECT_CPU_LIMIT", value_name = "AMOUNT", default_value = "1")]
    #[arg(value_parser = values::cpu)]
    cpu_limit: Quantity,
    /// Memory that the scheduler sets aside for it.
    #[arg(long, env = "LESSOR_INJECT_MEMORY_REQUEST", value_name = "AMOUNT", default_value = "64Mi")]
    memory_request: Quantity,
    /// Memory that it may use at most.
    #[arg(long, env = "LESSOR_INJECT_MEMORY_LIMIT", value_name = "AMOUNT", default_value = "256Mi")]
    memory_limit: Quantity,
    /// How long streams under way may run on after TERM, in whole seconds.
    #[arg(long, env = "LESSOR_INJECT_DRAIN", value_name = "SECONDS", default_value = "25s")]
    #[arg(value_parser = values::drain)]
    drain: u64,
    /// More hosts that do not go through the proxy, beside loopback, .svc, .cluster.local, the API server and
    /// the cloud's metadata.
    #[arg(long, env = "LESSOR_INJECT_NO_PROXY", value_name = "LIST", value_delimiter = ',')]
    #[arg(value_parser = values::no_proxy)]
    no_proxy: Vec<String>,
    /// How much the sidecar logs: error, warn, info, debug or trace.
    #[arg(long, env = "LESSOR_INJECT_LOG_LEVEL", value_name = "LEVEL", default_value = "info")]
    log_level: Level,
    /// The pool of callers that name none.
    #[arg(long, env = "LESSOR_INJECT_POOL", value_name = "NAME", value_parser = pool)]
    pool: Option<PoolName>,
}

impl Inject {
    pub(super) fn linger(&self) -> Duration {
        self.linger.min(MOST_LINGER)
    }

    pub(super) fn look_every(&self) -> Duration {
        self.look_every.clamp(LOOKS.0, LOOKS.1)
    }

    /// Whether the cluster's version must be asked for.
    pub(super) fn must_ask(&self) -> bool {
        self.pods.native == Native::Auto && self.pods.cluster_version.is_none()
    }

    /// What pods get; `asked` is the cluster's version as its API told it.
    pub fn defaults(&self, asked: Option<(u32, u32)>) -> Result<Defaults, String> {
        let pods = &self.pods;
        let native = match pods.native {
            Native::True => true,
            Native::False => false,
            Native::Auto => pods.cluster_version.or(asked).is_none_or(|version| version >= NATIVE_SINCE),
        };
        let defaults = Defaults {
            image: pods.image.clone(),
            secret: pods.secret.clone(),
            upstreams: pods.upstreams.clone(),
            mode: pods.mode,
            native,
            resources: Resources {
                cpu_request: pods.cpu_request.clone(),
                cpu_limit: pods.cpu_limit.clone(),
                memory_request: pods.memory_request.clone(),
                memory_limit: pods.memory_limit.clone(),
            },
            drain: pods.drain,
            no_proxy: pods.no_proxy.iter().filter(|entry| !entry.is_empty()).cloned().collect(),
            log_level: pods.log_level,
            pool: pods.pool.clone(),
            own_namespace: self.certificate.namespace.clone(),
        };
        match defaults.resources.crossed() {
            Some((request, limit)) => Err(format!("--{request} is above --{limit}; raise the limit")),
            None => Ok(defaults),
        }
    }
}

/// The numbers in `1.28`, `v1.28.3` or `v1.28.3-gke.100`.
pub(super) fn cluster_version(text: &str) -> Result<(u32, u32), String> {
    let mut parts = text.trim_start_matches('v').splitn(3, '.');
    // Some clusters write `28+` for the second.
    let mut number = || {
        let digits: String = parts.next()?.chars().take_while(char::is_ascii_digit).collect();
        digits.parse::<u32>().ok()
    };
    let version = number().zip(number());
    version.ok_or_else(|| "must be a version such as 1.28 or v1.31.2".into())
}

fn pool(text: &str) -> Result<PoolName, String> {
    PoolName::parse(text).map_err(|cause| cause.to_string())
}

/// `lessor inject --review`.
pub fn print_review(file: &Path, inject: &Inject) -> ExitCode {
    let printed = inject.defaults(None).map_err(|why| (why, Exit::Usage)).and_then(|defaults| {
        let request = read(file).map_err(|why| (format!("{}: {why}", file.display()), Exit::Usage))?;
        let answer = answer(&defaults, &request);
        if !inject.print_pod {
            return Ok(answer.to_review(&request.uid));
        }
        for warning in &answer.warnings {
            complain(&format!("warning: {warning}"));
        }
        match &answer.refusal {
            Some(why) => Err((why.clone(), Exit::Failed)),
            None => patched(&request.object, &answer).map_err(|why| (why, Exit::Failed)),
        }
    });
    match printed {
        Ok(json) => {
            print(&format!("{json:#}\n"));
            Exit::Ok.into()
        }
        Err((why, exit)) => {
            complain(&format!("error: {why}"));
            exit.into()
        }
    }
}

/// An AdmissionReview, or a pod alone.
fn read(file: &Path) -> Result<Request, String> {
    let mut text = Vec::new();
    let bound = LONGEST as u64 + 1;
    let read = if file == Path::new("-") {
        std::io::stdin().lock().take(bound).read_to_end(&mut text)
    } else {
        std::fs::File::open(file).and_then(|file| file.take(bound).read_to_end(&mut text))
    };
    read.map_err(|cause| cause.to_string())?;
    if text.len() > LONGEST {
        return Err(format!("is longer than {LONGEST} bytes"));
    }
    let json: Value =
        serde_json::from_slice(&text).map_err(|cause| format!("is no JSON: {cause}; {WHAT_TO_GIVE}"))?;
    if json.get("kind").and_then(Value::as_str) == Some("Pod") {
        return Ok(Request::of_pod(json));
    }
    Request::read(&text).map_err(|cause| match cause {
        BadReview::Unknown(what) => {
            format!("is {what}, no admission.k8s.io/v1 AdmissionReview; {WHAT_TO_GIVE}")
        }
        other => other.to_string(),
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a test that fails may panic
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        inject: Inject,
    }

    fn native(args: &[&str], asked: Option<(u32, u32)>) -> bool {
        let line = Line::try_parse_from(["inject"].iter().chain(args)).unwrap();
        line.inject.defaults(asked).unwrap().native
    }

    #[test]
    fn sidecars_are_native_unless_the_cluster_is_known_to_be_older() {
        assert!(native(&[], None));
        assert!(!native(&["--cluster-version", "v1.28.15"], None));
        assert!(native(&["--cluster-version", "1.29"], None));
        assert!(!native(&[], Some((1, 28))));
        assert!(native(&["--native", "true"], Some((1, 28))));
        assert!(!native(&["--native", "false"], Some((1, 33))));
        assert_eq!(cluster_version("1.30+"), Ok((1, 30)));
        assert!(cluster_version("new").is_err());
    }

    #[test]
    fn a_request_above_its_limit_is_refused_at_the_start() {
        let line = Line::try_parse_from(["inject", "--cpu-request", "2"]).unwrap();
        assert!(line.inject.defaults(None).unwrap_err().contains("--cpu-limit"));
    }
}
