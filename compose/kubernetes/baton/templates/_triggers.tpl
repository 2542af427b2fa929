{{/* What a pool is scaled by, as YAML: a figure's name, its query, and its target, of each pod or of
     the pool. docs/kubernetes.md has the reasons, bench/scaling.py what they do in an hour of traffic. */}}
{{- define "baton.triggers" -}}
{{- $root := index . 0 -}}{{- $pool := index . 1 -}}
{{- $of := printf "namespace=%q,release=%q" $root.Release.Namespace $root.Release.Name -}}
{{- $in := printf "%s,pool=%q" $of $pool.name -}}
{{- $pods := printf "count(baton_prefill_tokens_per_second{%s})" $in -}}
{{- $busy := printf "sum(rate(baton_prefill_tokens_total{%s,source=\"computed\"}[1m]) / ignoring (source) (baton_prefill_tokens_per_second{%s} > 0))" $in $in -}}
{{- $queue := printf "max(baton_queue_drain_seconds{%s})" $of -}}
{{- if ne $pool.role "decode" }}
# Pods that would be needed if each computed prompts all the time. At 0.6 a prompt waits for 0.75 of its own time.
- {name: busy, each: true, target: 0.6, query: {{ printf "%s or vector(0)" $busy | quote }}}
# And those that would empty the queue in two minutes. If the pool is not full, others make it wait.
- {name: queue, each: true, target: 1.0, query: {{ printf "(%s + %s * %s / 120) and on () (%s > 0.9 * %s) or vector(0)" $busy $queue $pods $busy $pods | quote }}}
{{- end }}
{{- if ne $pool.role "prefill" }}
# Pods that would be needed if each were full. A quarter is left for what comes while pods start.
- {name: pages, each: true, target: 0.75, query: {{ printf "sum(sum without (state) (baton_kv_pages{%s,state=~\"used|granted\"}) / baton_kv_pages_capacity{%s}) or vector(0)" $in $in | quote }}}
- {name: slots, each: true, target: 0.8, query: {{ printf "sum(baton_running_sequences{%s} / baton_max_sequences{%s}) or vector(0)" $in $in | quote }}}
{{- end }}
{{- if eq $pool.role "decode" }}
# The largest batch whose steps are short enough is what a pod can do.
- {name: step, each: false, target: {{ mulf 0.00085 $root.Values.scaling.tokenMillis }}, query: {{ printf "histogram_quantile(0.9, sum by (le) (rate(baton_engine_step_seconds_bucket{%s}[1m]))) > 0 or vector(0)" $in | quote }}}
{{- end }}
{{- end }}

{{/* Up: twice as many in 30 s. Down: one in 120 s, once nobody has asked for it for so long. */}}
{{- define "baton.scaling-behavior" -}}
scaleUp:
  stabilizationWindowSeconds: 0
  policies: [{type: Percent, value: 100, periodSeconds: 30}]
scaleDown:
  stabilizationWindowSeconds: {{ .Values.scaling.windowSeconds }}
  policies: [{type: Pods, value: 1, periodSeconds: 120}]
{{- end }}
