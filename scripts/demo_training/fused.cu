// What a training step does between its matrix products, each in one pass over memory: forward and backward kernels of demo_training/fused.py, which says
// what they compute. Sums over rows go to one place a warp or block and are added up by the caller: no sums in an order that differs from run to run.
// Macros: BF16 where what products read and write is BF16 (else F32), CHUNK tokens of a chunk of KDA. A head has 128 channels: 4 a lane, or one a thread.

constexpr int HEAD = 128, SUB = 16, PIECES = CHUNK / SUB, RUN = 32, ROWS = 8, MOST_WIDTH = 256, MOST_SOURCES = 4;

#ifdef BF16
struct T { unsigned short bits; };
static __device__ float get(T x) {
  union { unsigned u; float f; } v;
  v.u = (unsigned)x.bits << 16;
  return v.f;
}
static __device__ void put(T* to, float x) {   // to the nearest, ties to even; NaN stays one
  union { float f; unsigned u; } v;
  v.f = x;
  to->bits = (v.u & 0x7fffffffu) > 0x7f800000u ? 0x7fc0 : (unsigned short)((v.u + 0x7fffu + (v.u >> 16 & 1)) >> 16);
}
#else
typedef float T;
static __device__ float get(T x) { return x; }
static __device__ void put(T* to, float x) { *to = x; }
#endif
struct alignas(4 * sizeof(T)) T4 { T x[4]; };
struct alignas(16) F4 { float x[4]; };

static __device__ void load4(const T* from, float (&to)[4]) {
  T4 v = *(const T4*)from;
  for (int c = 0; c < 4; c++) to[c] = get(v.x[c]);
}
static __device__ void store4(T* to, const float (&from)[4]) {
  T4 v;
  for (int c = 0; c < 4; c++) put(&v.x[c], from[c]);
  *(T4*)to = v;
}
static __device__ void store4f(float* to, const float (&from)[4]) {
  F4 v;
  for (int c = 0; c < 4; c++) v.x[c] = from[c];
  *(F4*)to = v;
}
static __device__ float warp_sum(float x) {
  for (int by = 16; by; by /= 2) x += __shfl_xor_sync(~0u, x, by);
  return x;
}
static __device__ float sigmoid(float x) { return 1.f / (1.f + expf(-x)); }

// ---- short convolution, SiLU, and a head of length `scale` where is_unit: y [b, t, heads x HEAD] -> out [b, heads, t, HEAD] ----
// Grid (runs of RUN tokens / 4, heads, b), a warp each.

struct Conv {
  float taps[4][4], y[3][4];   // by tap, of the three tokens before

  __device__ void start(const T* row, const float* weights, int first, int stride) {
    for (int c = 0; c < 4; c++)
      for (int j = 0; j < 4; j++) taps[j][c] = weights[4 * c + j];
    for (int j = 0; j < 3; j++) {
      for (int c = 0; c < 4; c++) y[j][c] = 0.f;
      if (first - 3 + j >= 0) load4(row + (long long)(first - 3 + j) * stride, y[j]);
    }
  }
  __device__ void sums(const float (&now)[4], float (&z)[4]) const {
    for (int c = 0; c < 4; c++) z[c] = y[0][c] * taps[0][c] + y[1][c] * taps[1][c] + y[2][c] * taps[2][c] + now[c] * taps[3][c];
  }
  __device__ void push(const float (&now)[4]) {
    for (int c = 0; c < 4; c++) y[0][c] = y[1][c], y[1][c] = y[2][c], y[2][c] = now[c];
  }
};

