//! lessor lends API keys: see the README. Imports go down the list in the README's architecture part.

pub mod config;
pub mod control;
pub mod events;
pub mod explain;
mod fields;
pub mod fleet;
pub mod forward;
pub mod inject;
pub mod lease;
pub mod listen;
pub mod logs;
pub mod metrics;
pub mod model;
pub mod outcome;
pub mod process;
pub mod proxy;
pub mod reload;
pub mod route;
pub mod run;
pub mod scrub;
pub mod store;
pub mod watch;
mod words;
