//! `lessor events`: what happened, and with `--follow` what happens.

use std::io::Write as _;
use std::time::{Duration, UNIX_EPOCH};

use bytes::Bytes;
use http::{Method, StatusCode};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use serde::Deserialize;

use super::call::{self, Answer, Call, Tried};
use super::drain::Asker;
use super::{Exit, Failure, refused, tables};
use crate::control::admin;
use crate::events::{Event, What};
use crate::store::StoreTime;

/// A stream says that it lives every 15 s; one that is silent for longer than this is broken.
const SILENCE: Duration = Duration::from_mins(1);
/// Bytes of one line; an event is some hundred.
const LINE: usize = 64 * 1024;
/// How soon a stream that ended is opened again.
const AGAIN: Duration = Duration::from_millis(500);

/// What a line of data says.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Data {
    Event(Box<Event>),
    Missed { count: Option<u64> },
}

/// Prints what is kept; goes on with what comes, where `follow` says so, until the sidecar is gone or nobody
/// reads any more.
pub(super) async fn events(follow: bool, asker: &Asker<'_>) -> Result<Exit, Failure> {
    let mut last = "0".to_owned();
    loop {
        let read = read(follow, asker, &mut last).await?;
        if !follow || read == Read::NobodyListens {
            return Ok(Exit::Ok);
        }
        tokio::time::sleep(AGAIN).await;
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Read {
    Ended,
    NobodyListens,
}

/// One stream, to its end; `last` is the id to come back with.
async fn read(follow: bool, asker: &Asker<'_>, last: &mut String) -> Result<Read, Failure> {
    let path = format!("/v1/events?follow={follow}");
    let call = Call { method: Method::GET, path, bound: admin::ANSWER + Duration::from_secs(3) };
    let reached = call::reach(asker.doors.clone(), &call, asker.token.is_some()).await;
    let (door, _) = reached.map_err(Failure::Unreachable)?;
    let from = door.to_string();
    let broke = |cause: String| Failure::Unreachable(vec![Tried { at: from.clone(), cause }]);
    let (status, mut body) = door.open(&call, asker.token, Some(last)).await?;
    if !status.is_success() {
        return Err(refusal(status, body, from, asker.token.is_some()).await);
    }
    let mut lines = Lines::default();
    loop {
        let frame = match tokio::time::timeout(SILENCE, body.frame()).await {
            Ok(Some(Ok(frame))) => frame,
            Ok(None) => return Ok(Read::Ended),
            // A stream that is followed is opened again where it broke.
            Ok(Some(Err(_))) | Err(_) if follow => return Ok(Read::Ended),
            Ok(Some(Err(cause))) => return Err(broke(cause.to_string())),
            Err(_) => return Err(broke(format!("nothing came for {SILENCE:?}"))),
        };
        let Ok(data) = frame.into_data() else { continue };
        for line in lines.take(&data).map_err(|cause| broke(cause.into()))? {
            let Some(json) = line.strip_prefix("data:").map(str::trim_start) else { continue };
            let data: Data = serde_json::from_str(json)
                .map_err(|cause| Failure::Nonsense { from: from.clone(), cause: cause.to_string() })?;
            if let Data::Event(event) = &data {
                *last = event.id.to_string();
            }
            let text = if asker.json { json.to_owned() } else { shown(&data) };
            if !said(&text) {
                return Ok(Read::NobodyListens);
            }
        }
    }
}

async fn refusal(status: StatusCode, body: Incoming, from: String, token: bool) -> Failure {
    let whole = http_body_util::Limited::new(body, LINE).collect();
    let body = match tokio::time::timeout(admin::ANSWER, whole).await {
        Ok(Ok(body)) => body.to_bytes(),
        _ => Bytes::new(),
    };
    refused(&Answer { status, now: StoreTime::default(), body, from }, token)
}

/// Whether somebody took it.
fn said(line: &str) -> bool {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}").and_then(|()| out.flush()).is_ok()
}

/// Bytes into lines, however they come.
#[derive(Debug, Default)]
struct Lines(Vec<u8>);

impl Lines {
    fn take(&mut self, data: &[u8]) -> Result<Vec<String>, &'static str> {
        self.0.extend_from_slice(data);
        let mut lines = Vec::new();
        while let Some(end) = self.0.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = self.0.drain(..=end).collect();
            lines.push(String::from_utf8_lossy(&line).trim_end().to_owned());
        }
        if self.0.len() > LINE { Err("a line of it is too long to be an event") } else { Ok(lines) }
    }
}

