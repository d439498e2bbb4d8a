//! One key, as this process knows it.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use http::HeaderValue;

use super::pattern::Patterns;
use super::seen::KeyState;
use crate::config::{Credential, KeyConfig};
use crate::model::{Fingerprint, GroupName, KeySettings, ModelName};

/// One key.
#[derive(Debug)]
pub struct RingKey {
    /// Its settings and secret.
    pub config: Arc<KeyConfig>,
    /// Its id, as answers show it.
    pub shown: HeaderValue,
    /// What it is put in as; `None` while it has no secret.
    pub credential: Option<Arc<Credential>>,
    /// The models that it serves; none where it serves all.
    pub(super) models: Patterns,
    /// Its secret's fingerprint under the store's salt; `None` while it has no secret.
    pub fingerprint: Option<Fingerprint>,
    pub(super) state: Arc<KeyState>,
}

/// What is known of a request's model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelKnown {
    /// It has none (no body, or a path known as such): every key fits.
    NotNamed,
    /// This one.
    Named(ModelName),
    /// It may have one that could not be read: only keys without `models` fit.
    Unreadable,
}

impl ModelKnown {
    /// The name, where known.
    pub fn name(&self) -> Option<&ModelName> {
        match self {
            Self::Named(name) => Some(name),
            _ => None,
        }
    }
}

impl RingKey {
    /// `before` is what was known under its id.
    pub(super) fn new(config: &KeyConfig, models: Patterns, salt: &[u8; 32], before: Option<&Self>) -> Self {
        let state = before.map_or_else(Arc::default, |before| before.state.clone());
        // What a person switched by hand stays so until the file says otherwise.
        if before.is_none_or(|before| before.config.disabled != config.disabled) {
            state.off.store(config.disabled, Ordering::Relaxed);
        }
        let fingerprint = fingerprint_of(config, salt);
        // A name has no character that a header cannot have.
        let shown =
            HeaderValue::from_str(config.id.as_str()).unwrap_or_else(|_| HeaderValue::from_static(""));
        let credential = Credential::of(config).map(Arc::new);
        Self { fingerprint, state, models, shown, credential, config: Arc::new(config.clone()) }
    }

    /// The same under another salt.
    pub(super) fn salted(&self, salt: &[u8; 32]) -> Self {
        Self {
            config: Arc::clone(&self.config),
            shown: self.shown.clone(),
            credential: self.credential.clone(),
            models: Arc::clone(&self.models),
            fingerprint: fingerprint_of(&self.config, salt),
            state: Arc::clone(&self.state),
        }
    }

    /// What the store is told of it.
    pub fn settings(&self) -> KeySettings {
        KeySettings {
            key: self.config.id.clone(),
            pool: self.config.pool.clone(),
            group: self.config.group.clone(),
            max_concurrent_uses: self.config.max_concurrent_uses,
            fingerprint: self.fingerprint,
        }
    }

    /// Its group; where that is `auto`, what is known of it here.
    pub fn group(&self) -> Option<GroupName> {
        let known = || self.state.group.load().as_deref().cloned();
        match &self.config.group {
            Some(group) if group.is_auto() => known().or_else(|| Some(group.clone())),
            group => group.clone(),
        }
    }

    /// The store, or an answer, told its group.
    pub fn is_of(&self, group: &GroupName) {
        if self.config.group.as_ref().is_some_and(GroupName::is_auto) && self.group().as_ref() != Some(group)
        {
            self.state.group.store(Some(Arc::new(group.clone())));
        }
    }
}

fn fingerprint_of(key: &KeyConfig, salt: &[u8; 32]) -> Option<Fingerprint> {
    key.secret.as_ref().map(|secret| Fingerprint::of(secret, salt))
}
