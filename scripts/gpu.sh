#!/bin/sh
# Runs things by name on a machine with a GPU: scripts/gpu.sh NAME [arguments]. scripts/gpu_jobs.py runs several of them on all of a machine's GPUs.
set -eu
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
# Ranks of several GPUs run without NVLink's multicast (NVLS): collectives here are unicast, and a program that uses it can stop all GPUs of a host that
# others share.
names="tests, sanitize, step, one_launch, one_launch_hops, one_launch_decode, stages, experts, hops, torch, prefill, idle, first_token, official, bench_core, bench_cores, bench_mla, bench_sample, collectives, ranks, rank_steps, scaling, trace, load, rehearse, train, quality, draft, decode, decode_plain, launch"
name=${1:?"name one of: $names"}
shift
k3cuda() { python3 -m k3cuda "$@"; }
out=${OUT:-docs/benchmarks}
case $name in
  # All of them, or the files that are named.
  tests)
    case " $*" in *" tests/"*) ;; *) set -- tests/gpu "$@" ;; esac
    exec python3 -m pytest -m gpu "$@" ;;
  # Kernels of drafts, of what they read of the target, and of acceptance.
  draft) exec python3 -m pytest -m gpu tests/gpu/test_draft.py "$@" ;;
  # Every kernel of a small step, the three tools side by side; their reports in $OUT. Attention's reports of racecheck: docs/kernels.md.
  sanitize)
    python3 scripts/sanitize_step.py   # fills the cache of kernels
    set --
    for tool in memcheck initcheck racecheck; do   # probes for newer driver calls are reported as API errors
      compute-sanitizer --tool "$tool" --report-api-errors no --show-backtrace no --error-exitcode 1 python3 scripts/sanitize_step.py > "$out/$tool.txt" 2>&1 &
      set -- "$@" "$!"
    done
    code=0
    for pid in "$@"; do wait "$pid" || code=1; done
    tail -n 3 "$out"/memcheck.txt "$out"/initcheck.txt "$out"/racecheck.txt
    exit "$code" ;;
  # The files of docs/performance.md, each by its name, in $OUT or docs/benchmarks; scripts/make_performance.py makes the page of them.
  step) k3cuda bench step -v --rank 3 --rows 1,2,4,8,16,32,64 --context 1,8K,128K --stages 1,8,64 --output "$out/step.json" "$@" ;;
  one_launch) k3cuda bench step -v --rank 3 --rows 1,2,4,8 --context 1,8K,128K --decode-backend latency_specialized --output "$out/one_launch.json" "$@" ;;
  one_launch_hops) k3cuda bench step -v --rank 3 --rows 1,8 --decode-backend latency_specialized --hop-delay-us 0,2.5 --output "$out/one_launch_hops.json" "$@" ;;
  one_launch_decode) k3cuda bench decode -v --tp 16 --draft-tokens 7 --acceptance-length 6 --input-len 1 --output-len 1000 --decode-backend latency_specialized --output "$out/one_launch_decode.json" "$@" ;;
  experts) k3cuda bench step -v --rank 3 --rows 1,8,64 --context 8K --experts 16,120,613 --stages 1,8,64 --output "$out/experts.json" "$@" ;;
  hops) k3cuda bench step -v --rank 3 --rows 1,8 --hop-delay-us 0,2.5 --output "$out/hops.json" "$@" ;;
  torch) python3 scripts/compare_torch.py --output "$out/torch.json" "$@" ;;
  prefill) k3cuda bench prefill -v --rank 3 --prompt 8K --experts 887 --stages --output "$out/prefill.json" "$@" ;;
  idle) python3 scripts/bench_idle.py --output "$out/idle.json" "$@" ;;
  first_token) python3 scripts/bench_first_token.py --output "$out/first_token.json" "$@" ;;
  decode) k3cuda bench decode -v --tp 16 --batch 1,2,4,8 --draft-tokens 7 --acceptance-length 6 --input-len 1 --output-len 1000 --output "$out/decode.json" "$@" ;;
  decode_plain) k3cuda bench decode -v --tp 16 --batch 1,2,4,8,16,32,64 --input-len 1 --output-len 200 --output "$out/decode_plain.json" "$@" ;;
  official) for part in step one_launch one_launch_hops one_launch_decode experts hops torch prefill idle first_token load decode decode_plain; do sh scripts/gpu.sh "$part"; done ;;
  # One whole rank of a stand-in of the release in holes; it also writes 16 GB really, to measure the disk.
  load) python3 scripts/load_rank.py --output "$out/load.json" "$@" ;;
  stages) k3cuda bench stage -v --rank 3 --rows 1,8,64 --context 8K "$@" ;;
  # Collectives between processes, by NCCL and inside a kernel: --ranks N on N GPUs, or --ranks N --share-gpu on fewer.
  collectives) exec python3 scripts/bench_collectives.py "$@" ;;
  # All that is known of ranks as processes, on the GPUs that are here: what collectives bring and how long they take (collectives-N.json in $OUT for
  # as many ranks as have a GPU each), then steps, text, drafts, and ranks that die. Where there are fewer GPUs than ranks they share them, and times
  # mean nothing.
  ranks)
    gpus=$(python3 -c 'from k3cuda.runtime.machine import probe_driver; print(len(probe_driver().gpus))')
    for n in 2 4 8 16; do
      if [ "$n" -le "$gpus" ]; then NCCL_NVLS_ENABLE=0 python3 scripts/bench_collectives.py --ranks "$n" --output "$out/collectives-$n.json"
      elif [ "$n" -le 4 ]; then python3 scripts/bench_collectives.py --ranks "$n" --share-gpu; fi
    done
    exec python3 -m pytest -m gpu tests/gpu/test_peer_exchange_gpu.py tests/gpu/test_ranks_nccl.py tests/gpu/test_rank_failures_gpu.py "$@" ;;
  # Steps of the first layers of the release as real ranks, one a GPU: --ranks N; --trace for one axis of time.
  rank_steps) NCCL_NVLS_ENABLE=0 exec python3 scripts/bench_ranks.py --output "$out/rank_steps.json" "$@" ;;
  # How a step of one size scales: six layers, which fit one GPU, over 1, 2, 4 and 8 of the GPUs that are here.
  scaling)
    gpus=$(python3 -c 'from k3cuda.runtime.machine import probe_driver; print(len(probe_driver().gpus))')
    for n in 1 2 4 8; do
      if [ "$n" -le "$gpus" ]; then NCCL_NVLS_ENABLE=0 python3 scripts/bench_ranks.py --ranks "$n" --layers 6 --output "$out/rank_steps-$n.json" "$@"; fi
    done ;;
  bench_core | bench_cores | bench_mla | bench_sample) exec python3 "scripts/$name.py" "$@" ;;
  # All that `train` does in a minute and a half, with two steps of the target: what is broken is known before the minutes are spent.
  rehearse) rm -rf build/rehearsal; exec python3 scripts/train_demo.py build/rehearsal --steps 2 --minutes 1.5 "$@" ;;
  # The demo model and its drafts in at most 9.2 minutes, all of it included (docs/demo.md): demo.tar and train.jsonl in $OUT. What a call that ran out of
  # time had done stays in build/train_demo, and the next one goes on from there. Extra arguments are those of scripts/train_demo.py.
  train)
    code=0
    python3 scripts/train_demo.py build/train_demo --minutes 9.2 "$@" || code=$?
    cp build/train_demo/train.jsonl "$out/"
    # Whatever there is: where drafts failed the model comes back without them.
    if [ -d build/train_demo/demo ]; then (cd build/train_demo && find demo draft-* -type f 2>/dev/null | tar -cf demo.tar -T -) && cp build/train_demo/demo.tar "$out/"; fi
    exit "$code" ;;
  # The trained demo model on every backend, cache, cut and draft against the reference's answers (docs/demo.md says how they are shared out).
  quality) exec python3 -m pytest -m gpu -v --durations=0 tests/gpu/test_demo_quality.py "$@" ;;
  # Chains of products in one launch (docs/megakernel.md).
  launch) exec python3 scripts/bench_launch.py "$@" ;;
  trace) exec python3 scripts/trace_step.py "$@" ;;
  *) echo "gpu.sh: no $name; $names" >&2; exit 2 ;;
esac
