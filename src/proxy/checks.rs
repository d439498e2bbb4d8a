//! lessor's own check of a key: a request that carries nothing of any caller's, so that only the key can
//! be to blame for its refusal; or a provider that refuses everybody for a moment.
//!
//! So one refused check rests the key, and a second one, a while later, decides. What only a check decided is
//! checked again now and then, and comes back by itself.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use arc_swap::ArcSwap;
use http::header::HOST;
use http::{HeaderMap, Request, Uri};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::forward::Upstreams;
use crate::forward::replay::Replay;
use crate::inject;
use crate::lease::Leases;
use crate::model::{Class, Fingerprint, KeyId, KeyStatus, ProviderName};
use crate::route::ring::{ProviderKeys, Ring, RingKey};
use crate::store::{BY_CHECK, KeyView, StatusChange, Store};

use super::reply::Reply;

/// How long a check may take.
const CHECK: Duration = Duration::from_secs(20);

/// How long the store may take to say which keys only a check found bad.
const LOOK: Duration = Duration::from_secs(5);

/// How often keys are checked unasked.
#[derive(Debug, Clone, Copy)]
struct Pace {
    /// After one check of a key, before the next; so long a good one is believed.
    pause: Duration,
    /// After a refused one, before the one that decides; the store rests the key for as long.
    second: Duration,
    /// Between two checks of a key that only checks found bad, more or less.
    again: Duration,
}

const PACE: Pace =
    Pace { pause: Duration::from_secs(30), second: Duration::from_mins(1), again: Duration::from_mins(30) };

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
    /// Whether it names the key as bad, so that nothing else can be meant.
    proven: bool,
    /// The same for people.
    pub message: String,
}

/// A key of a provider.
type Mark = (ProviderName, KeyId);

/// Runs checks; clones share what is under way.
#[derive(Clone)]
pub struct Checks(Arc<Inner>);

