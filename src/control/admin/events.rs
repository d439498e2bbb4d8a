//! `GET /v1/events`: what happens, as server-sent events.
//!
//! A reader has a place among the events that are kept, and nothing is queued for it: one that reads too
//! slowly gets a `missed` event that says how many it lost. Each event has an id, and `Last-Event-ID` goes on
//! behind it. A stream ends by itself after an hour, or when lessor stops; a browser's `EventSource`, and
//! `lessor events --follow`, then come back and miss nothing.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::Extension;
use axum::extract::State;
use axum::response::sse::{self, KeepAlive, Sse};
use axum::response::{IntoResponse as _, Response};
use futures_util::stream;
use http::{HeaderMap, StatusCode};
use serde::Deserialize;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::answers::{Query, Refusal};
use super::{Answered, Asked};
use crate::events::{From, Next, Reader};

/// How often a stream without events says that it lives.
const KEEP_ALIVE: Duration = Duration::from_secs(15);
/// How long one stream lasts.
const STREAM: Duration = Duration::from_hours(1);
/// How soon a reader shall come back.
const RETRY: Duration = Duration::from_secs(1);

/// What a stream must know of its connection.
#[derive(Clone)]
pub(super) struct Following {
    /// lessor stops.
    pub(super) stop: CancellationToken,
    /// The connection carries a stream, and so lives on.
    pub(super) streams: Arc<AtomicBool>,
    /// For those who follow through this door.
    pub(super) places: Arc<Semaphore>,
}

#[derive(Deserialize)]
pub(super) struct Wanted {
    /// `false`: what is kept, and then the end.
    follow: Option<bool>,
}

/// A stream's state; dropped with it, however it ends.
struct Stream {
    reader: Reader,
    follow: bool,
    greeted: bool,
    until: Instant,
    following: Following,
    _place: OwnedSemaphorePermit,
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.following.streams.store(false, Ordering::Relaxed);
    }
}

pub(super) async fn events(
    State(state): Asked,
    Query(wanted): Query<Wanted>,
    Extension(following): Extension<Following>,
    headers: HeaderMap,
) -> Answered {
    let place = following.places.clone().try_acquire_owned().map_err(|_| {
        let message = "as many as may follow events at once do so already; end one of them".into();
        Refusal::new(StatusCode::SERVICE_UNAVAILABLE, "too_many_followers", message)
    })?;
    let follow = wanted.follow.unwrap_or(true);
    let reader = state.events.read(begin(&headers, follow)?);
    following.streams.store(true, Ordering::Relaxed);
    let until = Instant::now() + STREAM;
    let stream = Stream { reader, follow, greeted: false, until, following, _place: place };
    let stream = stream::unfold(stream, async |mut stream| {
        let event = stream.next().await?;
        Some((Ok::<_, Infallible>(event), stream))
    });
    Ok(kept_alive(Sse::new(stream)))
}

fn kept_alive<S>(stream: Sse<S>) -> Response
where
    S: futures_util::Stream<Item = Result<sse::Event, Infallible>> + Send + 'static,
{
    stream.keep_alive(KeepAlive::new().interval(KEEP_ALIVE).text("")).into_response()
}

/// Where to begin: behind the event that was read last, else with what comes; who does not follow wants what
/// is kept. `0` is before the first.
fn begin(headers: &HeaderMap, follow: bool) -> Result<From, Refusal> {
    let Some(last) = headers.get("last-event-id") else {
        return Ok(if follow { From::Now } else { From::Start });
    };
    match last.to_str() {
        Ok("0") => Ok(From::Start),
        Ok(id) => id.parse().map(From::After).map_err(|()| unknown_id()),
        Err(_) => Err(unknown_id()),
    }
}

fn unknown_id() -> Refusal {
    let message = "Last-Event-ID is no event's id; send one as an event had it, or 0 for all that are kept";
    Refusal::new(StatusCode::BAD_REQUEST, "bad_request", message.into())
}

impl Stream {
    /// Cancel safe: an event that was taken is returned at once.
    async fn next(&mut self) -> Option<sse::Event> {
        if !std::mem::replace(&mut self.greeted, true) {
            // At once, so that a reader sees the stream open before anything happens.
            return Some(sse::Event::default().retry(RETRY).comment("lessor events"));
        }
        if !self.follow {
            return self.reader.ready().map(|next| shown(&next));
        }
        tokio::select! {
            biased;
            () = self.following.stop.cancelled() => None,
            () = tokio::time::sleep_until(self.until) => None,
            next = self.reader.next() => next.map(|next| shown(&next)),
        }
    }
}

fn shown(next: &Next) -> sse::Event {
    match next {
        Next::Event(event) => {
            // Names and numbers alone: this cannot fail, and would be an event without data if it did.
            let json = serde_json::to_value(&**event).unwrap_or_default();
            let name = json["event"].as_str().unwrap_or("event").to_owned();
            sse::Event::default().id(event.id.to_string()).event(name).data(json.to_string())
        }
        Next::Missed(count) => missed(Some(*count)),
        Next::Unknown => missed(None),
    }
}

/// Has no id: who comes back goes on behind the last event that it did read.
fn missed(count: Option<u64>) -> sse::Event {
    let json = serde_json::json!({ "event": "missed", "count": count });
    sse::Event::default().event("missed").data(json.to_string())
}
