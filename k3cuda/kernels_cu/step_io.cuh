// What stands around a step: its inputs taken from the host's memory before it, its tokens drawn and laid there behind it.
#pragma once
#include "sample_row.cuh"

constexpr int kAsSampled = -1;   // of token_ids: the token last drawn for the row's slot
constexpr int kAsDrafted = -2;   // from here down: -2 - i is entry i of draft_ids

struct StepLoad {
  const uint4* inputs;             // host's copy of the input buffers, which are neighbours at the start of an arena
  u8* const* arenas;
  int ranks, first, last;          // sixteens of bytes from `first` on, below `last`; from 0 on, tokens are looked up
  int token_ids, row_slot, rows;   // offsets of these inputs, entries of each
  const int *slot_tokens, *draft_ids;
  const uint4 *draws, *penalties;  // records of the draws, and their penalties, in the host's memory
  uint4 *draws_to, *penalties_to;
  int draw_words;                  // sixteens of bytes
  const int* penalty_words;        // the same, in the host's memory
  u64* began;                      // when this kernel began: nanoseconds of the device's clock
};

// The host writes these bytes between two launches.
K3_DEVICE uint4 load_host(const uint4* p) {
#ifdef K3_HOST_SHIM
  return *p;
#else
  uint4 v;
  asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
#endif
}

// One block: the inputs, into every rank's arena.
K3_DEVICE void load_inputs(const StepLoad& a) {
  for (int i = a.first + threadIdx.x; i < a.last; i += 2 * blockDim.x) {   // two on their way: the host's memory answers late
    const int j = i + blockDim.x < a.last ? i + blockDim.x : i;
    const uint4 v = load_host(a.inputs + i), w = load_host(a.inputs + j);
    for (int r = 0; r < a.ranks; ++r) ((uint4*)a.arenas[r])[i] = v, ((uint4*)a.arenas[r])[j] = w;
  }
  if (a.first) return;
  __syncthreads();
  for (int row = threadIdx.x; row < a.rows; row += blockDim.x) {
    const int told = ((const int*)(a.arenas[0] + a.token_ids))[row];
    if (told > kAsSampled) continue;
    const int token = told == kAsSampled ? a.slot_tokens[((const int*)(a.arenas[0] + a.row_slot))[row]] : a.draft_ids[kAsDrafted - told];
    // Behind a row that was not finite any token does: its sequence has ended, or its draft is not judged.
    for (int r = 0; r < a.ranks; ++r) ((int*)(a.arenas[r] + a.token_ids))[row] = token < 0 ? 0 : token;
  }
}

// Block 0 loads the inputs, block 1 the records, the others the penalties: the host's memory answers late, so all ask at once.
K3_DEVICE void step_load(const StepLoad& a) {
  if (blockIdx.x == 0) {
    if (threadIdx.x == 0) *a.began = device_ns();
    return load_inputs(a);
  }
  if (blockIdx.x == 1) {
    for (int i = threadIdx.x; i < a.draw_words; i += blockDim.x) a.draws_to[i] = load_host(a.draws + i);
    return;
  }
  const int words = a.draw_words ? *(const volatile int*)a.penalty_words : 0;
  for (int i = (blockIdx.x - 2) * blockDim.x + threadIdx.x; i < words; i += (gridDim.x - 2) * blockDim.x) a.penalties_to[i] = load_host(a.penalties + i);
}

// Grid: any from 3.
extern "C" __global__ void __launch_bounds__(512) k_load(const __grid_constant__ StepLoad a) {
  grid_wait();
  grid_launch_next();
  step_load(a);
}

// Defines k_sample; grid: rows * CLUSTER blocks in clusters of CLUSTER.
#define K3_SAMPLE(VOCAB, CLUSTER, WARPS)                                                                                    \
  using SampleLayout = SampleShape<VOCAB, CLUSTER, WARPS>;                                                                 \
  extern "C" __global__ void __launch_bounds__(SampleLayout::kThreads, 1) k_sample(const __grid_constant__ SampleArgs a) { \
    __shared__ SampleSmem<SampleLayout> m;                                                                                 \
    grid_wait();                                                                                                           \
    grid_launch_next();                                                                                                    \
    sample_row<SampleLayout>(a, m, blockIdx.x / CLUSTER);                                                                  \
  }