struct Inner {
    ring: Arc<Ring>,
    upstreams: ArcSwap<Upstreams>,
    store: Arc<dyn Store>,
    leases: Leases,
    pace: Pace,
    /// Keys that are being checked unasked, or were a moment ago; and whether one was doubted since.
    under_way: Mutex<HashMap<Mark, bool>>,
    /// Secrets that a check found good, and when.
    good: Mutex<HashMap<Mark, (Fingerprint, Instant)>>,
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
        Self::paced(PACE, ring, upstreams, store, leases)
    }

    fn paced(
        pace: Pace,
        ring: Arc<Ring>,
        upstreams: Arc<Upstreams>,
        store: Arc<dyn Store>,
        leases: Leases,
    ) -> Self {
        let (under_way, good) = (Mutex::default(), Mutex::default());
        let (upstreams, tasks) = (ArcSwap::new(upstreams), TaskTracker::new());
        Self(Arc::new(Inner { ring, upstreams, store, leases, pace, under_way, good, tasks }))
    }

    /// From now on asks by these.
    pub fn ask_by(&self, upstreams: Arc<Upstreams>) {
        self.0.upstreams.store(upstreams);
    }

    /// Whether a check has just found this secret good: then a doubt is about the request.
    pub(super) fn found_good(&self, provider: &ProviderName, key: &RingKey) -> bool {
        let mark = (provider.clone(), key.config.id.clone());
        let good = self.0.good();
        good.get(&mark)
            .is_some_and(|(secret, at)| key.fingerprint == Some(*secret) && at.elapsed() < self.0.pace.pause)
    }

    /// Checks a key that is doubted: now, or after the pause where it was checked a moment ago. At most one task
    /// a key.
    pub(super) fn in_background(&self, provider: ProviderName, key: KeyId) {
        let mark = (provider, key);
        let known = self.0.under_way().get_mut(&mark).map(|doubted| *doubted = true).is_some();
        if known || self.0.under_way().insert(mark.clone(), false).is_some() {
            return;
        }
        let this = self.clone();
        self.0.tasks.spawn(async move {
            let mut refused = false;
            loop {
                let found = this.look(&mark, refused).await;
                refused = !refused && found.class == Class::Invalid && !found.proven;
                tokio::time::sleep(if refused { this.0.pace.second } else { this.0.pace.pause }).await;
                if !refused && !this.0.goes_on(&mark) {
                    return;
                }
            }
        });
    }

    /// One check unasked; `refused` says that the one before it was.
    async fn look(&self, mark: &Mark, refused: bool) -> CheckOutcome {
        let (provider, key) = mark;
        // What was doubted so far is answered by this one.
        if let Some(doubted) = self.0.under_way().get_mut(mark) {
            *doubted = false;
        }
        let found = self.check(provider, key, refused).await;
        // What is bad is told where it is applied, whoever asked for the check.
        if found.class != Class::Invalid || !(refused || found.proven) {
            tracing::info!(%provider, %key, ok = found.ok, status = found.status, "checked a doubted key: {}", found.message);
        }
        found
    }

    /// Asks the provider and applies what it says: good, bad, or nothing learned. A person asked, so one refusal
    /// decides.
    pub async fn run(&self, provider: &ProviderName, key: &KeyId) -> CheckOutcome {
        self.check(provider, key, true).await
    }

    async fn check(&self, provider: &ProviderName, key: &KeyId, decides: bool) -> CheckOutcome {
        let keys = self.0.ring.of(provider.as_str());
        match keys.as_ref().and_then(|keys| Some((keys, keys.key(key)?))) {
            Some((keys, known)) => {
                let found = self.ask(keys, known).await;
                self.apply(provider, known, &found, decides).await;
                found
            }
            None => nothing(format!("provider `{provider}` has no key `{key}` here")),
        }
    }

    /// The task that checks again, now and then, what only checks found bad; ends with `stop`. What a provider's
    /// code found bad waits for a person.
    pub async fn check_again(self, stop: CancellationToken) {
        loop {
            let pause = self.0.pace.again.mul_f64(rand::random_range(0.75..1.25));
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                () = tokio::time::sleep(pause) => {}
            }
            for keys in self.0.ring.all() {
                tokio::select! {
                    biased;
                    () = stop.cancelled() => return,
                    () = self.check_refused(&keys.provider.name) => {}
                }
            }
        }
    }

    async fn check_refused(&self, provider: &ProviderName) {
        let looking = tokio::time::timeout(LOOK, self.0.store.snapshot(provider.clone()));
        let Ok(Ok(seen)) = looking.await else { return };
        let by_check =
            |view: &&KeyView| view.status == KeyStatus::Invalid && view.reason.as_deref() == Some(BY_CHECK);
        for view in seen.keys.iter().filter(by_check) {
            let (key, found) = (&view.id, self.check(provider, &view.id, true).await);
            if found.class != Class::Invalid {
                tracing::info!(%provider, %key, ok = found.ok, status = found.status, "checked a refused key again: {}", found.message);
            }
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
            let key = (&*key.config, key.credential.as_deref());
            inject::put(provider, key, &check.path, &target, &mut headers, |_| false)
                .map_err(|fault| fault.message)
        });
        let target = match put {
            Ok(target) => target,
            Err(why) => return nothing(why),
        };
        headers.insert(HOST, keys.host.clone());
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
    async fn apply(&self, provider: &ProviderName, known: &RingKey, found: &CheckOutcome, decides: bool) {
        let key = &known.config.id;
        let Some(secret) = known.fingerprint else { return };
        let (status, code) = (found.status, found.code.clone());
        let change = match found.class {
            Class::Success => {
                // Before the store hears it, so that no doubt comes between.
                self.0.note_good((provider.clone(), key.clone()), secret);
                StatusChange::CheckedGood(secret)
            }
            Class::Invalid if found.proven || decides => {
                tracing::warn!(
                    %provider,
                    %key,
                    status,
                    code = code.as_deref(),
                    "lessor's own check found that this key is bad; it is not lent before it has another secret, or a \
                     check finds it good"
                );
                StatusChange::CheckedBad { secret, status, code }
            }
            Class::Invalid => StatusChange::Doubted { secret, status, code },
            _ => return,
        };
        if let Err(error) = self.0.store.set_status(provider.clone(), key.clone(), change).await {
            tracing::warn!(%provider, %key, %error, "a check's result could not be stored");
        }
        self.0.leases.wake(provider);
    }
}

impl Inner {
    /// A panic while it is held would be a mistake of this file; a check too many is better than none ever.
    fn under_way(&self) -> MutexGuard<'_, HashMap<Mark, bool>> {
        self.under_way.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn good(&self) -> MutexGuard<'_, HashMap<Mark, (Fingerprint, Instant)>> {
        self.good.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn note_good(&self, mark: Mark, secret: Fingerprint) {
        let (mut good, now) = (self.good(), Instant::now());
        good.retain(|_, (_, at)| now.duration_since(*at) < self.pace.pause);
        good.insert(mark, (secret, now));
    }

    /// After the pause: whether the key was doubted since its check began, else it is forgotten.
    fn goes_on(&self, mark: &Mark) -> bool {
        let mut under_way = self.under_way();
        let doubted = under_way.get(mark).copied().unwrap_or(false);
        if !doubted {
            under_way.remove(mark);
        }
        doubted
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
    let proven = class == Class::Invalid && outcome.proven;
    CheckOutcome { ok, status, class, code, proven, message }
}

fn nothing(message: String) -> CheckOutcome {
    CheckOutcome { ok: false, status: None, class: Class::Network, code: None, proven: false, message }
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

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a test that fails may panic
mod tests;
