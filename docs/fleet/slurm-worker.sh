#!/bin/bash
# A worker of a Prefect server, for one GPU: sbatch slurm-worker.sh
# A flow that it was running at its time limit resumes on another worker.
# Edit: the limits, the address of the server, the folders.
#SBATCH --job-name=kvq-worker
#SBATCH --gpus=1
#SBATCH --cpus-per-task=8
#SBATCH --mem=64G
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@120
#SBATCH --output=kvq-worker-%j.log
set -eu
export PREFECT_API_URL=https://prefect.internal/api
PREFECT_API_AUTH_STRING=$(cat "$HOME/.kvq-prefect-auth") # a file that only you can read, as the next one
export PREFECT_API_AUTH_STRING KVQ_HF_TOKEN_FILE=$HOME/.kvq-hf-token
export KVQ_HOME=${SCRATCH:?names a folder that all nodes see}/kvq KVQ_CHECKOUT=$HOME/kvq
cd "$KVQ_CHECKOUT"
exec .venv/bin/prefect worker start --pool kvq-gpu --type process
