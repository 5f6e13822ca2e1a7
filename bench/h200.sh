#!/usr/bin/env bash
# Measurements for docs/results.md in parts of less than ten minutes on one H200. A part that fails does not stop the next.
#
# usage: [LIB=FOLDER] [CORPUS=FILE] [OUT=FOLDER] bench/h200.sh PART...
#
#   fp8-large    fp8 beside compiled BF16 and torchao, one process each: 8 x 4096, 1.3B                    about 250 s
#   fp8-small    the same: 124M, llama-1b                                                                 about 330 s
#   small-steps  steps as CUDA graphs where launching takes long, and without: gpt-tiny, 124M with a batch of 4   about 100 s
#   experts      Mixtral's losses on fresh tokens beside compiled BF16                                    about 75 s
#   granularity  scales for rows and for blocks of 128: SQNR, learning by heart, step times               about 170 s
#   gradients    final losses with gradients in E4M3 where they fit, four seeds                           about 180 s
#   muon-gaps    Muon in narrow formats against FP32, four seeds                                          about 370 s
#   muon-reach   steps that Muon needs for AdamW's loss, 124M; on CORPUS if it is given                   about 450 s
#   muon-124m    Muon in narrow formats against FP32, 124M on CORPUS, four seeds                          about 450 s
#   neighbours   GLM of transformers, whose rotary embedding rotates neighbouring columns, beside compiled BF16    about 150 s
#   sums         errors of sums in the tensor cores                                                        about 20 s
#   gradient-bias   errors of FP8 gradients that all batches share, and emulated, 124M on CORPUS           about 400 s
#   rounding-noise  which roundings of forward make gradients noisy, emulated, 124M on CORPUS                about 150 s
#   equal-loss:SECONDS   FP8 at equal loss, 124M on CORPUS: continues bench/results' file              1,800 s in all
#                with RECIPES=bf16,fp8,... also other recipes, with SEEDS=9 more than five       310 s a pair
#   attention-keys  BF16 for keys: learning by heart, step times                                         about 200 s
#   loss-gap:SECONDS   where FP8 loses, 124M on CORPUS, beside the runs of equal-loss                     150 s a run
#   tests        tests/gpu, in 14 processes                                                               about 280 s
#   tests:WORDS  those that pytest -k WORDS selects; the whole output is in OUT/tests.log
#
# LIB has packages for a machine without a network (bench/offline.sh), or is a .tar.xz of such a folder: a tenth of its
# size. Python's warnings are off, so that what a part prints fits on a page. CORPUS is a packed corpus
# (bench/corpus/pack.py). OUT gets the JSON files; a part that measures a task again overwrites that of an earlier part.
set -uo pipefail
cd "$(dirname "$0")/.."
case ${LIB:-} in
  *.tar.xz)
    packages=${TMPDIR:-/tmp}/packages
    [ -d "$packages" ] || { mkdir -p "$packages" && tar -xJf "$LIB" -C "$packages" --strip-components=1; } || exit 2
    LIB=$packages
    ;;
esac
export OUT=${OUT:-$(mktemp -d)} PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore PYTHONPATH=$PWD/src${LIB:+:$LIB}
[ -z "${LIB:-}" ] || python3 -W ignore -m compileall -q "$LIB" || true
began=$SECONDS

part() { # SECONDS COMMAND...
  local limit=$1
  shift
  echo "== $((SECONDS - began)) s: $*"
  timeout "$limit" python3 "$@" 2>&1 | grep --line-buffered -v "^W[0-9]\|Warning"
  local code=${PIPESTATUS[0]}
  [ "$code" = 0 ] || echo "== ended with $code after at most $limit s"
}

run_tests() { # WORDS
  OMP_NUM_THREADS=1 part 420 -m pytest tests/gpu -q -n 14 --dist worksteal -p no:cacheprovider -p no:benchmark \
    ${1:+-k "$1"} | tee "$OUT/tests.log" | tail -n 40
}

read_corpus() { # sets tokens to a folder with the tokens of CORPUS, none without CORPUS
  tokens=()
  [ -n "${CORPUS:-}" ] || return 0
  [ -d "${TMPDIR:-/tmp}/tokens" ] || part 120 bench/corpus/read_corpus.py "$CORPUS" "${TMPDIR:-/tmp}/tokens"
  tokens=(--data "${TMPDIR:-/tmp}/tokens")
}

