//! A map that knows what was touched, for the backends that write rows.
//!
//! Every way to change an entry goes through this type, so a change that is not written to the file
//! cannot come about by forgetting to say so. `memory:` writes nothing and so tracks nothing: there the
//! cost is one look at an `Option`.

use std::collections::HashMap;
use std::collections::hash_map::Iter;
use std::hash::Hash;

use crate::model::Map;

/// A map, and which of its entries were touched since they were last taken.
#[derive(Debug)]
pub(in crate::store) struct Tracked<K, V> {
    entries: Map<K, V>,
    /// By entry: whether it was there before it was first touched. `None` where nobody asks.
    touched: Option<HashMap<K, bool>>,
}

impl<K, V> Default for Tracked<K, V> {
    fn default() -> Self {
        Self { entries: Map::default(), touched: None }
    }
}

/// What is held counts, not who looked at it.
impl<K: Eq + Hash, V: PartialEq> PartialEq for Tracked<K, V> {
    fn eq(&self, other: &Self) -> bool {
        self.entries == other.entries
    }
}

impl<K: Clone + Eq + Hash, V> Tracked<K, V> {
    /// These entries, from now on tracked.
    pub(in crate::store) fn of(entries: impl IntoIterator<Item = (K, V)>) -> Self {
        Self { entries: entries.into_iter().collect(), touched: Some(HashMap::new()) }
    }

    /// What was touched since the last call, each with whether it had been there before.
    pub(in crate::store) fn take_touched(&mut self) -> HashMap<K, bool> {
        self.touched.as_mut().map(std::mem::take).unwrap_or_default()
    }

    fn note(&mut self, key: &K) {
        if let Some(touched) = &mut self.touched
            && !touched.contains_key(key)
        {
            touched.insert(key.clone(), self.entries.contains_key(key));
        }
    }

    /// The entry of this key.
    pub(in crate::store) fn get(&self, key: &K) -> Option<&V> {
        self.entries.get(key)
    }

    /// The same, to be changed.
    pub(in crate::store) fn get_mut(&mut self, key: &K) -> Option<&mut V> {
        self.note(key);
        self.entries.get_mut(key)
    }

    /// The same, to change only what its row does not hold.
    pub(in crate::store) fn derived_mut(&mut self, key: &K) -> Option<&mut V> {
        self.entries.get_mut(key)
    }

    /// The entry of this key, made where there is none.
    pub(in crate::store) fn or_default(&mut self, key: K) -> &mut V
    where
        V: Default,
    {
        self.note(&key);
        self.entries.entry(key).or_default()
    }

    /// Writes an entry.
    pub(in crate::store) fn insert(&mut self, key: K, value: V) {
        self.note(&key);
        self.entries.insert(key, value);
    }

    /// Takes an entry out.
    pub(in crate::store) fn remove(&mut self, key: &K) -> Option<V> {
        self.note(key);
        self.entries.remove(key)
    }

    /// Drops every entry of which `keep` says no.
    pub(in crate::store) fn retain(&mut self, mut keep: impl FnMut(&K, &V) -> bool) {
        let touched = &mut self.touched;
        self.entries.retain(|key, value| {
            let kept = keep(key, value);
            if let Some(touched) = touched
                && !kept
            {
                touched.entry(key.clone()).or_insert(true);
            }
            kept
        });
    }

    /// All of them.
    pub(in crate::store) fn iter(&self) -> Iter<'_, K, V> {
        self.entries.iter()
    }

    /// Their keys.
    pub(in crate::store) fn ids(&self) -> Vec<K> {
        self.entries.keys().cloned().collect()
    }

    /// How many there are.
    pub(in crate::store) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there is none.
    pub(in crate::store) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }
}

impl<'a, K, V> IntoIterator for &'a Tracked<K, V> {
    type Item = (&'a K, &'a V);
    type IntoIter = Iter<'a, K, V>;

    fn into_iter(self) -> Self::IntoIter {
        self.entries.iter()
    }
}
