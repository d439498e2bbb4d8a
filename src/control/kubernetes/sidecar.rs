//! The sidecar's container and volumes.
//!
//! It fits PodSecurity's `restricted` by itself, whatever the pod says; it needs no service account, and has no
//! preStop: the kubelet runs that when the pod *begins* to end, while apps still call. Secrets are files, mounted
//! here alone: a variable would show in the pod's description.

use serde_json::{Value, json};

use super::settings::Wanted;

/// The container's name.
pub(super) const NAME: &str = "lessor";
/// Where apps reach it.
pub(super) const PROXY_PORT: u16 = 8321;
/// Where the kubelet reaches it, on the pod's address.
pub(super) const ADMIN_PORT: u16 = 8322;
/// The Secret, for the sidecar alone.
pub(super) const CONFIG_VOLUME: &str = "lessor-config";
/// Certificates that apps are to trust, and no key.
pub(super) const CA_VOLUME: &str = "lessor-ca";
/// The admin socket, for the sidecar alone.
pub(super) const RUN_VOLUME: &str = "lessor-run";
/// Where the certificates are, in all containers.
pub(super) const CA_DIR: &str = "/run/lessor/ca";
const CONFIG_DIR: &str = "/etc/lessor";
const RUN_DIR: &str = "/run/lessor/private";
/// The user of lessor's image.
const USER: u32 = 65532;

/// The container.
pub(super) fn container(wanted: &Wanted) -> Value {
    let resources = &wanted.resources;
    let mut container = json!({
        "name": NAME,
        "image": wanted.image,
        "args": args(wanted),
        "env": [
            { "name": "POD_IP", "valueFrom": { "fieldRef": { "apiVersion": "v1", "fieldPath": "status.podIP" } } },
            { "name": "XDG_RUNTIME_DIR", "value": RUN_DIR },
            { "name": "RUST_LOG", "value": wanted.log_level.to_string() },
        ],
        "ports": [{ "name": "lessor-admin", "containerPort": ADMIN_PORT, "protocol": "TCP" }],
        "resources": {
            "requests": {
                "cpu": resources.cpu_request.to_string(), "memory": resources.memory_request.to_string(),
            },
            "limits": { "cpu": resources.cpu_limit.to_string(), "memory": resources.memory_limit.to_string() },
        },
        // A wedged process is started anew; one whose store is away goes on serving what it can.
        "livenessProbe": {
            "httpGet": { "path": "/healthz", "port": ADMIN_PORT, "scheme": "HTTP" },
            "periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 6, "successThreshold": 1,
        },
        // What comes after a native sidecar starts when this has passed once.
        "startupProbe": {
            "httpGet": { "path": "/healthz", "port": ADMIN_PORT, "scheme": "HTTP" },
            "periodSeconds": 1, "timeoutSeconds": 1, "failureThreshold": 60, "successThreshold": 1,
        },
        "securityContext": {
            "runAsNonRoot": true,
            "runAsUser": USER,
            "runAsGroup": USER,
            "allowPrivilegeEscalation": false,
            "privileged": false,
            "readOnlyRootFilesystem": true,
            "capabilities": { "drop": ["ALL"] },
            "seccompProfile": { "type": "RuntimeDefault" },
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            { "name": CONFIG_VOLUME, "mountPath": CONFIG_DIR, "readOnly": true },
            { "name": CA_VOLUME, "mountPath": CA_DIR },
            { "name": RUN_VOLUME, "mountPath": RUN_DIR },
        ],
    });
    if wanted.native {
        container["restartPolicy"] = "Always".into();
    }
    container
}

/// A native sidecar gets TERM when the apps have gone, so it waits for a moment only; a classic one gets it
/// together with them, and ends a Job by `/quit`.
fn args(wanted: &Wanted) -> Vec<String> {
    let mut args = vec![
        "run".into(),
        format!("--config={CONFIG_DIR}/lessor.toml"),
        format!("--proxy=127.0.0.1:{PROXY_PORT}"),
        "--admin-ip=$(POD_IP)".into(),
        format!("--ca-dir={CA_DIR}"),
        format!("--grace={}s", wanted.drain),
        format!("--linger={}s", if wanted.native { 1 } else { 5.min(wanted.drain) }),
    ];
    args.extend(wanted.pool.iter().map(|pool| format!("--default-pool={pool}")));
    if let Some(names) = &wanted.only_upstreams {
        let names: Vec<_> = names.iter().map(ToString::to_string).collect();
        args.push(format!("--upstreams={}", names.join(",")));
    }
    if !wanted.native {
        args.push("--quit".into());
    }
    args
}

/// The volumes. The files of the Secret are root's, the sidecar is not root, and `fsGroup` is the pod's own
/// matter: with any mode below 0444 it could not read them. No other container mounts them.
pub(super) fn volumes(wanted: &Wanted) -> Vec<Value> {
    vec![
        json!({ "name": CONFIG_VOLUME, "secret": { "secretName": wanted.secret, "defaultMode": 0o444 } }),
        json!({ "name": CA_VOLUME, "emptyDir": { "medium": "Memory", "sizeLimit": "16Mi" } }),
        json!({ "name": RUN_VOLUME, "emptyDir": { "medium": "Memory", "sizeLimit": "1Mi" } }),
    ]
}
