//! What a person changes: keys, leases, apps.

use axum::extract::State;
use axum::response::Response;
use futures_util::future::join_all;
use http::StatusCode;

use super::answers::{Path, Query, Refusal, text};
use super::{AdminState, Answered, Asked, CALL, bounded, listed, not_lent};
use crate::control::doctor::Examined;
use crate::control::doctor::inside::{self, Patient, Wanted};
use crate::events::What;
use crate::model::{KeyId, LeaseId, ProviderName};
use crate::store::{StatusChange, StoreError};

pub(super) async fn disable(state: Asked, path: Path<(String, String)>) -> Answered {
    change(state, path, StatusChange::Disable, Some(false)).await
}

/// Whoever drains waits for the last lease's end by looking at the leases.
pub(super) async fn drain(state: Asked, path: Path<(String, String)>) -> Answered {
    change(state, path, StatusChange::Drain, Some(false)).await
}

pub(super) async fn enable(state: Asked, path: Path<(String, String)>) -> Answered {
    change(state, path, StatusChange::Enable, Some(true)).await
}

pub(super) async fn clear(state: Asked, path: Path<(String, String)>) -> Answered {
    change(state, path, StatusChange::Clear, None).await
}

/// Applies a person's word to the store, then to the process's own view; answers with the key. The store
/// knows which keys there are: another sidecar's, that the lists show too, is changed as well as an own.
async fn change(
    State(state): Asked,
    Path((provider, key)): Path<(String, String)>,
    change: StatusChange,
    on: Option<bool>,
) -> Answered {
    let provider = state.find_provider(&provider)?;
    let key = KeyId::parse(&key).map_err(|_| state.unknown_key(&provider, &key))?;
    // In a task of its own: a caller that leaves half-way must not leave store and process apart.
    let done = tokio::spawn({
        let (state, provider, key) = (state.clone(), provider.clone(), key.clone());
        async move {
            let what = match (on, &change) {
                (_, StatusChange::Drain) => "drained",
                (Some(true), _) => "enabled",
                (Some(false), _) => "disabled",
                (None, _) => "cleared",
            };
            let change = state.store.set_status(provider.clone(), key.clone(), change);
            let known = bounded(CALL, change).await?;
            if known {
                tracing::info!(%provider, %key, what, "a key was changed by hand");
            }
            if let (true, Some(on)) = (known, on) {
                state.hands.switched(&provider, &key, on);
            }
            Ok::<_, StoreError>(known)
        }
    });
    let known = match done.await {
        Ok(known) => known?,
        Err(_) => return Err(Refusal::internal()),
    };
    let asked = state.store.now();
    let seen = bounded(CALL, state.store.snapshot(provider.clone())).await?;
    state.hands.saw(&provider, &seen, asked);
    match seen.keys.iter().find(|seen| known && seen.id == key) {
        Some(view) => Ok(state.json(StatusCode::OK, &state.seen(view))),
        None => Err(state.unknown_key(&provider, key.as_str())),
    }
}

pub(super) async fn check(State(state): Asked, Path((provider, key)): Path<(String, String)>) -> Answered {
    let (provider, key) = state.find(&provider, &key)?;
    let mut result = state.hands.check(&provider, &key).await;
    if result.ok
        && let Ok(seen) = bounded(CALL, state.store.snapshot(provider.clone())).await
    {
        result.note = seen.keys.iter().find(|seen| seen.id == key).and_then(not_lent);
    }
    Ok(state.json(StatusCode::OK, &result))
}

pub(super) async fn apps(State(state): Asked) -> Response {
    state.json(StatusCode::OK, &serde_json::json!({ "apps": state.hands.apps() }))
}

pub(super) async fn revoke_app(state: Asked, Path(name): Path<String>) -> Answered {
    change_app(&state, &name, true)
}

pub(super) async fn restore_app(state: Asked, Path(name): Path<String>) -> Answered {
    change_app(&state, &name, false)
}

