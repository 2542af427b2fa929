#!/usr/bin/env bash
# `bench/pd.sh` under several arrangements in turns, and one table of medians.
#
#   bench/pd_beside.sh NAME=WORDS...
#   bench/pd_beside.sh @FILE
#
# WORDS are settings (KEY=VALUE, quoted as for a shell) and at most one folder: another commit's tree,
# whose own code then runs, as `git archive COMMIT | tar x -C FOLDER` makes it. No word: this tree as it
# is. So
#
#   bench/pd_beside.sh now= old=/tmp/cca7a10
#   bench/pd_beside.sh never="BATON_LOCAL_PREFILL=never" auto="BATON_LOCAL_PREFILL=auto"
#
# A FILE has a part on each line, NAME=WORDS, such as bench/four_gpus.list. WORDS behind `with` are those
# of all parts below, before their own, up to the next `with`.
#
# RUNS (2; of a file 1) rounds, every second one in reverse order. ONLY="NAME NAME" leaves the other parts
# out. ROWS and the other variables are those of `pd.sh`. All is over after LIMIT_S (560). A part may take its own LIMIT_S, and begins if so much
# is left; one without, if the longest so far would fit. If the first part does not start, none does.
# Parts with GPUS, PORT and ADMIN of their own can run beside those of another call. $OUT gets, for
# each part, NAME/ with what `pd.sh` leaves, then rows.jsonl with all rows, and table.txt, which is
# printed last, whatever fails.
set -uo pipefail
cd "$(dirname "$0")/.."
here=$PWD out=${OUT:-/tmp/pd_beside} limit=${LIMIT_S:-560} python=${PYTHON:-python3}
mkdir -p "$out"
export ROWS=${ROWS:-0 20 1024 64,0 8 8000 64,24 250 1024 256,3 100 8000 200}
longest=0 began=$SECONDS started=

parts=()
for one in "$@"; do
  case $one in
    @*)
      RUNS=${RUNS:-1} with=
      while read -r line; do
        case $line in
          '' | '#'*) ;;
          'with '*) with=${line#with } ;;
          *) parts+=("${line%%=*}=$with ${line#*=}") ;;
        esac
      done <"${one#@}" ;;
    *) parts+=("$one") ;;
  esac
done
[ -z "${ONLY:-}" ] || for at in "${!parts[@]}"; do
  case " $ONLY " in *" ${parts[at]%%=*} "*) ;; *) unset "parts[at]" ;; esac
done

part() { # part NAME=WORDS: one run of pd.sh
  local name=${1%%=*} tree=$here settings=() words=() word from=$SECONDS own=
  eval "words=(${1#*=})"
  for word in "${words[@]}"; do
    case $word in
      LIMIT_S=*) own=${word#*=} ;;
      *=*) settings+=("$word") ;;
      *) tree=$(realpath "$word") ;;
    esac
  done
  local left=$((limit - SECONDS + began))
  if [ "${own:-$longest}" -gt $((left - 10)) ]; then echo "no time for $name"; return; fi
  own=${own:-$((left - 10))}
  echo "== $name, after $((SECONDS - began)) s"
  env "${settings[@]}" OUT="$out/$name" LIMIT_S="$own" PYTHONPATH="$tree${PYTHONPATH:+:$PYTHONPATH}" \
    timeout -k 10 "$((own + 5))" bash "$tree/bench/pd.sh" >"$out/said" 2>&1
  local status=$?
  sed '/^  *TTFT/,$d' "$out/said" # all but the tables
  if [ $status != 3 ]; then started=yes
  elif [ -z "$started" ]; then echo "the first part did not start: so no other is tried"; exit 3; fi
  [ $((SECONDS - from)) -le $longest ] || longest=$((SECONDS - from))
}

end() {
  local one files=()
  for one in "${parts[@]}"; do
    one=$out/${one%%=*}/rows.jsonl
    [ ! -s "$one" ] || files+=("$one")
  done
  rm -f "$out/said"
  [ ${#files[@]} -gt 0 ] || return
  cat "${files[@]}" >"$out/rows.jsonl"
  { "$python" -m bench.pd_table "${files[@]}"; echo; "$python" -m bench.pd_table --medians "${files[@]}"; } | tee "$out/table.txt"
}
trap end EXIT
trap 'exit 143' TERM INT

for one in "${parts[@]}"; do rm -rf "${out:?}/${one%%=*}"; done
for round in $(seq "${RUNS:-2}"); do
  order=("${parts[@]}")
  if [ $((round % 2)) = 0 ]; then
    order=(); for one in "${parts[@]}"; do order=("$one" "${order[@]}"); done
  fi
  for one in "${order[@]}"; do part "$one"; done
done
