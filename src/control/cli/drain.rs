//! `lessor keys drain`: no new leases of a key, here and in the fleet, and a wait for the last one's end.
//!
//! The wait is the command's own: the sidecar holds nothing for it, so that a command which is killed leaves
//! nothing behind but a key that is disabled.

use std::time::{Duration, Instant};

use http::Method;
use serde_json::json;

use super::call::{self, Answer, Call, Endpoint};
use super::{Exit, Failure, KeyPath, Page, key_path, list, refused, tables};
use crate::control::admin::{self, LeaseSeen};
use crate::model::Secret;

/// How often it is looked whether the last lease has ended.
const LOOK: Duration = Duration::from_millis(500);

/// Where and as whom is asked.
pub(super) struct Asker<'a> {
    pub(super) doors: Vec<Endpoint>,
    pub(super) token: Option<&'a Secret>,
    pub(super) json: bool,
}

impl Asker<'_> {
    async fn ask(&self, method: Method, path: String) -> Result<Answer, Failure> {
        let call = Call { method, path, bound: admin::ANSWER + Duration::from_secs(3) };
        let reached = call::reach(self.doors.clone(), &call, self.token.is_some()).await;
        let (door, _) = reached.map_err(Failure::Unreachable)?;
        let answer = door.ask(&call, self.token).await?;
        if answer.status.is_success() { Ok(answer) } else { Err(refused(&answer, self.token.is_some())) }
    }

    /// The live leases of a key, of all sidecars that share the store.
    async fn leases(&self, key: &KeyPath) -> Result<(Vec<LeaseSeen>, Answer), Failure> {
        let answer = self.ask(Method::GET, "/v1/leases".into()).await?;
        let nonsense = |cause: serde_json::Error| Failure::Nonsense {
            from: "the sidecar".into(),
            cause: cause.to_string(),
        };
        let mut leases = list::<LeaseSeen>(&answer, "leases").map_err(nonsense)?;
        leases.retain(|seen| seen.lease.provider == key.provider && seen.lease.key_id == key.id);
        Ok((leases, answer))
    }
}

/// Disables the key and waits until nobody uses it, up to `timeout`.
pub(super) async fn drain(key: &KeyPath, timeout: Duration, asker: &Asker<'_>) -> Result<Page, Failure> {
    asker.ask(Method::POST, key_path(key, "drain")).await?;
    let begun = Instant::now();
    let (left, answer) = loop {
        let (leases, answer) = asker.leases(key).await?;
        let rest = timeout.saturating_sub(begun.elapsed());
        if leases.is_empty() || rest.is_zero() {
            break (leases, answer);
        }
        tokio::time::sleep(LOOK.min(rest)).await;
    };
    let exit = if left.is_empty() { Exit::Ok } else { Exit::Failed };
    let KeyPath { provider, id } = key;
    let text = if asker.json {
        let page = json!({
            "provider": provider, "key": id, "drained": left.is_empty(),
            "leases": left.iter().map(|seen| seen.lease.id).collect::<Vec<_>>(),
        });
        format!("{page:#}\n")
    } else if left.is_empty() {
        format!(
            "{provider}/{id} is drained: nobody uses it, and it stays disabled until `lessor keys enable {provider}/{id}`\n"
        )
    } else {
        let count = left.len();
        format!(
            "{provider}/{id} is not drained after {timeout:?}: {count} still live; it stays disabled, so they are its \
             last.\nWait on with the same command, or end them: lessor leases revoke ID\n\n{}",
            tables::leases(&left, answer.now)
        )
    };
    Ok(Page { text, note: None, exit })
}
