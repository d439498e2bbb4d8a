//! Headers of a request that steer lessor.

use std::time::Duration;

use http::{HeaderMap, HeaderName};

use super::Head;
use crate::fields::Rare;
use crate::model::{Code, Fault, KeyId, PoolName, ProviderName};

const POOL: HeaderName = HeaderName::from_static("x-lessor-pool");
const KEY: HeaderName = HeaderName::from_static("x-lessor-key");
const MAX_WAIT: HeaderName = HeaderName::from_static("x-lessor-max-wait");

/// What one request says of it; `None` where it says nothing, as most do.
pub(super) struct Steering<'h>(Option<&'h HeaderMap>);

impl<'h> Steering<'h> {
    pub(super) fn of(head: Head<'h>) -> Self {
        Self(head.rare.has(Rare::OWN).then_some(&head.parts.headers))
    }

    /// The pool that the request asks for.
    pub(super) fn pool(&self) -> Result<Option<PoolName>, Fault> {
        self.read(&POOL)
    }

    /// How long it says that it may wait.
    pub(super) fn max_wait(&self) -> Result<Option<Duration>, Fault> {
        self.text_of(&MAX_WAIT)?.map(parse_wait).transpose()
    }

    /// The key that the request asks for: its id, or `provider/id` as commands name it.
    pub(super) fn pinned(&self, of: &ProviderName) -> Result<Option<KeyId>, Fault> {
        let name = &KEY;
        let Some(text) = self.text_of(name)? else { return Ok(None) };
        let Some((provider, id)) = text.split_once('/') else { return self.read(name) };
        match id.parse() {
            Ok(id) if provider == of.as_str() => Ok(Some(id)),
            Ok::<KeyId, _>(id) => Err(Fault::new(
                Code::BadRequest,
                format!(
                    "{name}: this request is for `{of}`, and `{text}` is no key of that; write `{id}` for one of `{of}`"
                ),
            )),
            Err(error) => Err(Fault::new(Code::BadRequest, format!("{name}: {error}"))),
        }
    }

    /// A header's value, when given exactly once.
    fn text_of(&self, name: &HeaderName) -> Result<Option<&'h str>, Fault> {
        let Some(headers) = self.0 else { return Ok(None) };
        let mut all = headers.get_all(name).iter();
        match (all.next(), all.next()) {
            (None, _) => Ok(None),
            (Some(value), None) => match value.to_str() {
                Ok(text) => Ok(Some(text.trim())),
                Err(_) => Err(Fault::new(Code::BadRequest, format!("{name} is not readable"))),
            },
            _ => Err(Fault::new(Code::BadRequest, format!("{name} is given twice"))),
        }
    }

    fn read<T: std::str::FromStr<Err: std::fmt::Display>>(
        &self,
        name: &HeaderName,
    ) -> Result<Option<T>, Fault> {
        let Some(text) = self.text_of(name)? else { return Ok(None) };
        text.parse().map(Some).map_err(|error| Fault::new(Code::BadRequest, format!("{name}: {error}")))
    }
}

/// `500ms`, `3s`, or whole seconds.
fn parse_wait(text: &str) -> Result<Duration, Fault> {
    let wait = match text.parse::<u64>() {
        Ok(seconds) => Some(Duration::from_secs(seconds)),
        Err(_) => humantime::parse_duration(text).ok(),
    };
    wait.ok_or_else(|| {
        Fault::new(Code::BadRequest, "X-Lessor-Max-Wait is a duration: `500ms`, `3s`, or whole seconds")
    })
}