fn shown(data: &Data) -> String {
    match data {
        Data::Event(event) => {
            let at = UNIX_EPOCH + Duration::from_millis(event.at_ms);
            let line =
                format!("{}  {}", humantime::format_rfc3339_millis(at), told(&event.what, event.at_ms));
            tables::plain(&line)
        }
        Data::Missed { count: Some(count) } => format!("({count} events were not kept long enough)"),
        Data::Missed { count: None } => {
            "(another process answers; what happened before it is not known)".into()
        }
    }
}

fn told(what: &What, at_ms: u64) -> String {
    match what {
        What::KeyStatus { provider, key, from, to, reason } => {
            let why = reason.as_ref().map(|reason| format!(": {reason}")).unwrap_or_default();
            format!("key {provider}/{key} is {}, was {}{why}", to.as_str(), from.as_str())
        }
        What::CooldownBegan { provider, subject, reason, until_ms, status, code } => {
            let status = status.map(|status| status.to_string());
            let evidence: Vec<_> = status.as_deref().into_iter().chain(code.as_deref()).collect();
            let evidence =
                if evidence.is_empty() { String::new() } else { format!(" ({})", evidence.join(" ")) };
            let left = tables::duration(StoreTime(*until_ms).since(StoreTime(at_ms)));
            format!("cooldown of {subject} at {provider} began: {reason}{evidence}, for {left}")
        }
        What::CooldownEnded { provider, subject, reason } => {
            format!("cooldown of {subject} at {provider} ended: {reason}")
        }
        What::LeaseLost { provider, lease, key, pool, app, reason } => {
            format!("lease {lease} of {provider}/{key} ({pool}, app {app}) was lost: {reason}")
        }
        What::LeaseRevoked { provider, lease, key, app } => {
            let key = key.as_ref().map_or_else(|| provider.to_string(), |key| format!("{provider}/{key}"));
            let app = app.as_ref().map(|app| format!(" (app {app})")).unwrap_or_default();
            format!("lease {lease} of {key}{app} was revoked")
        }
        What::GraceBegan { provider, until_ms } => format!(
            "the store has just lost its data or failed over: for {} keys of {provider} are lent only to streams \
             that are already open",
            tables::duration(StoreTime(*until_ms).since(StoreTime(at_ms)))
        ),
        What::StoreAway { store, reason } => format!("the {store} store does not answer: {reason}"),
        What::StoreBack { store } => format!("the {store} store answers again"),
        What::AppRevoked { app } => format!("app {app} was revoked"),
        What::AppRestored { app } => format!("app {app} was let in again"),
        What::ConfigReloaded { config } => format!("the configuration was read again: {config}"),
        What::ConfigRefused { error, .. } => {
            format!("the configuration on disk is refused, and the one before is kept: {error}")
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a test that fails may panic
mod tests {
    use super::*;

    #[test]
    fn lines_are_the_same_however_their_bytes_come() {
        let text = b"id: 1\ndata: {\"a\":1}\n\n: alive\n\n";
        for size in 1..text.len() {
            let mut lines = Lines::default();
            let all: Vec<_> = text.chunks(size).flat_map(|chunk| lines.take(chunk).unwrap()).collect();
            assert_eq!(all, ["id: 1", "data: {\"a\":1}", "", ": alive", ""]);
        }
        assert!(Lines::default().take(&vec![b'x'; LINE + 1]).is_err());
    }

    #[test]
    fn an_event_is_one_line_that_cannot_move_the_cursor() {
        let json = r#"{"id":"0000000a-7","at_ms":1000,"event":"cooldown_began","provider":"openai",
            "subject":"a|gpt\u001b[2J","reason":"rate","until_ms":43000,"status":429,"code":null}"#;
        let line = shown(&serde_json::from_str(json).unwrap());
        let expected = "1970-01-01T00:00:01.000Z  cooldown of a|gpt?[2J at openai began: rate (429), for 42s";
        assert_eq!(line, expected);
        let missed = shown(&serde_json::from_str(r#"{"event":"missed","count":7}"#).unwrap());
        assert_eq!(missed, "(7 events were not kept long enough)");
    }
}
