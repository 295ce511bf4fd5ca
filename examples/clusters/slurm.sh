#!/usr/bin/env bash
# sbatch --nodes=4 slurm.sh: one run of Squall on all nodes of the job, the same line on each.
#SBATCH --job-name=squall
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive

export SQUALL_TOKEN=$(squall token)  # srun hands it on; nobody sees it on a command line
srun --ntasks-per-node=1 squall train examples/digits.py \
    --machines auto --replicas $((2 * SLURM_NNODES)) --shards 2 --run-dir "runs/slurm-$SLURM_JOB_ID"
