{{/*
What `lessor inject` does, in CEL: the same rules, kept equal by a test. Kubernetes' CEL has no way to bind a name
and none to flatten lists, so each step is a variable that maps one list of records to the next, and lists of lists
travel as text: \u0001 between entries, \u0002 within one, and `NAME=value` for a variable.
*/}}

{{/* What an annotation says, without blanks around, or the default. */}}
{{- define "lessor.cel.said" -}}
'lessor.dev/{{ .name }}' in variables.ann ? variables.ann['lessor.dev/{{ .name }}'].trim() : {{ .default | toJson }}
{{- end -}}

{{/* The same for a list with commas. */}}
{{- define "lessor.cel.list" -}}
'lessor.dev/{{ .name }}' in variables.ann
  ? variables.ann['lessor.dev/{{ .name }}'].split(',').map(x, x.trim()).filter(x, x != '')
  : {{ .default | toJson }}
{{- end -}}

{{/* Whether ours may stand there: nobody said to keep the variable, and it is not the app's with another value. */}}
{{- define "lessor.cel.free" -}}
!({{ .name }} in variables.keep) && (!({{ .name }} in a.names) || ({{ .pair }}) in a.lits)
{{- end -}}

{{/* What NO_PROXY is to be in one case, by the lists in that case and in the other. */}}
{{- define "lessor.cel.except" -}}
{{ .own }}.exists(v, v.trim() == '*') || ({{ .own }}.size() == 0 && {{ .other }}.exists(v, v.trim() == '*')) ? '*'
    : [(({{ .own }} + {{ .other }}.filter(v, v.trim() != '*')).join(',')
    .replace(' ', ',').replace('\t', ',').replace('\n', ',').replace('\r', ',').replace('\f', ',').split(',')
    + ['localhost', '127.0.0.1', '::1', '.svc', '.cluster.local', '169.254.169.254', '$(KUBERNETES_SERVICE_HOST)']
    + {{ toJson .more }}).filter(x, x != '')]
    .map(l, (l.size() > 128 ? l : variables.upTo.filter(i, i < l.size() && l.indexOf(l[i]) == i).map(i, l[i])).join(','))[0]
{{- end -}}

{{/* The mark that an injector with these settings leaves, as `lessor inject` reckons it. */}}
{{- define "lessor.cel.hash" -}}
{{- $s := .Values.sidecar -}}
{{- $amounts := include "lessor.amounts" . | fromYaml -}}
{{- $pool := "null" -}}
{{- with $s.pool }}{{ $pool = toJson . }}{{ end -}}
{{- printf `{"image":%s,"secret":%s,"upstreams":%s,"mode":%s,"native":%s,"resources":{"cpu_request":%s,"cpu_limit":%s,"memory_request":%s,"memory_limit":%s},"drain":%s,"no_proxy":%s,"log_level":%s,"pool":%s}` (include "lessor.sidecarImage" . | toJson) (toJson $s.secret) (include "lessor.upstreams" . | splitList "," | toJson) (toJson $s.mode) (include "lessor.cel.native" .) (toJson $amounts.cpuRequest) (toJson $amounts.cpuLimit) (toJson $amounts.memoryRequest) (toJson $amounts.memoryLimit) (include "lessor.cel.drain" .) (toJson (default list $s.noProxy)) (toJson $s.logLevel) $pool | sha256sum | trunc 12 -}}
{{- end -}}

{{/* A cluster that knows such policies knows native sidecars. */}}
{{- define "lessor.cel.native" -}}
{{ ternary "true" (toString .Values.sidecar.native) (eq (toString .Values.sidecar.native) "auto") }}
{{- end -}}

{{- define "lessor.cel.drain" -}}{{ toString .Values.sidecar.drain | trimSuffix "s" }}{{- end -}}

{{/* What the pod says and is: all that the checks need. */}}
{{- define "lessor.cel.pod" -}}
{{- $s := .Values.sidecar -}}
{{- $amounts := include "lessor.amounts" . | fromYaml -}}
- name: ann
  expression: "has(object.metadata) && has(object.metadata.annotations) ? object.metadata.annotations : {}"
- name: labels
  expression: "has(object.metadata) && has(object.metadata.labels) ? object.metadata.labels : {}"
