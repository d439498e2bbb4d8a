//! The pages that only show: health, metrics, and what there is.

use std::collections::{BTreeMap, HashSet};
use std::sync::atomic::Ordering;
use std::time::Duration;

use axum::extract::State;
use axum::response::{IntoResponse as _, Response};
use futures_util::future::join_all;
use http::{HeaderValue, StatusCode, header};
use serde::{Deserialize, Serialize};

use super::answers::{ERROR, Query, Refusal};
use super::seen::{GraceSeen, KeySeen, LeaseSeen, PoolView, Status, StoreSeen};
use super::{AdminState, Answered, Asked, CALL, PROBE, bounded, socket_path};
use crate::config::KeyConfig;
use crate::control::environment::Served;
use crate::model::{GroupName, KeyStatus, PoolName, ProviderName};
use crate::store::{KeyView, Snapshot, StoreError};

/// Why not to send work here; an empty list is ready.
#[derive(Serialize)]
struct Ready {
    ready: bool,
    reasons: Vec<String>,
}

pub(super) async fn readyz(State(state): Asked) -> Response {
    let reasons = state.reasons(&state.looked(PROBE).await);
    let status = if reasons.is_empty() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    state.json(status, &Ready { ready: reasons.is_empty(), reasons })
}

pub(super) async fn metrics(State(state): Asked) -> Response {
    // A store that is down must not blind whoever watches: then the page has what was last known.
    let seen = state.looked(PROBE).await;
    state.metrics.store_up(seen.is_ok());
    if let Ok(seen) = &seen {
        let own = state.keys(seen).into_iter().filter(|seen| seen.configured);
        state.metrics.key_statuses(own.map(|KeySeen { key, .. }| (key.provider, key.id, key.status)));
    }
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(header::CONTENT_TYPE, kind)], state.metrics.encode()).into_response()
}

#[derive(Deserialize)]
pub(super) struct Wanted {
    /// Whether to say why keys are ranked as they are.
    explain: Option<bool>,
}

pub(super) async fn status(State(state): Asked, Query(wanted): Query<Wanted>) -> Answered {
    let seen = state.looked(CALL).await;
    let reasons = state.reasons(&seen);
    let (seen, error) = match seen {
        Ok(seen) => (seen, None),
        Err(cause) => (BTreeMap::new(), Some(cause)),
    };
    let on_disk = state.on_disk.load();
    let page = Status {
        version: state.version.into(),
        uptime_seconds: state.started.elapsed().as_secs(),
        ready: reasons.is_empty(),
        reasons,
        draining: state.draining.load(Ordering::Relaxed),
        config: state.config.load().origin.clone(),
        config_refused: on_disk.refused.clone(),
        needs_restart: on_disk.needs_restart.iter().map(ToString::to_string).collect(),
        store: StoreSeen {
            kind: state.store.kind().into(),
            url: state.config.load().store.url.to_string(),
            up: error.is_none(),
            error: error.as_ref().map(ToString::to_string),
        },
        owner: state.owner.clone(),
        proxy: state.proxy_addresses.iter().map(ToString::to_string).collect(),
        live: state.hands.live(),
        waiting: state.hands.waiting(),
        pools: state.pools(&seen),
        keys: state.keys(&seen),
        leases: state.leases(&seen),
        graces: graces(&seen),
        ranking: wanted.explain.unwrap_or(false).then(|| state.hands.ranking()),
    };
    let Some(cause) = error else { return Ok(state.json(StatusCode::OK, &page)) };
    // The shape of every other refusal, and beside it what is known without the store.
    let refusal = Refusal::from(cause);
    let mut answer = state.json(refusal.status, &Down { error: refusal.error(), page: &page });
    answer.headers_mut().insert(ERROR, HeaderValue::from_static(refusal.code));
    Ok(answer)
}

