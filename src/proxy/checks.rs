//! lessor's own check of a key: a request that carries nothing of any caller's, so that only the key can
//! be to blame for its refusal.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use arc_swap::ArcSwap;
use http::{HeaderMap, Request, Uri};
use tokio_util::task::TaskTracker;

use crate::forward::Upstreams;
use crate::forward::replay::Replay;
use crate::inject;
use crate::lease::Leases;
use crate::model::{Class, KeyId, ProviderName};
use crate::route::ring::{ProviderKeys, Ring, RingKey};
use crate::store::{StatusChange, Store};

use super::reply::Reply;

/// How long a check may take.
const CHECK: Duration = Duration::from_secs(20);

/// How often one key is checked unasked, at most.
const PAUSE: Duration = Duration::from_secs(30);

/// What a check found.
#[derive(Debug, Clone)]
pub struct CheckOutcome {
    /// The provider took the key.
    pub ok: bool,
    /// The answer's status; `None` when none came.
    pub status: Option<u16>,
    /// What it says about the key.
    pub class: Class,
    /// The code or type in its body that decided.
    pub code: Option<Arc<str>>,
    /// The same for people.
    pub message: String,
}

/// Runs checks; clones share what is under way.
#[derive(Clone)]
pub struct Checks(Arc<Inner>);

struct Inner {
    ring: Arc<Ring>,
    upstreams: ArcSwap<Upstreams>,
    store: Arc<dyn Store>,
    leases: Leases,
    under_way: Mutex<HashSet<(ProviderName, KeyId)>>,
    tasks: TaskTracker,
}

impl std::fmt::Debug for Checks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Checks")
    }
}

impl Checks {
    /// Checks the ring's keys.
    pub fn new(ring: Arc<Ring>, upstreams: Arc<Upstreams>, store: Arc<dyn Store>, leases: Leases) -> Self {
        let under_way = Mutex::default();
        let (upstreams, tasks) = (ArcSwap::new(upstreams), TaskTracker::new());
        Self(Arc::new(Inner { ring, upstreams, store, leases, under_way, tasks }))
    }

    /// From now on asks by these.
    pub fn ask_by(&self, upstreams: Arc<Upstreams>) {
        self.0.upstreams.store(upstreams);
    }

    /// Checks a key soon, unless that is under way or was done a moment ago. At most one task a key.
    pub(super) fn in_background(&self, provider: ProviderName, key: KeyId) {
        let mark = (provider.clone(), key.clone());
        let fresh = self.0.under_way.lock().unwrap_or_else(PoisonError::into_inner).insert(mark.clone());
        if !fresh {
            return;
        }
        let this = self.clone();
        self.0.tasks.spawn(async move {
            let found = this.run(&provider, &key).await;
            // What is bad is told where it is applied, whoever asked for the check.
            if found.class != Class::Invalid {
                tracing::info!(%provider, %key, ok = found.ok, status = found.status, "checked a doubted key: {}", found.message);
            }
            tokio::time::sleep(PAUSE).await;
            this.0.under_way.lock().unwrap_or_else(PoisonError::into_inner).remove(&mark);
        });
    }

    /// Asks the provider and applies what it says: good, bad, or nothing learned.
    pub async fn run(&self, provider: &ProviderName, key: &KeyId) -> CheckOutcome {
        let keys = self.0.ring.of(provider.as_str());
        match keys.as_ref().and_then(|keys| Some((keys, keys.key(key)?))) {
            Some((keys, known)) => {
                let found = self.ask(keys, known).await;
                self.apply(provider, known, &found).await;
                found
            }
            None => nothing(format!("provider `{provider}` has no key `{key}` here")),
        }
    }

    async fn ask(&self, keys: &ProviderKeys, key: &RingKey) -> CheckOutcome {
        let provider = &keys.provider;
        let Some(check) = &provider.check else {
            return nothing(format!(
                "no check request is known for `{}`; set [providers.{0}] check",
                provider.name
            ));
        };
        if key.config.secret.is_none() {
            return nothing(format!("its secret, of {}, could not be had yet", key.config.source));
        }
        let mut headers: HeaderMap = check.headers.iter().cloned().collect();
        let target = check_target(&provider.base_url, &check.path);
        let put = target.and_then(|target| {
            inject::put(provider, &key.config, &check.path, &target, &mut headers, |_| false)
                .map_err(|fault| fault.message)
        });
        let target = match put {
            Ok(target) => target,
            Err(why) => return nothing(why),
        };
        let mut request = Request::new(());
        *request.method_mut() = check.method.clone();
        *request.uri_mut() = target;
        *request.headers_mut() = headers;
        let (none, upstreams) = (Replay::none(), self.0.upstreams.load_full());
        let asking = async {
            let answer = upstreams.send(&provider.name, request, &none).await?;
            Ok::<_, crate::forward::SendError>(Reply::read(provider, answer).await)
        };
        match tokio::time::timeout(CHECK, asking).await {
            Ok(Ok(reply)) => judged(&reply),
            Ok(Err(error)) => nothing(error.to_string()),
            Err(_) => nothing(format!("no answer within {CHECK:?}")),
        }
    }

    /// `known` is the key that was asked with, whatever is configured by now.
    async fn apply(&self, provider: &ProviderName, known: &RingKey, found: &CheckOutcome) {
        let key = &known.config.id;
        let change = match (found.class, known.fingerprint()) {
            (Class::Success, Some(fingerprint)) => StatusChange::CheckedGood(fingerprint),
            (Class::Invalid, Some(secret)) => {
                tracing::warn!(
                    %provider,
                    %key,
                    status = found.status,
                    code = found.code.as_deref(),
                    "lessor's own check found that this key is bad; it is not lent before it has another secret, or \
                     `lessor keys check` finds it good"
                );
                StatusChange::CheckedBad { secret, status: found.status, code: found.code.clone() }
            }
            _ => return,
        };
        if let Err(error) = self.0.store.set_status(provider.clone(), key.clone(), change).await {
            tracing::warn!(%provider, %key, %error, "a check's result could not be stored");
        }
        self.0.leases.wake(provider);
    }
}

/// A 401 to a request that carries nothing but the key is the key's fault; a 403 may be a key that is
/// not allowed to make this very request.
fn judged(reply: &Reply) -> CheckOutcome {
    let outcome = reply.outcome();
    let (status, code) = (outcome.status, outcome.code.clone());
    let (ok, class, message) = match outcome.class {
        Class::Success if outcome.shows_use() => {
            (true, Class::Success, "the provider takes the key".to_owned())
        }
        Class::Success => {
            (false, Class::Network, "nothing learned: the provider points elsewhere".to_owned())
        }
        Class::Invalid if outcome.proven || status == Some(401) => {
            (false, Class::Invalid, "the provider refuses the key".to_owned())
        }
        class => (
            false,
            if class == Class::Invalid { Class::Access } else { class },
            format!("nothing learned: {}", class.as_str()),
        ),
    };
    CheckOutcome { ok, status, class, code, message }
}

fn nothing(message: String) -> CheckOutcome {
    CheckOutcome { ok: false, status: None, class: Class::Network, code: None, message }
}

fn check_target(base: &Uri, path: &str) -> Result<Uri, String> {
    let authority = base.authority().map_or("", |authority| authority.as_str());
    Uri::builder()
        .scheme(base.scheme_str().unwrap_or("https"))
        .authority(authority)
        .path_and_query(format!("{}{path}", base.path().trim_end_matches('/')))
        .build()
        .map_err(|error| error.to_string())
}
