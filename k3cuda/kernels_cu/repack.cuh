// Weights as the checkpoint has them into kernel order, on the device: the bytes that runtime/repack.py makes, whose words these are.
// Loading is bound by the disk, so these kernels only have to be far from slow: a thread makes one word, or one lane's 16 bytes.
#pragma once
#include "prims.cuh"

// Tile t of matrix m becomes tile m * dst_matrix + t * dst_step of dst, [leaf][k-step][lane] 16 bytes. Strides count elements, so
// that a matrix may be a part of another, or its transpose; rows that are missing from the last tile are zero.
extern "C" __global__ void repack_bf16(const u16* src, uint4* dst, int matrices, int rows, int leaves, int steps, u64 matrix_stride, u64 row_stride,
                                       u64 k_stride, int dst_matrix, int dst_step) {
  int tiles = (rows + 15) / 16, words = steps * kWarpSize, q = lane_id() % 4, g = lane_id() / 4;
  u64 parts = u64(matrices) * tiles * leaves;
  for (u64 part = blockIdx.x; part < parts; part += gridDim.x) {
    int leaf = int(part % leaves), tile = int(part / leaves % tiles), matrix = int(part / leaves / tiles);
    uint4* out = dst + ((u64(matrix) * dst_matrix + u64(tile) * dst_step) * leaves + leaf) * words;
    for (int i = threadIdx.x; i < words; i += blockDim.x) {   // blockDim.x is whole warps: i's lane is the thread's
      int step = i / kWarpSize;
      int k = leaf * steps * 16 + (step < steps / 2 * 2 ? step / 2 * 32 + 8 * q + step % 2 * 4 : step * 16 + 4 * q);
      u32 word[4];
      for (int r = 0; r < 4; ++r) {   // register r of the fragment: row half r % 2, k half r / 2
        int row = tile * 16 + g + r % 2 * 8;
        const u16* p = src + matrix * matrix_stride + row * row_stride + (k + r / 2 * 2) * k_stride;
        word[r] = row < rows ? p[0] | u32(p[k_stride]) << 16 : 0u;
      }
      out[i] = uint4{word[0], word[1], word[2], word[3]};
    }
  }
}

// Packed nibbles [matrix][row][k / 2] and scales [matrix][row][k / 32] into leaves of weights and factor exponents. `nibbles` is
// NIBBLE_TABLES, [pair][half][code]; `shift` turns a scale code into an exponent; a code above `most` that is not 255 goes to *worst.
extern "C" __global__ void repack_mxfp4(const u8* packed, const u8* scale, u32* dst, const u32* nibbles, u32* worst, int matrices, int rows, int leaves,
                                        int groups, int shift, int most, int dst_step) {
  __shared__ u32 table[4 * 2 * 16];
  for (int i = threadIdx.x; i < 4 * 2 * 16; i += blockDim.x) table[i] = nibbles[i];
  __syncthreads();
  int tiles = (rows + 15) / 16, scale_words = (groups + 3) / 4, words = groups * 64 + scale_words * 16;
  u64 row_groups = u64(leaves) * groups, parts = u64(matrices) * tiles * leaves;
  for (u64 part = blockIdx.x; part < parts; part += gridDim.x) {
    int leaf = int(part % leaves), tile = int(part / leaves % tiles);
    u64 matrix = part / leaves / tiles, first_row = matrix * rows + tile * 16;
    u32* out = dst + ((matrix * tiles + tile) * dst_step * leaves + leaf) * words;
    for (int i = threadIdx.x; i < words; i += blockDim.x) {
      u32 word = 0;
      if (i < groups * 64) {
        // Two groups: [lane][group][step]; an odd last one: [lane][step].
        bool paired = i < groups / 2 * 128;
        int group = paired ? i / 128 * 2 + i % 4 / 2 : groups - 1, lane = paired ? i % 128 / 4 : i % 64 / 2, step = i % 2;
        for (int half = 0; half < 2; ++half) {
          int row = tile * 16 + lane / 4 + half * 8;
          if (row >= rows) continue;
          const u8* p = packed + ((first_row + lane / 4 + half * 8) * row_groups + leaf * groups + group) * 16 + lane % 4 * 4 + step * 2;
          for (int k = 0; k < 2; ++k) {
            const u32* of_pair = table + (half + 2 * k) * 32;
            word ^= of_pair[p[k] & 15] ^ of_pair[16 + (p[k] >> 4)];
          }
        }
      } else {
        int at = i - groups * 64, row = at % 16 / 2 + at % 2 * 8;
        for (int j = 0; j < 4; ++j) {
          int group = at / 16 * 4 + j;
          if (group >= groups) break;
          u32 code = tile * 16 + row < rows ? scale[(first_row + row) * row_groups + leaf * groups + group] : 0u;
          if (code > u32(most) && code < 255) *worst = code;   // whichever is the last
          word |= (code == 255 ? 255u : code + shift & 255) << (8 * j);
        }
      }
      out[i] = word;
    }
  }
}
