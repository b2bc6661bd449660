#!/bin/bash
# From raw text and published weights to an evaluated model: five jobs, each of which waits for the ones it depends on.
#
#   bash examples/slurm/pipeline.sh             # submits the jobs and prints their numbers
#   DRY_RUN=1 bash examples/slurm/pipeline.sh   # shows every script, the layout and the cost; submits nothing
#
# If a job fails, the jobs that depend on it are cancelled. Settings are environment variables:
#   SITE    the site file                              SCRIPTS  folder of the job scripts
#   PYTHON  a Python with this project's requirements  SHARDS   number of preprocessing tasks
#   TRAIN   the training script                        RUN      the run's folder, below WORK_DIR
#   CORPUS  prefix of the token files, below WORK_DIR  EXPORT   folder for the exported model, below WORK_DIR
#   DTYPE   data type of exported weights
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
SCRIPTS="${SCRIPTS:-$ROOT/examples/slurm}"
SITE="${SITE:-$ROOT/examples/slurm/site.env}"
PYTHON="${PYTHON:-python3}"
SHARDS="${SHARDS:-16}"
TRAIN="${TRAIN:-train-qwen3-4b-4-nodes.sbatch}"
CORPUS="${CORPUS:-data/corpus}"
RUN="${RUN:-runs/qwen3-4b-bidirectional-refresh}"
EXPORT="${EXPORT:-exported/qwen3-4b-bidirectional-refresh}"

export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"

launch() {
    local script="$1"
    shift
    "$PYTHON" "$ROOT/tools/launch.py" "$SCRIPTS/$script" --site "$SITE" "$@"
}

# stage SCRIPT AFTER WORDS...: submits a job that starts when the jobs AFTER are done, prints its number and stores it in JOB. With
# MODE=--check or --dry-run nothing is submitted.
stage() {
    local script="$1" after=()
    if [[ -n "$2" ]]; then after=(--dependency "afterok:$2"); fi
    shift 2
    if [[ "$MODE" == submit ]]; then
        JOB="$(launch "$script" "${after[@]}" "$@")"
        echo "$script: job $JOB${after:+, after ${after[1]#afterok:}}"
    else
        launch "$script" "$MODE" "${after[@]}" "$@"
        JOB=0
    fi
}

# Prints the token files of all shards as a list for data.train or data.valid.
shards() {
    local names=() index
    for ((index = 0; index < SHARDS; index++)); do
        if ((SHARDS == 1)); then
            names+=("$CORPUS-$1")
        else
            names+=("$(printf '%s-%05d-of-%05d-%s' "$CORPUS" "$index" "$SHARDS" "$1")")
        fi
    done
    (
        IFS=,
        echo "[${names[*]}]"
    )
}

# Inputs of the first two jobs must exist now; the others read what earlier jobs write.
submit_all() {
    local preprocessed converted trained exported heldout
    stage preprocess.sbatch "" --sbatch="--array=0-$((SHARDS - 1))" -- --output "$CORPUS"
    preprocessed="$JOB"
    stage convert.sbatch ""
    converted="$JOB"
    stage "$TRAIN" "$preprocessed:$converted" -- --data.train "$(shards train)" --data.valid "$(shards heldout)" \
        --checkpoint.dir "$RUN/checkpoints" --logging.dir "$RUN"
    trained="$JOB"
    stage convert.sbatch "$trained" --sbatch=--job-name=export --replace-options -- \
        export "$RUN/checkpoints" "$EXPORT" --dtype "${DTYPE:-bfloat16}"
    exported="$JOB"
    heldout="$(shards heldout | tr -d '[]' | cut -d, -f1)" # the held-out part of one shard has thousands of documents
    stage evaluate.sbatch "$exported" --replace-options -- \
        "$EXPORT" --data "$heldout" --output "$RUN/evaluation" --dtype "${DTYPE:-bfloat16}"
}

if [[ -n "${DRY_RUN:-}" ]]; then
    MODE=--dry-run
    submit_all
else
    # Refuse whatever can be refused before the first job is in the queue.
    MODE=--check
    submit_all
    MODE=submit
    submit_all
fi
