// Latent attention over a cache that a group of ranks holds together, by page: each rank attends over its own positions, which are one behind the
// other for it, and leaves of each row and head what the merge needs: weighted latents, m and the sum of weights (mla_core.cuh).
#pragma once
#include "mla_combine.cuh"

// How many of the first `length` positions the rank at `place` of `group` holds.
K3_DEVICE int mla_own_length(int length, int place, int group) {
  const int pages = length / kMlaPage, rest = length % kMlaPage;
  return (pages + group - 1 - place) / group * kMlaPage + (pages % group == place ? rest : 0);
}

// As mla_combine, of all rows, which may see none of the rank's positions: then 0, -infinity, 0. The sum is not divided by; `out` is
// [rows][heads][kLatent + 2].
template <int kHeads, int kLatent, class Ready>
K3_DEVICE void mla_combine_own(const MlaCombine& a, float* out, MlaCombineSmem<1>& m, Ready ready) {
  constexpr int kUnits = (kLatent + kMlaSlab - 1) / kMlaSlab;
  const int tid = threadIdx.x, cls = tid / 8, lane = tid % 8;
  ready();
  if (warp_id() == 0) mla_plan<kHeads>(a.rows, m.work, {{kHeads, kHeads, kHeads}}, 0);
  __syncthreads();
  if (blockIdx.x == 0 && tid == 0) *a.next = 0;
  int turn = 0;
  for (int unit = blockIdx.x; unit < a.rows.rows * kHeads * kUnits; unit += gridDim.x) {
    const int at = unit % kUnits * kMlaSlab, head = unit / kUnits % kHeads, row = unit / (kUnits * kHeads);
    if (m.work.slot[row] < 0) continue;
    const int run = m.work.run[row], chunks = mla_chunks(m.work.position[row] + 1), columns = m.work.length[run] * kHeads;
    const size_t first = m.work.before[kMlaClasses][run] + (row - run) * kHeads + head;
    const float2* top_sum = a.top_sum + first;
    const float4* from = (const float4*)(a.partial + first * kLatent + at) + lane;
    float top = minus_infinity();
    for (int j = cls; j < chunks; j += kMlaClassCount) top = fmaxf(top, top_sum[size_t(j) * columns].x);
    turn ^= 1;
    top = mla_block_top(m.top[turn], top);
    float total = 0;
    float4 o{0, 0, 0, 0};
    const bool inside = kLatent % kMlaSlab == 0 || at + lane * 4 < kLatent;
    for (int j = cls; j < chunks; j += kMlaClassCount) {
      const float2 ts = top_sum[size_t(j) * columns];
      const float4 v = inside ? from[size_t(j) * columns * (kLatent / 4)] : float4{0, 0, 0, 0};
      const float f = power_of_two(ts.x - top);
      total = fmaf(ts.y, f, total);
      o = {fmaf(v.x, f, o.x), fmaf(v.y, f, o.y), fmaf(v.z, f, o.z), fmaf(v.w, f, o.w)};
    }
    K3_UNROLL
    for (int d = 8; d < kWarpSize; d *= 2) {
      o = add4(o, shuffle4(o, d));
      total += __shfl_xor_sync(kFullWarp, total, d);
    }
    if (lane_id() < 8) m.sum[turn][0][warp_id()][lane] = o;
    if (lane_id() == 0) m.weight[turn][warp_id()] = total;
    __syncthreads();
    float* to = out + (size_t(row) * kHeads + head) * (kLatent + 2);
    if (tid < kMlaSlab && at + tid < kLatent) to[at + tid] = tree_sum<kMlaCombineWarps>((const float*)m.sum[turn][0] + tid, kMlaSlab);
    if (at == 0 && tid == 0) to[kLatent] = top, to[kLatent + 1] = tree_sum<kMlaCombineWarps>(m.weight[turn], 1);
  }
}

// Mean latent of one row and head from the group's parts, `stride` floats apart: scaled to the largest m by powers of two, added neighbours first.
template <int kGroup, int kLatent>
K3_DEVICE void mla_merge(const float* parts, size_t stride, float cache_scale, bf16* out) {
  float weight[kGroup], sum[kGroup], top = minus_infinity();
  K3_UNROLL
  for (int p = 0; p < kGroup; ++p) top = fmaxf(top, parts[p * stride + kLatent]);
  K3_UNROLL
  for (int p = 0; p < kGroup; ++p) {
    weight[p] = power_of_two(parts[p * stride + kLatent] - top);
    sum[p] = parts[p * stride + kLatent + 1] * weight[p];
  }
  const float scale = cache_scale / tree_sum<kGroup>(sum, 1);
  for (int dim = threadIdx.x; dim < kLatent; dim += blockDim.x) {
    float v[kGroup];
    K3_UNROLL
    for (int p = 0; p < kGroup; ++p) v[p] = parts[p * stride + dim] * weight[p];
    out[dim] = float_to_bf16(tree_sum<kGroup>(v, 1) * scale);
  }
}
