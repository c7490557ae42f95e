#!/usr/bin/env bash
# Wheels for a GPU machine without network that already has torch, Triton and transformers:
#
#   benchmarks/gpu/wheels.sh [--dry-run] [PYTHON]      here: into .whl/ (ignored by git); PYTHON: version of the other machine, e.g. 3.12
#   . benchmarks/gpu/wheels.sh use                     there: before each command; installs into /tmp/site
#
# Versions are from constraints-3.12.txt for Python 3.12, else from constraints.txt. torch and its packages of the other
# machine are used. Only python3 is needed here: packages that exist only as sources are pure Python. The folder is
# replaced as a whole, after all wheels are complete.
REPOSITORY=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

# Installed without dependencies: these lists are complete for an image with torch and transformers.
BINARY="diffusers pyzmq pydantic pydantic_core annotated-types typing-inspection av ftfy wcwidth importlib_metadata zipp peft
  pytest pluggy iniconfig hypothesis sortedcontainers"
SOURCE="deepspeed hjson"  # only source distributions exist; without its operators DeepSpeed is pure Python

pinned() {
  for name in "$@"; do
    grep -iE "^${name//[-_]/[-_]}==" "$CONSTRAINTS" || { echo "$name is not in $CONSTRAINTS" >&2; return 1; }
  done
}

use_wheels() {
  python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site "$REPOSITORY"/.whl/*.whl || return 1
  export PYTHONPATH=/tmp/site:$REPOSITORY:$REPOSITORY/kernels:$REPOSITORY/reward
  export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
}

make_wheels() {
  set -euo pipefail
  local dry=() version binary source platforms=()  # part is global: the trap reads it
  if [ "${1:-}" = --dry-run ]; then dry=(--dry-run); shift; fi
  version=${1:-3.12}
  CONSTRAINTS=$REPOSITORY/constraints-$version.txt
  [ -f "$CONSTRAINTS" ] || CONSTRAINTS=$REPOSITORY/constraints.txt
  binary=$(pinned $BINARY)
  source=$(pinned $SOURCE)
  for platform in manylinux_2_28 manylinux_2_26 manylinux_2_24 manylinux_2_17 manylinux2014; do
    platforms+=(--platform "${platform}_x86_64")
  done
  if [ ${#dry[@]} -gt 0 ]; then  # resolves the same files without storing them
    python3 -m pip install -q --dry-run --ignore-installed --target /tmp/none --no-deps --only-binary=:all: \
      --python-version "$version" --implementation cp "${platforms[@]}" $binary
    echo "would build" $source && return
  fi
  part=$(mktemp -d "$REPOSITORY/.whl-part-XXXXXX")
  trap 'rm -rf "$part"' EXIT
  python3 -m pip download -q --no-deps --only-binary=:all: --python-version "$version" --implementation cp \
    "${platforms[@]}" -d "$part" $binary
  DS_BUILD_OPS=0 python3 -m pip wheel -q --no-deps -w "$part/built" $source
  for wheel in "$part"/built/*; do
    case $wheel in
      *-none-any.whl) mv "$wheel" "$part" ;;
      *) echo "$(basename "$wheel") does not work with another Python" >&2; return 1 ;;
    esac
  done
  rmdir "$part/built"
  rm -rf "$REPOSITORY/.whl"
  chmod 755 "$part"
  mv "$part" "$REPOSITORY/.whl"
  du -sh "$REPOSITORY/.whl"
}

if [ "${1:-}" = use ]; then use_wheels; else make_wheels "$@"; fi
