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

{{/* Labels and annotations of one object; `more` are annotations of its own. */}}
{{- define "lessor.metadata" -}}
{{- $more := default dict .more -}}
{{- with .root -}}
labels:
  {{- include "lessor.selector" . | nindent 2 }}
  app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
  app.kubernetes.io/managed-by: {{ .Release.Service }}
  app.kubernetes.io/part-of: lessor
  helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
  {{- with .Values.commonLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
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

{{- define "lessor.tlsSecret" -}}
{{- if and (eq .Values.certificates.mode "given") (not .Values.certificates.secretName) -}}
{{- fail "certificates.secretName must name the Secret with tls.crt and tls.key where certificates.mode is given" -}}
{{- end -}}
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
{{- $out := .root.Values.injection.excludedNamespaces -}}
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
