//! What all replicas share: one Secret with the CAs and the certificate that is served.
//!
//! A CA is followed by another at half of its life. The next one is *published* at once and *signs* only when the
//! old one has less than a certificate's life left, so between the two lie months in which the webhook
//! configuration comes to hold both. All of that follows from the clock and the Secret, so every replica finds the
//! same to be due, and the first to write it wins.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::SystemTime;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::ServerCertVerifier as _;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Value, json};
use zeroize::Zeroizing;

use super::certificates::{Served, provider};
use super::mint::{Authority, Terms};
use crate::model::Secret;

const CA: &str = "ca.crt";
const CA_KEY: &str = "ca.key";
const LEAF: &str = "tls.crt";
const LEAF_KEY: &str = "tls.key";
/// How a key begins in PEM.
const KEY_BEGINS: &str = "-----BEGIN PRIVATE KEY-----";
const CERTIFICATE_BEGINS: &str = "-----BEGIN CERTIFICATE-----";

/// The Secret as the API has it. What is not ours in it stays.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Object {
    api_version: String,
    kind: String,
    metadata: Value,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    r#type: Option<String>,
    #[serde(default)]
    data: Option<BTreeMap<String, Hidden>>,
}

/// Base64 of something secret.
#[derive(Clone)]
struct Hidden(Zeroizing<String>);

impl std::fmt::Debug for Hidden {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Hidden(..)")
    }
}

impl Serialize for Hidden {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&self.0)
    }
}

impl<'de> Deserialize<'de> for Hidden {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        String::deserialize(from).map(|text| Self(Zeroizing::new(text)))
    }
}

impl Object {
    /// One that is not there yet.
    pub(super) fn new(namespace: &str, name: &str) -> Self {
        Self {
            api_version: "v1".into(),
            kind: "Secret".into(),
            metadata: json!({ "name": name, "namespace": namespace }),
            r#type: Some("kubernetes.io/tls".into()),
            data: None,
        }
    }

    fn text(&self, key: &str) -> Option<Zeroizing<String>> {
        let text = &self.data.as_ref()?.get(key)?.0;
        let bytes = Zeroizing::new(STANDARD.decode(text.as_bytes()).ok()?);
        std::str::from_utf8(&bytes).ok().map(|text| Zeroizing::new(text.to_owned()))
    }

    /// The same with this in it, as it is sent.
    pub(super) fn with(mut self, shared: &Shared) -> Bytes {
        let data = self.data.get_or_insert_default();
        let mut put = |key: &str, text: &str| {
            data.insert(key.into(), Hidden(Zeroizing::new(STANDARD.encode(text))));
        };
        put(CA, &shared.authorities.iter().map(|authority| authority.text.as_str()).collect::<String>());
        let keys = shared.authorities.iter().map(|authority| authority.key.expose());
        put(CA_KEY, &Zeroizing::new(keys.collect::<String>()));
        put(LEAF, &shared.leaf);
        put(LEAF_KEY, shared.leaf_key.expose());
        // With room for all, so that growing leaves no copy behind.
        let mut text = Zeroizing::new(Vec::with_capacity(256 * 1024));
        // Maps of texts: there is nothing in it that JSON could not say.
        let _ = serde_json::to_writer(&mut *text, &self);
        Bytes::from_owner(text)
    }
}

/// What is in it.
#[derive(Debug, Clone)]
pub(super) struct Shared {
    /// Oldest first.
    pub(super) authorities: Vec<Authority>,
    /// PEM.
    pub(super) leaf: String,
    /// PEM.
    leaf_key: Secret,
}

