//! lessor lends API keys: see the README. Imports go down the list in the README's architecture part.

pub mod config;
pub mod metrics;
pub mod model;
pub mod outcome;
pub mod store;
