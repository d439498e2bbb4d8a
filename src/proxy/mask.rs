//! What an answer brings back of the key it was had with: masked in every place, by one mechanism.

use std::sync::{Arc, PoisonError, RwLock};

use bytes::Bytes;
use http::header::{CONTENT_ENCODING, CONTENT_LENGTH, SEC_WEBSOCKET_EXTENSIONS};
use http::response::Parts;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use hyper::ext::ReasonPhrase;

use crate::config::{Compressed, Config, KeyConfig, Place, Provider, Scrub, places};
use crate::fields;
use crate::metrics::{Metrics, Scrubbed};
use crate::model::{KeyId, Map, ProviderName, Secret};
use crate::route::ring::RingKey;
use crate::scrub::{Filter, Frames, LEAST, Needle, Packed, compression};

/// What each key is masked by, made once a secret.
#[derive(Debug)]
pub struct Masks {
    needles: RwLock<Map<ProviderName, Map<KeyId, Arc<Needles>>>>,
    compressed: Compressed,
    metrics: Metrics,
}

/// What is looked for of one key's secrets.
#[derive(Debug)]
struct Needles {
    /// What it was made of.
    hidden: Arc<[Secret]>,
    /// All of it, for heads and trailers.
    head: Arc<Needle>,
    /// What is long enough to be told from innocent text; none where nothing is.
    body: Option<Arc<Needle>>,
    /// Headers of the credential, which never come back.
    names: Vec<HeaderName>,
}

impl Needles {
    fn of(provider: &Provider, key: &KeyConfig) -> Self {
        let hidden = key.hidden.clone();
        let head = Arc::new(Needle::of(&hidden));
        let long: Vec<Secret> = hidden.iter().filter(|one| one.expose().len() >= LEAST).cloned().collect();
        let body = match long.len() {
            0 => None,
            all if all == hidden.len() => Some(head.clone()),
            _ => Some(Arc::new(Needle::of(&long))),
        };
        Self { hidden, head, body, names: names(provider, key) }
    }
}

/// One key's, for one answer.
#[derive(Debug, Clone)]
pub(super) struct Mask {
    needles: Arc<Needles>,
    provider: Arc<Provider>,
    compressed: Compressed,
    extensions_offered: bool,
    metrics: Metrics,
}

impl Masks {
    /// For all keys of the configuration whose provider is scrubbed.
    pub fn new(config: &Config, metrics: Metrics) -> Self {
        let mut needles: Map<_, Map<_, _>> = Map::default();
        for key in &config.keys {
            let provider = config.providers.get(&key.provider);
            if let Some(provider) = provider.filter(|provider| provider.scrub != Scrub::Off) {
                let made = Arc::new(Needles::of(provider, key));
                needles.entry(key.provider.clone()).or_default().insert(key.id.clone(), made);
            }
        }
        Self { needles: RwLock::new(needles), compressed: config.compressed, metrics }
    }

    /// None where the provider's answers are not scrubbed.
    pub(super) fn of(&self, provider: &Arc<Provider>, key: &RingKey) -> Option<Mask> {
        if provider.scrub == Scrub::Off {
            return None;
        }
        let needles = self.needles(provider, &key.config);
        let (compressed, metrics) = (self.compressed, self.metrics.clone());
        Some(Mask { needles, provider: provider.clone(), compressed, extensions_offered: false, metrics })
    }

    /// Whether there is something of the key in this, also where answers are not scrubbed.
    pub(super) fn finds(&self, provider: &Provider, key: &RingKey, text: &str) -> bool {
        self.needles(provider, &key.config).head.mask(text.as_bytes()).is_some()
    }

    /// Those of the very secret that was sent: others than at the start where it was rotated.
    fn needles(&self, provider: &Provider, key: &KeyConfig) -> Arc<Needles> {
        let known = {
            let needles = self.needles.read().unwrap_or_else(PoisonError::into_inner);
            needles.get(&provider.name).and_then(|keys| keys.get(&key.id)).cloned()
        };
        if let Some(known) = known.filter(|known| Arc::ptr_eq(&known.hidden, &key.hidden)) {
            return known;
        }
        let made = Arc::new(Needles::of(provider, key));
        let mut needles = self.needles.write().unwrap_or_else(PoisonError::into_inner);
        needles.entry(provider.name.clone()).or_default().insert(key.id.clone(), made.clone());
        made
    }
}