impl Shared {
    /// What an object holds; nothing where it is empty or broken, which is then made anew.
    pub(super) fn of(object: &Object) -> Option<Self> {
        let keys = object.text(CA_KEY)?;
        let keys = keys.split_inclusive("-----END PRIVATE KEY-----\n").filter(|key| key.contains(KEY_BEGINS));
        let certificates = object.text(CA)?;
        let certificates = certificates
            .split_inclusive("-----END CERTIFICATE-----\n")
            .filter(|text| text.contains(CERTIFICATE_BEGINS));
        let (keys, certificates): (Vec<_>, Vec<_>) = (keys.collect(), certificates.collect());
        if keys.len() != certificates.len() || keys.is_empty() {
            return None;
        }
        let pairs = certificates.into_iter().zip(keys);
        let authorities: Option<Vec<_>> =
            pairs.map(|(text, key)| Authority::of(text.into(), Secret::new(key.into()))).collect();
        let leaf = object.text(LEAF)?.to_string();
        let mut leaf_key = object.text(LEAF_KEY)?;
        let leaf_key = Secret::new(std::mem::take(&mut *leaf_key));
        Some(Self { authorities: authorities?, leaf, leaf_key })
    }

    /// What should be there in place of `before`; `None` where that is good for now.
    pub(super) fn due(
        before: Option<&Self>,
        names: &[String],
        terms: Terms,
        now: SystemTime,
    ) -> Result<Option<Self>, rcgen::Error> {
        let mut authorities = before.map(|before| before.authorities.clone()).unwrap_or_default();
        let had = authorities.len();
        authorities.retain(|authority| authority.is_valid(now));
        let mut changed = authorities.len() != had;
        if authorities.last().is_none_or(|newest| newest.left(now) <= terms.ca / 2) {
            authorities.push(Authority::fresh(terms.ca, now)?);
            changed = true;
        }
        let good = before.filter(|before| before.leaf_is_good(&authorities, names, terms, now));
        let (leaf, leaf_key) = if let Some(before) = good {
            (before.leaf.clone(), before.leaf_key.clone())
        } else {
            changed = true;
            let lasts = |authority: &&Authority| authority.left(now) >= terms.leaf;
            // There is at least the one that was pushed.
            let signer = authorities.iter().find(lasts).or(authorities.last());
            signer.ok_or(rcgen::Error::CouldNotParseCertificate)?.leaf(names, terms.leaf, now)?
        };
        Ok(changed.then_some(Self { authorities, leaf, leaf_key }))
    }

    fn leaf_is_good(&self, roots: &[Authority], names: &[String], terms: Terms, now: SystemTime) -> bool {
        let Ok(served) = self.served(now) else { return false };
        let left = served.not_after.duration_since(now).unwrap_or_default();
        let roots: Vec<_> = roots.iter().map(|authority| authority.certificate.clone()).collect();
        left > terms.leaf / 3 && names.iter().all(|name| is_trusted(served.chain(), &roots, name, now))
    }

    /// The pair that is served.
    pub(super) fn served(&self, now: SystemTime) -> Result<Served, super::certificates::CertificateError> {
        Served::of(&self.leaf, &self.leaf_key, ("the Secret's tls.crt", "the Secret's tls.key"), now)
    }

    /// The CAs that must be trusted.
    pub(super) fn roots(&self) -> Vec<CertificateDer<'static>> {
        self.authorities.iter().map(|authority| authority.certificate.clone()).collect()
    }
}

