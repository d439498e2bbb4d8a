//! What the admin doors may ask of the running proxy.

use std::pin::Pin;
use std::sync::Arc;

use super::doctors_tools;
use super::local_ca::LocalCa;
use crate::config::{self, AppConfig};
use crate::control::admin::{AppSeen, CaSeen, CheckResult, Hands, RankSeen, RankingSeen, TermsSeen};
use crate::control::doctor::Tools;
use crate::lease::Leases;
use crate::model::{AppName, KeyId, ProviderName};
use crate::proxy::{Checks, Proxy};
use crate::route::ring::{Explained, ProviderKeys, Ring};
use crate::store::{Snapshot, StoreError, StoreTime};
use crate::watch::Watcher;

/// The rooms that it asks.
pub(super) struct Reach {
    pub(super) watcher: Watcher,
    pub(super) checks: Checks,
    pub(super) ring: Arc<Ring>,
    pub(super) walk: Proxy,
    pub(super) leases: Leases,
    pub(super) ca: Option<LocalCa>,
}

impl Hands for Reach {
    fn check(
        &self,
        provider: &ProviderName,
        key: &KeyId,
    ) -> Pin<Box<dyn Future<Output = CheckResult> + Send>> {
        let (checks, provider, key) = (self.checks.clone(), provider.clone(), key.clone());
        Box::pin(async move {
            let found = checks.run(&provider, &key).await;
            CheckResult {
                ok: found.ok,
                status: found.status,
                code: found.code.map(|code| code.to_string()),
                class: found.class.as_str().to_owned(),
                message: found.message,
                note: None,
            }
        })
    }

    fn switched(&self, provider: &ProviderName, key: &KeyId, on: bool) {
        if let Some(keys) = self.ring.of(provider.as_str()) {
            keys.switch(key, on);
        }
        self.leases.wake(provider);
    }

    fn lends_not(&self) -> Pin<Box<dyn Future<Output = Option<StoreError>> + Send + '_>> {
        let candidates = |provider: &ProviderName| {
            self.ring.of(provider.as_str()).map(|keys| keys.first_candidates(1)).unwrap_or_default()
        };
        Box::pin(self.leases.lends_not(candidates))
    }

    fn saw(&self, provider: &ProviderName, seen: &Snapshot, asked: StoreTime) {
        self.watcher.saw(provider, seen, asked);
    }

    fn doctors_tools(&self) -> Tools {
        doctors_tools()
    }

    fn waiting(&self) -> usize {
        self.leases.waiting()
    }

    fn live(&self) -> usize {
        self.leases.live()
    }

    fn ranking(&self) -> RankingSeen {
        let ranking = self.ring.ranking();
        let all = self.ring.all();
        let mut keys: Vec<RankSeen> = all.iter().flat_map(|keys| explained(keys)).collect();
        keys.sort_by(|a, b| a.provider.cmp(&b.provider)); // stable: keys stay in their order
        let config::Weights { capacity, idle, success, error, rate_limit, cooldown, freshness, jitter } =
            ranking.weights;
        RankingSeen {
            strategy: ranking.strategy.as_str().to_owned(),
            weights: TermsSeen { capacity, idle, success, error, rate_limit, cooldown, freshness },
            jitter,
            keys,
        }
    }

    fn apps(&self) -> Vec<AppSeen> {
        let rooms = self.walk.rooms();
        let apps = rooms.routes.apps();
        let seen = |app: &AppConfig| AppSeen {
            name: app.name.clone(),
            token: app.token.is_some(),
            uid: app.uid,
            pools: app.pools.clone(),
            providers: app.providers.clone(),
            revoked: apps.standing(&app.name).is_revoked(),
        };
        apps.all().map(seen).collect()
    }

    fn revoke_app(&self, app: &AppName, revoked: bool) {
        let rooms = self.walk.rooms();
        let apps = rooms.routes.apps();
        if revoked {
            apps.revoke(app);
        } else {
            apps.restore(app);
        }
    }

    fn ca(&self) -> Option<CaSeen> {
        self.ca.as_ref().map(LocalCa::seen)
    }
}

fn explained(keys: &ProviderKeys) -> Vec<RankSeen> {
    let digits = |number: f64| (number * 1e4).round() / 1e4;
    let seen = |Explained { key, row, terms, score }: Explained| RankSeen {
        provider: keys.provider.name.clone(),
        key,
        score: digits(score),
        terms: TermsSeen {
            capacity: digits(terms.capacity),
            idle: digits(terms.idle),
            success: digits(terms.success),
            error: digits(terms.error),
            rate_limit: digits(terms.rate_limit),
            cooldown: digits(terms.cooldown),
            freshness: digits(terms.freshness),
        },
        in_flight: row.in_flight,
        first_byte_ms: (row.first_byte_ms > 0.0).then(|| digits(f64::from(row.first_byte_ms))),
        rests_ms: (row.rest_us > 0).then_some(row.rest_us.div_ceil(1000)),
    };
    keys.explain().into_iter().map(seen).collect()
}
