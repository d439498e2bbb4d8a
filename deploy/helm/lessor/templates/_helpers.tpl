{{/* Small words that several templates use. */}}

{{- define "lessor.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "lessor.injector" -}}{{ include "lessor.fullname" . }}-injector{{- end -}}

{{/* What picks the injector's pods; it must never change in an upgrade. */}}
{{- define "lessor.selector" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: injector
{{- end -}}

{{/* Fails where somebody's labels have one by which things find each other. */}}
{{- define "lessor.notOurs" -}}
{{- $ours := include "lessor.selector" .root | fromYaml | keys | sortAlpha -}}
{{- range append $ours "lessor.dev/inject" -}}
{{- if hasKey (default dict $.labels) . -}}
{{- fail (printf "%s has %s, which the chart sets itself; take it out" $.name .) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Labels and annotations of one object; `more` are annotations of its own. */}}
{{- define "lessor.metadata" -}}
{{- $more := default dict .more -}}
{{- with .root -}}
labels:
  {{- include "lessor.selector" . | nindent 2 }}
  {{- include "lessor.notOurs" (dict "root" . "labels" .Values.commonLabels "name" "commonLabels") }}
  {{- $usual := dict "app.kubernetes.io/version" .Chart.AppVersion "app.kubernetes.io/managed-by" .Release.Service "app.kubernetes.io/part-of" "lessor" "helm.sh/chart" (printf "%s-%s" .Chart.Name .Chart.Version) }}
  {{- merge dict (default dict .Values.commonLabels) $usual | toYaml | nindent 2 }}
{{- with merge dict $more .Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}
{{- end -}}

{{- define "lessor.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ default .Chart.AppVersion .Values.image.tag }}
{{- end -}}
{{- end -}}

{{- define "lessor.sidecarImage" -}}{{ default (include "lessor.image" .) .Values.sidecar.image }}{{- end -}}

{{- define "lessor.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{ default (include "lessor.injector" .) .Values.serviceAccount.name }}
{{- else -}}
{{ required "serviceAccount.name must be set where serviceAccount.create is false" .Values.serviceAccount.name }}
{{- end -}}
{{- end -}}

{{/* Fails where a certificate of the user's own is not all there, with all that is missing. */}}
{{- define "lessor.given" -}}
{{- $lacks := list -}}
{{- if eq .Values.certificates.mode "given" -}}
{{- if not .Values.certificates.secretName -}}
{{- $lacks = append $lacks "certificates.secretName must name the Secret with tls.crt and tls.key" -}}
{{- end -}}
{{- if not .Values.certificates.given.caBundle -}}
{{- $lacks = append $lacks "certificates.given.caBundle must be the CA of that Secret's certificate, as PEM" -}}
{{- end -}}
{{- end -}}
{{- with $lacks -}}{{- fail (printf "certificates.mode is given: %s" (join "; and " .)) -}}{{- end -}}
{{- end -}}

{{- define "lessor.tlsSecret" -}}
{{- include "lessor.given" . -}}
{{ default (printf "%s-tls" (include "lessor.injector" .)) .Values.certificates.secretName }}
{{- end -}}

{{/* "yes" with the webhook, nothing with the policy. */}}
{{- define "lessor.webhook" -}}{{ if eq .Values.injection.method "webhook" }}yes{{ end }}{{- end -}}

{{/* "yes" where the injector asks the API server for something. */}}
{{- define "lessor.selfManaged" -}}
{{- if and (include "lessor.webhook" .) (eq .Values.certificates.mode "selfManaged") -}}yes{{- end -}}
{{- end -}}

{{/* The namespace of a selector: those opted in, or all others; never those in which nothing is injected. */}}
{{- define "lessor.namespaces" -}}
{{- $out := default list .root.Values.injection.excludedNamespaces -}}
{{- if include "lessor.webhook" .root -}}{{- $out = append $out .root.Release.Namespace | uniq -}}{{- end -}}
matchExpressions:
  - key: lessor.dev/inject
    operator: {{ ternary "In" "NotIn" .optedIn }}
    values: [enabled, "true"]
  {{- with $out }}
  - key: kubernetes.io/metadata.name
    operator: NotIn
    values: {{ toJson . }}
  {{- end }}
{{- end -}}

{{/* The pods of such a namespace: all that did not opt out, or only those that say something else. An unknown word
gets to the injector too, which says so. */}}
{{- define "lessor.pods" -}}
matchExpressions:
  {{- if not .optedIn }}
  - key: lessor.dev/inject
    operator: Exists
  {{- end }}
  - key: lessor.dev/inject
    operator: NotIn
    values: [disabled, "false"]
{{- end -}}

{{/* A container that the `restricted` profile lets in. */}}
{{- define "lessor.restricted" -}}
allowPrivilegeEscalation: false
capabilities:
  drop: [ALL]
privileged: false
readOnlyRootFilesystem: true
runAsGroup: 65532
runAsNonRoot: true
runAsUser: 65532
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{/* A policy bound to the two sets of pods that the webhook has, too: of namespaces that opted in, and of others. */}}
{{- define "lessor.bindings" -}}
{{- $ := . -}}
{{- range $suffix, $optedIn := dict "namespace" true "pod" false }}
---
apiVersion: {{ $.api }}
kind: {{ $.kind }}
metadata:
  name: {{ $.policy }}-{{ $suffix }}
  {{- include "lessor.metadata" (dict "root" $.root) | nindent 2 }}
spec:
  policyName: {{ $.policy }}
  {{- with $.actions }}
  validationActions: {{ toJson . }}
  {{- end }}
  matchResources:
    namespaceSelector:
      {{- include "lessor.namespaces" (dict "root" $.root "optedIn" $optedIn) | nindent 6 }}
    objectSelector:
      {{- include "lessor.pods" (dict "optedIn" $optedIn) | nindent 6 }}
{{- end }}
{{- end -}}

{{/* Providers whose variables apps get, with commas; a slip would leave apps without any. */}}
{{- define "lessor.upstreams" -}}
{{- $catalogue := .Files.Get "files/providers.json" | fromJson | keys | sortAlpha -}}
{{- $known := concat $catalogue (default list .Values.sidecar.ownProviders) -}}
{{- range required "sidecar.upstreams must name a provider at least" .Values.sidecar.upstreams -}}
{{- if not (has . $known) -}}
{{- fail (printf "sidecar.upstreams has %s, which the catalogue does not know (%s); if the Secrets' lessor.toml defines it, put it into sidecar.ownProviders too" . (join ", " $catalogue)) -}}
{{- end -}}
{{- end -}}
{{ join "," .Values.sidecar.upstreams }}
{{- end -}}

{{/* Those of networkPolicy.apps.exceptCidrs that are of one family, as the end of an ipBlock. */}}
{{- define "lessor.except" -}}
{{- $except := list -}}
{{- $byte := "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])" -}}
{{- $four := printf "^%s([.]%s){3}/([1-9]|[12][0-9]|3[0-2])$" $byte $byte -}}
{{- $some := "[0-9a-fA-F]{1,4}(:[0-9a-fA-F]{1,4}){0,6}" -}}
{{- $bits := "/([1-9]|[1-9][0-9]|1[01][0-9]|12[0-8])$" -}}
{{- $six := printf "^(%s)?::(%s)?%s|^[0-9a-fA-F]{1,4}(:[0-9a-fA-F]{1,4}){7}%s" $some $some $bits $bits -}}
{{- range default list .root.Values.networkPolicy.apps.exceptCidrs -}}
{{- $groups := splitList "/" . | first | splitList ":" | compact -}}
{{- $isSix := and (regexMatch $six .) (or (not (contains "::" .)) (lt (len $groups) 8)) -}}
{{- if not (or (regexMatch $four .) $isSix) -}}
{{- fail (printf "networkPolicy.apps.exceptCidrs has %s, which is no network such as 169.254.0.0/16 or fd00:ec2::254/128" .) -}}
{{- end -}}
{{- if eq $isSix $.six -}}{{- $except = append $except . -}}{{- end -}}
{{- end -}}
{{- with $except -}}except: {{ toJson . }}{{- end -}}
{{- end -}}

{{/* The sidecar's amounts as texts, each one that `lessor inject` takes: it would refuse others at its start, and the
policy in every pod. A number of a values file is a float here, and would print as 6.7108864e+07. */}}
{{- define "lessor.amounts" -}}
{{- $factors := dict "" 1 "n" 0.000000001 "u" 0.000001 "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "E" 1e18 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 "Pi" 1125899906842624 "Ei" 1152921504606846976 -}}
{{- $resources := .Values.sidecar.resources -}}
{{- range $what := list "cpu" "memory" -}}
{{- $much := dict -}}
{{- range $side := list "request" "limit" -}}
{{- $path := printf "sidecar.resources.%ss.%s" $side $what -}}
{{- $value := index $resources (printf "%ss" $side) $what -}}
{{- $text := toString $value -}}
{{- if and (kindIs "float64" $value) (eq (float64 $value) (floor $value)) (lt (float64 $value) 1e15) -}}
{{- $text = printf "%d" (int64 $value) -}}
{{- end -}}
{{- if not (and (regexMatch "^[0-9](([0-9]{0,17})|([0-9]{0,8}[.][0-9]{0,8}))(Ki|Mi|Gi|Ti|Pi|Ei|n|u|m|k|M|G|T|P|E)?$" $text) (regexMatch "[1-9]" $text)) -}}
{{- fail (printf "%s is %s, must be an amount above 0 such as 50m or 1 (CPU), 64Mi or 1Gi (memory)" $path $text) -}}
{{- end -}}
{{- $_ := set $much $side (mulf (regexFind "^[0-9.]+" $text) (index $factors (regexFind "[A-Za-z]*$" $text))) }}
{{ $what }}{{ title $side }}: {{ $text | quote }}
{{- end -}}
{{- if gt $much.request $much.limit -}}
{{- fail (printf "sidecar.resources.requests.%s is above sidecar.resources.limits.%s; raise the limit, or lower the request" $what $what) -}}
{{- end -}}
{{- end -}}
{{- end -}}