extern "C" __global__ void conv_forward(const T* y, const float* weights, float* out, int t, int heads, float scale, float eps, int is_unit) {
  const int lane = threadIdx.x % 32, head = blockIdx.y, first = (blockIdx.x * 4 + threadIdx.x / 32) * RUN, stride = heads * HEAD;
  if (first >= t) return;
  const int last = first + RUN < t ? first + RUN : t;
  const T* row = y + (long long)blockIdx.z * t * stride + head * HEAD + 4 * lane;
  float* to = out + ((long long)blockIdx.z * heads + head) * t * HEAD + 4 * lane;
  Conv conv;
  conv.start(row, weights + (head * HEAD + 4 * lane) * 4, first, stride);
  for (int i = first; i < last; i++) {
    float now[4], z[4];
    load4(row + (long long)i * stride, now);
    conv.sums(now, z);
    conv.push(now);
    float squares = 0.f;
    for (int c = 0; c < 4; c++) z[c] *= sigmoid(z[c]), squares += z[c] * z[c];
    if (is_unit) {
      const float by = scale / sqrtf(warp_sum(squares) + eps);
      for (int c = 0; c < 4; c++) z[c] *= by;
    }
    store4f(to + (long long)i * HEAD, z);
  }
}

// parts [b x runs, heads x HEAD, 4]: of the taps' gradient.
extern "C" __global__ void conv_backward(const T* y, const float* weights, const float* grad, T* grad_y, float* parts, int t, int heads, float scale, float eps,
                                         int is_unit) {
  const int lane = threadIdx.x % 32, head = blockIdx.y, run = blockIdx.x * 4 + threadIdx.x / 32, first = run * RUN, stride = heads * HEAD;
  if (first >= t) return;
  const int last = first + RUN < t ? first + RUN : t, runs = (t + RUN - 1) / RUN;
  const long long at = (long long)blockIdx.z * t * stride + head * HEAD + 4 * lane;
  const float* g = grad + ((long long)blockIdx.z * heads + head) * t * HEAD + 4 * lane;
  float of_taps[4][4] = {}, before[3][4] = {};
  Conv conv;
  conv.start(y + at, weights + (head * HEAD + 4 * lane) * 4, first, stride);
  for (int i = first; i < last + 3; i++) {
    float dz[4] = {};
    if (i < t) {
      float now[4], z[4], s[4], slope[4];
      load4(y + at + (long long)i * stride, now);
      conv.sums(now, z);
      const F4 d = *(const F4*)(g + (long long)i * HEAD);
      float squares = 0.f, along = 0.f;
      for (int c = 0; c < 4; c++) {
        const float gate = sigmoid(z[c]);
        s[c] = z[c] * gate;
        slope[c] = gate * (1.f + z[c] * (1.f - gate));
        squares += s[c] * s[c];
        along += s[c] * d.x[c];
        dz[c] = d.x[c];
      }
      if (is_unit) {
        const float r = 1.f / sqrtf(warp_sum(squares) + eps), turn = warp_sum(along) * r * r;
        for (int c = 0; c < 4; c++) dz[c] = scale * r * (d.x[c] - s[c] * turn);
      }
      for (int c = 0; c < 4; c++) {
        dz[c] *= slope[c];
        if (i < last) {
          for (int j = 0; j < 3; j++) of_taps[j][c] += dz[c] * conv.y[j][c];
          of_taps[3][c] += dz[c] * now[c];
        }
      }
      conv.push(now);
    }
    if (i >= first + 3) {
      float dy[4];
      for (int c = 0; c < 4; c++)
        dy[c] = before[0][c] * conv.taps[3][c] + before[1][c] * conv.taps[2][c] + before[2][c] * conv.taps[1][c] + dz[c] * conv.taps[0][c];
      store4(grad_y + at + (long long)(i - 3) * stride, dy);
    }
    for (int c = 0; c < 4; c++) before[0][c] = before[1][c], before[1][c] = before[2][c], before[2][c] = dz[c];
  }
  float* part = parts + (((long long)blockIdx.z * runs + run) * stride + head * HEAD + 4 * lane) * 4;
  for (int c = 0; c < 4; c++)
    for (int j = 0; j < 4; j++) part[4 * c + j] = of_taps[j][c];
}

// ---- sums of log decays inside a chunk: f [b, t, heads x HEAD] -> total [b, heads, t, HEAD]. Grid (chunks, heads, b), a thread a channel. ----

