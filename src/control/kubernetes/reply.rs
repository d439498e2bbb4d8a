//! The body of an answer, which owns its share of what may be held until the peer has taken it.
//!
//! An answer that was reckoned and is not taken costs as much as one that is under way: a peer that opens no window
//! would have them kept for nothing. It goes out in small pieces, and its end is a piece of its own, so what lies
//! uncounted in a connection's buffer is one piece at most.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use tokio::sync::OwnedSemaphorePermit;

use super::watch::Open;

/// Bytes of one piece.
const PIECE: usize = 8 * 1024;

/// What is sent.
#[derive(Debug, Default)]
pub(super) struct Reply {
    rest: Bytes,
    _held: Option<OwnedSemaphorePermit>,
    _open: Option<Open>,
}

impl Reply {
    pub(super) fn of(text: String) -> Self {
        Self { rest: text.into(), ..Self::default() }
    }

    /// With what is given back once it is sent, or cannot be.
    pub(super) fn holding(self, held: OwnedSemaphorePermit) -> Self {
        Self { _held: Some(held), ..self }
    }

    /// As one that its connection waits for.
    pub(super) fn open(self, open: Open) -> Self {
        Self { _open: Some(open), ..self }
    }
}

impl Body for Reply {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if self.rest.is_empty() {
            return Poll::Ready(None);
        }
        let piece = PIECE.min(self.rest.len());
        Poll::Ready(Some(Ok(Frame::data(self.rest.split_to(piece)))))
    }

    // Never at once: the end is asked for when there is room behind the last piece.
    fn is_end_stream(&self) -> bool {
        false
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.rest.len() as u64)
    }
}
