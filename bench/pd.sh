#!/usr/bin/env bash
# ROUTERS routers (1) and PREFILL, DECODE and BOTH workers (1, 1, 0), each on a GPU of its own as far
# as there are GPUs, under `baton bench` through the gRPC door. ROWS is a list separated by commas:
#
#   RATE NUM PROMPT OUTPUT    requests a second (0: one by one), requests, tokens of each
#   azure RATE SECONDS        lengths of Azure's conversation trace, judged by SLO_TTFT_MS (400) and
#                             SLO_ITL_P99_MS (10) request by request
#   lognormal RATE SECONDS [IN OUT]   the same with log-normal lengths, of IN tokens (2,048) and OUT (28)
#                             on average
#   mooncake RATE SECONDS [MOST]  lengths and shared prefixes of Mooncake's conversation trace, likewise:
#                             of its first MOST (600) requests
#   bursts RATE SECONDS       drawn: in one second of four requests come five times as fast as in the
#                             others; three of four are log-normal of 600 + 300 tokens, one of 4,000 + 60
#   waterfall PROMPT OUTPUT   one request, drawn: waterfall.txt
#
# LEVELS judges the same requests by several service levels: "400:12,1000:25" (TTFT and p99 of a
# request's own gaps, ms).
#
# `bench/pd_beside.sh` runs it in turns with another commit, or with other settings.
#
# $OUT gets rows.jsonl, which grows from run to run, up.log of the last one (every process), and the
# table of all rows so far, which is printed last, whatever fails. The default rows take about three
# minutes after a cold start, with REPEATS=3 about eight. All is over after LIMIT_S (560): a row that
# is not is cut off. A start may take READY_S (110) of them.
# MODEL, DEVICE, GPUS, KV_GIB, PORT, ADMIN, UP_ARGS (more options of `baton up`) and BATON_* may be set from outside. DOOR=fast: through
# the routers' fast door, at PORT + 100. SENDERS: of the
# client, each with a connection, which the kernel gives to one of several routers: 8 share them unevenly. Seeds are fresh unless
# SEED is set; then each row has one of its own, for prompts of one seed begin alike and would be
# found cached. The client needs numpy and nothing else beside Baton.
# TRY=1 rehearses any of this on a CPU: shapes are cut to four small layers, and rows to a few requests.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${OUT:-/tmp/pd}; mkdir -p "$out"
python=${PYTHON:-python3}
port=${PORT:-50051} admin=${ADMIN:-9090} device=${DEVICE:-cuda} door=${PORT:-50051} fast=
model=${MODEL:-bench/shapes/llama-8b} limit=${LIMIT_S:-560} ready=${READY_S:-110}
rows=${ROWS:-0 20 1024 64,0 12 8000 64,24 300 1024 256,3 300 8000 200}
export ROUTERS=${ROUTERS:-1} PREFILL=${PREFILL:-1} DECODE=${DECODE:-1} BOTH=${BOTH:-0}
export PYTHONUNBUFFERED=1 GRPC_VERBOSITY=error
export BATON_DEBUG_LOAD_FORMAT=${BATON_DEBUG_LOAD_FORMAT:-dummy} BATON_MAX_SEQUENCES=${BATON_MAX_SEQUENCES:-128}
[ -z "${GPUS:-}" ] || export CUDA_VISIBLE_DEVICES=$GPUS
[ "${DOOR:-}" != fast ] || { door=$((port + 100)) fast=BATON_FAST_LISTEN=127.0.0.1:$((port + 100)); }

small() { # small SHAPE: a folder with the same kind of model, of four small layers
  "$python" -c '
import json, pathlib, sys
shape, out = map(pathlib.Path, sys.argv[1:])
config = json.loads((shape / "config.json").read_text())
heads = "num_attention_heads num_key_value_heads linear_num_value_heads linear_num_key_heads num_hidden_layers".split()
widths = "head_dim linear_key_head_dim linear_value_head_dim kv_lora_rank".split()
parts = "qk_nope_head_dim qk_rope_head_dim v_head_dim".split()
most = {"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 128, "n_routed_experts": 8, "num_experts": 8,
        "shared_expert_intermediate_size": 128, "num_experts_per_tok": 2, "vocab_size": 4096, "draft_vocab_size": 4096,
        "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 16384,
        **dict.fromkeys(heads, 4), **dict.fromkeys(widths, 64), **dict.fromkeys(parts, 32)}
config |= {name: min(config[name], least) for name, least in most.items() if name in config} | {"torch_dtype": "float32"}
if "layer_types" in config:
    config["layer_types"] = config["layer_types"][: config["num_hidden_layers"]]
(out / shape.name).mkdir(parents=True, exist_ok=True)
(out / shape.name / "config.json").write_text(json.dumps(config))
print(out / shape.name)' "$1" "$out/small"
}

