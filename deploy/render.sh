#!/usr/bin/env bash
# Writes the plain manifests anew from the chart: render.sh [FOLDER]. A test holds deploy/manifests to what this says.
set -euo pipefail
cd "$(dirname "$0")"
folder=${1:-manifests}

# The policies stand in no namespace.
namespace() {
    echo "apiVersion: v1"
    echo "kind: Namespace"
    echo "metadata:"
    echo "  name: lessor"
    echo "  labels:"
    echo "    pod-security.kubernetes.io/enforce: restricted"
}

render() {
    local name=$1
    shift
    mkdir -p "$folder/$name"
    {
        echo "# Rendered from deploy/helm/lessor by deploy/render.sh; change it there."
        [ "$name" = policy ] || namespace
        "${HELM:-helm}" template lessor helm/lessor --namespace lessor --no-hooks "$@" |
            sed -e '/^ *helm\.sh\/chart: /d' -e '/^ *app\.kubernetes\.io\/managed-by: Helm$/d' -e '/^# Source: /d'
    } >"$folder/$name/lessor.yaml"
}

render webhook
# Nobody knows here for which version of Kubernetes this is, and the injector has no token to ask.
render cert-manager --set certificates.mode=certManager --set-string sidecar.native=true
render policy --set injection.method=policy
