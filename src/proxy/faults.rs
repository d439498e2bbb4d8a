//! The rooms' errors in the client's words (design, section 8).

use std::time::Duration;

use super::none_free::{exhausted, no_access};
use crate::forward::SendError;
use crate::forward::replay::BodyFault;
use crate::lease::{AcquireError, Lost};
use crate::model::{Code, Fault};
use crate::route::Route;
use crate::route::ring::ModelKnown;
use crate::words::of_tls;

/// When nothing better is known.
const SOON: Duration = Duration::from_secs(1);

/// An error with its causes, one after the other.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.ends_with(&more) {
            text = format!("{text}: {more}");
        }
        cause = error.source();
    }
    text
}

pub(super) fn of_send(error: &SendError) -> Fault {
    let code = match error {
        SendError::Body(fault) => return of_body(*fault),
        SendError::Denied(_) => Code::DestinationDenied,
        SendError::Timeout { .. } | SendError::ConnectTimeout { .. } => Code::UpstreamTimeout,
        SendError::Connect { .. } | SendError::Broken { .. } | SendError::Unusable { .. } => {
            Code::UpstreamUnreachable
        }
    };
    Fault::new(code, of_tls(&chain(error)))
}

pub(super) fn of_body(fault: BodyFault) -> Fault {
    let code = match fault {
        BodyFault::Broken => Code::BadRequest,
        BodyFault::Idle => Code::RequestTimeout,
    };
    Fault::new(code, fault.to_string())
}

pub(super) fn of_acquire(error: &AcquireError, route: &Route, model: &ModelKnown) -> Fault {
    let text = chain(error);
    match error {
        AcquireError::PoolExhausted { retry_after, queue_full, kept, .. } => {
            exhausted(route, model, kept, *retry_after, *queue_full)
        }
        AcquireError::StoreGrace { retry_after } => {
            Fault::new(Code::PoolExhausted, text).retry_after(*retry_after)
        }
        AcquireError::NoAccess { retry_after, kept, .. } => no_access(route, model, kept, *retry_after),
        // No wait heals it: a person or a check does.
        AcquireError::KeyUnavailable { .. } => Fault::new(Code::KeyUnavailable, unusable(route)),
        AcquireError::StoreUnavailable { .. } => Fault::new(Code::StoreUnavailable, text).retry_after(SOON),
        AcquireError::ShuttingDown => Fault::new(Code::ShuttingDown, text).retry_after(SOON),
    }
}

/// The bodies of other requests leave no room for one that must be read.
pub(super) fn no_room(max_total: usize, waited: Duration) -> Fault {
    let message = format!(
        "the bodies of requests under way fill retry.max_total ({max_total} bytes), and none gave way within \
         {waited:?}; send the request again"
    );
    Fault::new(Code::PoolExhausted, message).retry_after(SOON)
}

pub(super) fn of_lost(lost: Lost) -> Fault {
    let why = match lost {
        Lost::Expired => "the lease could not be renewed before the provider answered",
        Lost::Unknown => "the store lost the lease before the provider answered",
        Lost::Revoked => "the lease was revoked before the provider answered",
        Lost::TooLong => "lease.max_duration passed before the provider answered",
    };
    Fault::new(Code::KeyUnavailable, why).retry_after(SOON)
}

fn unusable(route: &Route) -> String {
    let (provider, pool) = (&route.provider().name, &route.pool);
    match &route.pinned {
        Some(key) => {
            format!("key `{provider}/{key}` is invalid, disabled or pending; see `lessor keys list`")
        }
        None => format!(
            "every key of `{provider}` in pool `{pool}` and its fallbacks that fits is invalid, disabled or pending; \
             see `lessor keys list`"
        ),
    }
}

pub(super) fn no_candidate(route: &Route, model: &ModelKnown) -> Fault {
    let provider = &route.provider().name;
    let pool = &route.pool;
    let what = match (&route.pinned, model) {
        (Some(key), _) => {
            format!("key `{key}` of `{provider}` is not in pool `{pool}`, or does not serve this model")
        }
        (None, ModelKnown::Named(model)) => {
            format!("no key of `{provider}` in pool `{pool}` serves model `{model}`")
        }
        (None, ModelKnown::Unreadable) => format!(
            "every key of `{provider}` in pool `{pool}` names its models, and this request's model could not be read \
             (no JSON by its Content-Type, encoded, malformed, given twice, or past retry.max_body)"
        ),
        (None, ModelKnown::NotNamed) => format!("pool `{pool}` of `{provider}` has no key"),
    };
    Fault::new(Code::NoCandidate, what)
}
