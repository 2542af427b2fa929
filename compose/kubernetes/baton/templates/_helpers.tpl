{{- define "baton.labels" -}}
app.kubernetes.io/name: baton
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{/* Of what the Prometheus operator looks for, which may go by labels of its own. */}}
{{- define "baton.monitor-labels" -}}
{{ include "baton.labels" . }}
{{- with .Values.monitor.labels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "baton.image" -}}
{{- $root := index . 0 -}}{{- $image := index . 1 -}}
{{- if $root.Values.image.tag }}{{ $image }}:{{ $root.Values.image.tag }}{{ else }}{{ $image }}{{ end -}}
{{- end }}

{{/* What a pool is called in the cluster. Its pods, and so its workers, add a number. */}}
{{- define "baton.pool" -}}
{{ (index . 0).Release.Name }}-{{ (index . 1).name }}
{{- end }}

{{- define "baton.security" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]{{ if . }}, add: [IPC_LOCK]{{ end }}}
{{- end }}

{{- define "baton.pod-security" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "baton.env-name" -}}
- name: BATON_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
{{- end }}

{{- define "baton.env" -}}
- {name: BATON_ADMIN, value: "0.0.0.0:9090"}
- {name: BATON_LOG_FORMAT, value: json}
{{- /* Of several routers each would have a part of a trace. */}}
{{- $kept := eq (int .Values.router.replicas) 1 | ternary (printf "%s://%s-routers:50050" (.Values.tls.enabled | ternary "grpcs" "http") .Release.Name) "" }}
{{- with .Values.traces | default $kept }}
- {name: BATON_OTLP_ENDPOINT, value: {{ . | quote }}}
{{- end }}
{{- if .Values.tls.enabled }}
- {name: BATON_TLS_DIR, value: /certs}
{{- else }}
- {name: BATON_INSECURE, value: "true"}
{{- end }}
{{- end }}

{{/* Secrets whose keys become variables: that of all pods, then the pod's own, which wins. */}}
{{- define "baton.secret-env" -}}
{{- $names := compact (list ((index . 0).Values.secretEnv | default "") ((index . 1).secretEnv | default "")) -}}
{{- if $names }}
envFrom:
{{- range uniq $names }}
  - secretRef: {name: {{ . }}}
{{- end }}
{{- end }}
{{- end }}

{{- define "baton.volumes" -}}
{{- $root := index . 0 -}}{{- $holder := index . 1 -}}
- name: tmp
  emptyDir: {}
- name: cache
  persistentVolumeClaim: {claimName: {{ $root.Values.cache.claim | default (printf "%s-cache" $root.Release.Name) }}}
{{- with $root.Values.models.claim }}
- name: models
  persistentVolumeClaim: {claimName: {{ . }}, readOnly: true}
{{- end }}
{{- if $root.Values.tls.enabled }}
- name: certs
  secret: {secretName: {{ $holder }}-tls, defaultMode: 0440}
{{- end }}
{{- end }}

{{- define "baton.mounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: cache, mountPath: /var/cache/baton}
{{- if .Values.models.claim }}
- {name: models, mountPath: /models, readOnly: true}
{{- end }}
{{- if .Values.tls.enabled }}
- {name: certs, mountPath: /certs, readOnly: true}
{{- end }}
{{- end }}
