#!/usr/bin/env bash
# A router, one prefill worker and one decode worker, each on a GPU of its own, under load through
# the gRPC door, idle rows first. Writes rows.jsonl and up.log (all three processes) to $OUT.
# Every wait is bounded: a cold start, then at most about four minutes. MODEL, DEVICE, GPUS and
# BATON_* may be set from outside; ROWS is a list of "RATE NUM ISL OSL" separated by commas.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${OUT:-/tmp/pd}; mkdir -p "$out"
python=${PYTHON:-python3}
port=50051 admin=9090
rows=${ROWS:-0 12 1024 64,0 8 8000 64,8 80 1024 256,2 40 8000 200,24 300 1024 256,3 90 8000 200}
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

seed=${SEED:-1}
IFS=, read -ra list <<<"$rows"
for row in "${list[@]}"; do
  if [ $((SECONDS - began)) -gt "${LAST_ROW_S:-190}" ]; then echo "no time for: $row"; continue; fi
  read -r rate num isl osl <<<"$row"
  timeout 75 "$python" -m bench.serve_load 127.0.0.1:$port --rate "$rate" --num "$num" \
    --isl "$isl" --osl "$osl" --seed "$seed" --traces 127.0.0.1:$admin --out "$out/rows.jsonl" \
    ${VOCABULARY:+--vocabulary "$VOCABULARY"} || { echo "row failed: $row"; tail -30 "$out/up.log"; }
  seed=$((seed + 1))
done
grep -E "peer (open|failed|refused)|WARN|ERROR" "$out/up.log" | head -20