/// Whether an API server that trusts `roots` takes this chain for a server of that name.
pub(super) fn is_trusted(
    chain: &[CertificateDer<'static>],
    roots: &[CertificateDer<'static>],
    name: &str,
    now: SystemTime,
) -> bool {
    let verified = || {
        let mut store = rustls::RootCertStore::empty();
        store.add_parsable_certificates(roots.iter().cloned());
        let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(store), Arc::new(provider()))
            .build()
            .ok()?;
        let (leaf, behind) = chain.split_first()?;
        let name = ServerName::try_from(name).ok()?;
        let now = UnixTime::since_unix_epoch(now.duration_since(SystemTime::UNIX_EPOCH).ok()?);
        verifier.verify_server_cert(leaf, behind, &name, &[], now).ok()
    };
    verified().is_some()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a test that fails may panic
mod tests {
    use std::time::Duration;

    use super::*;

    const DAY: Duration = Duration::from_hours(24);
    const TERMS: Terms = Terms { ca: Duration::from_hours(24 * 365), leaf: Duration::from_hours(24 * 7) };

    fn names() -> Vec<String> {
        vec!["injector.lessor.svc".into()]
    }

    fn round_trip(shared: &Shared) -> Shared {
        let sent = Object::new("lessor", "tls").with(shared);
        Shared::of(&serde_json::from_slice(&sent).unwrap()).unwrap()
    }

    #[test]
    fn over_years_every_certificate_is_trusted_by_what_was_published_long_before() {
        let start = SystemTime::now();
        let mut shared = Shared::due(None, &names(), TERMS, start).unwrap().unwrap();
        let mut published = vec![shared.roots()];
        let (mut leaves, mut authorities) = (1, vec![shared.roots()[0].clone()]);
        for day in 1..1000 {
            let now = start + DAY * day;
            if let Some(next) = Shared::due(Some(&shared), &names(), TERMS, now).unwrap() {
                leaves += u32::from(next.leaf != shared.leaf);
                shared = round_trip(&next);
                assert!(Shared::due(Some(&shared), &names(), TERMS, now).unwrap().is_none(), "day {day}");
            }
            published.push(shared.roots());
            let chain = shared.served(now).unwrap().chain().to_vec();
            // A webhook configuration that nobody has written for a month would do.
            let old = &published[published.len().saturating_sub(30)];
            assert!(is_trusted(&chain, old, "injector.lessor.svc", now), "day {day}");
            assert!(shared.authorities.len() <= 3, "day {day}");
            authorities.extend(shared.roots().into_iter().filter(|root| !published[0].contains(root)));
        }
        authorities.sort_unstable_by(|a, b| a.as_ref().cmp(b.as_ref()));
        authorities.dedup();
        assert!((5..=7).contains(&authorities.len()), "{} CAs", authorities.len());
        assert!((190..=210).contains(&leaves), "{leaves} certificates");
    }

    #[test]
    fn what_is_empty_broken_or_for_another_name_is_made_anew() {
        let now = SystemTime::now();
        let first = Shared::due(None, &names(), TERMS, now).unwrap().unwrap();
        assert!(Shared::due(Some(&first), &names(), TERMS, now).unwrap().is_none());
        let other = Shared::due(Some(&first), &["other.lessor.svc".into()], TERMS, now).unwrap().unwrap();
        assert_eq!(other.roots(), first.roots());
        let mut object: Object = serde_json::from_slice(&Object::new("n", "s").with(&first)).unwrap();
        object.data.as_mut().unwrap().remove(CA_KEY);
        assert!(Shared::of(&object).is_none());
        assert!(Shared::of(&Object::new("n", "s")).is_none());
        // The key of another certificate.
        let mixed = Shared { leaf_key: other.leaf_key.clone(), ..first.clone() };
        assert_eq!(Shared::due(Some(&mixed), &names(), TERMS, now).unwrap().unwrap().roots(), first.roots());
        // An unknown CA's certificate.
        let stranger = Shared::due(None, &names(), TERMS, now).unwrap().unwrap();
        let posed = Shared { leaf: stranger.leaf, leaf_key: stranger.leaf_key, ..first };
        assert!(Shared::due(Some(&posed), &names(), TERMS, now).unwrap().is_some());
    }

    #[test]
    fn what_others_keep_in_the_secret_stays_and_nothing_shows_in_debug() {
        let now = SystemTime::now();
        let shared = Shared::due(None, &names(), TERMS, now).unwrap().unwrap();
        let object = json!({ "apiVersion": "v1", "kind": "Secret", "type": "Opaque",
            "metadata": { "name": "s", "resourceVersion": "7", "labels": { "a": "b" } }, "data": { "other": "eA==" } });
        let object: Object = serde_json::from_value(object).unwrap();
        let sent: Value = serde_json::from_slice(&object.with(&shared)).unwrap();
        assert_eq!((&sent["type"], &sent["data"]["other"]), (&json!("Opaque"), &json!("eA==")));
        assert_eq!(sent["metadata"]["resourceVersion"], "7");
        assert_eq!(sent["metadata"]["labels"]["a"], "b");
        let object: Object = serde_json::from_value(sent).unwrap();
        for shown in [format!("{object:?}"), format!("{shared:?}")] {
            assert!(!shown.contains("PRIVATE") && !shown.contains("LS0tLS1CRUdJTiBQUklWQVRF"), "{shown}");
        }
    }
}