- name: label
  expression: "'lessor.dev/inject' in variables.labels ? variables.labels['lessor.dev/inject'] : 'true'"
{{- range $name, $said := dict
  "image" (list "image" (include "lessor.sidecarImage" .))
  "secret" (list "secret" $s.secret)
  "mode" (list "mode" $s.mode)
  "native" (list "native-sidecar" (include "lessor.cel.native" .))
  "cpuRequest" (list "cpu-request" $amounts.cpuRequest)
  "cpuLimit" (list "cpu-limit" $amounts.cpuLimit)
  "memoryRequest" (list "memory-request" $amounts.memoryRequest)
  "memoryLimit" (list "memory-limit" $amounts.memoryLimit)
  "logLevel" (list "log-level" $s.logLevel)
  "pool" (list "pool" $s.pool)
  "drainSaid" (list "drain" (include "lessor.cel.drain" .))
  "java" (list "java" "false")
  "sharing" (list "share-process-namespace" "")
}}
- name: {{ $name }}
  expression: {{ include "lessor.cel.said" (dict "name" (index $said 0) "default" (index $said 1)) | toJson }}
{{- end }}
{{- range $name, $said := dict
  "upstreams" (list "upstreams" (include "lessor.upstreams" . | splitList ","))
  "only" (list "containers" list)
  "skip" (list "skip-containers" list)
  "keep" (list "keep-env" list)
}}
- name: {{ $name }}
  expression: {{ include "lessor.cel.list" (dict "name" (index $said 0) "default" (index $said 1)) | toJson }}
{{- end }}
- name: initNames
  expression: "has(object.spec.initContainers) ? object.spec.initContainers.map(c, c.name) : []"
- name: appNames
  expression: "object.spec.containers.map(c, c.name)"
- name: every
  expression: "(has(object.spec.initContainers) ? object.spec.initContainers.map(c, c) : []) + object.spec.containers.map(c, c)"
- name: there
  expression: "'lessor' in variables.initNames || 'lessor' in variables.appNames"
# There already, by this policy, the webhook, or a template that was made from such a pod.
- name: marked
  expression: >-
    variables.there && 'lessor.dev/injected' in variables.labels && variables.labels['lessor.dev/injected'] == 'true'
    && 'lessor.dev/status' in variables.ann
# What is marked and has another container of that name is refused.
- name: ours
  expression: >-
    variables.marked && variables.every.filter(c, c.name == 'lessor').size() == 1
    && variables.every.exists(c, c.name == 'lessor' && (!has(c.command) || c.command.size() == 0)
    && has(c.args) && c.args.size() > 0 && c.args[0] == 'run'
    && has(c.volumeMounts) && c.volumeMounts.exists(m, m.name == 'lessor-config'))
- name: windows
  expression: >-
    (has(object.spec.os) && object.spec.os.name == 'windows')
    || (has(object.spec.nodeSelector) && 'kubernetes.io/os' in object.spec.nodeSelector
    && object.spec.nodeSelector['kubernetes.io/os'] == 'windows')
- name: hostNetwork
  expression: "has(object.spec.hostNetwork) && object.spec.hostNetwork == true"
- name: wanted
  expression: >-
    variables.label in ['true', 'enabled'] && !(request.namespace in {{ toJson (default list .Values.injection.excludedNamespaces) }})
    && (variables.there ? variables.marked : !variables.windows && !variables.hostNetwork)
- name: grace
  expression: "has(object.spec.terminationGracePeriodSeconds) ? (int(object.spec.terminationGracePeriodSeconds) < 0 ? 1 : int(object.spec.terminationGracePeriodSeconds)) : 30"
# A drain that is longer than the pod's grace would end by a kill.
- name: longest
  expression: "variables.grace > 2 ? variables.grace - 2 : 1"
- name: drainRight
  expression: "variables.drainSaid.matches('^[0-9]{1,9}s?$')"
- name: drainNumber
  expression: "variables.drainRight ? int(variables.drainSaid.replace('s', '')) : 0"
- name: drain
  expression: "variables.drainNumber > variables.longest ? variables.longest : variables.drainNumber"
{{- end -}}

