#!/usr/bin/env bash
#SBATCH --job-name=k3cuda-16
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=16
#SBATCH --exclusive
#SBATCH --time=04:00:00
#SBATCH --signal=TERM@60
# A server on 16 ranks, one a GPU: sbatch --export=ALL,MODEL=/models/model examples/slurm-ranks.sh
# The four machines must share one NVLink domain: with Slurm's block topology add --segment=4. Every machine reads MODEL under the same path.
# k3cuda[cu13,serve] is in PATH on all of them, K3CUDA_API_KEY in the environment. Rank 0 is on the first machine and answers there;
# --signal asks it to stop a minute before the end of the job.
set -euo pipefail
: "${MODEL:?wanted MODEL=the folder of a checkpoint}" "${K3CUDA_API_KEY:?wanted a key for clients}"

# Jobs that share a machine need ports of their own; the token keeps everybody else out of the rendezvous, and never leaves the environment.
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
K3CUDA_JOB_TOKEN=$(head -c 32 /dev/urandom | base64)
export K3CUDA_JOB_TOKEN

srun --ntasks=1 --nodes=1 k3cuda check "$MODEL" --tp 16
echo "http://$(hostname -f):8000/v1"
exec srun --kill-on-bad-exit=1 k3cuda serve "$MODEL" --tp 16 --decode-backend standard --rendezvous-timeout 300 --served-model-name k3 --host 0.0.0.0 --shutdown-grace 45