extern "C" __global__ void decay_forward(const T* f, const float* bias, const float* steep, float* total, int t, int heads, float bound) {
  const int head = blockIdx.y, channel = head * HEAD + threadIdx.x;
  const T* from = f + ((long long)blockIdx.z * t + blockIdx.x * CHUNK) * heads * HEAD + channel;
  float* to = total + (((long long)blockIdx.z * heads + head) * t + blockIdx.x * CHUNK) * HEAD + threadIdx.x;
  const float a = steep[head], b = bias[channel];
  float sum = 0.f;
  for (int i = 0; i < CHUNK; i++) {
    sum += bound * sigmoid(a * (get(from[(long long)i * heads * HEAD]) + b));
    to[i * HEAD] = sum;
  }
}

// parts [2, b x chunks, heads x HEAD]: of the gradients of bias and steep.
extern "C" __global__ void decay_backward(const T* f, const float* bias, const float* steep, const float* grad, T* grad_f, float* parts, int t, int heads,
                                          float bound) {
  const int head = blockIdx.y, channel = head * HEAD + threadIdx.x;
  const long long at = ((long long)blockIdx.z * t + blockIdx.x * CHUNK) * heads * HEAD + channel;
  const float* g = grad + (((long long)blockIdx.z * heads + head) * t + blockIdx.x * CHUNK) * HEAD + threadIdx.x;
  const float a = steep[head], b = bias[channel];
  float sum = 0.f, of_bias = 0.f, of_steep = 0.f;
  for (int i = CHUNK - 1; i >= 0; i--) {
    sum += g[i * HEAD];
    const float x = get(f[at + (long long)i * heads * HEAD]) + b, s = sigmoid(a * x), w = sum * bound * s * (1.f - s);
    put(&grad_f[at + (long long)i * heads * HEAD], w * a);
    of_bias += w * a;
    of_steep += w * x;
  }
  const long long part = ((long long)blockIdx.z * gridDim.x + blockIdx.x) * heads * HEAD + channel;
  parts[part] = of_bias;
  parts[part + (long long)gridDim.z * gridDim.x * heads * HEAD] = of_steep;
}

// ---- factors of a chunk's products (kda.py): q, k, v, total [chunks, CHUNK, HEAD], beta [chunks, CHUNK]. A block a chunk, a thread a channel. ----

extern "C" __global__ void factors_forward(const float* q, const float* k, const float* v, const float* total, const float* beta, float* left, float* right,
                                           float* values, float* keys, float* write, float* read, float* kept) {
  const long long at = (long long)blockIdx.x * CHUNK * HEAD + threadIdx.x;
  float middle[PIECES];
  for (int p = 0; p < PIECES; p++) middle[p] = total[at + (p * SUB + SUB / 2) * HEAD];
  const float end = total[at + (CHUNK - 1) * HEAD];
  kept[(long long)blockIdx.x * HEAD + threadIdx.x] = expf(end);
#pragma unroll
  for (int piece = 0; piece < PIECES; piece++)
    for (int j = 0; j < SUB; j++) {
      const int i = piece * SUB + j;
      const float g = total[at + i * HEAD], x = q[at + i * HEAD], y = k[at + i * HEAD], b = beta[(long long)blockIdx.x * CHUNK + i];
      const float up = expf(g - middle[piece]), grown = expf(g);
      float* l = left + ((long long)blockIdx.x * PIECES + piece) * 2 * SUB * HEAD + threadIdx.x;
      l[j * HEAD] = x * up;
      l[(SUB + j) * HEAD] = y * up;
#pragma unroll
      for (int p = 0; p < PIECES; p++)
        right[((long long)blockIdx.x * PIECES + p) * CHUNK * HEAD + i * HEAD + threadIdx.x] = piece <= p ? y * expf(middle[p] - g) : 0.f;
      values[at + i * HEAD] = b * v[at + i * HEAD];
      keys[at + i * HEAD] = b * y * grown;
      write[at + i * HEAD] = y * expf(end - g);
      read[at + i * HEAD] = x * grown;
    }
}

