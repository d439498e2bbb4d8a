//! What must fit together across tables: ids, secrets, pools and their fallbacks.

use std::collections::{BTreeMap, BTreeSet};

use super::errors::Span;
use super::fields;
use super::tree::{Field, Page, Said, Table};
use super::{Provider, Scrub};
use crate::model::{KeyId, PoolName, ProviderName, SHORT_SECRET, Secret};

/// The keys read so far, to find two that are one.
#[derive(Default)]
pub(super) struct KeysSeen {
    ids: BTreeSet<(ProviderName, KeyId)>,
    secrets: Vec<(ProviderName, KeyId, Secret)>,
}

impl KeysSeen {
    /// An id is unique in its provider.
    pub(super) fn note_id(&mut self, page: &Page<'_>, provider: &ProviderName, id: &Said<KeyId>) {
        if !self.ids.insert((provider.clone(), id.value.clone()))
            && let Some(at) = &id.at
        {
            page.refuse(at, format!("key {} of provider {provider} is there twice", id.value));
        }
    }

    /// One secret under two ids would be lent twice over: the provider sees one key.
    pub(super) fn note_secret(
        &mut self,
        page: &Page<'_>,
        provider: &ProviderName,
        id: &KeyId,
        secret: &Secret,
        at: &Span,
    ) {
        let twin =
            self.secrets.iter().find(|(p, other, known)| p == provider && other != id && same(known, secret));
        if let Some((_, other, _)) = twin {
            page.refuse(at, format!("keys {other} and {id} have one secret; a key may be listed only once"));
        }
        self.secrets.push((provider.clone(), id.clone(), secret.clone()));
    }
}

/// Whether two secrets are one.
pub(super) fn same(a: &Secret, b: &Secret) -> bool {
    a.expose() == b.expose()
}

/// What is said of a secret that bodies cannot be searched for, or a part of one: its text would be found by
/// chance.
pub(super) fn short_secret(provider: &Provider, id: &KeyId, hidden: &[Secret]) -> Option<String> {
    let is_short = |secret: &Secret| secret.expose().len() < SHORT_SECRET;
    let what = match hidden {
        _ if provider.scrub != Scrub::On => return None,
        [first, ..] if is_short(first) => "the secret",
        [_, rest @ ..] if rest.iter().any(is_short) => "a part of the secret",
        _ => return None,
    };
    Some(format!(
        "{what} of key {id} of provider {} has fewer than {SHORT_SECRET} characters: an echo of it is masked in \
         an answer's headers, not in its body",
        provider.name
    ))
}

/// The pools that exist, and their fallbacks.
pub(super) struct Pools {
    /// Pools of keys, those with a table, and `default`.
    known: BTreeSet<PoolName>,
    /// Fallbacks of those that have any.
    pub(super) fallbacks: BTreeMap<PoolName, Vec<PoolName>>,
}

impl Pools {
    /// Reads `[pools]`; `of_keys` are the pools that keys name.
    pub(super) fn read(page: &Page<'_>, section: &Table<'_>, of_keys: BTreeSet<PoolName>) -> Self {
        let mut pools = Self { known: of_keys, fallbacks: BTreeMap::new() };
        pools.known.insert(PoolName::default_pool());
        let mut tables = Vec::new();
        for (text, at, field) in section.children() {
            match PoolName::parse(text) {
                Ok(name) => {
                    pools.known.insert(name.clone());
                    tables.push((name, field));
                }
                Err(_) => {
                    page.refuse(
                        &at,
                        format!("{} is no name: 1 to 64 of a-z 0-9 . _ - are allowed", field.path),
                    );
                }
            }
        }
        let mut places: BTreeMap<(PoolName, PoolName), Span> = BTreeMap::new();
        for (name, field) in tables {
            let Some(table) = field.table("pools.*") else { continue };
            let mut fallback: Vec<PoolName> = Vec::new();
            for (pool, field) in pools.names_in(&table, "fallback") {
                if fallback.contains(&pool) {
                    field.wrong::<()>("which stands in the list already");
                    continue;
                }
                places.insert((name.clone(), pool.clone()), field.at);
                fallback.push(pool);
            }
            pools.fallbacks.insert(name, fallback);
        }
        for (from, to) in cycles(&pools.fallbacks) {
            if let Some(at) = places.get(&(from.clone(), to.clone())) {
                page.refuse(
                    at,
                    format!(
                        "pools.{from}.fallback names {to}, which falls back to {from}: fallbacks are one-way"
                    ),
                );
            }
        }
        pools
    }

    /// The known pools that a list names; others are refused.
    pub(super) fn names_in<'p>(&self, table: &Table<'p>, name: &str) -> Vec<(PoolName, Field<'p>)> {
        let mut names = Vec::new();
        for field in table.texts(name) {
            let Some(pool) = field.name::<PoolName>() else { continue };
            if self.known.contains(&pool) {
                names.push((pool, field));
            } else {
                let hint = fields::hint(pool.as_str(), self.known.iter().map(PoolName::as_str));
                field.wrong::<()>(&format!("must be a pool of some key or of [pools]; {hint}"));
            }
        }
        names
    }
}

/// Every step of `fallbacks` that leads back to where it began.
fn cycles(fallbacks: &BTreeMap<PoolName, Vec<PoolName>>) -> Vec<(PoolName, PoolName)> {
    let reaches = |from: &PoolName, to: &PoolName| {
        let (mut open, mut seen) = (vec![from], BTreeSet::new());
        while let Some(pool) = open.pop() {
            if pool == to {
                return true;
            }
            if seen.insert(pool) {
                open.extend(fallbacks.get(pool).into_iter().flatten());
            }
        }
        false
    };
    let steps = fallbacks.iter().flat_map(|(from, all)| all.iter().map(move |to| (from, to)));
    steps.filter(|(from, to)| reaches(to, from)).map(|(from, to)| (from.clone(), to.clone())).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a test that fails may panic
mod tests {
    use super::*;

    fn fallbacks(all: &[(&str, &[&str])]) -> BTreeMap<PoolName, Vec<PoolName>> {
        let name = |text: &&str| PoolName::parse(text).unwrap();
        all.iter().map(|(from, to)| (name(from), to.iter().map(name).collect())).collect()
    }

    #[test]
    fn every_step_of_a_cycle_is_told_and_none_beside_it() {
        let found = cycles(&fallbacks(&[("a", &["b", "d"]), ("b", &["c"]), ("c", &["a"]), ("d", &[])]));
        let steps: Vec<_> = found.iter().map(|(a, b)| format!("{a}{b}")).collect();
        assert_eq!(steps, ["ab", "bc", "ca"]);
    }

    #[test]
    fn a_pool_that_falls_back_to_itself_is_a_cycle_and_a_diamond_is_none() {
        assert_eq!(cycles(&fallbacks(&[("a", &["a"])])).len(), 1);
        assert!(cycles(&fallbacks(&[("a", &["b", "c"]), ("b", &["d"]), ("c", &["d"])])).is_empty());
    }
}
