//! Whether a pod gets a sidecar, and why not.
//!
//! Three answers beside yes: a pod is left alone (with a warning, unless it asked for that), it is refused where
//! a sidecar would protect nothing or the pod could not start, and one that has its sidecar is only completed:
//! other webhooks may have added containers since.
//!
//! A namespace's label is not in a review. It is the webhook configuration that calls for pods of labelled
//! namespaces, so a pod without a label that comes here is one whose namespace has it.

use super::pod::{Container, Pod};
use super::settings::{INJECT, INJECTED, STATUS, Wanted};
use super::sidecar::{ADMIN_PORT, CA_DIR, CA_VOLUME, CONFIG_VOLUME, NAME, PROXY_PORT, RUN_VOLUME};
use super::values;

/// Where nothing of a user's runs.
const SYSTEM: [&str; 3] = ["kube-system", "kube-node-lease", "kube-public"];

/// What to do with a pod.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Decision {
    /// Nothing, and perhaps why.
    Leave(Option<String>),
    /// Give it a sidecar.
    Inject,
    /// It has one of ours: look after containers that were added since.
    Complete,
}

/// By the pod's labels and its kind.
pub(super) fn decide(pod: Pod<'_>, namespace: &str, own_namespace: Option<&str>) -> Decision {
    let leave = |why: String| Decision::Leave(Some(why));
    match pod.label(INJECT) {
        None | Some("true" | "enabled") => {}
        Some("false" | "disabled") => return Decision::Leave(None),
        Some(other) => {
            let other = values::shown(other);
            return leave(format!("no sidecar: label {INJECT} is \"{other}\"; it is \"true\" or \"false\""));
        }
    }
    if SYSTEM.contains(&namespace) || own_namespace == Some(namespace) {
        return leave(format!("no sidecar: pods of namespace {namespace} get none"));
    }
    if pod.all_containers().any(|container| container.name() == NAME) {
        let ours = pod.label(INJECTED) == Some("true") && pod.annotation(STATUS).is_some();
        return if ours {
            Decision::Complete
        } else {
            leave(format!("no sidecar: the pod has a container `{NAME}` already"))
        };
    }
    if pod.is_windows() {
        return leave("no sidecar: lessor does not run on Windows nodes".into());
    }
    if pod.host_network() {
        return leave(
            "no sidecar: with hostNetwork its ports would be the node's; run `lessor run` on the node".into(),
        );
    }
    Decision::Inject
}

/// Why a pod that should have a sidecar cannot be admitted with one.
pub(super) fn refusal(pod: Pod<'_>, wanted: &Wanted, first: bool) -> Option<String> {
    if let Some(field) = pod.shares_processes().filter(|_| !wanted.accepts_sharing) {
        return Some(format!(
            "{field} lets the pod's containers read lessor's memory and its mounted Secret; take it out, or set \
             annotation lessor.dev/share-process-namespace to accept"
        ));
    }
    if first
        && let Some(name) = [CONFIG_VOLUME, CA_VOLUME, RUN_VOLUME].into_iter().find(|n| pod.has_volume(n))
    {
        return Some(format!("the pod has a volume `{name}`, which is lessor's own name; rename it"));
    }
    if let Some(volume) = secret_volume(pod, wanted, first) {
        return Some(format!(
            "volume `{volume}` holds Secret {}, which only lessor's container may have; take it out",
            wanted.secret
        ));
    }
    pod.all_containers()
        .filter(|container| container.name() != NAME)
        .find_map(|container| container_refusal(container, wanted))
}

fn container_refusal(container: Container<'_>, wanted: &Wanted) -> Option<String> {
    let name = container.name();
    for (volume, path, read_only) in container.mounts() {
        if volume == CONFIG_VOLUME || volume == RUN_VOLUME {
            return Some(format!(
                "container `{name}` mounts `{volume}`, which only lessor's may; take it out"
            ));
        }
        if volume == CA_VOLUME && !read_only {
            return Some(format!("container `{name}` mounts `{volume}` to write; set readOnly: true"));
        }
        if volume != CA_VOLUME && path.trim_end_matches('/') == CA_DIR {
            return Some(format!(
                "container `{name}` mounts `{volume}` at {CA_DIR}, where lessor's CA is; mount it elsewhere"
            ));
        }
    }
    if container.secrets().any(|secret| secret == wanted.secret) {
        return Some(format!(
            "container `{name}` has variables of Secret {}, which only lessor's may have; take them out",
            wanted.secret
        ));
    }
    let port = container.ports().find(|port| [PROXY_PORT, ADMIN_PORT].map(u64::from).contains(port))?;
    Some(format!("container `{name}` has port {port}, which is lessor's; let it listen on another"))
}

/// A volume, other than ours, with the Secret in it.
fn secret_volume<'a>(pod: Pod<'a>, wanted: &Wanted, first: bool) -> Option<&'a str> {
    pod.volumes().iter().find_map(|volume| {
        let name = volume.get("name")?.as_str()?;
        let own = !first && name == CONFIG_VOLUME;
        let one = volume.pointer("/secret/secretName");
        let projected = volume.pointer("/projected/sources").and_then(serde_json::Value::as_array);
        let projected = projected.into_iter().flatten().filter_map(|source| source.pointer("/secret/name"));
        let held = one.into_iter().chain(projected).any(|held| held.as_str() == Some(&wanted.secret));
        (held && !own).then_some(name)
    })
}
