//! What an answer brings back of the key it was had with: masked in every place, by one mechanism.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock};

use bytes::Bytes;
use http::header::{CONTENT_ENCODING, CONTENT_LENGTH, SEC_WEBSOCKET_EXTENSIONS};
use http::response::Parts;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use hyper::ext::ReasonPhrase;

use crate::config::{Compressed, Config, KeyConfig, Place, Provider, Scrub};
use crate::metrics::{Metrics, Scrubbed};
use crate::model::{KeyId, ProviderName};
use crate::route::ring::RingKey;
use crate::scrub::{Filter, Frames, Needle, Packed, compression};

/// What each key is masked by, made once a secret.
#[derive(Debug)]
pub struct Masks {
    needles: RwLock<HashMap<ProviderName, HashMap<KeyId, Arc<Needle>>>>,
    compressed: Compressed,
    metrics: Metrics,
}

/// One key's, for one answer.
#[derive(Debug, Clone)]
pub(super) struct Mask {
    needle: Arc<Needle>,
    provider: Arc<Provider>,
    compressed: Compressed,
    extensions_offered: bool,
    metrics: Metrics,
}

impl Masks {
    /// For all keys of the configuration whose provider is scrubbed.
    pub fn new(config: &Config, metrics: Metrics) -> Self {
        let mut needles: HashMap<_, HashMap<_, _>> = HashMap::new();
        for key in &config.keys {
            if config.providers.get(&key.provider).is_some_and(|provider| provider.scrub != Scrub::Off) {
                let needle = Arc::new(Needle::new(&key.secret));
                needles.entry(key.provider.clone()).or_default().insert(key.id.clone(), needle);
            }
        }
        Self { needles: RwLock::new(needles), compressed: config.compressed, metrics }
    }

    /// None where the provider's answers are not scrubbed.
    pub(super) fn of(&self, provider: &Arc<Provider>, key: &RingKey) -> Option<Mask> {
        if provider.scrub == Scrub::Off {
            return None;
        }
        let needle = self.needle(&provider.name, &key.config);
        let (compressed, metrics) = (self.compressed, self.metrics.clone());
        Some(Mask { needle, provider: provider.clone(), compressed, extensions_offered: false, metrics })
    }

    /// The needle of the very secret that was sent: another one than at the start where it was rotated.
    fn needle(&self, provider: &ProviderName, key: &KeyConfig) -> Arc<Needle> {
        let known = {
            let needles = self.needles.read().unwrap_or_else(PoisonError::into_inner);
            needles.get(provider).and_then(|keys| keys.get(&key.id)).cloned()
        };
        if let Some(known) = known.filter(|needle| needle.is_of(&key.secret)) {
            return known;
        }
        let needle = Arc::new(Needle::new(&key.secret));
        let mut needles = self.needles.write().unwrap_or_else(PoisonError::into_inner);
        needles.entry(provider.clone()).or_default().insert(key.id.clone(), needle.clone());
        needle
    }
}

impl Mask {
    /// Masks the head's headers and reason phrase.
    pub(super) fn head(&self, head: &mut Parts) {
        self.headers(&mut head.headers, Scrubbed::Header);
        let phrase = head.extensions.get::<ReasonPhrase>();
        let Some((masked, count)) = phrase.and_then(|phrase| self.needle.mask(phrase.as_bytes())) else {
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
        self.headers(trailers, Scrubbed::Trailer);
    }

    /// What the body goes through. Where it is unpacked on the way, the head stops saying that it is packed,
    /// and how long: also where no body follows (HEAD, 304), for that head stands for the same answer.
    pub(super) fn filter(&self, head: &mut Parts) -> Filter {
        if self.provider.scrub != Scrub::On || self.needle.is_short() {
            return Filter::none();
        }
        match compression(&head.headers) {
            Packed::No => Filter::new(self.needle.clone(), None),
            // A part of something packed cannot be unpacked.
            Packed::As(coding)
                if self.compressed == Compressed::Decode && head.status != StatusCode::PARTIAL_CONTENT =>
            {
                head.headers.remove(CONTENT_ENCODING);
                head.headers.remove(CONTENT_LENGTH);
                Filter::new(self.needle.clone(), Some(coding))
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
        if self.provider.scrub != Scrub::On || self.needle.is_short() {
            return Frames::open();
        }
        let agreed = self.extensions_offered && headers.contains_key(SEC_WEBSOCKET_EXTENSIONS);
        let packed = self.compressed == Compressed::Pass && agreed;
        Frames::new(self.needle.clone(), packed)
    }

    /// Counts what was masked in what came over a WebSocket.
    pub(super) fn count_websocket(&self, masked: u64) {
        self.count(Scrubbed::WebSocket, masked);
    }

    /// Counts what the body's filter masked.
    pub(super) fn count_body(&self, masked: u64) {
        self.count(Scrubbed::Body, masked);
    }

    fn headers(&self, headers: &mut HeaderMap, place: Scrubbed) {
        let mut count = 0;
        for injection in &self.provider.inject {
            if let Place::Header { name, .. } = &injection.place {
                count += u64::from(headers.remove(name).is_some());
            }
        }
        let named: Vec<HeaderName> =
            headers.keys().filter(|name| self.needle.is_in_name(name.as_str())).cloned().collect();
        for name in named {
            count += u64::from(headers.remove(name).is_some());
        }
        for value in headers.values_mut() {
            if let Some((masked, found)) = self.needle.mask(value.as_bytes()) {
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
