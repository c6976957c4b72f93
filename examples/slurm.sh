#!/usr/bin/env bash
#SBATCH --job-name=k3cuda
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gpus=1
#SBATCH --cpus-per-task=16
#SBATCH --time=04:00:00
#SBATCH --signal=TERM@60
# A server for the time of a job: sbatch --export=ALL,MODEL=/models/model examples/slurm.sh
# It needs k3cuda[cu13,serve] in PATH, and K3CUDA_API_KEY in the environment: other users reach the node too.
# --signal asks it to stop a minute before the end of the job; requests have 45 seconds to finish.
set -euo pipefail
: "${MODEL:?wanted MODEL=the folder of a checkpoint}" "${K3CUDA_API_KEY:?wanted a key for clients}"

srun k3cuda info
srun k3cuda check "$MODEL"
echo "http://$(hostname -f):8000/v1"
exec srun k3cuda serve "$MODEL" --served-model-name k3 --host 0.0.0.0 --decode-backend standard --shutdown-grace 45
