//! Beside the walk: what people, probes and scrapers ask of a running sidecar.
//!
//! Nothing here touches a request on its way to a provider. [`admin`] answers, and [`banner`] says at
//! the start what is served.

pub mod admin;
pub mod banner;
