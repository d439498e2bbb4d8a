//! The model that a request names in its body.

use http::request::Parts;
use tokio::time::Instant;

use super::{Rooms, faults};
use crate::forward::replay::Replay;
use crate::model::Fault;
use crate::route::ring::ModelKnown;
use crate::route::scan::{BodyScan, Scan};
use crate::route::{ModelNeed, Route};

impl Rooms {
    /// Reads as much of the body as the model needs; what was read is kept for sending. Where other bodies fill
    /// `retry.max_total` it waits for room like for a key, and as long.
    pub(super) async fn read_model(
        &self,
        route: &Route,
        head: &Parts,
        body: &Replay,
    ) -> Result<ModelKnown, Fault> {
        let need = route.model_need(&head.method, body.has_body());
        if need == ModelNeed::None {
            return Ok(ModelKnown::NotNamed);
        }
        let mut until = None;
        loop {
            let Some(model) = BodyScan::of(&head.headers, &route.provider().model_field) else {
                return Ok(ModelKnown::Unreadable);
            };
            let (known, decided) = read_once(model, need, body).await?;
            if decided || !body.is_starved() {
                body.spare();
                return Ok(known);
            }
            let until = *until.get_or_insert_with(|| Instant::now() + route.max_wait);
            if !body.room(until).await {
                return Err(faults::no_room(self.config.retry.max_total, route.max_wait));
            }
        }
    }
}

/// What of the model is found in what can be kept, and whether more of the body would not change that.
async fn read_once(
    mut model: BodyScan<'_>,
    need: ModelNeed,
    body: &Replay,
) -> Result<(ModelKnown, bool), Fault> {
    let mut latest = Scan::Unsure;
    let is_decided = |latest: &Scan| match need {
        ModelNeed::First => *latest != Scan::Unsure,
        _ => *latest == Scan::Unreadable,
    };
    let read = body.read_ahead(|chunk| {
        latest = model.feed(chunk);
        is_decided(&latest)
    });
    let whole = read.await.map_err(faults::of_body)?;
    let decided = whole || is_decided(&latest);
    let known = if whole { model.end() } else { latest };
    let known = match known {
        Scan::Model(name) if whole || need == ModelNeed::First => ModelKnown::Named(name),
        Scan::Absent => ModelKnown::NotNamed,
        _ => ModelKnown::Unreadable,
    };
    Ok((known, decided))
}
