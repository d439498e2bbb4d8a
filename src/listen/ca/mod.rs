//! The local CA: certificates for the hosts of configured providers, and for no other.
//!
//! Its key is made in memory and never written; only the certificate leaves. So whoever reads the
//! runtime directory can trust this sidecar and cannot pose as it, and a restart makes a new CA. An
//! operator's own CA (`[ca]`) survives restarts instead, and is the operator's to keep: [`operator`] reads it
//! again when it was renewed.
//!
//! A CA of lessor's own is followed by another while it is still good: the next one is *published* at
//! half of a life and *signs* only when the old one has less than a leaf's life left. Whoever read the
//! bundle in between trusts both, and no handshake fails. Nothing here decides which hosts get a
//! certificate: who asks has made sure that it is a provider's.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use rustls::ServerConfig;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::CertificateDer;
use tokio::sync::Notify;

use crate::config::{Alpn, CaFiles};

pub mod files;
mod java;
mod mint;
pub mod operator;
#[cfg(test)]
#[allow(clippy::unwrap_used)] // a test that fails may panic
mod tests;
mod wget;

use mint::Signer;

/// Hosts whose certificates are kept. Only configured hosts get one, so this is a bound that a sound
/// configuration does not reach.
const MOST_LEAVES: usize = 1024;

/// Why there is no certificate.
#[derive(Debug, thiserror::Error)]
pub enum CaError {
    /// The certificate library said no.
    #[error("a certificate could not be made")]
    Mint(#[from] rcgen::Error),
    /// The TLS library did not take it.
    #[error("a certificate was made that TLS does not take")]
    Tls(#[from] rustls::Error),
    /// The operator's CA is over, or not yet begun.
    #[error("the CA of ca.cert_file is not valid now; renew it, lessor reads it again by itself")]
    NotValidNow,
}

/// How long certificates live.
#[derive(Debug, Clone, Copy)]
pub struct Terms {
    /// A CA of lessor's own.
    pub ca: Duration,
    /// A host's certificate; much shorter than a CA's life.
    pub leaf: Duration,
    /// How far both reach back, for clients whose clock is behind.
    pub backdate: Duration,
}

impl Default for Terms {
    fn default() -> Self {
        let day = Duration::from_hours(24);
        Self { ca: day * 7, leaf: day, backdate: Duration::from_hours(1) }
    }
}

/// The wall clock, which certificates go by.
pub type Clock = Arc<dyn Fn() -> SystemTime + Send + Sync>;

/// A CA, and the certificates it has made.
pub struct Authority {
    terms: Terms,
    clock: Clock,
    crypto: Arc<CryptoProvider>,
    /// Protocols inside a tunnel, the preferred first.
    alpn: Vec<Vec<u8>>,
    state: Mutex<State>,
    turned: Notify,
}

struct State {
    /// Oldest first; more than one while a new one is published and does not sign yet.
    signers: Vec<Arc<Signer>>,
    /// The one signer is an operator's: nothing follows it.
    fixed: bool,
    /// Counts changes of `signers`.
    turn: u64,
    leaves: HashMap<String, Leaf>,
}

struct Leaf {
    config: Arc<ServerConfig>,
    of: Arc<Signer>,
    made: SystemTime,
    /// From here on a new one is made.
    renew: SystemTime,
}

impl fmt::Debug for Authority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Authority").field("terms", &self.terms).finish_non_exhaustive()
    }
}

impl Authority {
    /// A CA of lessor's own, or the operator's.
    pub fn new(operator: Option<&CaFiles>) -> Result<Self, CaError> {
        Self::with(operator, Terms::default(), Arc::new(SystemTime::now))
    }

    /// Offers these protocols inside a tunnel, the preferred first, in place of HTTP/1.1 alone.
    #[must_use]
    pub fn offering(mut self, alpn: &[Alpn]) -> Self {
        self.alpn = alpn.iter().map(|alpn| alpn.as_str().into()).collect();
        self
    }

    /// The same with other terms, by another clock.
    pub fn with(operator: Option<&CaFiles>, terms: Terms, clock: Clock) -> Result<Self, CaError> {
        let signer = match operator {
            Some(files) => Signer::of_operator(files)?,
            None => Signer::fresh(terms, clock())?,
        };
        let state = State {
            signers: vec![Arc::new(signer)],
            fixed: operator.is_some(),
            turn: 0,
            leaves: HashMap::new(),
        };
        Ok(Self {
            terms,
            clock,
            crypto: Arc::new(rustls::crypto::aws_lc_rs::default_provider()),
            alpn: vec![Alpn::Http1.as_str().into()],
            state: Mutex::new(state),
            turned: Notify::new(),
        })
    }