{{/* What must hold of a pod that is to get a sidecar; the same in the policy that gives it and in the one that refuses. */}}
{{- define "lessor.cel.rules" -}}
{{- $guarded := printf "[variables.secret, %s]" (squote .Values.sidecar.secret) -}}
{{- $name := `'^[a-z0-9._-]{1,64}$'` -}}
{{- $quantity := `'^[0-9](([0-9]{0,17})|([0-9]{0,8}[.][0-9]{0,8}))(Ki|Mi|Gi|Ti|Pi|Ei|n|u|m|k|M|G|T|P|E)?$'` -}}
- that: "!variables.there || variables.ours"
  message: >-
    the pod is marked as one that has its sidecar, and its container `lessor` is not lessor's; take out label
    lessor.dev/injected and annotation lessor.dev/status, and rename the container
- that: "variables.mode in ['base-url', 'proxy', 'both']"
  message: annotation lessor.dev/mode must be base-url, proxy or both
- that: "variables.pool == '' || variables.pool.matches({{ $name }})"
  message: annotation lessor.dev/pool must be a name of a-z 0-9 . _ -
- that: "variables.image.matches('^[A-Za-z0-9]([A-Za-z0-9._/:@+-]*[A-Za-z0-9._+-])?$') && variables.image.size() <= 512"
  message: annotation lessor.dev/image must be an image such as lessor:1.0 or host/lessor:1.0
- that: "variables.secret.matches('^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$') && variables.secret.size() <= 253"
  message: annotation lessor.dev/secret must be a name of lower-case letters, digits, - and .
- that: "variables.native in ['true', 'false']"
  message: annotation lessor.dev/native-sidecar must be "true" or "false"
- that: "variables.java in ['true', 'false']"
  message: annotation lessor.dev/java must be "true" or "false"
- that: "variables.logLevel in ['error', 'warn', 'info', 'debug', 'trace']"
  message: annotation lessor.dev/log-level must be one of error, warn, info, debug, trace
- that: "[variables.cpuRequest, variables.cpuLimit, variables.memoryRequest, variables.memoryLimit].all(q, q.matches({{ $quantity }}) && q.matches('[1-9]'))"
  message: lessor.dev/cpu-request, cpu-limit, memory-request and memory-limit must be amounts above 0 such as 50m or 64Mi
- that: "[variables.cpuRequest, variables.cpuLimit].all(q, q.matches('[0-9.num]$'))"
  message: lessor.dev/cpu-request and cpu-limit must be amounts of CPU such as 50m or 1
- that: >-
    [[variables.cpuRequest, variables.cpuLimit], [variables.memoryRequest, variables.memoryLimit]].all(pair,
    !pair.all(q, q.matches({{ $quantity }})) || quantity(pair[0]).compareTo(quantity(pair[1])) <= 0)
  message: a request of lessor.dev/cpu-request or memory-request is above its limit (the default, where it is not set)
- that: "variables.upstreams.size() > 0 && variables.upstreams.all(p, p.matches({{ $name }}))"
  message: annotation lessor.dev/upstreams must be providers' names with commas between
- that: "!('lessor.dev/containers' in variables.ann) || (variables.only.size() > 0 && variables.only.all(n, n.matches('^[a-z0-9-]{1,63}$')))"
  message: annotation lessor.dev/containers must be names of containers with commas between
- that: "!('lessor.dev/skip-containers' in variables.ann) || (variables.skip.size() > 0 && variables.skip.all(n, n.matches('^[a-z0-9-]{1,63}$')))"
  message: annotation lessor.dev/skip-containers must be names of containers with commas between
- that: "!('lessor.dev/keep-env' in variables.ann) || (variables.keep.size() > 0 && variables.keep.all(n, n.matches('^[!-<>-~]+$')))"
  message: annotation lessor.dev/keep-env must be names of variables with commas between
- that: "variables.drainNumber >= 1 && variables.drainNumber <= 3600 && (!('lessor.dev/drain' in variables.ann) || variables.drainNumber <= variables.longest)"
  message: annotation lessor.dev/drain must be whole seconds, and 2 s below terminationGracePeriodSeconds (30 where it is not set)
- that: "variables.sharing == 'accept' || (variables.sharing == '' && !('lessor.dev/share-process-namespace' in variables.ann))"
  message: annotation lessor.dev/share-process-namespace must be accept, or not there