fn graces(seen: &BTreeMap<ProviderName, Snapshot>) -> Vec<GraceSeen> {
    let grace = |(provider, seen): (&ProviderName, &Snapshot)| {
        seen.grace_until_ms.map(|until_ms| GraceSeen { provider: provider.clone(), until_ms })
    };
    seen.iter().filter_map(grace).collect()
}

/// A status without what only the store knows.
#[derive(Serialize)]
struct Down<'a> {
    error: serde_json::Value,
    #[serde(flatten)]
    page: &'a Status,
}

pub(super) async fn pools(State(state): Asked) -> Answered {
    let seen = state.snapshots(CALL).await?;
    Ok(state.json(StatusCode::OK, &serde_json::json!({ "pools": state.pools(&seen) })))
}

pub(super) async fn keys(State(state): Asked) -> Answered {
    let seen = state.snapshots(CALL).await?;
    Ok(state.json(StatusCode::OK, &serde_json::json!({ "keys": state.keys(&seen) })))
}

pub(super) async fn leases(State(state): Asked) -> Answered {
    let seen = state.snapshots(CALL).await?;
    Ok(state.json(StatusCode::OK, &serde_json::json!({ "leases": state.leases(&seen) })))
}

pub(super) async fn ca(State(state): Asked) -> Answered {
    let seen = state.hands.ca().ok_or_else(|| {
        let message = "there is no local CA: proxy.intercept is false".into();
        Refusal::new(StatusCode::NOT_FOUND, "no_ca", message)
    })?;
    Ok(state.json(StatusCode::OK, &seen))
}

/// What a child must know of this sidecar: asks no store, so that a child starts while that is away.
pub(super) async fn environment(State(state): Asked) -> Response {
    let socket = state.proxy_addresses.first().map(socket_path);
    state.json(StatusCode::OK, &Served::new(&state.config.load(), &state.proxy_addresses, socket.as_deref()))
}

impl AdminState {
    /// Why not to send work here. A key that only rests comes back by itself and does not count
    /// against it: taking the pod out of service would not bring it back sooner.
    fn reasons(&self, seen: &Result<BTreeMap<ProviderName, Snapshot>, StoreError>) -> Vec<String> {
        let mut reasons = Vec::new();
        if self.draining.load(Ordering::Relaxed) {
            reasons.push("shutting_down: open streams are being finished".into());
        }
        match seen {
            Err(cause) => reasons.push(format!("store_unavailable: {cause}")),
            Ok(seen) => reasons.extend(self.no_key_reason(seen)),
        }
        reasons
    }

    /// All providers' keys and leases, of a store that also lends.
    async fn looked(&self, bound: Duration) -> Result<BTreeMap<ProviderName, Snapshot>, StoreError> {
        let looked = async {
            self.store.ping().await?;
            match self.hands.lends_not().await {
                Some(cause) => Err(cause),
                None => self.snapshots(bound).await,
            }
        };
        bounded(bound, looked).await
    }

    fn no_key_reason(&self, seen: &BTreeMap<ProviderName, Snapshot>) -> Option<String> {
        let config = self.config.load();
        if config.keys.is_empty() {
            return Some("key_unavailable: no key is configured".into());
        }
        let mut refused = Vec::new();
        for key in &config.keys {
            let view = seen.get(&key.provider).and_then(|seen| seen.keys.iter().find(|it| it.id == key.id));
            let status = view.map_or(KeyStatus::Pending, |view| view.status);
            if !matches!(status, KeyStatus::Invalid | KeyStatus::Disabled | KeyStatus::Pending) {
                return None;
            }
            refused.push(format!("{}/{} is {}", key.provider, key.id, status.as_str()));
        }
        let more = refused.len().saturating_sub(8);
        refused.truncate(8);
        let more = if more > 0 { format!(", and {more} more") } else { String::new() };
        Some(format!("key_unavailable: no key is usable: {}{more}", refused.join(", ")))
    }

