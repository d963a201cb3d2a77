#!/usr/bin/env bash
# Make the two Secrets that the manifests refer to, once, with random contents; existing ones are left alone.
#   bash cluster/kuberay/secrets.sh [NAMESPACE]     HF_TOKEN=... adds a Hugging Face token for gated models
set -euo pipefail
namespace=${1:-default}

random() { head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n'; }
exists() { kubectl --namespace "$namespace" get secret "$1" >/dev/null 2>&1; }
# From standard input: what stands among a command's arguments is readable for other users of the machine.
create() { kubectl --namespace "$namespace" create --filename - >/dev/null; }

if exists dspark-secrets; then
    echo "dspark-secrets is there already"
else
    create <<YAML
apiVersion: v1
kind: Secret
metadata: {name: dspark-secrets, labels: {app.kubernetes.io/part-of: dspark}}
stringData:
  redis_password: "$(random)"
  deployment_secret: "$(random)"
  hf_token: "${HF_TOKEN:-}"
YAML
    echo "dspark-secrets made"
fi

if exists dspark-api-keys; then
    echo "dspark-api-keys is there already"
else
    key=sk-$(random)
    create <<YAML
apiVersion: v1
kind: Secret
metadata: {name: dspark-api-keys, labels: {app.kubernetes.io/part-of: dspark}}
stringData:
  keys.yaml: |
    keys:
      - name: first
        sha256: $(printf %s "$key" | sha256sum | cut -d' ' -f1)
YAML
    echo "dspark-api-keys made; the only copy of its key: $key"
fi
