#!/usr/bin/env bash
# A router, one prefill worker and one decode worker, each on a GPU of its own, under `baton bench`
# through the gRPC door, idle rows first. Writes rows.jsonl, rows.txt and up.log (all three
# processes) to $OUT. Every wait is bounded: with one run a row about three minutes after a cold
# start, with REPEATS=3 about eight. MODEL, DEVICE, GPUS and BATON_* may be set from outside; ROWS is
# a list of "RATE NUM PROMPT OUTPUT" separated by commas, rate 0 means one by one. Seeds are fresh
# unless SEED is set. The client needs numpy and nothing else beside Baton.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${OUT:-/tmp/pd}; mkdir -p "$out"
python=${PYTHON:-python3}
port=50051 admin=9090
rows=${ROWS:-0 20 1024 64,0 12 8000 64,24 300 1024 256,3 300 8000 200}
export PYTHONUNBUFFERED=1 GRPC_VERBOSITY=error
export BATON_LOAD_FORMAT=${BATON_LOAD_FORMAT:-dummy} BATON_MAX_SEQUENCES=${BATON_MAX_SEQUENCES:-128}
[ "${DEVICE:-cuda}" = cpu ] || export CUDA_VISIBLE_DEVICES=${GPUS:-0,1}

began=$SECONDS
"$python" -m baton up --model "${MODEL:-bench/shapes/llama-8b}" --device "${DEVICE:-cuda}" \
  --prefill 1 --decode 1 --kv-memory-gib "${KV_GIB:-40}" --port $port --http-port 0 \
  --admin-port $admin --drain-s 5 >"$out/up.log" 2>&1 &
up=$!
stop() {
  kill -TERM $up 2>/dev/null
  for _ in $(seq 120); do kill -0 $up 2>/dev/null || return 0; sleep 0.1; done
  kill -KILL $up 2>/dev/null # The processes below end with it.
}
trap stop EXIT

until grep -q "Baton is ready" "$out/up.log"; do
  if ! kill -0 $up 2>/dev/null || [ $((SECONDS - began)) -gt "${READY_S:-110}" ]; then
    echo "not ready after $((SECONDS - began)) s"; tail -60 "$out/up.log"; exit 1
  fi
  sleep 0.5
done
echo "ready after $((SECONDS - began)) s"
grep -E "peer (open|failed|refused)" "$out/up.log"

declare -A idle # TTFT p50 by prompt length, ms: what a queue is simulated with
IFS=, read -ra list <<<"$rows"
for row in "${list[@]}"; do
  if [ $((SECONDS - began)) -gt "${LAST_ROW_S:-450}" ]; then echo "no time for: $row"; continue; fi
  read -r rate num isl osl <<<"$row"
  [ "$rate" = 0 ] && repeats=1 || repeats=${REPEATS:-1}
  timeout "${ROW_S:-400}" "$python" -m baton bench --url 127.0.0.1:$port --rate "$rate" \
    --num "$num" --prompt-tokens "$isl" --output-tokens "$osl" --repeats "$repeats" \
    --vocabulary "${VOCABULARY:-49000}" --admin 127.0.0.1:$admin --json \
    ${SEED:+--seed "$SEED"} ${idle[$isl]:+--simulate-idle-ttft-ms "${idle[$isl]}"} \
    >"$out/row.json" 2>"$out/row.err" || { echo "row failed or is not valid: $row"; tail "$out/row.err"; }
  [ -s "$out/row.json" ] || { tail -30 "$out/up.log"; continue; }
  cat "$out/row.json" >>"$out/rows.jsonl"
  "$python" - "$out/row.json" <<'PYTHON' | tee -a "$out/rows.txt"
import json, sys
row = json.load(open(sys.argv[1]))
load = row["workload"]
for run in row["runs"]:
    print(load["prompt_tokens"], "+", load["output_tokens"], "@", run["offered_rate"] or "one by one",
          "seed", run["seed"], f"{run['ok']} of {run['requests']}")
    for name in ("ttft_ms", "simulated_ttft_ms", "second_gap_ms", "itl_ms", "tpot_ms", "e2e_ms"):
        if run[name]:
            print(f"  {name:18}", *(f"{key} {run[name][key]:.2f}" for key in ("p50", "p99", "max")))
    print("  client lag p99", run["client"]["lag_ms"]["p99"], "loop", run["client"]["loop_lag_ms"]["p99"])
PYTHON
  if [ "$rate" = 0 ]; then
    idle[$isl]=$("$python" -c 'import json, sys; print(json.load(open(sys.argv[1]))["runs"][0]["ttft_ms"]["p50"])' "$out/row.json")
  fi
done
rm -f "$out/row.json" "$out/row.err"
grep -E "peer (open|failed|refused)|WARN|ERROR" "$out/up.log" | head -20