- that: >-
    variables.sharing == 'accept' || !((has(object.spec.shareProcessNamespace) && object.spec.shareProcessNamespace == true)
    || (has(object.spec.hostPID) && object.spec.hostPID == true))
  message: >-
    shareProcessNamespace or hostPID lets the pod's containers read lessor's memory and its mounted Secret; take it
    out, or set annotation lessor.dev/share-process-namespace to accept
- that: "variables.there || !has(object.spec.volumes) || !object.spec.volumes.exists(v, v.name in ['lessor-config', 'lessor-ca', 'lessor-run'])"
  message: a volume of the pod has one of lessor's names (lessor-config, lessor-ca, lessor-run); rename it
- that: >-
    !has(object.spec.volumes) || !object.spec.volumes.exists(v, !(variables.there && v.name == 'lessor-config')
    && ((has(v.secret) && has(v.secret.secretName) && v.secret.secretName in {{ $guarded }})
    || (has(v.azureFile) && v.azureFile.secretName in {{ $guarded }})
    {{- range $kind, $reference := dict "csi" "nodePublishSecretRef" "flexVolume" "secretRef" "iscsi" "secretRef" "cephfs" "secretRef" "rbd" "secretRef" "scaleIO" "secretRef" "storageos" "secretRef" }}
    || (has(v.{{ $kind }}) && has(v.{{ $kind }}.{{ $reference }}) && v.{{ $kind }}.{{ $reference }}.name in {{ $guarded }})
    {{- end }}
    || (has(v.projected) && has(v.projected.sources)
    && v.projected.sources.exists(s, has(s.secret) && s.secret.name in {{ $guarded }}))))
  message: a volume of the pod holds lessor's Secret, which only lessor's container may have; take it out
- that: >-
    variables.every.all(c, c.name == 'lessor' || !has(c.volumeMounts) || c.volumeMounts.all(m,
    !(m.name in ['lessor-config', 'lessor-run'])
    && (m.name == 'lessor-ca' ? has(m.readOnly) && m.readOnly == true : !m.mountPath.matches('^/run/lessor/ca/*$'))))
  message: >-
    a container mounts lessor's Secret, its socket, its certificates to write, or something else at /run/lessor/ca;
    take that out
- that: >-
    variables.every.all(c, c.name == 'lessor' || ((!has(c.env) || !c.env.exists(e, has(e.valueFrom)
    && has(e.valueFrom.secretKeyRef) && e.valueFrom.secretKeyRef.name in {{ $guarded }}))
    && (!has(c.envFrom) || !c.envFrom.exists(e, has(e.secretRef) && e.secretRef.name in {{ $guarded }}))))
  message: a container has variables of lessor's Secret, which only lessor's may have; take them out
- that: "variables.every.all(c, c.name == 'lessor' || !has(c.ports) || !c.ports.exists(p, p.containerPort in [8321, 8322]))"
  message: a container has port 8321 or 8322, which is lessor's; let it listen on another
{{- end -}}

{{/* What goes where: only what the policy that injects needs. */}}
{{- define "lessor.cel.work" -}}
{{- $door := "http://127.0.0.1:8321" -}}
{{- $providers := .Files.Get "files/providers.json" | fromJson -}}
{{- $addresses := dict -}}
{{- $keys := dict -}}
{{- range $name, $provider := $providers -}}
{{- $own := list -}}
{{- range $provider.addresses -}}
{{- $parts := splitn "=" 2 . -}}
{{- $own = append $own (printf "%s=%s/%s%s" $parts._0 $door $name $parts._1) -}}
{{- end -}}
{{- if $own -}}{{- $_ := set $addresses $name $own -}}{{- end -}}
{{- $_ := set $keys $name $provider.keys -}}
{{- end -}}
- name: addresses
  expression: {{ toJson $addresses | toJson }}
- name: keys
  expression: {{ toJson $keys | toJson }}
# A pod that has its sidecar is completed in the mode that it has.
- name: way
  expression: >-
    variables.ours && variables.ann['lessor.dev/status'].matches('"mode" *: *"base-url"') ? 'base-url'
    : variables.ours && variables.ann['lessor.dev/status'].matches('"mode" *: *"proxy"') ? 'proxy'
    : variables.ours && variables.ann['lessor.dev/status'].matches('"mode" *: *"both"') ? 'both' : variables.mode
