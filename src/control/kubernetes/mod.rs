//! Pods get their sidecar when they are created: the mutating webhook of `lessor inject`.
//!
//! A review goes in, and an answer comes out, with no effect beside: [`answer`] is a function of the injector's
//! [`Defaults`] and of the pod, so a dry run is answered like any other, and a second call with what came of the
//! first changes nothing. The pod is JSON throughout, for what this version does not know must survive, and the
//! patch only adds.

use serde_json::{Value, json};

mod certificates;
mod cluster;
mod decide;
mod doors;
mod environ;
mod health;
mod managed;
mod mint;
mod options;
mod patch;
mod places;
mod pod;
mod reply;
mod review;
mod serve;
mod settings;
mod shared;
mod sidecar;
mod values;
mod watch;
mod webhook;
mod work;

use decide::Decision;
pub use options::{Inject, print_review};
use patch::Patch;
use pod::{Container, List, Pod};
pub use review::{Answer, BadReview, Request, Verdict};
pub use serve::{InjectError, serve};
pub use settings::{Defaults, Resources};
use settings::{INJECTED, STATUS, Wanted};
pub use values::{Level, Mode, Quantity};

/// Which container `kubectl logs` and `kubectl exec` take when none is named.
const DEFAULT_CONTAINER: [&str; 2] =
    ["kubectl.kubernetes.io/default-container", "kubectl.kubernetes.io/default-logs-container"];

/// What becomes of the pod under review.
pub fn answer(defaults: &Defaults, request: &Request) -> Answer {
    if !request.creates_pod() {
        let what =
            format!("{} of a {}", values::shown(&request.operation), values::shown(&request.kind.kind));
        return Answer::skipped(Some(format!(
            "nothing to do with {what}; the webhook's rule should be CREATE of pods"
        )));
    }
    let pod = match Pod::of(&request.object) {
        Ok(pod) => pod,
        Err(why) => return Answer::denied(why),
    };
    let namespace = Some(request.namespace.as_str()).filter(|name| !name.is_empty());
    let namespace = namespace.or(pod.namespace()).unwrap_or("default");
    match decide::decide(pod, namespace, defaults.own_namespace.as_deref()) {
        Decision::Leave(why) => Answer::skipped(why),
        Decision::Inject => checked(defaults, pod, true),
        Decision::Complete => checked(defaults, pod, false),
        Decision::Refuse(why) => Answer::denied(why),
    }
}

/// The pod's name for people.
pub fn pod_name(request: &Request) -> String {
    Pod::of(&request.object).map_or_else(|_| "?".into(), Pod::name)
}

fn checked(defaults: &Defaults, pod: Pod<'_>, first: bool) -> Answer {
    if let Some(why) = decide::too_large(pod) {
        return Answer::denied(why);
    }
    let mut wanted = match Wanted::of(defaults, pod) {
        Ok(wanted) => wanted,
        Err(why) => return Answer::denied(why),
    };
    if let Some(why) = decide::refusal(pod, &wanted, first) {
        return Answer::denied(why);
    }
    if first { inject(defaults, pod, wanted) } else { complete(pod, &mut wanted) }
}

/// The whole pod. Containers are named by their place in the pod that came, so the sidecar, which moves those
/// behind it, goes in last.
fn inject(defaults: &Defaults, pod: Pod<'_>, mut wanted: Wanted) -> Answer {
    let mut patch = Patch::default();
    let mut notes = std::mem::take(&mut wanted.notes);
    marks(defaults, pod, &wanted, &mut patch);
    patch.append(&["spec", "volumes"], pod.at("/spec/volumes").is_some(), sidecar::volumes(&wanted));
    let early = if wanted.native { None } else { pod.containers(List::Init).next() };
    if let Some(container) = early {
        let name = container.name();
        notes.push(format!("init container `{name}` runs before the classic sidecar, so it gets nothing"));
    }
    if !wanted.native && pod.ends() {
        let quit = format!("POST http://127.0.0.1:{}/quit", sidecar::ADMIN_PORT);
        notes.push(format!("the pod ends only when its app says so to the classic sidecar: {quit}"));
    }
    let inits = pod.containers(List::Init).filter(|_| wanted.native);
    let selected: Vec<_> =
        inits.chain(pod.containers(List::App)).filter(|container| wanted.selects(container.name())).collect();
    if selected.is_empty() {
        notes.push("no container is selected, so none gets an environment".into());
    }
    for container in selected {
        furnish(container, &wanted, &mut patch, &mut notes);
    }
    let container = sidecar::container(&wanted);
    if !wanted.native {
        patch.append(&["spec", "containers"], true, vec![container]);
    } else if pod.at("/spec/initContainers").is_some() {
        // First: the app's own init containers may call providers.
        patch.add(&["spec", "initContainers", "0"], container);
    } else {
        patch.add(&["spec", "initContainers"], json!([container]));
    }
    Answer::new(Verdict::Injected, patch, notes)
}

