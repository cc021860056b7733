# Sourced by the other scripts: goes to the repository's root and makes .venv hold what pyproject.toml asks for.
# Afterwards $PYTHON is the environment's interpreter. Needs Python 3.11 or newer with its venv module.
# shellcheck shell=bash

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
PYTHON=$PWD/.venv/bin/python

_die() {
  echo "${0##*/}: $*" >&2
  exit 1
}

# Whether $1 runs, is new enough, and can import the modules named after it.
_is_python() {
  local modules=${*:2}
  "$1" -c "import sys ${modules:+, ${modules// /, }}; sys.exit(sys.version_info < (3, 11))" 2>/dev/null
}

_find_python() {
  local candidate
  for candidate in python3 python3.13 python3.12 python3.11; do
    if _is_python "$candidate" venv ensurepip; then
      echo "$candidate"
      return
    fi
  done
  _die "needs Python 3.11 or newer with its venv module; on Debian: apt-get install python3 python3-venv"
}

# What the environment was made from: a change of any of these installs again.
_wanted_stamp() {
  {
    echo "$PWD"
    "$PYTHON" --version
    cat pyproject.toml packages/thunderagent-{nova,workflows}/pyproject.toml
  } | "$PYTHON" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'
}

_is_ready() {
  _is_python "$PYTHON" && [[ -f .venv/.stamp && $(<.venv/.stamp) == "$(_wanted_stamp)" ]]
}

_set_up() {
  local python
  # Two scripts started at once must not both install. (Without flock, as on macOS, they might.)
  if command -v flock >/dev/null; then
    exec 9<pyproject.toml
    flock 9
    if _is_ready; then return; fi
  fi
  echo "Setting up .venv ..." >&2
  if ! _is_python "$PYTHON" pip; then
    python=$(_find_python)
    "$python" -m venv --clear .venv
  fi
  # Imported modules are compiled then: compiling everything takes half of an installation's time.
  "$PYTHON" -m pip install --quiet --quiet --disable-pip-version-check --no-compile --editable '.[dev,e2e,plots]'
  # Without what they need besides: workflows' is among `dev`, and Nova's is heavy and not needed by most of its tests.
  "$PYTHON" -m pip install --quiet --quiet --disable-pip-version-check --no-deps \
    --editable packages/thunderagent-nova --editable packages/thunderagent-workflows
  _wanted_stamp >.venv/.stamp
}

if ! _is_ready; then
  # In a subshell, so that the lock is given back at its end.
  (_set_up)
fi
