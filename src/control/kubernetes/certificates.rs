//! The certificate by which the webhook is served: checked before it is taken, and changed while connections run.
//!
//! What is no sound pair, as two files are for a moment while one is new and the other old, leaves the one that is
//! served as it is: an API server that is shown a wrong certificate creates no pod at all.

use std::io::Read as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use arc_swap::ArcSwapOption;
use rustls::ServerConfig;
use rustls::crypto::CryptoProvider;
use rustls::crypto::aws_lc_rs::sign::any_supported_type;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use zeroize::{Zeroize as _, Zeroizing};

use super::health::Readiness;
use crate::model::Secret;

/// The largest file that is read as a certificate or a key.
const LARGEST: u64 = 1 << 20;
/// How long before its end a certificate should have been renewed; of a short life it is a tenth.
const LATE: Duration = Duration::from_hours(48);

/// Why a pair is not taken.
#[derive(Debug, thiserror::Error)]
pub(super) enum CertificateError {
    #[error("{0} has no readable PEM certificate")]
    NoCertificate(String),
    // The library's own words could repeat parts of what it read.
    #[error("{0} has no readable PEM key")]
    NoKey(String),
    #[error("{key} is not the key of {chain}; write both of one issue")]
    NoPair { chain: String, key: String },
    #[error("{0} is not valid now; renew it, it is read again by itself")]
    NotValidNow(String),
    #[error(
        "{0} has a certificate, its number {1} from above, that cannot be read; write the whole chain anew"
    )]
    Broken(String, usize),
    #[error("{} is no regular file; write the PEM text to one", .0.display())]
    NoFile(PathBuf),
    #[error("{} is longer than {LARGEST} bytes, which no certificate or key is", .0.display())]
    TooLong(PathBuf),
    #[error("{} cannot be read", path.display())]
    Unread { path: PathBuf, source: std::io::Error },
}

/// A pair that may be served.
#[derive(Debug)]
pub(super) struct Served {
    certified: Arc<CertifiedKey>,
    pub(super) not_after: SystemTime,
    /// From when on it is late that there is no other.
    late: SystemTime,
}

impl Served {
    /// Checks a chain and its key, both PEM; `of` says where each is from.
    pub(super) fn of(
        chain: &str,
        key: &Secret,
        of: (&str, &str),
        now: SystemTime,
    ) -> Result<Self, CertificateError> {
        let unread = || CertificateError::NoCertificate(of.0.into());
        let chain: Vec<_> = CertificateDer::pem_slice_iter(chain.as_bytes())
            .collect::<Result<_, _>>()
            .map_err(|_| unread())?;
        // A client goes by all of them: one that is broken breaks each handshake.
        let broken = |at| CertificateError::Broken(of.0.into(), at);
        let read = |(at, one): (usize, &CertificateDer<'_>)| validity(one).ok_or_else(|| broken(at + 1));
        let validities = chain.iter().enumerate().map(read).collect::<Result<Vec<_>, _>>()?;
        let validity = *validities.first().ok_or_else(unread)?;
        let no_key = || CertificateError::NoKey(of.1.into());
        let mut der = PrivateKeyDer::from_pem_slice(key.expose().as_bytes()).map_err(|_| no_key())?;
        let signing = any_supported_type(&der);
        der.zeroize();
        let signing = signing.map_err(|_| no_key())?;
        let certified = CertifiedKey::new(chain, signing);
        if certified.keys_match().is_err() {
            return Err(CertificateError::NoPair { chain: of.0.into(), key: of.1.into() });
        }
        if !(validity.0..validity.1).contains(&now) {
            return Err(CertificateError::NotValidNow(of.0.into()));
        }
        let life = validity.1.duration_since(validity.0).unwrap_or_default();
        let late = validity.1 - LATE.min(life / 10);
        Ok(Self { certified: Arc::new(certified), not_after: validity.1, late })
    }

    /// What is shown to a client, its own certificate first.
    pub(super) fn chain(&self) -> &[CertificateDer<'static>] {
        &self.certified.cert
    }
}

/// From when to when a certificate is valid.
pub(super) fn validity(certificate: &CertificateDer<'_>) -> Option<(SystemTime, SystemTime)> {
    let (rest, parsed) = x509_parser::parse_x509_certificate(certificate).ok()?;
    if !rest.is_empty() {
        return None;
    }
    let time = |seconds: i64| {
        SystemTime::UNIX_EPOCH + Duration::from_secs(u64::try_from(seconds).unwrap_or_default())
    };
    let validity = parsed.validity();
    Some((time(validity.not_before.timestamp()), time(validity.not_after.timestamp())))
}

pub(super) fn provider() -> CryptoProvider {
    rustls::crypto::aws_lc_rs::default_provider()
}

/// What is served now; each handshake asks anew.
#[derive(Debug, Default)]
pub(super) struct Current {
    served: ArcSwapOption<Served>,
    told_late: AtomicBool,
}

impl Current {
    pub(super) fn put(&self, served: Served) {
        self.served.store(Some(Arc::new(served)));
        self.told_late.store(false, Ordering::Relaxed);
    }