few() { # few ROW...: a row of the same kind, of a few short requests
  case $1 in
    azure | bursts | lognormal) echo "$1 1 2 ${*:4}" ;;
    mooncake) echo "$1 1 2 300" ;;
    waterfall) echo "$1 256 8" ;;
    0) echo 0 2 256 8 ;;
    *) echo 2 4 256 8 ;;
  esac
}

if [ -n "${TRY:-}" ]; then
  device=cpu model=$(small "$model") KV_GIB=1 VOCABULARY=4000 ready=${READY_S:-300}
  [ ! -d "${BATON_SPECULATION:-}" ] || BATON_SPECULATION=$(small "$BATON_SPECULATION")
fi

began=$SECONDS
left() { # seconds, at least 1; 15 are for the end
  local left=$((limit - SECONDS + began - 15))
  echo $((left > 1 ? left : 1))
}
[ "$ready" -lt "$(left)" ] || ready=$(left)
rm -f "$out/waterfall.txt" "$out/up.log"
env $fast "$python" -m baton up --model "$model" --device "$device" \
  --routers "$ROUTERS" --prefill "$PREFILL" --decode "$DECODE" --both "$BOTH" \
  --kv-memory-gib "${KV_GIB:-40}" --port "$port" --http-port 0 --admin-port "$admin" --drain-s 5 ${UP_ARGS:-} >"$out/up.log" 2>&1 &
up=$!
stop() {
  kill -TERM $up 2>/dev/null
  for _ in $(seq 120); do kill -0 $up 2>/dev/null || return 0; sleep 0.1; done
  kill -KILL $up 2>/dev/null # The processes below end with it.
}
end() { # whatever happened, the table comes last
  stop
  rm -f "$out/row.json" "$out/row.err" "$out/requests.jsonl"
  grep -E "WARN|ERROR" "$out/up.log" | head -20
  [ ! -s "$out/waterfall.txt" ] || cat "$out/waterfall.txt"
  [ ! -s "$out/rows.jsonl" ] || "$python" -m bench.pd_table "$out/rows.jsonl" | tee "$out/table.txt"
}
trap end EXIT
trap 'exit 143' TERM INT

until grep -q "Baton is ready" "$out/up.log" 2>/dev/null; do
  if ! kill -0 $up 2>/dev/null || [ $((SECONDS - began)) -gt "$ready" ]; then
    echo "not ready after $((SECONDS - began)) s"; tail -60 "$out/up.log"; exit 3
  fi
  sleep 0.5
done
echo "ready after $((SECONDS - began)) s"

mapfile -t admins < <(sed -nE 's/^ *([^ ]+) .*worker serves.* admin=([^ ]+).*/\1=\2/p' "$out/up.log")
mapfile -t routers < <(sed -nE 's|^ *metrics +http://([^/]+)/metrics.*|\1|p' "$out/up.log")
for i in "${!routers[@]}"; do admins+=("router-$i=${routers[i]}"); done

bench() { # bench OPTION...: one result, into row.json
  rm -f "$out/row.json" "$out/requests.jsonl"
  local before; before=$("$python" -m bench.pd_table --admin "${admins[@]}")
  timeout --foreground -k 5 "$(left)" "$python" -m baton bench --url 127.0.0.1:"$door" --json \
    --requests "$out/requests.jsonl" --admin 127.0.0.1:"$admin" --vocabulary "${VOCABULARY:-49000}" \
    ${SENDERS:+--senders "$SENDERS"} ${SEED:+--seed "$((SEED + 1000 * row_number))"} "$@" >"$out/row.json" 2>"$out/row.err" ||
    { echo "row failed or is not valid: $*"; tail "$out/row.err"; }
  [ -s "$out/row.json" ] || { tail -30 "$out/up.log"; return 1; }
  "$python" -m bench.pd_table --admin "${admins[@]}" --before "${before:-null}" \
    --add "$out/row.json" "$out/rows.jsonl"
}