- name: base
  expression: "variables.way != 'proxy'"
- name: proxy
  expression: "variables.way != 'base-url'"
- name: isNative
  expression: "variables.native == 'true'"
# Init containers before a sidecar cannot reach it.
- name: early
  expression: >-
    variables.initNames.filter(n, n != 'lessor' && (variables.there
    ? 'lessor' in variables.initNames && variables.initNames.indexOf(n) > variables.initNames.indexOf('lessor')
    : variables.isNative))
- name: others
  expression: >-
    ['istio-proxy', 'istio-init', 'istio-validation', 'linkerd-proxy', 'linkerd-init', 'linkerd-network-validator',
    'vault-agent', 'vault-agent-init', 'consul-dataplane', 'kuma-sidecar', 'kuma-init', 'daprd', 'cloud-sql-proxy']
- name: chosen
  expression: >-
    (variables.early + variables.appNames).filter(n, n != 'lessor' && !(n in variables.skip)
    && ('lessor.dev/containers' in variables.ann ? n in variables.only : !(n in variables.others)))
- name: records
  expression: >-
    variables.early.filter(n, n in variables.chosen).map(n, {
    'path': dyn('/spec/initContainers/' + string(variables.initNames.indexOf(n))),
    'c': dyn(object.spec.initContainers[variables.initNames.indexOf(n)])})
    + variables.appNames.filter(n, n in variables.chosen).map(n, {
    'path': dyn('/spec/containers/' + string(variables.appNames.indexOf(n))),
    'c': dyn(object.spec.containers[variables.appNames.indexOf(n)])})
- name: upTo
  expression: {{ until 128 | toJson | toJson }}
- name: bundles
  expression: >-
    ['SSL_CERT_FILE', 'REQUESTS_CA_BUNDLE', 'CURL_CA_BUNDLE', 'AWS_CA_BUNDLE', 'NODE_EXTRA_CA_CERTS', 'GIT_SSL_CAINFO', 'PIP_CERT', 'DENO_CERT', 'CARGO_HTTP_CAINFO']
# Where one of a provider's addresses is the app's own, so are all, and so is its key.
- name: providers
  expression: >-
    [variables.upstreams.filter(p, p in variables.keys)]
    .map(l, variables.upTo.filter(i, i < l.size() && l.indexOf(l[i]) == i).map(i, l[i]))[0].map(p, {
    'addresses': dyn(p in variables.addresses ? variables.addresses[p] : []), 'keys': dyn(variables.keys[p])})
# The variables that are set, or looked at before others are. Entries of other names are left out from here on: a
# container may have hundreds, and an expression has a budget.
- name: minds
  expression: >-
    variables.providers.map(u, (u.addresses.map(p, p.split('=')[0]) + u.keys).join('\u0001')).join('\u0001').split('\u0001')
    + ['http_proxy', 'HTTP_PROXY', 'https_proxy', 'HTTPS_PROXY', 'all_proxy', 'ALL_PROXY', 'no_proxy', 'NO_PROXY', 'NODE_USE_ENV_PROXY', 'JAVA_TOOL_OPTIONS', 'SYSTEM_WGETRC']
    + variables.bundles
- name: named
  expression: >-
    variables.records.map(a, {'path': dyn(a.path), 'c': dyn(a.c),
    'entries': dyn(has(a.c.env) ? a.c.env.filter(e, e.name in variables.minds) : []),
    'mounted': dyn(has(a.c.volumeMounts) && a.c.volumeMounts.exists(m, m.name == 'lessor-ca' && m.mountPath.matches('^/run/lessor/ca/*$')))})
    .map(a, {'path': dyn(a.path), 'c': dyn(a.c), 'entries': dyn(a.entries), 'mounted': dyn(a.mounted),
    'names': dyn(a.entries.map(e, e.name))})
