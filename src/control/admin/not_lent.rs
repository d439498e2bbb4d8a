//! Why a key is not lent though somebody just found it good or changed it, and what would lend it.

use crate::model::KeyStatus;
use crate::store::KeyView;

/// `None` where it is lent.
pub fn not_lent(key: &KeyView) -> Option<String> {
    let named = format!("{}/{}", key.provider, key.id);
    let rests = |what: &str| format!("{what}; its rest goes on, and `lessor keys clear {named}` lifts it");
    match key.status {
        KeyStatus::Disabled => Some(format!("it is disabled; `lessor keys enable {named}` lends it again")),
        KeyStatus::Invalid => Some(format!(
            "it is invalid; give it another secret, or `lessor keys check {named}` where it is good again, or \
             `lessor keys enable {named}`"
        )),
        KeyStatus::Pending => {
            Some("it is pending: its secret could not be had, and the sidecar's log says why".into())
        }
        KeyStatus::RateLimited | KeyStatus::Cooldown | KeyStatus::Exhausted => {
            Some(rests(&format!("it is {}", key.status.as_str())))
        }
        KeyStatus::Probation => Some(format!(
            "it is on probation: one request at a time, until one succeeds; `lessor keys clear {named}` ends that"
        )),
        KeyStatus::Available => {
            // What rests with the provider as a whole ends in seconds, and no key's rest is lifted by hand for it.
            let provider = format!("{}|", key.provider);
            let is_its = |subject: &str| subject != key.provider.as_str() && !subject.starts_with(&provider);
            let mut subjects = key.cooldowns.iter().map(|rest| rest.subject.as_str()).filter(|it| is_its(it));
            let first = subjects.next()?;
            let more = subjects.count();
            let more = if more > 0 { format!(" and {more} more") } else { String::new() };
            Some(rests(&format!("not for {first}{more}")))
        }
    }
}