extern "C" __global__ void factors_backward(const float* q, const float* k, const float* v, const float* total, const float* beta, const float* grad_left,
                                            const float* grad_right, const float* grad_values, const float* grad_keys, const float* grad_write,
                                            const float* grad_read, const float* grad_kept, float* grad_q, float* grad_k, float* grad_v, float* grad_total,
                                            float* grad_beta) {
  __shared__ float of_beta[CHUNK][HEAD / 32];
  const long long at = (long long)blockIdx.x * CHUNK * HEAD + threadIdx.x;
  float middle[PIECES], of_middle[PIECES] = {};
  for (int p = 0; p < PIECES; p++) middle[p] = total[at + (p * SUB + SUB / 2) * HEAD];
  const float end = total[at + (CHUNK - 1) * HEAD];
  float of_end = grad_kept[(long long)blockIdx.x * HEAD + threadIdx.x] * expf(end);
#pragma unroll
  for (int piece = 0; piece < PIECES; piece++)
    for (int j = 0; j < SUB; j++) {
      const int i = piece * SUB + j;
      const float g = total[at + i * HEAD], x = q[at + i * HEAD], y = k[at + i * HEAD], b = beta[(long long)blockIdx.x * CHUNK + i];
      const float up = expf(g - middle[piece]), grown = expf(g), down = expf(end - g);
      const float* l = grad_left + ((long long)blockIdx.x * PIECES + piece) * 2 * SUB * HEAD + threadIdx.x;
      const float lq = l[j * HEAD] * up, lk = l[(SUB + j) * HEAD] * up, rise = lq * x + lk * y;
      float dq = lq, dk = lk, dg = rise;
      of_middle[piece] -= rise;
#pragma unroll
      for (int p = piece; p < PIECES; p++) {
        const float r = grad_right[((long long)blockIdx.x * PIECES + p) * CHUNK * HEAD + i * HEAD + threadIdx.x] * expf(middle[p] - g);
        dk += r;
        dg -= r * y;
        of_middle[p] += r * y;
      }
      const float dread = grad_read[at + i * HEAD] * grown, dkeys = grad_keys[at + i * HEAD] * grown, dwrite = grad_write[at + i * HEAD] * down;
      const float dv = grad_values[at + i * HEAD];
      grad_q[at + i * HEAD] = dq + dread;
      grad_k[at + i * HEAD] = dk + dkeys * b + dwrite;
      grad_v[at + i * HEAD] = dv * b;
      grad_total[at + i * HEAD] = dg + dread * x + dkeys * b * y - dwrite * y;
      of_end += dwrite * y;
      const float sum = warp_sum(dkeys * y + dv * v[at + i * HEAD]);
      if (threadIdx.x % 32 == 0) of_beta[i][threadIdx.x / 32] = sum;
    }
  for (int p = 0; p < PIECES; p++) grad_total[at + (p * SUB + SUB / 2) * HEAD] += of_middle[p];   // a thread's own channel: written by itself above
  grad_total[at + (CHUNK - 1) * HEAD] += of_end;
  __syncthreads();
  if (threadIdx.x < CHUNK) {
    float sum = 0.f;
    for (int w = 0; w < HEAD / 32; w++) sum += of_beta[threadIdx.x][w];
    grad_beta[(long long)blockIdx.x * CHUNK + threadIdx.x] = sum;
  }
}

// ---- (I + a)^-1 of strictly lower triangular a [chunks, CHUNK, CHUNK], by forward substitution: a thread a column, 128 / CHUNK chunks a block ----

