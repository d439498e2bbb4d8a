//! stub
use crate::{config::*, metrics::Metrics, model::*, store::*};
use std::{
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};
#[derive(Clone, Debug)]
pub struct Leases;
pub struct Want<'a> {
    pub provider: &'a ProviderName,
    pub app: &'a AppName,
    pub pool: &'a PoolName,
    pub model: Option<&'a ModelName>,
    pub fitting: Arc<[KeyId]>,
    pub rank: &'a (dyn Fn() -> Vec<Candidate> + Send + Sync),
    pub confirm: &'a (dyn Fn(&KeyId) -> bool + Send + Sync),
    pub until: tokio::time::Instant,
}
#[derive(Debug, thiserror::Error)]
pub enum AcquireError {
    #[error("x")]
    PoolExhausted { pool: PoolName, retry_after: Duration, queue_full: bool },
    #[error("x")]
    KeyUnavailable { pool: PoolName },
    #[error("x")]
    StoreUnavailable { cause: StoreError },
    #[error("x")]
    ShuttingDown,
}
#[derive(Debug)]
pub struct Lease;
pub enum Lost {
    Expired,
    Revoked,
    TooLong,
}
impl Leases {
    pub fn new(_: Arc<dyn Store>, _: LeaseConfig, _: QueueConfig, _: OwnerId, _: Metrics) -> Self {
        todo!()
    }
    pub async fn acquire(&self, _: Want<'_>) -> Result<Lease, AcquireError> {
        todo!()
    }
    pub fn wake(&self, _: &ProviderName) {
        todo!()
    }
    pub fn waiting(&self) -> usize {
        0
    }
    pub fn live(&self) -> usize {
        0
    }
    pub fn refuse_new(&self) {}
    pub async fn shutdown(&self) {}
    pub fn set_repair(&self, _: Arc<dyn Fn(&ProviderName) -> SyncKeys + Send + Sync>) {}
}
impl Lease {
    pub fn id(&self) -> LeaseId {
        todo!()
    }
    pub fn key(&self) -> &KeyId {
        todo!()
    }
    pub fn pool(&self) -> &PoolName {
        todo!()
    }
    pub fn waited(&self) -> Duration {
        todo!()
    }
    pub fn report(&mut self, _: Outcome, _: Option<&ModelName>, _: Option<&GroupName>) {}
    pub fn poll_lost(&self, _: &mut Context<'_>) -> Poll<Lost> {
        Poll::Pending
    }
    pub async fn lost(&self) -> Lost {
        todo!()
    }
}
