{{/* A worker's pod, or with `agent` that of a host behind the first of a worker's, which routers do not
     see: it has no ports, and ends with its group. */}}
{{- define "baton.worker" -}}
{{- $root := index . 0 -}}{{- $pool := index . 1 -}}{{- $is_agent := index . 2 -}}
{{- $name := include "baton.pool" (list $root $pool) -}}
{{- $nodes := int ($pool.nodes | default 1) -}}{{- $pp := int ($pool.pp | default 1) -}}
metadata:
  labels:
    {{- include "baton.labels" $root | nindent 4 }}
    app.kubernetes.io/component: worker
    baton/pool: {{ $pool.name }}
    baton/role: {{ $pool.role }}
spec:
  automountServiceAccountToken: false
  {{- $drain := hasKey $pool "drainSeconds" | ternary $pool.drainSeconds 60 }}
  terminationGracePeriodSeconds: {{ add $drain 20 }}
  securityContext: {{- include "baton.pod-security" $root | nindent 4 }}
  {{- with $root.Values.image.pullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $pool.nodeSelector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $pool.tolerations }}
  tolerations: {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: worker
      image: {{ include "baton.image" (list $root (gt (int $pool.gpus) 0 | ternary $root.Values.image.gpu $root.Values.image.cpu)) }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      args: [worker, --role={{ $pool.role }}]
      env:
        {{- if gt $nodes 1 }}
        # All hosts of a worker have its name. LeaderWorkerSet adds who leads, and which host this is.
        - name: GROUP
          valueFrom: {fieldRef: {fieldPath: "metadata.labels['leaderworkerset.sigs.k8s.io/group-index']"}}
        - {name: BATON_NAME, value: "{{ $name }}-$(GROUP)"}
        - {name: BATON_FABRIC, value: {{ $pool.fabric }}}
        {{- else }}
        {{- include "baton.env-name" $root | nindent 8 }}
        {{- end }}
        {{- include "baton.env" $root | nindent 8 }}
        - name: POD_IP
          valueFrom: {fieldRef: {fieldPath: status.podIP}}
        - {name: BATON_LISTEN, value: "0.0.0.0:50060"}
        - {name: BATON_ADVERTISE, value: "$(POD_IP):50060"}
        - {name: BATON_ROUTERS, value: {{ printf "%s-routers:50050" $root.Release.Name }}}
        - {name: BATON_MODEL, value: {{ $root.Values.model | quote }}}
        - {name: BATON_DEVICE, value: {{ gt (int $pool.gpus) 0 | ternary "cuda" "cpu" }}}
        - {name: BATON_TP, value: {{ div (mul (max 1 (int $pool.gpus)) $nodes) $pp | quote }}}
        - {name: BATON_PP, value: {{ $pp | quote }}}
        - {name: BATON_DRAIN_S, value: {{ $drain | quote }}}
        {{- with $root.Values.adapters }}
        {{- if .claim }}
        - {name: BATON_ADAPTERS_DIR, value: /adapters}
        {{- end }}
        {{- $loaded := list }}
        {{- range $adapter, $folder := .loaded }}
        {{- $loaded = append $loaded (printf "%s=/adapters/%s" $adapter $folder) }}
        {{- end }}
        {{- with $loaded }}
        - {name: BATON_ADAPTERS, value: {{ join "," . | quote }}}
        {{- end }}
        {{- end }}
        {{- range $key, $value := $pool.env }}
        - {name: {{ $key }}, value: {{ $value | quote }}}
        {{- end }}
      {{- include "baton.secret-env" (list $root $pool) | nindent 6 }}
      {{- if not $is_agent }}
      ports:
        - {name: worker, containerPort: 50060}
        - {name: admin, containerPort: 9090}
      startupProbe:
        httpGet: {path: /health/ready, port: admin}
        timeoutSeconds: 5
        periodSeconds: 10
        failureThreshold: {{ mul 6 ($pool.startMinutes | default 15) }}
      readinessProbe:
        httpGet: {path: /health/ready, port: admin}
        timeoutSeconds: 5
        periodSeconds: 10
        failureThreshold: 2
      {{- /* A step that hangs ends the process by itself: this finds a loop that answers nobody. */}}
      livenessProbe:
        httpGet: {path: /health/live, port: admin}
        timeoutSeconds: 5
        periodSeconds: 20
        failureThreshold: 6
      {{- end }}
      {{- $memory := $pool.memory | default "16Gi" }}
      resources:
        requests:
          cpu: {{ $pool.cpu | default "2" | quote }}
          memory: {{ $memory }}
        limits:
          memory: {{ $memory }}
          {{- if $pool.gpus }}
          nvidia.com/gpu: {{ $pool.gpus }}
          {{- end }}
          {{- with $pool.rdma }}
          {{ . }}: 1
          {{- end }}
      securityContext: {{- include "baton.security" (ne ($pool.rdma | default "") "") | nindent 8 }}
      volumeMounts:
        {{- include "baton.mounts" $root | nindent 8 }}
        - {name: shm, mountPath: /dev/shm}
        {{- if $root.Values.adapters.claim }}
        - {name: adapters, mountPath: /adapters, readOnly: true}
        {{- end }}
  volumes:
    {{- include "baton.volumes" (list $root $name) | nindent 4 }}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: 2Gi}
    {{- with $root.Values.adapters.claim }}
    - name: adapters
      persistentVolumeClaim: {claimName: {{ . }}, readOnly: true}
    {{- end }}
{{- end }}