extern "C" __global__ void inverse_forward(const float* a, float* out, int chunks) {
  __shared__ float rows[HEAD / CHUNK][CHUNK][CHUNK];
  const int first = blockIdx.x * (HEAD / CHUNK), mine = threadIdx.x / CHUNK, column = threadIdx.x % CHUNK;
  for (int i = threadIdx.x; i < HEAD * CHUNK; i += HEAD)
    rows[i / (CHUNK * CHUNK)][i / CHUNK % CHUNK][i % CHUNK] = first + i / (CHUNK * CHUNK) < chunks ? a[(long long)first * CHUNK * CHUNK + i] : 0.f;
  __syncthreads();
  float x[CHUNK];   // in registers: both loops are unrolled
#pragma unroll
  for (int i = 0; i < CHUNK; i++) {
    float sum[4] = {};
#pragma unroll
    for (int l = 0; l < i; l++) sum[l % 4] = fmaf(rows[mine][i][l], x[l], sum[l % 4]);
    x[i] = (i == column ? 1.f : 0.f) - ((sum[0] + sum[1]) + (sum[2] + sum[3]));
  }
  if (first + mine < chunks)
#pragma unroll
    for (int i = 0; i < CHUNK; i++) out[((long long)(first + mine) * CHUNK + i) * CHUNK + column] = x[i];
}

// ---- norm of a head's output and its gate: o [b, heads, t, HEAD], gate [b, t, heads x HEAD] -> out like gate. Grid as of the convolution. ----

extern "C" __global__ void gated_forward(const float* o, const float* weight, const T* gate, T* out, int t, int heads, float eps) {
  const int lane = threadIdx.x % 32, first = (blockIdx.x * 4 + threadIdx.x / 32) * RUN;
  const int last = first + RUN < t ? first + RUN : t;
  for (int i = first; i < last; i++) {
    const F4 x = *(const F4*)(o + (((long long)blockIdx.z * heads + blockIdx.y) * t + i) * HEAD + 4 * lane);
    const long long at = (((long long)blockIdx.z * t + i) * heads + blockIdx.y) * HEAD + 4 * lane;
    float g[4], squares = 0.f;
    load4(gate + at, g);
    for (int c = 0; c < 4; c++) squares += x.x[c] * x.x[c];
    const float r = 1.f / sqrtf(warp_sum(squares) / HEAD + eps);
    for (int c = 0; c < 4; c++) g[c] = x.x[c] * r * weight[4 * lane + c] * sigmoid(g[c]);
    store4(out + at, g);
  }
}

// parts [b x heads x runs, HEAD]: of the weight's gradient.
extern "C" __global__ void gated_backward(const float* o, const float* weight, const T* gate, const T* grad, float* grad_o, T* grad_gate, float* parts, int t,
                                          int heads, float eps) {
  const int lane = threadIdx.x % 32, run = blockIdx.x * 4 + threadIdx.x / 32, first = run * RUN;
  if (first >= t) return;
  const int last = first + RUN < t ? first + RUN : t, runs = (t + RUN - 1) / RUN;
  float of_weight[4] = {};
  for (int i = first; i < last; i++) {
    const long long of_o = (((long long)blockIdx.z * heads + blockIdx.y) * t + i) * HEAD + 4 * lane;
    const long long at = (((long long)blockIdx.z * t + i) * heads + blockIdx.y) * HEAD + 4 * lane;
    const F4 x = *(const F4*)(o + of_o);
    float g[4], d[4], squares = 0.f, along = 0.f;
    load4(gate + at, g);
    load4(grad + at, d);
    for (int c = 0; c < 4; c++) squares += x.x[c] * x.x[c];
    const float r = 1.f / sqrtf(warp_sum(squares) / HEAD + eps);
    for (int c = 0; c < 4; c++) {
      const float s = sigmoid(g[c]), normed = x.x[c] * r;
      g[c] = d[c] * normed * weight[4 * lane + c] * s * (1.f - s);
      of_weight[c] += d[c] * s * normed;
      d[c] *= s * weight[4 * lane + c];
      along += d[c] * x.x[c];
    }
    const float turn = warp_sum(along) * r * r / HEAD;
    for (int c = 0; c < 4; c++) d[c] = r * (d[c] - x.x[c] * turn);
    store4f(grad_o + of_o, d);
    store4(grad_gate + at, g);
  }
  store4f(parts + (((long long)blockIdx.z * heads + blockIdx.y) * runs + run) * HEAD + 4 * lane, of_weight);
}

