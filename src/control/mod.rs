//! Beside the walk: what people, probes and scrapers ask of a running sidecar, and how they ask.
//!
//! Nothing here touches a request on its way to a provider. [`admin`] answers, [`cli`] asks, and
//! [`banner`] says at the start what is served. [`exec`] starts a child with the [`environment`] that takes it
//! through lessor, and [`doctor`] looks whether all of it works on this machine. [`kubernetes`] gives pods a sidecar
//! when they are created.

pub mod admin;
pub mod banner;
pub mod cli;
pub mod doctor;
pub mod environment;
pub mod exec;
pub mod kubernetes;
