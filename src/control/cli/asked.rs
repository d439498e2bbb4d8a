//! What `lessor doctor` asks of a sidecar, over the same doors.

use std::path::Path;
use std::time::Duration;

use http::Method;

use super::call::{self, Answer, Call, Endpoint};
use super::{Failure, Options, list, parsed, refused};
use crate::control::admin;
use crate::control::doctor::inside::{self, Wanted};
use crate::control::doctor::{Check, Examined};
use crate::model::Secret;

/// Has the sidecar examine itself. `socket` is its admin socket; a door that a person named comes first.
pub(in crate::control) async fn examined(
    options: &Options,
    socket: Option<&Path>,
    wanted: &Wanted,
) -> Result<Vec<Check>, String> {
    // Names need no encoding: the rule for names allows unreserved characters only.
    let provider = wanted.provider.as_ref().map(|name| format!("&provider={name}")).unwrap_or_default();
    let path = format!("/v1/doctor?all_keys={}{provider}", wanted.all_keys);
    let bound = inside::BOUND + Duration::from_secs(3);
    let answer = ask(options, socket, Call { method: Method::POST, path, bound }).await?;
    parsed::<Examined>(&answer)
        .map(|examined| examined.checks)
        .map_err(|cause| format!("its answer cannot be read: {cause}"))
}

/// Why the sidecar takes no work; none is ready.
pub(in crate::control) async fn reasons(
    options: &Options,
    socket: Option<&Path>,
) -> Result<Vec<String>, String> {
    let bound = admin::ANSWER + Duration::from_secs(3);
    let answer = ask(options, socket, Call { method: Method::GET, path: "/readyz".into(), bound }).await?;
    list(&answer, "reasons").map_err(|cause| format!("its answer cannot be read: {cause}"))
}

async fn ask(options: &Options, socket: Option<&Path>, call: Call) -> Result<Answer, String> {
    let token = std::env::var("LESSOR_ADMIN_TOKEN").ok().filter(|token| !token.is_empty()).map(Secret::new);
    let door = match (options.admin(), socket) {
        (Some(named), _) => Endpoint::named(named)?,
        (None, Some(path)) => Endpoint::Unix { path: path.into(), named: false },
        (None, None) => return Err("it has no admin socket".into()),
    };
    let (door, _) = call::reach(vec![door], &call, token.is_some())
        .await
        .map_err(|tried| Failure::Unreachable(tried).to_string())?;
    let answer = door.ask(&call, token.as_ref()).await.map_err(|failure| failure.to_string())?;
    // Not ready is an answer, too.
    if answer.status.is_success() || (call.path == "/readyz" && answer.status.as_u16() == 503) {
        return Ok(answer);
    }
    Err(refused(&answer, token.is_some()).to_string())
}
