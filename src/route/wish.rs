//! What a request wants of a key, and the keys of a pool that fit it.

use std::sync::Arc;

use super::key::{ModelKnown, RingKey};
use super::pattern::{Patterns, serves};
use crate::model::{GroupName, KeyId, Map, PoolName};

/// Some keys: positions in [`super::ring::ProviderKeys::keys`], in their order, with the rank of the key's pool in the chain.
type Members = Arc<[(usize, usize)]>;

/// The keys of a pool and of its fallbacks.
#[derive(Debug, Clone)]
pub(super) struct PoolKeys {
    pub(super) members: Members,
    /// Each list of models that is one of theirs: far fewer than keys, for most name the same.
    lists: Vec<Patterns>,
    /// Whether some are of other pools.
    pub(super) falls_back: bool,
}

impl PoolKeys {
    pub(super) fn of(pool: &PoolName, keys: &[RingKey], fallbacks: &Map<PoolName, Vec<PoolName>>) -> Self {
        let chain = chain(pool, fallbacks);
        let rank = |key: &RingKey| chain.iter().position(|pool| **pool == key.config.pool);
        let members: Members =
            keys.iter().enumerate().filter_map(|(at, key)| Some((at, rank(key)?))).collect();
        let mut lists: Vec<Patterns> = Vec::new();
        for models in members.iter().map(|(at, _)| &keys[*at].models) {
            if !lists.iter().any(|list| Arc::ptr_eq(list, models)) {
                lists.push(Arc::clone(models));
            }
        }
        Self { members, lists, falls_back: chain.len() > 1 }
    }

    /// Whether some of them serve certain models only.
    pub(super) fn models_matter(&self) -> bool {
        self.lists.iter().any(|models| !models.is_empty())
    }

    /// Those of them, out of `keys`, that fit.
    pub(super) fn fitting(&self, keys: &[RingKey], wish: &Wish) -> Fitting {
        let serves = |models: &&Patterns| serves(models, &wish.model);
        // Mostly all fit, and then none is looked at.
        if wish.takes_any() && self.lists.iter().all(|models| serves(&models)) {
            return Fitting { members: Arc::clone(&self.members) };
        }
        let serving: Vec<&Patterns> = self.lists.iter().filter(serves).collect();
        let fits = |(at, _): &&(usize, usize)| {
            let key = &keys[*at];
            serving.iter().any(|models| Arc::ptr_eq(models, &key.models))
                && wish.pinned.as_ref().is_none_or(|id| *id == key.config.id)
                && !wish.rules_out(key)
        };
        Fitting { members: self.members.iter().filter(fits).copied().collect() }
    }
}

/// The pool, then its fallbacks in order, each once.
fn chain<'a>(pool: &'a PoolName, fallbacks: &'a Map<PoolName, Vec<PoolName>>) -> Vec<&'a PoolName> {
    let mut chain = vec![pool];
    let mut at = 0;
    while at < chain.len() {
        for next in fallbacks.get(chain[at]).into_iter().flatten() {
            if !chain.contains(&next) {
                chain.push(next);
            }
        }
        at += 1;
    }
    chain
}

/// What one request wants of a key.
#[derive(Debug, Clone)]
pub struct Wish {
    /// The pool asked for.
    pub pool: PoolName,
    /// Its model.
    pub model: ModelKnown,
    /// The very key asked for.
    pub pinned: Option<KeyId>,
    /// Keys with which it was refused.
    refused: Vec<KeyId>,
    /// Groups that were refused whole.
    refused_groups: Vec<GroupName>,
}

impl Wish {
    /// Nothing was refused yet.
    pub fn new(pool: PoolName, model: ModelKnown, pinned: Option<KeyId>) -> Self {
        Self { pool, model, pinned, refused: Vec::new(), refused_groups: Vec::new() }
    }

    /// Rules a key out, and the whole group where the limit is the group's.
    pub fn rule_out(&mut self, key: KeyId, group: Option<GroupName>) {
        self.refused.push(key);
        self.refused_groups.extend(group);
    }

    /// Whether every key that serves the model will do.
    fn takes_any(&self) -> bool {
        self.pinned.is_none() && self.refused.is_empty() && self.refused_groups.is_empty()
    }

    fn rules_out(&self, key: &RingKey) -> bool {
        self.refused.contains(&key.config.id)
            || (!self.refused_groups.is_empty()
                && key.group().is_some_and(|group| self.refused_groups.contains(&group)))
    }
}

/// The keys that fit one request, in pool order.
#[derive(Debug, Clone, Default)]
pub struct Fitting {
    pub(super) members: Members,
}

impl Fitting {
    /// Whether no key fits.
    pub fn is_empty(&self) -> bool {
        self.members.is_empty()
    }
}