// ---- SiTU: out = b tanh(gate / b) sigmoid(gate) c tanh(up / c). Four elements a thread. ----

extern "C" __global__ void situ_forward(const T* gate, const T* up, T* out, long long fours, float b, float c) {
  const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= fours) return;
  float x[4], y[4];
  load4(gate + 4 * i, x);
  load4(up + 4 * i, y);
  for (int e = 0; e < 4; e++) x[e] = b * tanhf(x[e] / b) * sigmoid(x[e]) * (c * tanhf(y[e] / c));
  store4(out + 4 * i, x);
}

extern "C" __global__ void situ_backward(const T* gate, const T* up, const T* grad, T* grad_gate, T* grad_up, long long fours, float b, float c) {
  const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= fours) return;
  float x[4], y[4], d[4];
  load4(gate + 4 * i, x);
  load4(up + 4 * i, y);
  load4(grad + 4 * i, d);
  for (int e = 0; e < 4; e++) {
    const float tx = tanhf(x[e] / b), s = sigmoid(x[e]), ty = tanhf(y[e] / c);
    x[e] = d[e] * c * ty * (s * (1.f - tx * tx) + b * tx * s * (1.f - s));
    y[e] = d[e] * b * tx * s * (1.f - ty * ty);
  }
  store4(grad_gate + 4 * i, x);
  store4(grad_up + 4 * i, y);
}

// ---- RMS norm of rows of `width`, at most MOST_WIDTH: a warp ROWS rows ----

extern "C" __global__ void norm_forward(const T* x, const float* weight, T* out, int rows, int width, float eps) {
  const int lane = threadIdx.x % 32, first = (blockIdx.x * 4 + threadIdx.x / 32) * ROWS;
  for (int i = first; i < first + ROWS && i < rows; i++) {
    float v[MOST_WIDTH / 32], squares = 0.f;
#pragma unroll
    for (int e = 0; e < MOST_WIDTH / 32; e++) {
      v[e] = e * 32 + lane < width ? get(x[(long long)i * width + e * 32 + lane]) : 0.f;
      squares += v[e] * v[e];
    }
    const float r = 1.f / sqrtf(warp_sum(squares) / width + eps);
#pragma unroll
    for (int e = 0; e < MOST_WIDTH / 32; e++)
      if (e * 32 + lane < width) put(&out[(long long)i * width + e * 32 + lane], v[e] * r * weight[e * 32 + lane]);
  }
}

// parts [warps, width]: of the weight's gradient.
extern "C" __global__ void norm_backward(const T* x, const float* weight, const T* grad, T* grad_x, float* parts, int rows, int width, float eps) {
  const int lane = threadIdx.x % 32, warp = blockIdx.x * 4 + threadIdx.x / 32, first = warp * ROWS;
  float of_weight[MOST_WIDTH / 32] = {};
  for (int i = first; i < first + ROWS && i < rows; i++) {
    float v[MOST_WIDTH / 32], d[MOST_WIDTH / 32], squares = 0.f, along = 0.f;
#pragma unroll
    for (int e = 0; e < MOST_WIDTH / 32; e++) {
      const bool is_there = e * 32 + lane < width;
      v[e] = is_there ? get(x[(long long)i * width + e * 32 + lane]) : 0.f;
      d[e] = is_there ? get(grad[(long long)i * width + e * 32 + lane]) : 0.f;
      squares += v[e] * v[e];
    }
    const float r = 1.f / sqrtf(warp_sum(squares) / width + eps);
#pragma unroll
    for (int e = 0; e < MOST_WIDTH / 32; e++) {
      of_weight[e] += d[e] * v[e] * r;
      d[e] *= e * 32 + lane < width ? weight[e * 32 + lane] : 0.f;
      along += d[e] * v[e];
    }
    const float turn = warp_sum(along) * r * r / width;
#pragma unroll
    for (int e = 0; e < MOST_WIDTH / 32; e++)
      if (e * 32 + lane < width) put(&grad_x[(long long)i * width + e * 32 + lane], r * (d[e] - v[e] * turn));
  }
#pragma unroll
  for (int e = 0; e < MOST_WIDTH / 32; e++)
    if (e * 32 + lane < width) parts[(long long)warp * width + e * 32 + lane] = of_weight[e];
}