# Values that are written in the pod. Of a name that stands twice the later one counts. One with a character in it
# that parts lists here is left alone, like one from elsewhere.
- name: literal
  expression: >-
    variables.named.map(a, {'path': dyn(a.path), 'c': dyn(a.c), 'names': dyn(a.names), 'mounted': dyn(a.mounted),
    'lits': dyn(a.names.map(n, a.entries[a.names.lastIndexOf(n)])
    .filter(e, !has(e.valueFrom) && !(has(e.value) && e.value.matches('[\u0001\u0002]')))
    .map(e, e.name + '=' + (has(e.value) ? e.value : '')))})
# A variable's own entries, those of its other case, then ours, each once. Alone, * means all to most clients; with
# more beside it, it would mean nothing.
- name: lists
  expression: >-
    variables.literal.map(a, {'path': dyn(a.path), 'c': dyn(a.c), 'names': dyn(a.names), 'lits': dyn(a.lits), 'mounted': dyn(a.mounted),
    'low': dyn(a.lits.filter(l, l.startsWith('no_proxy=')).map(l, l.substring(9))),
    'up': dyn(a.lits.filter(l, l.startsWith('NO_PROXY=')).map(l, l.substring(9)))})
- name: excepted
  expression: >-
    variables.lists.map(a, {'path': dyn(a.path), 'c': dyn(a.c), 'names': dyn(a.names), 'lits': dyn(a.lits), 'mounted': dyn(a.mounted),
    'low': dyn({{ include "lessor.cel.except" (dict "own" "a.low" "other" "a.up" "more" (default list .Values.sidecar.noProxy)) }}),
    'up': dyn({{ include "lessor.cel.except" (dict "own" "a.up" "other" "a.low" "more" (default list .Values.sidecar.noProxy)) }})})
{{- $pairs := dict }}
{{- range list "http_proxy" "HTTP_PROXY" "https_proxy" "HTTPS_PROXY" }}
{{- $_ := set $pairs . (include "lessor.cel.free" (dict "name" (squote .) "pair" (printf "'%s=%s'" . $door))) }}
{{- end }}
# Both cases of a proxy variable are one setting.
- name: proxied
  expression: >-
    variables.excepted.map(a, {'path': dyn(a.path), 'c': dyn(a.c), 'names': dyn(a.names), 'lits': dyn(a.lits), 'mounted': dyn(a.mounted), 'low': dyn(a.low), 'up': dyn(a.up),
    'plain': dyn(variables.proxy && {{ $pairs.http_proxy }} && {{ $pairs.HTTP_PROXY }}),
    'secure': dyn(variables.proxy && {{ $pairs.https_proxy }} && {{ $pairs.HTTPS_PROXY }}),
    'excepts': dyn((variables.proxy || ['http_proxy', 'HTTP_PROXY', 'https_proxy', 'HTTPS_PROXY', 'all_proxy', 'ALL_PROXY'].exists(n, n in a.names))
    && ['no_proxy', 'NO_PROXY'].all(n, !(n in variables.keep) && (!(n in a.names) || a.lits.exists(l, l.startsWith(n + '=')))))})
