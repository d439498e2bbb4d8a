//! What a script is called with.
//!
//! Each key and argument costs Redis as much as a small command, so what several asks of a call share is sent
//! once, and each names it by its number.

use std::collections::HashMap;
use std::hash::Hash;

use redis::Cmd;

use crate::model::GroupName;

/// A script's keys and arguments as they are gathered.
#[derive(Default)]
pub(super) struct Call {
    pub(super) keys: Vec<String>,
    args: Vec<String>,
}

impl Call {
    pub(super) fn key(&mut self, key: String) -> &mut Self {
        self.keys.push(key);
        self
    }

    pub(super) fn arg(&mut self, arg: impl Into<String>) -> &mut Self {
        self.args.push(arg.into());
        self
    }

    #[allow(clippy::needless_pass_by_value, reason = "numbers are passed")]
    pub(super) fn number(&mut self, number: impl ToString) -> &mut Self {
        self.args.push(number.to_string());
        self
    }

    pub(super) fn numbers(&mut self, numbers: impl IntoIterator<Item = usize>) -> &mut Self {
        self.args.extend(numbers.into_iter().map(|number| number.to_string()));
        self
    }

    pub(super) fn command(&self, verb: &str, script: &str) -> Cmd {
        let mut cmd = redis::cmd(verb);
        cmd.arg(script).arg(self.keys.len()).arg(&self.keys).arg(&self.args);
        cmd
    }
}

/// Things of which a call names few, so that looking through them costs less than a hash.
pub(super) struct Few<T>(Vec<T>);

impl<T> Default for Few<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<T: Copy + PartialEq> Few<T> {
    /// Its number, from 1.
    pub(super) fn number(&mut self, one: T) -> usize {
        // From the end: most calls ask as the one before did.
        let known = self.0.iter().rposition(|known| *known == one);
        known.unwrap_or_else(|| {
            self.0.push(one);
            self.0.len() - 1
        }) + 1
    }

    /// The same; 0 for none.
    pub(super) fn number_or_none(&mut self, one: Option<T>) -> usize {
        one.map_or(0, |one| self.number(one))
    }

    pub(super) fn list(&self) -> &[T] {
        &self.0
    }
}

/// Things of which a call may name as many as there are asks, and more.
pub(super) struct Many<T> {
    list: Vec<T>,
    index: HashMap<T, usize>,
}

impl<T> Default for Many<T> {
    fn default() -> Self {
        Self { list: Vec::new(), index: HashMap::new() }
    }
}

impl<T: Copy + Eq + Hash> Many<T> {
    /// Its number, from 1.
    pub(super) fn number(&mut self, one: T) -> usize {
        let list = &mut self.list;
        *self.index.entry(one).or_insert_with(|| {
            list.push(one);
            list.len()
        })
    }

    pub(super) fn list(&self) -> &[T] {
        &self.list
    }
}

/// The group among whose uses a lease counts: one that was granted before its group was known counts in none.
pub(super) fn crowd(group: Option<&GroupName>) -> Option<&GroupName> {
    group.filter(|group| **group != GroupName::auto())
}