/// Twice is as good as once. It is this process's own word, so no store is asked.
fn change_app(state: &AdminState, name: &str, revoked: bool) -> Answered {
    let find = || state.hands.apps().into_iter().find(|app| app.name.as_str() == name);
    let unknown = || {
        let known = listed(state.hands.apps().iter().map(|app| &app.name));
        let message = format!("no such app; there is {known}");
        Refusal::new(StatusCode::NOT_FOUND, "unknown_app", message)
    };
    let before = find().ok_or_else(unknown)?;
    let app = before.name;
    state.hands.revoke_app(&app, revoked);
    if before.revoked != revoked {
        let app = app.clone();
        state.events.tell(if revoked { What::AppRevoked { app } } else { What::AppRestored { app } });
    }
    tracing::info!(%app, what = if revoked { "revoked" } else { "restored" }, "an app was changed by hand");
    Ok(state.json(StatusCode::OK, &find().ok_or_else(unknown)?))
}

/// The inside half of `lessor doctor`.
pub(super) async fn examine(State(state): Asked, Query(wanted): Query<Wanted>) -> Answered {
    if let Some(provider) = &wanted.provider {
        state.find_provider(provider.as_str())?;
    }
    let patient = Patient {
        config: state.config.load_full(),
        on_disk: state.on_disk.load_full(),
        store: Ok(state.store.clone()),
        proxy: state.proxy_addresses.first().cloned(),
        tools: state.hands.doctors_tools(),
    };
    let checks = inside::examine(patient, wanted).await;
    Ok(state.json(StatusCode::OK, &Examined { checks }))
}

pub(super) async fn revoke(State(state): Asked, Path(id): Path<String>) -> Answered {
    let unknown = || {
        let message = "no such live lease; GET /v1/leases lists them".into();
        Refusal::new(StatusCode::NOT_FOUND, "unknown_lease", message)
    };
    let lease = LeaseId(id.parse().map_err(|_| unknown())?);
    // A lease does not say whose keys it is of, and may be another sidecar's. All at once, so that many
    // providers of a slow store take no longer than one.
    let config = state.config.load_full();
    let asked = config
        .providers
        .keys()
        .map(async |provider| (provider, bounded(CALL, state.store.revoke(provider.clone(), lease)).await));
    let answers = join_all(asked).await;
    if let Some((provider, _)) = answers.iter().find(|(_, answer)| matches!(answer, Ok(true))) {
        tracing::info!(%provider, lease = %lease, "a lease was revoked by hand");
        let answer = serde_json::json!({ "id": lease, "provider": provider, "revoked": true });
        return Ok(state.json(StatusCode::OK, &answer));
    }
    // Only who heard every provider's no may say that there is none.
    for (_, answer) in answers {
        answer?;
    }
    Err(unknown())
}

/// Does what SIGTERM does. The answer comes before the end, for the drain waits for the admin doors, too.
pub(super) async fn quit(State(state): Asked) -> Response {
    if let Some(quit) = &state.quit {
        tracing::info!("told to stop by POST /quit");
        quit.cancel();
    }
    text("stopping\n")
}

impl AdminState {
    /// A provider that this sidecar serves.
    fn find_provider(&self, provider: &str) -> Result<ProviderName, Refusal> {
        let config = self.config.load();
        config.providers.get_key_value(provider).map(|(provider, _)| provider.clone()).ok_or_else(|| {
            let message = format!("no such provider; there is {}", listed(config.providers.keys()));
            Refusal::new(StatusCode::NOT_FOUND, "unknown_provider", message)
        })
    }

    /// A key that this sidecar serves, and so has the secret of.
    fn find(&self, provider: &str, key: &str) -> Result<(ProviderName, KeyId), Refusal> {
        let provider = self.find_provider(provider)?;
        let keys = &self.config.load().keys;
        match keys.iter().find(|it| it.provider == provider && it.id.as_str() == key) {
            Some(key) => Ok((provider, key.id.clone())),
            None => Err(self.unknown_key(&provider, key)),
        }
    }

    fn unknown_key(&self, provider: &ProviderName, key: &str) -> Refusal {
        let config = self.config.load();
        let ids = config.keys.iter().filter(|key| key.provider == *provider).map(|key| &key.id);
        let message = format!("{provider} has no key {key:?} here; there is {}", listed(ids));
        Refusal::new(StatusCode::NOT_FOUND, "unknown_key", message)
    }
}
