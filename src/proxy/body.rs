//! The body of any answer, and what it holds until its end.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use http::HeaderMap;
use http_body::{Body, Frame, SizeHint};
use http_body_util::Full;

use crate::forward::held::{Broken, Ending, Guard, Held};
use crate::lease::{Lease, Lost};
use crate::model::{GroupName, Outcome, ProviderName};
use crate::route::Standing;
use crate::route::ring::{Ended, ModelKnown, ProviderKeys, RingKey};
use crate::scrub::Filter;

use super::mask::Mask;
use super::trace::Trace;

/// A proxied body, or lessor's own.
#[derive(Debug)]
pub enum AnswerBody {
    /// From a provider or another host. Boxed, for on its way to the client's connection an answer is moved often.
    Proxied(Box<Held<Ticket>>),
    /// lessor's own words.
    Own(Full<Bytes>),
}

impl AnswerBody {
    pub(super) fn own(bytes: Bytes) -> Self {
        Self::Own(Full::new(bytes))
    }
}

impl Body for AnswerBody {
    type Data = Bytes;
    type Error = Broken;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        match self.get_mut() {
            Self::Proxied(held) => Pin::new(&mut **held).poll_frame(cx),
            Self::Own(full) => Pin::new(full).poll_frame(cx).map_err(|never| match never {}),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Proxied(held) => held.is_end_stream(),
            Self::Own(full) => full.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Proxied(held) => held.size_hint(),
            Self::Own(full) => full.size_hint(),
        }
    }
}

/// A key in use by one request: counted in the ring for as long as its lease lives.
#[derive(Debug)]
pub(super) struct InUse {
    pub(super) lease: Lease,
    keys: Arc<ProviderKeys>,
    /// Where the key is among them; `None` where it is no more.
    place: Option<usize>,
    /// What it has come to so far.
    ended: Ended,
    first_byte: Option<Duration>,
}

impl InUse {
    pub(super) fn new(lease: Lease, keys: Arc<ProviderKeys>, model: &ModelKnown) -> Self {
        let place = keys.place(lease.key());
        if let Some(place) = place {
            keys.lent(place, model, lease.begun().into_std());
            if let Some(group) = lease.group() {
                keys.keys[place].is_of(group);
            }
        }
        Self { lease, keys, place, ended: Ended::Untold, first_byte: None }
    }

    /// The key, as it is configured for this use.
    pub(super) fn key(&self) -> Option<&RingKey> {
        self.place.map(|place| &self.keys.keys[place])
    }

    pub(super) fn provider(&self) -> &ProviderName {
        &self.keys.provider.name
    }

    /// The provider's answer began after this time.
    pub(super) fn began_after(&mut self, first_byte: Duration) {
        self.first_byte = Some(first_byte);
    }

    /// The provider broke its answer off.
    fn broke(&mut self) {
        self.ended = Ended::Badly;
    }

    /// Says what the answer said; the store hears it before the slot comes back.
    pub(super) fn report(&mut self, outcome: Outcome, model: &ModelKnown) {
        self.ended = Ended::of(outcome.class);
        if let (Some(known), Some(group)) = (self.key(), &outcome.organization) {
            known.is_of(group);
        }
        self.lease.report(outcome, model.name());
    }

    /// Whether answers say which group the key is of.
    pub(super) fn learns_group(&self) -> bool {
        self.lease.group().is_some_and(GroupName::is_auto)
    }

    /// The group that shares the key's limits, as far as it is known.
    pub(super) fn group(&self) -> Option<GroupName> {
        self.key().and_then(RingKey::group).filter(|group| *group != GroupName::auto())
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        if let Some(place) = self.place {
            self.keys.returned(place, self.ended, self.first_byte);
        }
    }
}

/// What an answer's body holds until its last byte: its lease (none where no key was lent, or where the
/// key was given back before), and its line in the log.
#[derive(Debug)]
pub struct Ticket {
    in_use: Option<InUse>,
    /// The caller's: a revoked one gets no more of it.
    standing: Standing,
    trace: Trace,
    /// Masks the key that was used, also where it was given back before.
    mask: Option<Mask>,
    /// What the body goes through.
    filter: Filter,
}

impl Ticket {
    pub(super) fn new(
        in_use: Option<InUse>,
        standing: Standing,
        trace: Trace,
        mask: Option<Mask>,
        filter: Filter,
    ) -> Self {
        Self { in_use, standing, trace, mask, filter }
    }

    /// Why it must be cut now, in the log's word.
    fn poll_why_cut(&self, cx: &mut Context<'_>) -> Poll<&'static str> {
        if self.standing.is_revoked() {
            return Poll::Ready("app_revoked");
        }
        let Some(in_use) = &self.in_use else { return Poll::Pending };
        in_use.lease.poll_lost(cx).map(word_of)
    }

    /// The same, at its end.
    fn why_cut(&self) -> Option<&'static str> {
        match self.poll_why_cut(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(why) => Some(why),
            Poll::Pending => None,
        }
    }
}

/// A lost lease, in the log's word.
pub(super) fn word_of(lost: Lost) -> &'static str {
    match lost {
        Lost::Revoked => "lease_revoked",
        Lost::Expired | Lost::Unknown | Lost::TooLong => "lease_lost",
    }
}

impl Guard for Ticket {
    fn poll_cut(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        self.poll_why_cut(cx).map(|_why| ())
    }

    fn feed(&mut self, data: Bytes) {
        self.filter.feed(data);
    }

    fn finish(&mut self) {
        self.filter.finish();
    }

    fn take(&mut self) -> Option<Result<Bytes, std::io::Error>> {
        let taken = self.filter.take();
        if let Some(mask) = &self.mask {
            mask.count_body(self.filter.take_masked());
        }
        taken
    }

    fn inside(&self) -> Option<usize> {
        self.filter.inside()
    }

    fn is_empty(&self) -> bool {
        self.filter.is_empty()
    }

    fn trailers(&mut self, trailers: &mut HeaderMap) {
        if let Some(mask) = &self.mask {
            mask.trailers(trailers);
        }
    }

    fn ended(&mut self, how: Ending) {
        if let (Ending::UpstreamBroke | Ending::Idle, Some(in_use)) = (how, &mut self.in_use) {
            in_use.broke();
        }
        match how {
            Ending::Complete => {}
            // What cuts a connection whose client takes nothing looks as if the client had gone.
            Ending::ClientGone => self.trace.ended_as(self.why_cut().unwrap_or("cancelled")),
            Ending::UpstreamBroke => self.trace.ended_as("upstream_broke"),
            Ending::Idle => self.trace.ended_as("upstream_idle"),
            Ending::Cut => self.trace.ended_as(self.why_cut().unwrap_or("lease_lost")),
        }
        self.in_use = None;
    }
}