    /// The way to serve TLS as `host`, which must be a configured provider's.
    pub fn serve_as(&self, host: &str) -> Result<Arc<ServerConfig>, CaError> {
        let now = (self.clock)();
        let mut state = self.state();
        self.turn_to(&mut state, now)?;
        let signer = state.signer(self.terms, now).ok_or(CaError::NotValidNow)?;
        if let Some(leaf) = state.leaves.get(host).filter(|leaf| leaf.is_good(&signer, now)) {
            return Ok(leaf.config.clone());
        }
        let (chain, key) = signer.leaf(host, self.terms, now)?;
        let mut config = ServerConfig::builder_with_provider(self.crypto.clone())
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_single_cert(chain, key)?;
        config.alpn_protocols.clone_from(&self.alpn);
        let config = Arc::new(config);
        state.make_room(now);
        let renew = now + (self.terms.leaf * 3 / 4).min(signer.left(now) / 2);
        let leaf = Leaf { config: config.clone(), of: signer, made: now, renew };
        state.leaves.insert(host.to_owned(), leaf);
        Ok(config)
    }

    /// Signs with this CA of the operator's from now on, and with it alone: whose clients trust the old one
    /// and when they change is the operator's to arrange.
    pub fn adopt(&self, operator: &CaFiles) -> Result<(), CaError> {
        let signer = Arc::new(Signer::of_operator(operator)?);
        let mut state = self.state();
        // Leaves of the old one are not handed out any more, for each knows its signer.
        state.signers = vec![signer];
        state.fixed = true;
        state.turn += 1;
        drop(state);
        self.turned.notify_one();
        Ok(())
    }

    /// Makes the next CA where it is time; whether something changed.
    pub fn turn(&self) -> Result<bool, CaError> {
        let mut state = self.state();
        let before = state.turn;
        self.turn_to(&mut state, (self.clock)())?;
        Ok(state.turn != before)
    }

    /// All CAs to trust, and how often that has changed.
    pub fn trusted(&self) -> (Vec<CertificateDer<'static>>, u64) {
        let state = self.state();
        let certificates = state.signers.iter().flat_map(|signer| signer.published().iter().cloned());
        (certificates.collect(), state.turn)
    }

    /// The same as PEM.
    pub fn pem(&self) -> String {
        self.trusted().0.iter().map(|certificate| mint::pem_of(certificate)).collect()
    }

    /// Resolves after a turn.
    pub async fn turned(&self) {
        self.turned.notified().await;
    }

    /// How often it must be looked whether a turn is due.
    pub fn look_every(&self) -> Duration {
        (self.terms.ca / 1000).clamp(Duration::from_millis(10), Duration::from_mins(1))
    }

    fn turn_to(&self, state: &mut State, now: SystemTime) -> Result<(), CaError> {
        if state.fixed {
            return Ok(());
        }
        let before = state.signers.len();
        // Also one that has not begun: the clock was set back, and clients would refuse it.
        state.signers.retain(|signer| signer.is_valid(now));
        let mut changed = state.signers.len() != before;
        if state.signers.last().is_none_or(|newest| newest.left(now) <= self.terms.ca / 2) {
            state.signers.push(Arc::new(Signer::fresh(self.terms, now)?));
            changed = true;
        }
        if changed {
            state.turn += 1;
            self.turned.notify_one();
        }
        Ok(())
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// The oldest that still outlives a leaf; the operator's as long as it is valid.
    fn signer(&self, terms: Terms, now: SystemTime) -> Option<Arc<Signer>> {
        let lasts = |signer: &&Arc<Signer>| signer.is_valid(now) && signer.left(now) >= terms.leaf;
        let valid = |signer: &&Arc<Signer>| signer.is_valid(now);
        self.signers.iter().find(lasts).or_else(|| self.signers.iter().rev().find(valid)).cloned()
    }

    /// Keeps the number of leaves below its bound: what is due for renewal goes, then the oldest.
    fn make_room(&mut self, now: SystemTime) {
        if self.leaves.len() < MOST_LEAVES {
            return;
        }
        self.leaves.retain(|_, leaf| now < leaf.renew);
        let oldest = self.leaves.iter().min_by_key(|(_, leaf)| leaf.made).map(|(host, _)| host.clone());
        if let Some(oldest) = oldest.filter(|_| self.leaves.len() >= MOST_LEAVES) {
            self.leaves.remove(&oldest);
        }
    }
}

impl Leaf {
    fn is_good(&self, signer: &Arc<Signer>, now: SystemTime) -> bool {
        // Made in the future: the clock was set back.
        Arc::ptr_eq(&self.of, signer) && self.made <= now && now < self.renew
    }
}
