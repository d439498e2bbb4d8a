//! stub
use crate::config::Provider;
use crate::model::ProviderName;
use std::{collections::BTreeMap, sync::Arc};
pub fn builtin() -> &'static BTreeMap<ProviderName, Arc<Provider>> {
    todo!()
}
pub fn host_patterns() -> Vec<(String, ProviderName)> {
    todo!()
}
pub fn credential_headers() -> &'static [http::HeaderName] {
    todo!()
}
pub fn credential_queries() -> &'static [String] {
    todo!()
}
