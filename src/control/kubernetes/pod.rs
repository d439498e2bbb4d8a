//! A pod as it came: JSON that is looked at here and there, so that what this version does not know survives.

use serde_json::Value;

/// The lists in which a pod's containers stand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum List {
    Init,
    App,
    /// Those of a debugger. An API server takes none with a new pod; they are looked at all the same.
    Ephemeral,
}

impl List {
    pub(super) fn key(self) -> &'static str {
        match self {
            Self::Init => "initContainers",
            Self::App => "containers",
            Self::Ephemeral => "ephemeralContainers",
        }
    }
}

/// All of them, those first that start first.
const LISTS: [List; 3] = [List::Init, List::App, List::Ephemeral];

/// The pod under review.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pod<'a>(&'a Value);

impl<'a> Pod<'a> {
    /// Reads no more than is needed to know that it is a pod; why not, otherwise.
    pub(super) fn of(object: &'a Value) -> Result<Self, String> {
        let containers = object.pointer("/spec/containers").and_then(Value::as_array);
        if containers.is_none_or(Vec::is_empty) {
            return Err("the object under review has no spec.containers, so it is no pod".into());
        }
        let named = |container: &Value| container.get("name").is_some_and(Value::is_string);
        let pod = Self(object);
        if LISTS.iter().all(|list| pod.raw(&format!("/spec/{}", list.key())).iter().all(named)) {
            Ok(pod)
        } else {
            Err("a container of the pod under review has no name".into())
        }
    }

    pub(super) fn at(self, pointer: &str) -> Option<&'a Value> {
        self.0.pointer(pointer).filter(|value| !value.is_null())
    }

    fn raw(self, pointer: &str) -> &'a [Value] {
        self.at(pointer).and_then(Value::as_array).map_or(&[], Vec::as_slice)
    }

    fn text(self, pointer: &str) -> Option<&'a str> {
        self.at(pointer).and_then(Value::as_str)
    }

    fn is(self, pointer: &str) -> bool {
        self.at(pointer) == Some(&Value::Bool(true))
    }

    /// Its name for people; one that is generated has none yet.
    pub(super) fn name(self) -> String {
        match (self.text("/metadata/name"), self.text("/metadata/generateName")) {
            (Some(name), _) if !name.is_empty() => name.into(),
            (_, Some(beginning)) => format!("{beginning}*"),
            _ => "a pod without a name".into(),
        }
    }

    pub(super) fn namespace(self) -> Option<&'a str> {
        self.text("/metadata/namespace").filter(|name| !name.is_empty())
    }

    pub(super) fn label(self, key: &str) -> Option<&'a str> {
        self.at("/metadata/labels")?.get(key)?.as_str()
    }

    pub(super) fn annotation(self, key: &str) -> Option<&'a str> {
        self.at("/metadata/annotations")?.get(key)?.as_str()
    }

    pub(super) fn annotations(self) -> impl Iterator<Item = (&'a str, &'a str)> {
        let all = self.at("/metadata/annotations").and_then(Value::as_object);
        all.into_iter().flatten().filter_map(|(key, value)| Some((key.as_str(), value.as_str()?)))
    }

    pub(super) fn containers(self, list: List) -> impl Iterator<Item = Container<'a>> {
        let all = self.raw(&format!("/spec/{}", list.key()));
        all.iter().enumerate().map(move |(index, value)| Container { list, index, value })
    }

    pub(super) fn all_containers(self) -> impl Iterator<Item = Container<'a>> {
        LISTS.into_iter().flat_map(move |list| self.containers(list))
    }

    pub(super) fn volumes(self) -> &'a [Value] {
        self.raw("/spec/volumes")
    }

    pub(super) fn has_volume(self, name: &str) -> bool {
        self.volumes().iter().any(|volume| volume.get("name").and_then(Value::as_str) == Some(name))
    }

    pub(super) fn host_network(self) -> bool {
        self.is("/spec/hostNetwork")
    }

    /// The field by which containers of the pod see each other's processes.
    pub(super) fn shares_processes(self) -> Option<&'static str> {
        ["shareProcessNamespace", "hostPID"].into_iter().find(|field| self.is(&format!("/spec/{field}")))
    }

    pub(super) fn is_windows(self) -> bool {
        self.text("/spec/os/name") == Some("windows")
            || self.text("/spec/nodeSelector/kubernetes.io~1os") == Some("windows")
    }

    /// How long the node waits between TERM and the end, in seconds; what is negative counts as 1.
    pub(super) fn grace(self) -> u64 {
        let Some(seconds) = self.at("/spec/terminationGracePeriodSeconds") else { return 30 };
        if seconds.as_i64().is_some_and(|seconds| seconds < 0) { 1 } else { seconds.as_u64().unwrap_or(30) }
    }

    /// Whether it ends by itself, as a Job's does.
    pub(super) fn ends(self) -> bool {
        matches!(self.text("/spec/restartPolicy"), Some("Never" | "OnFailure"))
    }
}

