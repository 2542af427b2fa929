#!/usr/bin/env bash
# `bench/pd.sh` under several arrangements in turns, and one table of medians.
#
#   bench/pd_beside.sh NAME=WORDS...
#
# WORDS are settings (KEY=VALUE) and at most one folder: another commit's tree, whose own code then
# runs, as `git archive COMMIT | tar x -C FOLDER` makes it. No word: this tree as it is. So
#
#   bench/pd_beside.sh now= old=/tmp/cca7a10
#   bench/pd_beside.sh never="BATON_LOCAL_PREFILL=never" auto="BATON_LOCAL_PREFILL=auto"
#
# RUNS (2) rounds, every second one in reverse order. ROWS and the other variables are those of
# `pd.sh`. No round's part begins later than LIMIT_S (560) minus what the longest took. $OUT gets
# NAME.jsonl with the rows of each, up.log of the last one that failed, and table.txt.
set -uo pipefail
cd "$(dirname "$0")/.."
here=$PWD out=${OUT:-/tmp/pd_beside} limit=${LIMIT_S:-560} python=${PYTHON:-python3}
mkdir -p "$out"
export ROWS=${ROWS:-0 20 1024 64,0 8 8000 64,24 250 1024 256,3 100 8000 200}
longest=0 began=$SECONDS

part() { # part NAME=WORDS: one run of pd.sh
  local name=${1%%=*} words=${1#*=} tree=$here settings=() word from=$SECONDS
  for word in $words; do
    case $word in *=*) settings+=("$word") ;; *) tree=$(realpath "$word") ;; esac
  done
  if [ $((SECONDS - began + longest)) -gt "$limit" ]; then echo "no time for $name"; return; fi
  echo "== $name, after $((SECONDS - began)) s"
  local folder; folder=$(mktemp -d)
  env "${settings[@]}" OUT="$folder" PYTHONPATH="$tree${PYTHONPATH:+:$PYTHONPATH}" \
    LAST_ROW_S=$((limit - SECONDS + began - 30)) bash "$tree/bench/pd.sh" >"$folder/said" 2>&1
  sed '/^  *TTFT/,$d' "$folder/said" # all but the tables
  if [ -s "$folder/rows.jsonl" ]; then cat "$folder/rows.jsonl" >>"$out/$name.jsonl"
  else cp "$folder/up.log" "$out/up.log"; fi
  rm -r "$folder"
  [ $((SECONDS - from)) -le $longest ] || longest=$((SECONDS - from))
}

rm -f "$out"/*.jsonl
for round in $(seq "${RUNS:-2}"); do
  order=("$@")
  if [ $((round % 2)) = 0 ]; then
    order=(); for one in "$@"; do order=("$one" "${order[@]}"); done
  fi
  for one in "${order[@]}"; do part "$one"; done
done
files=(); for one in "$@"; do [ ! -s "$out/${one%%=*}.jsonl" ] || files+=("$out/${one%%=*}.jsonl"); done
{ "$python" -m bench.pd_table "${files[@]}"; echo; "$python" -m bench.pd_table --medians "${files[@]}"; } | tee "$out/table.txt"