# Java's own words for the same; nonProxyHosts knows no networks.
- name: javas
  expression: >-
    variables.proxied.map(a, {'path': dyn(a.path), 'c': dyn(a.c), 'names': dyn(a.names), 'lits': dyn(a.lits), 'mounted': dyn(a.mounted), 'low': dyn(a.low), 'up': dyn(a.up),
    'plain': dyn(a.plain), 'secure': dyn(a.secure), 'excepts': dyn(a.excepts),
    'jvm': dyn('-Dhttp.proxyHost=127.0.0.1 -Dhttp.proxyPort=8321 -Dhttp.nonProxyHosts='
    + a.low.split(',').filter(x, x.matches('^[A-Za-z0-9._:*$()-]*$'))
    .map(x, isIP(x) && x.contains(':') ? '[' + x + ']' : x.startsWith('.') ? '*' + x : x).join('|')
    + (a.secure ? ' -Dhttps.proxyHost=127.0.0.1 -Dhttps.proxyPort=8321 -Djavax.net.ssl.trustStore=/run/lessor/ca/ca-bundle.p12 -Djavax.net.ssl.trustStoreType=PKCS12' : '')),
    'now': dyn(a.lits.filter(l, l.startsWith('JAVA_TOOL_OPTIONS=')).map(l, l.substring(18)))})
{{- $address := include "lessor.cel.free" (dict "name" "p.split('=')[0]" "pair" "p") }}
{{- $key := include "lessor.cel.free" (dict "name" "k" "pair" "k + '=lessor-placeholder'") }}
- name: planned
  expression: >-
    variables.javas.map(a, {'path': dyn(a.path), 'c': dyn(a.c), 'names': dyn(a.names), 'lits': dyn(a.lits), 'mounted': dyn(a.mounted), 'secure': dyn(a.secure),
    'adds': dyn((variables.providers.map(u, (
    (variables.base && u.addresses.all(p, {{ $address }}) ? u.addresses : [])
    + ((variables.proxy || u.addresses.all(p, {{ $address }})) && u.keys.all(k, ({{ $key }}) && !(k in a.names)) ? [u.keys[0] + '=lessor-placeholder'] : [])
    ).join('\u0001')).join('\u0001').split('\u0001')
    + (a.plain ? ['http_proxy={{ $door }}', 'HTTP_PROXY={{ $door }}'] : [])
    + (a.secure ? ['https_proxy={{ $door }}', 'HTTPS_PROXY={{ $door }}'] : [])
    + (a.excepts ? ['no_proxy=' + a.low, 'NO_PROXY=' + a.up] : [])
    + (a.plain || a.secure ? ['NODE_USE_ENV_PROXY=1'] : [])
    + (a.secure ? variables.bundles.map(n, n + '=/run/lessor/ca/ca-bundle.pem')
    + ['SYSTEM_WGETRC=/run/lessor/ca/wgetrc'] : [])
    + (variables.java == 'true' && a.plain ? ['JAVA_TOOL_OPTIONS=' + a.jvm] : []))
    .filter(p, p != '' && !(p.split('=')[0] in a.names) && !(p.split('=')[0] in variables.keep))),
    'extends': dyn((a.excepts ? ['no_proxy=' + a.low, 'NO_PROXY=' + a.up].filter(p, p.split('=')[0] in a.names && !(p in a.lits)) : [])
    + (variables.java == 'true' && a.plain && !('JAVA_TOOL_OPTIONS' in variables.keep)
    ? a.now.filter(v, !v.contains(a.jvm) && !v.contains('proxyHost')).map(v, 'JAVA_TOOL_OPTIONS=' + (v == '' ? a.jvm : v + ' ' + a.jvm)) : []))})
# Paths and values of what is added to each container.
- name: appended
  expression: >-
    variables.planned.map(a, a.adds.map(p, a.path + '/env/-\u0002' + p).join('\u0001')).filter(x, x != '')
    .join('\u0001').split('\u0001').filter(x, x != '')
- name: replaced
  expression: >-
    variables.planned.map(a, a.extends.map(p, a.path + '/env/' + string(a.c.env.map(e, e.name).lastIndexOf(p.split('=')[0])) + '/value\u0002' + p.substring(p.indexOf('=') + 1))
    .join('\u0001')).filter(x, x != '').join('\u0001').split('\u0001').filter(x, x != '')
- name: mounting
  expression: "variables.planned.filter(a, a.secure && !a.mounted)"
- name: args
  expression: >-
    ['run', '--config=/etc/lessor/lessor.toml', '--proxy=127.0.0.1:8321', '--admin-ip=$(POD_IP)', '--ca-dir=/run/lessor/ca',
    '--grace=' + string(variables.drain) + 's',
    '--linger=' + (variables.isNative ? '1' : variables.drain < 5 ? string(variables.drain) : '5') + 's']
    + (variables.pool != '' ? ['--default-pool=' + variables.pool] : [])
    + ('lessor.dev/upstreams' in variables.ann ? ['--upstreams=' + variables.upstreams.join(',')] : [])
    + (!variables.isNative ? ['--quit'] : [])
- name: status
  expression: >-
    '{"config":"{{ include "lessor.cel.hash" . }}","mode":"' + variables.mode + '","native":' + variables.native
    + ',"version":"{{ .Chart.AppVersion }}"}'
- name: acts
  expression: >-
    variables.wanted
    {{- range include "lessor.cel.rules" . | fromYamlArray }}
    && ({{ .that }})
    {{- end }}
{{- end -}}