/// Containers that other webhooks have added since.
fn complete(pod: Pod<'_>, wanted: &mut Wanted) -> Answer {
    // As it was done, should the injector's own settings have changed since.
    let status = pod.annotation(STATUS).and_then(|text| serde_json::from_str::<Value>(text).ok());
    if let Some(mode) = status.as_ref().and_then(|status| status.get("mode")?.as_str()?.parse().ok()) {
        wanted.mode = mode;
    }
    let (mut patch, mut notes) = (Patch::default(), Vec::new());
    let ours = pod.containers(List::Init).find(|container| container.name() == sidecar::NAME);
    for container in pod.containers(List::Init).chain(pod.containers(List::App)) {
        if container.name() == sidecar::NAME || !wanted.selects(container.name()) {
            continue;
        }
        if container.list == List::Init && ours.is_none_or(|ours| container.index < ours.index) {
            if ours.is_some() {
                let name = container.name();
                notes.push(format!("init container `{name}` runs before lessor, so it gets nothing"));
            }
            continue;
        }
        let mut said = Vec::new();
        if furnish(container, wanted, &mut patch, &mut said) {
            notes.extend(said); // what was said the first time is not said again
        }
    }
    Answer::new(Verdict::Completed, patch, notes)
}

/// The environment of one container; whether anything was added.
fn furnish(container: Container<'_>, wanted: &Wanted, patch: &mut Patch, notes: &mut Vec<String>) -> bool {
    let mut plan = environ::changes(container, wanted);
    notes.append(&mut plan.notes);
    let base = container.path();
    let at = |more: &[&str]| -> Vec<String> {
        base.iter().cloned().chain(more.iter().map(|step| (*step).to_owned())).collect()
    };
    let entries = plan.entries();
    let mounted = container
        .mounts()
        .any(|(name, path, _)| name == sidecar::CA_VOLUME && path.trim_end_matches('/') == sidecar::CA_DIR);
    let mounts = if plan.mounts_ca && !mounted { vec![environ::Changes::ca_mount()] } else { Vec::new() };
    let changed = !(entries.is_empty() && mounts.is_empty() && plan.extended.is_empty());
    for (index, value) in plan.extended {
        patch.add(&at(&["env", &index.to_string(), "value"]), value);
    }
    patch.append(&at(&["env"]), container.has_list("env"), entries);
    patch.append(&at(&["volumeMounts"]), container.has_list("volumeMounts"), mounts);
    changed
}

/// Labels and annotations.
fn marks(defaults: &Defaults, pod: Pod<'_>, wanted: &Wanted, patch: &mut Patch) {
    if pod.at("/metadata").is_none() {
        patch.add(&["metadata"], json!({}));
    }
    let label = (INJECTED, Value::from("true"));
    patch.members(&["metadata", "labels"], pod.at("/metadata/labels").is_some(), vec![label]);
    let status = json!({
        "version": env!("CARGO_PKG_VERSION"),
        "mode": wanted.mode,
        "native": wanted.native,
        "config": defaults.hash(),
    });
    let mut annotations = vec![(STATUS, Value::from(status.to_string()))];
    let app = pod.containers(List::App).next().map(Container::name).filter(|_| !wanted.native);
    if let Some(app) = app {
        let unset = DEFAULT_CONTAINER.into_iter().filter(|key| pod.annotation(key).is_none());
        annotations.extend(unset.map(|key| (key, Value::from(app))));
    }
    patch.members(&["metadata", "annotations"], pod.at("/metadata/annotations").is_some(), annotations);
}

/// The pod with the patch applied; `None` where there is none.
pub fn patched(object: &Value, answer: &Answer) -> Result<Value, String> {
    let mut pod = object.clone();
    if let Some(patch) = &answer.patch {
        let patch: json_patch::Patch =
            serde_json::from_value(patch.clone()).map_err(|cause| cause.to_string())?;
        json_patch::patch(&mut pod, &patch).map_err(|cause| cause.to_string())?;
    }
    Ok(pod)
}
