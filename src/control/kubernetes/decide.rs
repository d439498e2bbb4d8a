//! Whether a pod gets a sidecar, and why not.
//!
//! Three answers beside yes: a pod is left alone (with a warning, unless it asked for that), it is refused where
//! a sidecar would protect nothing or the pod could not start, and one that has its sidecar is only completed:
//! other webhooks may have added containers since.
//!
//! A namespace's label is not in a review. It is the webhook configuration that calls for pods of labelled
//! namespaces, so a pod without a label that comes here is one whose namespace has it.

use serde_json::Value;

use super::pod::{Container, List, Pod};
use super::settings::{DOMAIN, INJECT, INJECTED, STATUS, Wanted};
use super::sidecar::{ADMIN_PORT, CA_DIR, CA_VOLUME, CONFIG_VOLUME, NAME, PROXY_PORT, RUN_VOLUME};
use super::values;

/// Where nothing of a user's runs.
const SYSTEM: [&str; 3] = ["kube-system", "kube-node-lease", "kube-public"];

/// Containers of a pod that gets a sidecar.
const CONTAINERS: usize = 256;
/// Entries of `env`, of all its containers.
const VARIABLES: usize = 10_000;
/// Bytes of an annotation of ours.
const ANNOTATION: usize = 4096;

/// What to do with a pod.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Decision {
    /// Nothing, and perhaps why.
    Leave(Option<String>),
    /// Give it a sidecar.
    Inject,
    /// It has one of ours: look after containers that were added since.
    Complete,
    /// It cannot be admitted.
    Refuse(String),
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
        let marked = pod.label(INJECTED) == Some("true") && pod.annotation(STATUS).is_some();
        return match (marked, has_sidecar(pod)) {
            (true, true) => Decision::Complete,
            // Without a sidecar's bounds it would be served as one.
            (true, false) => Decision::Refuse(format!(
                "the pod is marked as one that has its sidecar, and its container `{NAME}` is not lessor's; take \
                 out label {INJECTED} and annotation {STATUS}, and rename the container"
            )),
            (false, _) => leave(format!("no sidecar: the pod has a container `{NAME}` already")),
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

/// Whether the one container of this name is what an injector makes, be it by another image.
fn has_sidecar(pod: Pod<'_>) -> bool {
    let mut named = pod.all_containers().filter(|container| container.name() == NAME);
    let (one, more) = (named.next(), named.next());
    let ours = |container: Container<'_>| {
        container.list != List::Ephemeral
            && container.runs("run")
            && container.mounts().any(|(volume, ..)| volume == CONFIG_VOLUME)
    };
    one.is_some_and(ours) && more.is_none()
}

/// Why a pod is not looked at closely: each bound is far above what pods have, and keeps an answer cheap.
pub(super) fn too_large(pod: Pod<'_>) -> Option<String> {
    let containers = pod.all_containers().count();
    if containers > CONTAINERS {
        return Some(format!("the pod has {containers} containers; with a sidecar it may have {CONTAINERS}"));
    }
    let variables: usize = pod.all_containers().map(Container::variables).sum();
    if variables > VARIABLES {
        return Some(format!(
            "the pod's containers have {variables} variables; with a sidecar they may have {VARIABLES}: mount \
             a ConfigMap as files, or take it by envFrom"
        ));
    }
    let long = |(key, value): &(&str, &str)| key.starts_with(DOMAIN) && value.len() > ANNOTATION;
    let (key, value) = pod.annotations().find(long)?;
    let (key, length) = (values::shown(key), value.len());
    Some(format!("annotation {key} is {length} bytes long; it may be {ANNOTATION} at most"))
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
    if let Some((volume, secret)) = secret_volume(pod, wanted, first) {
        return Some(format!(
            "volume `{volume}` holds Secret {secret}, which only lessor's container may have; take it out"
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
    if let Some(secret) = container.secrets().find(|secret| wanted.guards(secret)) {
        return Some(format!(
            "container `{name}` has variables of Secret {secret}, which only lessor's may have; take them out"
        ));
    }
    let port = container.ports().find(|port| [PROXY_PORT, ADMIN_PORT].map(u64::from).contains(port))?;
    Some(format!("container `{name}` has port {port}, which is lessor's; let it listen on another"))
}

/// A volume, other than ours, with a Secret of ours in it, and that Secret.
fn secret_volume<'a>(pod: Pod<'a>, wanted: &Wanted, first: bool) -> Option<(&'a str, &'a str)> {
    pod.volumes().iter().find_map(|volume| {
        let name = volume.get("name")?.as_str()?;
        let own = !first && name == CONFIG_VOLUME;
        let held = guarded_in(volume, wanted).filter(|_| !own)?;
        Some((name, held))
    })
}

/// A Secret of ours that a volume refers to. Each kind of volume has its own place for that (`secret.secretName`,
/// `csi.nodePublishSecretRef.name`, `iscsi.secretRef.name`, a projected `secret.name`), so it is looked for by
/// those names, wherever they stand; how deep is bounded by what reads JSON.
fn guarded_in<'a>(value: &'a Value, wanted: &Wanted) -> Option<&'a str> {
    let guarded = |text: Option<&'a Value>| text.and_then(Value::as_str).filter(|name| wanted.guards(name));
    match value {
        Value::Array(items) => items.iter().find_map(|item| guarded_in(item, wanted)),
        Value::Object(members) => members.iter().find_map(|(key, member)| {
            let here = match key.as_str() {
                "secretName" => guarded(Some(member)),
                "secret" => guarded(member.get("name")),
                reference if reference.to_ascii_lowercase().ends_with("secretref") => {
                    guarded(member.get("name"))
                }
                _ => None,
            };
            here.or_else(|| guarded_in(member, wanted))
        }),
        _ => None,
    }
}