lognormal() { # lognormal IN OUT: log-normal lengths of these means, in the form of Mooncake's trace
  "$python" -c '
import json, math, sys, numpy
draw = numpy.random.default_rng(0).lognormal
columns = [draw(math.log(float(mean)) - 0.32, 0.8, 6000).round().clip(1, 8192) for mean in sys.argv[1:]]
for prompt, output in zip(*columns):
    print(json.dumps({"timestamp": 0, "input_length": prompt, "output_length": output}))' "$@"
}

bursts() { # bursts RATE SECONDS: in the form of Mooncake's trace, with times of their own
  "$python" -c '
import json, sys, numpy
rate, seconds, seed = map(float, sys.argv[1:])
draw = numpy.random.default_rng(int(seed))
count = int(rate * seconds)
even_s = numpy.cumsum(draw.exponential(1 / rate, count))
fours, rest = numpy.divmod(even_s, 4)
at_s = 4 * fours + numpy.where(rest < 2.5, rest / 2.5, 1 + (rest - 2.5) * 2)
chats = draw.random(count) < 0.75
lengths = [
    draw.lognormal(numpy.log(numpy.where(chats, *means)) - 0.32, 0.8).round().clip(1, 8192)
    for means in ((600, 4000), (300, 60))
]
for at, prompt, output in zip(at_s, *lengths):
    print(json.dumps({"timestamp": 1e3 * at, "input_length": prompt, "output_length": output}))' "$@" "${SEED:-0}"
}

declare -A idle # TTFT p50 by prompt length, ms: what a queue is simulated with
IFS=, read -ra list <<<"$rows"
row_number=0
for row in "${list[@]}"; do
  row_number=$((row_number + 1))
  if [ "$(left)" -lt 10 ]; then echo "no time for: $row"; continue; fi
  [ -z "${TRY:-}" ] || row=$(few $row)
  echo "$row"
  read -r kind first second third fourth <<<"$row"
  case $kind in
    azure)
      bench --trace azure-conversation --rate "$first" --num 6000 --duration-s "$second" \
        --slo-ttft-ms "${SLO_TTFT_MS:-400}" --slo-itl-p99-ms "${SLO_ITL_P99_MS:-10}" ;;
    mooncake)
      LENGTHS=mooncake bench --trace mooncake-conversation --rate "$first" --num "${third:-600}" --duration-s "$second" \
        --slo-ttft-ms "${SLO_TTFT_MS:-400}" --slo-itl-p99-ms "${SLO_ITL_P99_MS:-10}" ;;
    lognormal)
      lognormal "${third:-2048}" "${fourth:-28}" >"$out/lognormal.jsonl"
      LENGTHS=lognormal${third:+-$third-$fourth} bench --trace "$out/lognormal.jsonl" --rate "$first" --num 6000 --duration-s "$second" \
        --slo-ttft-ms "${SLO_TTFT_MS:-400}" --slo-itl-p99-ms "${SLO_ITL_P99_MS:-10}" ;;
    bursts)
      bursts "$first" "$second" >"$out/bursts.jsonl"
      LENGTHS=bursts bench --trace "$out/bursts.jsonl" --arrivals trace --rate "$first" \
        --num "$(wc -l <"$out/bursts.jsonl")" \
        --slo-ttft-ms "${SLO_TTFT_MS:-400}" --slo-itl-p99-ms "${SLO_ITL_P99_MS:-10}" ;;
    waterfall)
      bench --num 1 --prompt-tokens "$first" --output-tokens "$second" &&
        COLUMNS=110 "$python" -m baton trace --admin 127.0.0.1:"$admin" >"$out/waterfall.txt" ;;
    0)
      bench --num "$first" --prompt-tokens "$second" --output-tokens "$third" && idle[$second]=$(
        "$python" -c 'import json, sys; print(json.load(open(sys.argv[1]))["runs"][0]["ttft_ms"]["p50"])' \
          "$out/row.json") ;;
    *)
      bench --rate "$kind" --num "$first" --prompt-tokens "$second" --output-tokens "$third" \
        --repeats "${REPEATS:-1}" ${idle[$second]:+--simulate-idle-ttft-ms "${idle[$second]}"} ;;
  esac
done
exit 0