/// The headers in which the key, or something secret of its own, is sent.
fn names(provider: &Provider, key: &KeyConfig) -> Vec<HeaderName> {
    let placed = places(&provider.inject).chain(places(&key.inject)).filter_map(Place::header);
    let own = key.headers.iter().filter(|header| header.value.is_sensitive()).map(|header| &header.name);
    placed.chain(own).cloned().collect()
}

impl Mask {
    /// Masks the head's headers and reason phrase; headers whose name `goes` are taken out.
    pub(super) fn head(&self, head: &mut Parts, goes: impl Fn(&str) -> bool) {
        self.headers(&mut head.headers, Scrubbed::Header, goes);
        let phrase = head.extensions.get::<ReasonPhrase>();
        let Some((masked, count)) = phrase.and_then(|phrase| self.needles.head.mask(phrase.as_bytes()))
        else {
            return;
        };
        self.count(Scrubbed::Reason, count);
        match ReasonPhrase::try_from(Bytes::copy_from_slice(&masked)) {
            Ok(phrase) => head.extensions.insert(phrase),
            Err(_) => head.extensions.remove::<ReasonPhrase>(),
        };
    }

    /// Masks trailers.
    pub(super) fn trailers(&self, trailers: &mut HeaderMap) {
        self.headers(trailers, Scrubbed::Trailer, |_| false);
    }

    /// What the body goes through. Where it is unpacked on the way, the head stops saying that it is packed,
    /// and how long: also where no body follows (HEAD, 304), for that head stands for the same answer.
    pub(super) fn filter(&self, head: &mut Parts) -> Filter {
        let Some(needle) = self.body() else { return Filter::none() };
        match compression(&head.headers) {
            Packed::No => Filter::new(needle.clone(), None),
            // A part of something packed cannot be unpacked.
            Packed::As(coding)
                if self.compressed == Compressed::Decode && head.status != StatusCode::PARTIAL_CONTENT =>
            {
                head.headers.remove(CONTENT_ENCODING);
                head.headers.remove(CONTENT_LENGTH);
                Filter::new(needle.clone(), Some(coding))
            }
            Packed::As(_) | Packed::Otherwise => Filter::none(),
        }
    }

    /// The same where the request did, or did not, offer WebSocket extensions: what nobody offered is not agreed on.
    pub(super) fn for_offer(mut self, extensions: bool) -> Self {
        self.extensions_offered = extensions;
        self
    }

    /// What comes over a WebSocket goes through it. A message that says it is packed is taken at its word
    /// only where the answer agreed to that.
    pub(super) fn frames(&self, headers: &HeaderMap) -> Frames {
        let Some(needle) = self.body() else { return Frames::open() };
        let agreed = self.extensions_offered && headers.contains_key(SEC_WEBSOCKET_EXTENSIONS);
        let packed = self.compressed == Compressed::Pass && agreed;
        Frames::new(needle.clone(), packed)
    }

    /// What bodies are searched for, where they are.
    fn body(&self) -> Option<&Arc<Needle>> {
        self.needles.body.as_ref().filter(|_| self.provider.scrub == Scrub::On)
    }

    /// Counts what was masked in what came over a WebSocket.
    pub(super) fn count_websocket(&self, masked: u64) {
        self.count(Scrubbed::WebSocket, masked);
    }

    /// Counts what the body's filter masked.
    pub(super) fn count_body(&self, masked: u64) {
        self.count(Scrubbed::Body, masked);
    }

    fn headers(&self, headers: &mut HeaderMap, place: Scrubbed, goes: impl Fn(&str) -> bool) {
        let (needles, mut count) = (&*self.needles, 0);
        fields::remove(headers, |name| {
            if goes(name) {
                return true;
            }
            let hides =
                needles.names.iter().any(|hidden| hidden.as_str() == name) || needles.head.is_in_name(name);
            count += u64::from(hides);
            hides
        });
        for value in headers.values_mut() {
            if let Some((masked, found)) = needles.head.mask(value.as_bytes()) {
                count += found;
                *value = HeaderValue::from_bytes(&masked).unwrap_or_else(|_| HeaderValue::from_static("*"));
            }
        }
        self.count(place, count);
    }

    fn count(&self, place: Scrubbed, count: u64) {
        if count > 0 {
            self.metrics.scrubbed(&self.provider.name, place, count);
        }
    }
}