need_corpus() { # PART
  read_corpus && [ ${#tokens[@]} -gt 0 ] || { echo "h200.sh: $1 needs CORPUS" >&2 && exit 2; }
}

continue_file() { # NAME: sets file, and copies it from bench/results to OUT
  file=$1
  [ -e "$OUT/$file" ] || [ ! -e "bench/results/$file" ] || cp "bench/results/$file" "$OUT"
}

steps() { # SECONDS TASK ROUNDS STEPS MORE...
  part "$1" bench/fp8_steps.py "${@:2}"
}

[ $# -gt 0 ] || { sed -n '2,30s/^# \{0,1\}//p' "$0" && exit 2; }
for name in "$@"; do
  case $name in
    fp8-large) steps 200 gpt:8x4096 3 4 fp8-only tensorwise && steps 300 gpt-1.3b 2 4 fp8-only tensorwise ;;
    fp8-small) steps 150 gpt2-124m 4 5 fp8-only tensorwise && steps 200 llama-1b 3 4 fp8-only tensorwise ;;
    small-steps)
      steps 80 gpt-tiny 6 20 no-graphs
      steps 110 gpt2-124m 6 20 batch=4 no-graphs
      ;;
    experts) part 160 bench/experts.py mixtral 2 2 6 fp8 "fp8[first_forward=mostly-bf16]" fresh ;;
    granularity)
      part 60 bench/sqnr.py 2048 5504 8192
      part 120 bench/memorise.py 6 bf16 fp8 "fp8[granularity=block]" "fp8[granularity=row]"
      steps 80 gpt2-124m 3 4 ours fp8-only "fp8[granularity=row]" "fp8[granularity=block]"
      steps 100 gpt:8x4096 2 4 ours fp8-only "fp8[granularity=row]" "fp8[granularity=block]"
      ;;
    attention-keys)
      keys="fp8[gradients_format=auto,attention_keys=bf16]"
      part 90 bench/memorise.py 6 bf16 fp8 "$keys"
      steps 60 gpt2-124m 4 4 ours fp8-only "fp8[attention_keys=bf16]"
      steps 80 gpt:8x4096 2 4 ours fp8-only "fp8[attention_keys=bf16]"
      ;;
    gradients)
      part 240 bench/convergence.py gpt:10x512 1200 4 32 256 bf16 "fp8[products=all]" \
        "fp8[products=all,gradients_format=auto]"
      ;;
    muon-gaps) part 590 bench/muon_convergence.py 575 gaps ;;
    muon-reach) read_corpus && part 500 bench/muon_convergence.py 480 reach "${tokens[@]}" ;;
    muon-124m)
      need_corpus "$name"
      part 490 bench/muon_convergence.py 475 gaps --task gpt2-124m --batch 16 --steps 300 "${tokens[@]}"
      ;;
    equal-loss:*)
      need_corpus "$name"
      continue_file h200-equal-loss-gpt2-124m.json
      part 590 bench/equal_loss.py "$OUT/$file" "${name#*:}" --shorter 2 --seeds "${SEEDS:-5}" \
        --recipes "${RECIPES:-bf16,fp8}" "${tokens[@]}"
      ;;
    neighbours)
      part 200 -m narrowgauge bench --model transformers:GlmForCausalLM --batch 8 --context 2048 --rounds 3 --steps 4 \
        --recipes fp8 --save "$OUT/h200-glm-10x2048.json" --config '{"hidden_size": 2048, "intermediate_size": 6144,
          "num_hidden_layers": 10, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}'
      ;;
    sums) part 60 bench/fast_sums.py accuracy ;;
    gradient-bias)
      need_corpus "$name"
      part 400 bench/gradient_bias.py fp8 "fp8[gradients_format=auto]" "fp8 with *:output" \
        "fp8 with *:grad_input+grad_weight" "fp8[head=bf16]" "fp8 with lm_head:output" "fp8 with blocks.[0-3].*:output" \
        "fp8 with blocks.*.up:output, blocks.*.down:output" "${tokens[@]}"
      part 190 bench/rounding_bias.py --batches 32 "${tokens[@]}"
      ;;
    rounding-noise)
      need_corpus "$name"
      part 300 bench/rounding_noise.py "${tokens[@]}"
      ;;
    loss-gap:*)
      need_corpus "$name"
      file=h200-loss-gap-gpt2-124m.json
      [ -e "$OUT/$file" ] || cp bench/results/h200-equal-loss-gpt2-124m.json "$OUT/$file"
      part 590 bench/loss_gap.py "$OUT/$file" "${name#*:}" fp8 "fp8[head=bf16]" "fp8 with *:output" \
        "fp8 with *:grad_input+grad_weight" "${tokens[@]}"
      ;;
    tests) run_tests "" ;;
    tests:*) run_tests "${name#tests:}" ;;
    *) echo "h200.sh: no part $name" >&2 && exit 2 ;;
  esac
done
echo "== $((SECONDS - began)) s, files in $OUT: $(cd "$OUT" && echo *)"