// ---- mixture over depth of up to MOST_SOURCES sources, rows of `width`: a warp ROWS rows. Sources behind `count` are not read. ----

struct Mixed {
  float x[MOST_SOURCES][MOST_WIDTH / 32], vector[MOST_WIDTH / 32], part[MOST_SOURCES], dot[MOST_SOURCES], r[MOST_SOURCES];

  __device__ void start(const float* from, int width, int lane) {
#pragma unroll
    for (int e = 0; e < MOST_WIDTH / 32; e++) vector[e] = e * 32 + lane < width ? from[e * 32 + lane] : 0.f;
  }
  __device__ void row(const T* const (&sources)[MOST_SOURCES], int count, long long at, int width, float eps, int lane) {
    float largest = -3e38f, sum = 0.f;
#pragma unroll
    for (int s = 0; s < MOST_SOURCES; s++) {
      if (s >= count) continue;
      float squares = 0.f, along = 0.f;
#pragma unroll
      for (int e = 0; e < MOST_WIDTH / 32; e++) {
        x[s][e] = e * 32 + lane < width ? get(sources[s][at + e * 32 + lane]) : 0.f;
        squares += x[s][e] * x[s][e];
        along += x[s][e] * vector[e];
      }
      dot[s] = warp_sum(along);
      r[s] = 1.f / sqrtf(warp_sum(squares) / width + eps);
      largest = fmaxf(largest, dot[s] * r[s]);
    }
#pragma unroll
    for (int s = 0; s < MOST_SOURCES; s++)
      if (s < count) sum += part[s] = expf(dot[s] * r[s] - largest);
#pragma unroll
    for (int s = 0; s < MOST_SOURCES; s++)
      if (s < count) part[s] /= sum;
  }
};

extern "C" __global__ void mix_forward(const T* s0, const T* s1, const T* s2, const T* s3, const float* vector, T* out, int count, int rows, int width,
                                       float eps) {
  const int lane = threadIdx.x % 32, first = (blockIdx.x * 4 + threadIdx.x / 32) * ROWS;
  const T* const sources[MOST_SOURCES] = {s0, s1, s2, s3};
  Mixed mixed;
  mixed.start(vector, width, lane);
  for (int i = first; i < first + ROWS && i < rows; i++) {
    mixed.row(sources, count, (long long)i * width, width, eps, lane);
#pragma unroll
    for (int e = 0; e < MOST_WIDTH / 32; e++) {
      float sum = 0.f;
#pragma unroll
      for (int s = 0; s < MOST_SOURCES; s++)
        if (s < count) sum += mixed.part[s] * mixed.x[s][e];
      if (e * 32 + lane < width) put(&out[(long long)i * width + e * 32 + lane], sum);
    }
  }
}

