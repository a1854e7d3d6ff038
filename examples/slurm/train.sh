#!/bin/bash
# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
#
# sbatch train.sh: trains train.py on two nodes, a trainer and server for each 8 cores.
#SBATCH --job-name=clicks
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
set -euo pipefail

# Where the ranks meet: on the first node, at a port that the jobs of a node do not share.
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))
export MASTER_ADDR MASTER_PORT

srun python train.py
