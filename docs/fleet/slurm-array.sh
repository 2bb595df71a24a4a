#!/bin/bash
# The models of list.yaml, each a job of an array, at most 8 at a time: sbatch slurm-array.sh
# Edit: the array, which is the numbers of the list's entries, its limits, the folders, the registry. The same command
# again does nothing twice, and goes on where a job was stopped, at its time limit for example.
#SBATCH --job-name=kvq
#SBATCH --array=1-2%8
#SBATCH --gpus=1
#SBATCH --cpus-per-task=8
#SBATCH --mem=64G
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=kvq-%A_%a.log
set -eu
export KVQ_HOME=${SCRATCH:?names a folder that all nodes see}/kvq
export KVQ_REGISTRY=hf://my-org
export KVQ_HF_TOKEN_FILE=$HOME/.kvq-hf-token # a token that may write to the registry, in a file that only you can read
cd "$HOME/kvq"                               # the checkout, with .venv and list.yaml
exec .venv/bin/kvq-calibrate --models list.yaml --only "$SLURM_ARRAY_TASK_ID" --device cuda
