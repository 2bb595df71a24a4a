#!/bin/bash
# One calibration on four nodes of eight GPUs, by Ray: sbatch slurm-ray.sh
# Edit: the nodes, of which all but one join the first, the model, the folders, and workers: one for each GPU.
#SBATCH --job-name=kvq-ray
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=08:00:00
#SBATCH --output=kvq-ray-%j.log
set -eu
head=$(hostname)
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK # which srun, since 22.05, does not take from sbatch by itself
export RAY_ADDRESS=$head:6379 RAY_AUTH_MODE=disabled # or a token, where others have access
export KVQ_HOME=${SCRATCH:?names a folder that all nodes see}/kvq
cd "$HOME/kvq"
srun --nodes=1 --ntasks=1 --nodelist="$head" .venv/bin/ray start --head --port=6379 --block &
sleep 20
others=$((SLURM_JOB_NUM_NODES - 1))
srun --nodes="$others" --ntasks="$others" --exclude="$head" .venv/bin/ray start --address="$RAY_ADDRESS" --block &
.venv/bin/kvq-calibrate --model llama-3.1-8b --device cuda --workers 32
