#!/usr/bin/env bash
# Packages that tests/gpu and the benchmarks import, for a GPU machine without a network that has torch and transformers.
#
# usage: bench/offline.sh FOLDER [PYTHON] [MACHINE]        (default: Python 3.12, x86_64)
#        on that machine: export PYTHONPATH=$PWD/src:FOLDER
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:?usage: bench/offline.sh FOLDER [PYTHON] [MACHINE]}
packages="execnet hypothesis iniconfig liger-kernel markdown-it-py mdurl ml_dtypes orjson packaging peft pluggy pygments
  pytest pytest-timeout pytest-xdist rich timm torchao"
read -ra packages <<<"$(tr '\n' ' ' <<<"$packages")"
platforms=(--platform any)
for glibc in manylinux2014 manylinux_2_17 manylinux_2_24 manylinux_2_27 manylinux_2_28; do
  platforms+=(--platform "${glibc}_${3:-x86_64}")
done
mkdir -p "$folder"
for package in "${packages[@]}"; do
  # A package by itself: what it depends on is there, or in the list above.
  pinned=$(grep -iE "^${package//_/[-_]}==" constraints.txt || true)
  "${PIP:-pip}" install --quiet --no-deps --no-compile --upgrade --target "$folder" --only-binary=:all: \
    --python-version "${2:-3.12}" "${platforms[@]}" "${pinned:-$package}" \
    2>"$folder/.log" || { echo "offline.sh: $package: $(grep -m1 ERROR "$folder/.log")" >&2; exit 1; }
done
rm -rf "$folder/.log" "$folder/bin"
du -sh "$folder"