// parts [warps, width]: of the vector's gradient.
extern "C" __global__ void mix_backward(const T* s0, const T* s1, const T* s2, const T* s3, const float* vector, const T* grad, T* d0, T* d1, T* d2, T* d3,
                                        float* parts, int count, int rows, int width, float eps) {
  const int lane = threadIdx.x % 32, warp = blockIdx.x * 4 + threadIdx.x / 32, first = warp * ROWS;
  const T* const sources[MOST_SOURCES] = {s0, s1, s2, s3};
  T* const grads[MOST_SOURCES] = {d0, d1, d2, d3};
  Mixed mixed;
  mixed.start(vector, width, lane);
  float of_vector[MOST_WIDTH / 32] = {};
  for (int i = first; i < first + ROWS && i < rows; i++) {
    mixed.row(sources, count, (long long)i * width, width, eps, lane);
    float d[MOST_WIDTH / 32], of_part[MOST_SOURCES], mean = 0.f;
#pragma unroll
    for (int e = 0; e < MOST_WIDTH / 32; e++) d[e] = e * 32 + lane < width ? get(grad[(long long)i * width + e * 32 + lane]) : 0.f;
#pragma unroll
    for (int s = 0; s < MOST_SOURCES; s++) {
      if (s >= count) continue;
      float along = 0.f;
#pragma unroll
      for (int e = 0; e < MOST_WIDTH / 32; e++) along += d[e] * mixed.x[s][e];
      of_part[s] = warp_sum(along);
      mean += mixed.part[s] * of_part[s];
    }
#pragma unroll
    for (int s = 0; s < MOST_SOURCES; s++) {
      if (s >= count) continue;
      const float of_score = mixed.part[s] * (of_part[s] - mean), r = mixed.r[s], turn = mixed.dot[s] * r * r / width;
#pragma unroll
      for (int e = 0; e < MOST_WIDTH / 32; e++) {
        of_vector[e] += of_score * r * mixed.x[s][e];
        if (e * 32 + lane < width)
          put(&grads[s][(long long)i * width + e * 32 + lane], mixed.part[s] * d[e] + of_score * r * (mixed.vector[e] - mixed.x[s][e] * turn));
      }
    }
  }
#pragma unroll
  for (int e = 0; e < MOST_WIDTH / 32; e++)
    if (e * 32 + lane < width) parts[(long long)warp * width + e * 32 + lane] = of_vector[e];
}

// ---- rows of experts (experts.py): places [rows x choices] of each choice, `none` and above for those without one. Four elements a thread. ----

extern "C" __global__ void spread_forward(const T* x, const long long* row_of, T* out, long long fours, int width, int rows) {
  const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= fours) return;
  const long long row = row_of[4 * i / width];
  float v[4] = {};
  if (row < rows) load4(x + row * width + 4 * i % width, v);
  store4(out + 4 * i, v);
}

extern "C" __global__ void spread_backward(const T* grad, const long long* places, T* grad_x, long long fours, int width, int choices, long long none) {
  const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= fours) return;
  float sum[4] = {}, v[4];
  for (int k = 0; k < choices; k++) {
    const long long place = places[4 * i / width * choices + k];
    if (place >= none) continue;
    load4(grad + place * width + 4 * i % width, v);
    for (int c = 0; c < 4; c++) sum[c] += v[c];
  }
  store4(grad_x + 4 * i, sum);
}

extern "C" __global__ void collect_forward(const T* y, const long long* places, const float* share, T* out, long long fours, int width, int choices,
                                           long long none) {
  const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= fours) return;
  float sum[4] = {}, v[4];
  for (int k = 0; k < choices; k++) {
    const long long choice = 4 * i / width * choices + k, place = places[choice];
    if (place >= none) continue;
    load4(y + place * width + 4 * i % width, v);
    for (int c = 0; c < 4; c++) sum[c] += share[choice] * v[c];
  }
  store4(out + 4 * i, sum);
}

// A warp a row. grad_y is zero where no choice is.
extern "C" __global__ void collect_backward(const T* y, const long long* places, const float* share, const T* grad, T* grad_y, float* grad_share, int rows,
                                            int width, int choices, long long none) {
  const int lane = threadIdx.x % 32, i = blockIdx.x * 4 + threadIdx.x / 32;
  if (i >= rows) return;
  for (int k = 0; k < choices; k++) {
    const long long choice = (long long)i * choices + k, place = places[choice];
    float along = 0.f;
    if (place < none)
      for (int e = lane; e < width; e += 32) {
        const float d = get(grad[(long long)i * width + e]);
        along += d * get(y[place * width + e]);
        put(&grad_y[place * width + e], share[choice] * d);
      }
    along = warp_sum(along);
    if (lane == 0) grad_share[choice] = along;
  }
}
