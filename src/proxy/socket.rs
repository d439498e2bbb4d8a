//! A WebSocket from its 101 to its end: one task that holds the lease, and carries bytes both ways.

use std::convert::Infallible;
use std::io;
use std::time::Duration;

use bytes::Bytes;
use http::{Response, Version};
use hyper::upgrade::OnUpgrade;
use tokio_util::sync::CancellationToken;

use crate::config::WebSocketConfig;
use crate::forward::headers;
use crate::forward::relay::{End, Relay, Sieve, Upstream};
use crate::lease::Lost;
use crate::listen::Conn;
use crate::route::Standing;
use crate::scrub::Frames;

use super::Rooms;
use super::body::{AnswerBody, InUse, word_of};
use super::mask::Mask;
use super::reply::Reply;
use super::trace::Trace;

/// How long both connections may take to be handed over once the provider agreed.
const HAND_OVER: Duration = Duration::from_secs(10);

/// What a socket holds until its end.
struct Socket {
    in_use: Option<InUse>,
    /// The caller's.
    standing: Standing,
    trace: Trace,
    conn: Conn,
    abort: CancellationToken,
    bounds: WebSocketConfig,
}

/// What ends a socket from outside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cut {
    Lost(Lost),
    AppRevoked,
    Shutdown,
    TooLong,
}

impl Rooms {
    /// Answers 101, and carries bytes until either side ends.
    pub(super) fn socket(
        &self,
        client: OnUpgrade,
        reply: Reply,
        in_use: Option<InUse>,
        conn: Conn,
        standing: Standing,
        mut trace: Trace,
    ) -> Response<AnswerBody> {
        let class = reply.outcome().class.as_str();
        let (mut head, mask) = reply.into_head();
        head.version = Version::HTTP_11;
        trace.answered(head.status.as_u16(), class);
        if self.config.listen.response_headers && trace.attempts() > 0 {
            head.headers.insert("x-lessor-attempts", trace.attempts().into());
        }
        headers::put_websocket(&mut head.headers);
        let switched = head.extensions.remove::<OnUpgrade>();
        let masking = Masking::new(mask, &head.headers);
        let socket = Socket {
            in_use,
            standing,
            trace,
            conn,
            abort: self.abort.clone(),
            bounds: self.config.websocket,
        };
        self.tunnels.spawn(socket.carry(client, switched, masking));
        Response::from_parts(head, AnswerBody::own(Bytes::new()))
    }
}

impl Socket {
    async fn carry(mut self, client: OnUpgrade, switched: Option<OnUpgrade>, masking: Masking) {
        let bounds = self.bounds;
        let mut too_long = std::pin::pin!(after(bounds.max_duration));
        let taking_over = async {
            let upstream = match switched {
                Some(switched) => Upstream::of(switched).await,
                None => Err(io::Error::other("the answer's connection cannot be had")),
            };
            // A client that left before it saw the answer has no connection to hand over.
            let client = client.await.ok();
            upstream.map(|upstream| Some(Relay::new(client?, upstream, masking, bounds.idle)))
        };
        let taken = tokio::select! {
            biased;
            cut = self.cut() => Err(cut),
            taken = tokio::time::timeout(HAND_OVER, taking_over) => Ok(taken.unwrap_or(Ok(None))),
        };
        let mut relay = match taken {
            Ok(Ok(Some(relay))) => relay,
            Ok(Ok(None)) => return self.trace.ended_as("cancelled"),
            Ok(Err(error)) => {
                tracing::warn!(%error, "a WebSocket that the provider agreed to could not be taken over");
                self.conn.close_by_reset();
                return self.trace.ended_as("upstream_broke");
            }
            Err(cut) => return self.break_off(cut),
        };
        let end = tokio::select! {
            biased;
            cut = self.cut() => Err(cut),
            () = &mut too_long => Err(Cut::TooLong),
            end = relay.run(self.conn.gone()) => Ok(end),
        };
        match end {
            Ok(End::Client) => {
                relay.see_client_out().await;
                if !relay.sieve().said_goodbye() {
                    self.trace.ended_as("cancelled");
                }
            }
            Ok(End::Upstream) => self.see_upstream_out(relay).await,
            Ok(End::Idle { untaken }) => {
                // As where a client takes nothing of an answer: it is as good as gone.
                self.trace.ended_as(if untaken { "cancelled" } else { "upstream_idle" });
                self.conn.close_by_reset();
                relay.break_off();
            }
            Err(cut) => {
                self.break_off(cut);
                relay.break_off();
            }
        }
    }

    /// The key is free from here on: the provider is done with it, however slowly the client reads.
    async fn see_upstream_out(&mut self, mut relay: Relay<Masking>) {
        self.in_use = None;
        let in_order = tokio::select! {
            biased;
            cut = self.cut() => return self.break_off(cut),
            in_order = relay.see_upstream_out(self.conn.gone()) => in_order,
        };
        if !relay.sieve().said_goodbye() {
            self.trace.ended_as("upstream_broke");
        }
        if !in_order {
            self.conn.close_by_reset();
        }
    }

    /// Resolves when the socket must end whatever its peers do.
    async fn cut(&self) -> Cut {
        let lost = async {
            match &self.in_use {
                Some(in_use) => in_use.lease.lost().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            () = self.standing.revoked() => Cut::AppRevoked,
            lost = lost => Cut::Lost(lost),
            () = self.abort.cancelled() => Cut::Shutdown,
        }
    }

    /// The client sees a reset, never a clean end.
    fn break_off(&mut self, cut: Cut) {
        self.conn.close_by_reset();
        self.trace.ended_as(match cut {
            Cut::Lost(lost) => word_of(lost),
            Cut::AppRevoked => "app_revoked",
            Cut::Shutdown => "cancelled",
            Cut::TooLong => "too_long",
        });
    }
}

/// Resolves after `time`, or never.
async fn after(time: Option<Duration>) {
    match time {
        Some(time) => tokio::time::sleep(time).await,
        None => match std::future::pending::<Infallible>().await {},
    }
}

/// What comes from the provider, with its key masked and counted.
pub(super) struct Masking {
    frames: Frames,
    mask: Option<Mask>,
}

impl Masking {
    fn new(mask: Option<Mask>, headers: &http::HeaderMap) -> Self {
        let frames = mask.as_ref().map_or_else(Frames::open, |mask| mask.frames(headers));
        Self { frames, mask }
    }
}

impl Sieve for Masking {
    fn feed(&mut self, data: Bytes) {
        self.frames.feed(data);
    }

    fn finish(&mut self) {
        self.frames.finish();
    }

    fn take(&mut self) -> Option<Bytes> {
        let piece = self.frames.take();
        if let Some(mask) = &self.mask {
            mask.count_websocket(self.frames.take_masked());
        }
        piece
    }

    fn said_goodbye(&self) -> bool {
        self.frames.said_goodbye()
    }
}
