//! The names of Redis keys, layout version 1.
//!
//! The provider stands in braces: it is the cluster's hash tag, so all keys of a provider lie in one slot
//! and a script may touch any of them. What belongs to no provider has names of its own.

use crate::model::{GroupName, KeyId, LeaseId, PoolName, ProviderName};

/// The prefix of every name (`store.prefix`).
#[derive(Debug, Clone)]
pub(super) struct Names {
    prefix: Box<str>,
    channel: Box<str>,
}

impl Names {
    pub(super) fn new(prefix: &str) -> Self {
        Self { prefix: prefix.into(), channel: format!("{prefix}:events").into() }
    }

    /// The layout's version and the salt of fingerprints.
    pub(super) fn store(&self) -> String {
        format!("{}:store", self.prefix)
    }

    /// The channel on which sidecars wake each other.
    pub(super) fn channel(&self) -> &str {
        &self.channel
    }

    /// The pattern of all names.
    pub(super) fn all(&self) -> String {
        format!("{}:*", self.prefix)
    }

    /// A key that nobody uses, for trying what the user may do.
    pub(super) fn trial(&self) -> String {
        format!("{}:{{trial}}:{}", self.prefix, LeaseId::fresh())
    }

    pub(super) fn of(&self, provider: &ProviderName) -> ProviderNames {
        ProviderNames { base: format!("{}:{{{provider}}}:", self.prefix) }
    }
}

/// The names of one provider.
#[derive(Debug, Clone)]
pub(super) struct ProviderNames {
    base: String,
}

impl ProviderNames {
    fn name(&self, last: &str) -> String {
        [&self.base, last].concat()
    }

    /// HASH: the life of the data, its grace, the server's replication id.
    pub(super) fn epoch(&self) -> String {
        self.name("epoch")
    }

    /// STRING: the last fencing token.
    pub(super) fn fence(&self) -> String {
        self.name("fence")
    }

    /// HASH: scoped cooldowns.
    pub(super) fn cooldowns(&self) -> String {
        self.name("cooldowns")
    }

    /// ZSET: leases that probe.
    pub(super) fn probes(&self) -> String {
        self.name("probes")
    }

    /// ZSET: sidecars where somebody waits.
    pub(super) fn waiting(&self) -> String {
        self.name("waiting")
    }

    /// ZSET: every key, by when a sidecar last spoke of it.
    pub(super) fn keys(&self) -> String {
        self.name("keys")
    }

    /// HASH: which key has which secret.
    pub(super) fn fingerprints(&self) -> String {
        self.name("fingerprints")
    }

    /// STRING: who reconciles.
    pub(super) fn reconcile(&self) -> String {
        self.name("reconcile")
    }

    /// ZSET: the keys of a pool.
    pub(super) fn pool(&self, pool: &PoolName) -> String {
        [&self.base, "pool:", pool.as_str(), ":keys"].concat()
    }

    /// HASH: the learned caps of groups.
    pub(super) fn groups(&self) -> String {
        self.name("groups")
    }

    /// HASH: what a person cleared, and the newest token as of then.
    pub(super) fn cleared(&self) -> String {
        self.name("cleared")
    }

    /// ZSET: the leases of all keys of a group.
    pub(super) fn crowd(&self, group: &GroupName) -> String {
        [&self.base, "group:", group.as_str(), ":leases"].concat()
    }

    /// HASH: a key.
    pub(super) fn key(&self, key: &KeyId) -> String {
        [&self.base, "key:", key.as_str()].concat()
    }

    /// ZSET: a key's leases.
    pub(super) fn leases(&self, key: &KeyId) -> String {
        [&self.base, "key:", key.as_str(), ":leases"].concat()
    }

    /// HASH: a lease.
    pub(super) fn lease(&self, lease: LeaseId) -> String {
        format!("{}lease:{lease}", self.base)
    }

    /// The pattern of all leases' names. A prefix holds no character that a pattern gives a meaning to.
    pub(super) fn all_leases(&self) -> String {
        self.name("lease:*")
    }

    /// The lease that a name stands for.
    pub(super) fn lease_of(&self, name: &str) -> Option<LeaseId> {
        name.strip_prefix(&self.base)?.strip_prefix("lease:")?.parse().ok().map(LeaseId)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use redis::cluster_routing::{Route, SlotAddr};

    use super::*;

    #[test]
    fn all_names_of_a_provider_lie_in_one_slot_and_keep_to_the_layout() {
        let names = Names::new("lessor").of(&ProviderName::parse("openai").unwrap());
        let (key, pool) = (KeyId::parse("k").unwrap(), PoolName::parse("vip").unwrap());
        let lease = LeaseId::fresh();
        let all = [
            (names.epoch(), "lessor:{openai}:epoch".to_owned()),
            (names.fence(), "lessor:{openai}:fence".into()),
            (names.cooldowns(), "lessor:{openai}:cooldowns".into()),
            (names.probes(), "lessor:{openai}:probes".into()),
            (names.waiting(), "lessor:{openai}:waiting".into()),
            (names.keys(), "lessor:{openai}:keys".into()),
            (names.fingerprints(), "lessor:{openai}:fingerprints".into()),
            (names.groups(), "lessor:{openai}:groups".into()),
            (names.cleared(), "lessor:{openai}:cleared".into()),
            (names.crowd(&GroupName::parse("org").unwrap()), "lessor:{openai}:group:org:leases".into()),
            (names.reconcile(), "lessor:{openai}:reconcile".into()),
            (names.pool(&pool), "lessor:{openai}:pool:vip:keys".into()),
            (names.key(&key), "lessor:{openai}:key:k".into()),
            (names.leases(&key), "lessor:{openai}:key:k:leases".into()),
            (names.lease(lease), format!("lessor:{{openai}}:lease:{lease}")),
        ];
        let slot = |name: &str| format!("{:?}", Route::with_key(name, SlotAddr::Master));
        for (name, layout) in &all {
            assert_eq!(name, layout);
            assert_eq!(slot(name), slot("openai"), "{name}");
        }
        assert_eq!(names.lease_of(&names.lease(lease)), Some(lease));
        assert_eq!(names.lease_of("lessor:{other}:lease:x"), None);
    }
}