    /// All providers' keys and leases, or the first failure.
    async fn snapshots(&self, bound: Duration) -> Result<BTreeMap<ProviderName, Snapshot>, StoreError> {
        let config = self.config.load_full();
        let asked = config.providers.keys().map(|provider| async move {
            let seen = bounded(bound, self.store.snapshot(provider.clone())).await?;
            Ok((provider.clone(), seen))
        });
        join_all(asked).await.into_iter().collect()
    }

    /// All keys of the store, and which are this sidecar's.
    fn keys(&self, seen: &BTreeMap<ProviderName, Snapshot>) -> Vec<KeySeen> {
        let config = self.config.load();
        let own: HashSet<_> = config.keys.iter().map(|key| (&key.provider, &key.id)).collect();
        let all = seen.values().flat_map(|seen| seen.keys.iter().cloned());
        all.map(|key| KeySeen { configured: own.contains(&(&key.provider, &key.id)), key }).collect()
    }

    pub(super) fn seen(&self, key: &KeyView) -> KeySeen {
        let own = |known: &KeyConfig| known.provider == key.provider && known.id == key.id;
        KeySeen { configured: self.config.load().keys.iter().any(own), key: key.clone() }
    }

    /// Of this sidecar's keys: no request here is served by another's.
    fn pools(&self, seen: &BTreeMap<ProviderName, Snapshot>) -> Vec<PoolView> {
        let config = self.config.load();
        let mut pools: BTreeMap<(ProviderName, PoolName), PoolView> = BTreeMap::new();
        let own: Vec<KeySeen> = self.keys(seen).into_iter().filter(|seen| seen.configured).collect();
        for KeySeen { key, .. } in &own {
            let pool = pools.entry((key.provider.clone(), key.pool.clone())).or_insert_with(|| PoolView {
                provider: key.provider.clone(),
                pool: key.pool.clone(),
                fallback: config.pools.get(&key.pool).cloned().unwrap_or_default(),
                keys: 0,
                available: 0,
                in_use: 0,
                max_concurrent_uses: 0,
                learned_concurrent_uses: None,
            });
            pool.keys += 1;
            pool.available += usize::from(key.status == KeyStatus::Available);
            pool.in_use = pool.in_use.saturating_add(key.in_use);
            pool.max_concurrent_uses = pool.max_concurrent_uses.saturating_add(key.max_concurrent_uses);
        }
        for ((provider, name), pool) in &mut pools {
            let keys = own.iter().map(|seen| &seen.key);
            let learned = learned(keys.filter(|key| key.provider == *provider && key.pool == *name));
            pool.learned_concurrent_uses =
                Some(learned).filter(|learned| *learned < pool.max_concurrent_uses);
        }
        pools.into_values().collect()
    }

    /// All live leases, and which are this sidecar's own.
    fn leases(&self, seen: &BTreeMap<ProviderName, Snapshot>) -> Vec<LeaseSeen> {
        let all = seen.values().flat_map(|seen| seen.leases.iter().cloned());
        all.map(|lease| LeaseSeen { own: lease.owner == self.owner, lease }).collect()
    }
}

/// How many uses these keys have at once by what answers taught of each and of their groups.
fn learned<'k>(keys: impl Iterator<Item = &'k KeyView>) -> u32 {
    let mut groups: BTreeMap<&GroupName, (u32, u32)> = BTreeMap::new();
    let mut alone = 0_u32;
    for key in keys {
        let own = key.learned_concurrent_uses.unwrap_or(u32::MAX).min(key.max_concurrent_uses);
        match key.group.as_ref().zip(key.group_concurrent_uses) {
            Some((group, most)) => {
                let (uses, _) = groups.entry(group).or_insert((0, most));
                *uses = uses.saturating_add(own);
            }
            None => alone = alone.saturating_add(own),
        }
    }
    groups.into_values().fold(alone, |all, (uses, most)| all.saturating_add(uses.min(most)))
}