    pub(super) fn get(&self) -> Option<Arc<Served>> {
        self.served.load_full()
    }

    /// The way to serve TLS with whatever is current; HTTP/2 as API servers like it, or HTTP/1.1.
    pub(super) fn server(self: &Arc<Self>) -> Result<Arc<ServerConfig>, rustls::Error> {
        let mut config = ServerConfig::builder_with_provider(Arc::new(provider()))
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_cert_resolver(self.clone());
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        Ok(Arc::new(config))
    }
}

impl ResolvesServerCert for Current {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.served.load().as_ref()?.certified.clone())
    }
}

/// A certificate that others renew.
#[derive(Debug, Clone)]
pub(super) struct Files {
    pub(super) chain: PathBuf,
    pub(super) key: PathBuf,
}

/// What was read of them.
struct Text {
    chain: Zeroizing<String>,
    key: Secret,
}

impl Files {
    /// Keeps `current` by what the files say, until told to stop. They are read whole each time: they are small,
    /// and a mounted Secret changes by a link that no time stamp of theirs tells. SIGHUP has them read at once.
    pub(super) async fn follow(
        self,
        current: Arc<Current>,
        ready: Arc<Readiness>,
        every: Duration,
        stop: CancellationToken,
    ) {
        let mut hangup = signal(SignalKind::hangup()).ok();
        let mut known: Option<Text> = None;
        let mut told = None;
        loop {
            match self.look(known.as_ref()).await {
                Ok(Some((text, served))) => {
                    let left = served.not_after.duration_since(SystemTime::now()).unwrap_or_default();
                    let days = left.as_secs() / (24 * 60 * 60);
                    tracing::info!(file = %self.chain.display(), days, "certificate is taken");
                    current.put(served);
                    (known, told) = (Some(text), None);
                }
                Ok(None) => told = None,
                Err(why) => {
                    let why = crate::run::with_causes(&why);
                    if told.as_ref() != Some(&why) {
                        let kept =
                            if known.is_some() { "; the one that was read before is kept" } else { "" };
                        tracing::warn!("the webhook's certificate is not taken: {why}{kept}");
                        told = Some(why);
                    }
                }
            }
            ready.set(state_of(&current, told.as_deref()));
            let by_hand = async {
                match &mut hangup {
                    Some(hangup) => hangup.recv().await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = stop.cancelled() => return,
                _ = by_hand => {}
                () = tokio::time::sleep(every) => {}
            }
        }
    }

    /// What the files say, if it is other than what is known.
    async fn look(&self, known: Option<&Text>) -> Result<Option<(Text, Served)>, CertificateError> {
        let files = self.clone();
        // A file system may take its time: not on a thread that serves.
        let text = tokio::task::spawn_blocking(move || {
            Ok(Text { chain: read(&files.chain)?, key: Secret::new(read(&files.key)?.to_string()) })
        });
        let gone = |cause: tokio::task::JoinError| CertificateError::Unread {
            path: self.chain.clone(),
            source: std::io::Error::other(cause),
        };
        let text: Text = text.await.map_err(gone)??;
        if known.is_some_and(|k| k.chain == text.chain && k.key.expose() == text.key.expose()) {
            return Ok(None);
        }
        let of = (self.chain.display().to_string(), self.key.display().to_string());
        let served = Served::of(&text.chain, &text.key, (&of.0, &of.1), SystemTime::now())?;
        Ok(Some((text, served)))
    }
}

fn read(path: &Path) -> Result<Zeroizing<String>, CertificateError> {
    let unread = |source| CertificateError::Unread { path: path.into(), source };
    // To open a pipe waits for its other end, unless it is told not to; a regular file knows no such thing.
    let wait_for_nobody = rustix::fs::OFlags::NONBLOCK.bits();
    let flags = i32::try_from(wait_for_nobody).unwrap_or_default();
    let file = std::fs::OpenOptions::new().read(true).custom_flags(flags).open(path).map_err(unread)?;
    if !file.metadata().map_err(unread)?.is_file() {
        return Err(CertificateError::NoFile(path.into()));
    }
    let mut text = Zeroizing::new(String::new());
    file.take(LARGEST + 1).read_to_string(&mut text).map_err(unread)?;
    if text.len() as u64 > LARGEST {
        return Err(CertificateError::TooLong(path.into()));
    }
    Ok(text)
}

/// Whether what is current can be served; a renewal that is late is told once, before it is too late.
pub(super) fn state_of(current: &Current, why: Option<&str>) -> Result<(), String> {
    let because = why.map_or_else(String::new, |why| format!(": {why}"));
    let Some(served) = current.get() else { return Err(format!("there is no certificate yet{because}")) };
    let now = SystemTime::now();
    if now >= served.not_after {
        return Err(format!("the certificate is over{because}"));
    }
    if now >= served.late && !current.told_late.swap(true, Ordering::Relaxed) {
        let left = served.not_after.duration_since(now).unwrap_or_default();
        tracing::warn!(
            seconds = left.as_secs(),
            "the webhook's certificate ends soon, and there is no other"
        );
    }
    Ok(())
}