/// One container of it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Container<'a> {
    pub(super) list: List,
    pub(super) index: usize,
    value: &'a Value,
}

impl<'a> Container<'a> {
    pub(super) fn name(self) -> &'a str {
        self.value.get("name").and_then(Value::as_str).unwrap_or_default()
    }

    /// Where it stands, as steps of a JSON pointer.
    pub(super) fn path(self) -> [String; 3] {
        ["spec".into(), self.list.key().into(), self.index.to_string()]
    }

    fn items(self, key: &str) -> &'a [Value] {
        self.value.get(key).and_then(Value::as_array).map_or(&[], Vec::as_slice)
    }

    /// Whether it has a list, be it empty, at this key.
    pub(super) fn has_list(self, key: &str) -> bool {
        self.value.get(key).is_some_and(Value::is_array)
    }

    /// The entry of a variable: the last one, for that is the one which counts.
    fn entry(self, name: &str) -> Option<(usize, &'a Value)> {
        let env = self.items("env").iter().enumerate();
        env.rev().find(|(_, entry)| entry.get("name").and_then(Value::as_str) == Some(name))
    }

    /// How many entries `env` has.
    pub(super) fn variables(self) -> usize {
        self.items("env").len()
    }

    /// Whether it runs its image's entrypoint with this as the first argument.
    pub(super) fn runs(self, word: &str) -> bool {
        self.items("command").is_empty() && self.items("args").first().and_then(Value::as_str) == Some(word)
    }

    pub(super) fn has_variable(self, name: &str) -> bool {
        self.entry(name).is_some()
    }

    /// The value of a variable that is written in the pod, with its place; `None` where it comes from elsewhere.
    pub(super) fn literal(self, name: &str) -> Option<(usize, &'a str)> {
        let (at, entry) = self.entry(name)?;
        if entry.get("valueFrom").is_some_and(|from| !from.is_null()) {
            return None;
        }
        Some((at, entry.get("value").and_then(Value::as_str).unwrap_or_default()))
    }

    pub(super) fn has_env_from(self) -> bool {
        !self.items("envFrom").is_empty()
    }

    /// Names of volumes, paths, and whether they are read-only.
    pub(super) fn mounts(self) -> impl Iterator<Item = (&'a str, &'a str, bool)> {
        self.items("volumeMounts").iter().map(|mount| {
            let text = |key| mount.get(key).and_then(Value::as_str).unwrap_or_default();
            let read_only = mount.get("readOnly") == Some(&Value::Bool(true));
            (text("name"), text("mountPath"), read_only)
        })
    }

    pub(super) fn ports(self) -> impl Iterator<Item = u64> {
        self.items("ports").iter().filter_map(|port| port.get("containerPort")?.as_u64())
    }

    /// Names of Secrets that its variables come from.
    pub(super) fn secrets(self) -> impl Iterator<Item = &'a str> {
        let one = self.items("env").iter().filter_map(|entry| entry.pointer("/valueFrom/secretKeyRef/name"));
        let all = self.items("envFrom").iter().filter_map(|entry| entry.pointer("/secretRef/name"));
        one.chain(all).filter_map(Value::as_str)
    }
}
