// Runs CUDA C++ device code on the CPU, for tests only. g++ -x c++ -include k3_host_shim.h -DK3_HOST_SHIM k.cu
//
// Model: one OS thread per resident block, one fiber per CUDA thread, all fibers of a block on that OS thread.
//  * __shared__ is `static thread_local`, so it is private to the block for free.
//  * __syncthreads and warp collectives are fiber barriers; atomics are the compiler's __atomic builtins.
//  * a cooperative launch starts every block at once; a plain launch uses a small pool. Its `cooperative` says how many neighbours make a cluster.
//  * threads that wait on a barrier that can never complete are reported, not hung on.
// Not emulated: inline PTX, tensor-core instructions, TMA descriptors. Such code sits behind
// primitives with a second body under #ifdef K3_HOST_SHIM.
#pragma once
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <sched.h>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

#undef __shared__
#define __shared__ static thread_local
#ifndef __global__
#define __global__
#define __constant__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __align__(n) __attribute__((aligned(n)))
#endif
#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __grid_constant__
#define __grid_constant__
#define __CUDA_ARCH_SHIM__ 1

namespace shim {
struct Dim {
    unsigned x = 1, y = 1, z = 1;
};
enum Wait : unsigned char { kRun, kBlock, kWarp, kSpin, kDone };

#if defined(__x86_64__)
// Saves the callee-saved registers on the old stack, then continues on the new one: no system call, unlike swapcontext.
extern "C" void k3_shim_switch(void** save, void* to);
asm(R"(
.text
.globl k3_shim_switch
.hidden k3_shim_switch
.type k3_shim_switch,@function
k3_shim_switch:
    pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
    ret
)");
#endif

struct Block;
struct Fiber {
    Dim tid;
    unsigned lin = 0;
    Wait why = kRun;
    Block* b = nullptr;
    const unsigned* word = nullptr;   // what it waits for: this word is no longer `old`
    unsigned old = 0;
#if defined(__x86_64__)
    void* sp = nullptr;
#else
    ucontext_t uc;
#endif
};
struct WarpState {
    uint64_t slot[2][32];
    unsigned count[32] = {}, gen[32] = {};  // one barrier per lowest lane of a mask: disjoint masks never meet
    unsigned live = 0;                      // mask of lanes that have not returned
};
// What blocks of a cooperative launch know of one another.
struct Cluster {
    unsigned size;
    std::vector<std::atomic<unsigned char*>> dyn;   // of every block of the grid
    std::vector<std::atomic<unsigned>> met;         // of every cluster: meetings of its blocks
    std::mutex sends;
    Cluster(unsigned blocks, unsigned size) : size(size), dyn(blocks), met(blocks / size + 1) {}
};
struct Block {
    Dim bid, bdim, gdim;
    Cluster* cluster = nullptr;
    unsigned meetings = 0;
    std::vector<Fiber> f;
    std::vector<WarpState> w;
    unsigned live = 0, count = 0, gen = 0;
    bool progress = false;
    unsigned char* dyn = nullptr;
    void (*entry)(void*) = nullptr;
    void* arg = nullptr;
#if defined(__x86_64__)
    void* main_sp = nullptr;
#else
    ucontext_t main;
#endif
};
inline thread_local Fiber* cur = nullptr;
// Bytes of a thread's stack; not a power of two, else the tops of all stacks share a few sets of the cache.
constexpr size_t kStack = (64 << 10) + 13 * 64;

inline void to_main(Wait why) {
    Fiber* f = cur;
    f->why = why;
#if defined(__x86_64__)
    k3_shim_switch(&f->sp, f->b->main_sp);
#else
    swapcontext(&f->uc, &f->b->main);
#endif
    f->why = kRun;
}
// Until `word` is no longer `old`: the block looks, and does not come back here before.
inline void wait_on(Wait why, const unsigned& word, unsigned old) {
    cur->word = &word, cur->old = old;
    to_main(why);
}
inline void fiber_main() {
    Block* b = cur->b;
    b->entry(b->arg);
    Fiber* f = cur;
    b->w[f->lin / 32].live &= ~(1u << (f->lin % 32));
    --b->live;
    b->progress = true;
    if (b->live && b->count == b->live) b->count = 0, ++b->gen;  // a returned thread no longer holds up __syncthreads
    to_main(kDone);
}
[[noreturn]] inline void stuck(Block* b) {
    unsigned n[5] = {};
    for (auto& f : b->f) ++n[f.why];
    std::fprintf(stderr, "k3 shim: block %u is stuck: %u threads at __syncthreads, %u at a warp collective, %u returned\n", b->bid.x,
                 n[kBlock], n[kWarp], n[kDone]);
    std::abort();
}
inline void run_block(Block* b, unsigned char* stacks, unsigned* order) {
    unsigned n = b->f.size();
    for (unsigned i = 0; i < n; ++i) {
        Fiber& f = b->f[i];
        f.why = kRun;
        unsigned char* top = stacks + (i + 1) * kStack;
#if defined(__x86_64__)
        void** s = (void**)top;
        *--s = nullptr;               // fake return address of fiber_main keeps the stack 16-byte aligned
        *--s = (void*)fiber_main;     // popped by ret
        for (int k = 0; k < 6; ++k) *--s = nullptr;
        f.sp = s;
#else
        getcontext(&f.uc);
        f.uc.uc_stack.ss_sp = top - kStack;
        f.uc.uc_stack.ss_size = kStack;
        f.uc.uc_link = nullptr;
        makecontext(&f.uc, fiber_main, 0);
#endif
    }
    for (unsigned round = 0; b->live; ++round) {
        const bool looks = !b->progress || round % 4 == 0;   // who looks again and again does so seldom while others get on
        b->progress = false;
        bool spin = false;
        for (unsigned k = 0; k < n; ++k) {
            Fiber& f = b->f[order[k]];
            if (f.why == kDone) continue;
            if (f.word) {
                if (__atomic_load_n(f.word, __ATOMIC_ACQUIRE) == f.old) {
                    spin |= f.why == kSpin;
                    continue;
                }
                f.word = nullptr;
            } else if (f.why == kSpin && !looks) {
                spin = true;
                continue;
            }
            cur = &f;
#if defined(__x86_64__)
            k3_shim_switch(&b->main_sp, f.sp);
#else
            swapcontext(&b->main, &f.uc);
#endif
            spin |= f.why == kSpin;
        }
        if (!b->progress) {
            if (!spin) stuck(b);
            if (looks) sched_yield();  // waiting for another block
        }
    }
}
inline void sync_block() {
    Block* b = cur->b;
    unsigned g = b->gen;
    b->progress = true;
    if (++b->count == b->live) {
        b->count = 0;
        ++b->gen;
    } else
        wait_on(kBlock, b->gen, g);
    if (b->gen != g) b->progress = true;
}
// All lanes of `mask` meet; returns the buffer parity that was current before the meeting.
inline unsigned sync_warp(unsigned mask, uint64_t v = 0) {
    Fiber* f = cur;
    WarpState& w = f->b->w[f->lin / 32];
    mask &= w.live;
    unsigned k = __builtin_ctz(mask), g = w.gen[k];
    w.slot[g & 1][f->lin % 32] = v;
    f->b->progress = true;
    if (++w.count[k] == (unsigned)__builtin_popcount(mask)) {
        w.count[k] = 0;
        ++w.gen[k];
    } else
        wait_on(kWarp, w.gen[k], g);
    f->b->progress = true;
    return g & 1;
}
template <class T>
inline T shfl(unsigned mask, T v, unsigned src) {
    static_assert(sizeof(T) <= 8, "shuffle moves at most 8 bytes");
    uint64_t u = 0;
    std::memcpy(&u, &v, sizeof v);
    unsigned p = sync_warp(mask, u);
    std::memcpy(&v, &cur->b->w[cur->lin / 32].slot[p][src & 31], sizeof v);
    return v;
}

inline unsigned cluster_size() { return cur->b->cluster->size; }
inline unsigned cluster_rank() { return cur->b->bid.x % cluster_size(); }
// All threads of all blocks of a cluster.
inline void sync_cluster() {
    Block* b = cur->b;
    if (cluster_size() == 1) return sync_block();
    auto& met = b->cluster->met[b->bid.x / cluster_size()];
    sync_block();
    if (cur->lin == 0) ++b->meetings, ++met;
    sync_block();
    while (met < b->meetings * cluster_size()) to_main(kSpin);
}
// Where what `p` is in this block lies in block `rank` of its cluster.
template <class T>
T* in_block(T* p, unsigned rank) {
    Block* b = cur->b;
    return (T*)(b->cluster->dyn[b->bid.x - cluster_rank() + rank] + ((unsigned char*)p - b->dyn));
}

// Launch. `seed` != 0 visits the threads of a block in a shuffled order, to expose missing barriers.
template <class Fn>
void launch(Dim grid, Dim block, size_t smem, unsigned coop, unsigned seed, Fn&& body) {
    unsigned nb = grid.x * grid.y * grid.z, nt = block.x * block.y * block.z, nw = (nt + 31) / 32;
    std::vector<unsigned> order(nt);
    for (unsigned i = 0; i < nt; ++i) order[i] = i;
    for (unsigned i = nt, r = seed; seed && i > 1; --i) r = r * 1664525u + 1013904223u, std::swap(order[i - 1], order[(r >> 8) % i]);
    std::atomic<unsigned> next{0};
    Cluster cluster(nb, std::max(1u, coop));
    auto worker = [&] {
        std::unique_ptr<unsigned char[]> stacks(new unsigned char[nt * kStack + 16]);  // untouched pages cost nothing
        auto* base = (unsigned char*)(((uintptr_t)stacks.get() + 15) & ~(uintptr_t)15);
        std::vector<unsigned char> dyn(smem + 1024);
        for (unsigned i; (i = next++) < nb;) {
            Block b;
            b.bid = {i % grid.x, i / grid.x % grid.y, i / grid.x / grid.y};
            b.bdim = block, b.gdim = grid, b.live = nt;
            b.f.resize(nt), b.w.resize(nw);
            b.dyn = (unsigned char*)(((uintptr_t)dyn.data() + 1023) & ~(uintptr_t)1023);
            b.cluster = &cluster, cluster.dyn[i] = b.dyn;
            for (unsigned t = 0; t < nt; ++t) {
                b.f[t].tid = {t % block.x, t / block.x % block.y, t / block.x / block.y};
                b.f[t].lin = t, b.f[t].b = &b, b.w[t / 32].live |= 1u << (t % 32);
            }
            b.entry = [](void* p) { (*(std::remove_reference_t<Fn>*)p)(); };
            b.arg = (void*)&body;
            run_block(&b, base, order.data());
        }
    };
    unsigned n = coop ? nb : std::min(nb, std::max(1u, std::thread::hardware_concurrency()));
    std::vector<std::thread> pool;
    for (unsigned i = 0; i < n; ++i) pool.emplace_back(worker);
    for (auto& t : pool) t.join();
}
template <class... A, size_t... I>
void call(void (*k)(A...), void** a, std::index_sequence<I...>) {
    k(*(A*)a[I]...);
}
template <class... A>
void launch_kernel(void (*k)(A...), const unsigned* g, const unsigned* b, size_t smem, int coop, unsigned seed, void** a) {
    launch({g[0], g[1], g[2]}, {b[0], b[1], b[2]}, smem, coop, seed, [=] { call(k, a, std::index_sequence_for<A...>{}); });
}
}  // namespace shim

// Exports `k3_shim_<kernel>(grid[3], block[3], smem, cooperative, seed, void** args)`: the same void** as cuLaunchKernelEx.
#define K3_SHIM_EXPORT(K)                                                                                              \
    extern "C" void k3_shim_##K(const unsigned* g, const unsigned* b, size_t smem, int coop, unsigned seed, void** a) { \
        shim::launch_kernel(K, g, b, smem, coop, seed, a);                                                             \
    }
#define K3_DYN_SMEM(T, name) T* name = (T*)shim::cur->b->dyn
#define threadIdx (shim::cur->tid)
#define blockIdx (shim::cur->b->bid)
#define blockDim (shim::cur->b->bdim)
#define gridDim (shim::cur->b->gdim)
inline void __syncthreads() { shim::sync_block(); }
inline void __syncwarp(unsigned m = ~0u) { shim::sync_warp(m); }
inline void __threadfence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
inline void __threadfence_block() { std::atomic_thread_fence(std::memory_order_seq_cst); }
template <class T> T __shfl_sync(unsigned m, T v, int s, int w = 32) { unsigned l = shim::cur->lin % 32; return shim::shfl(m, v, (l & ~(w - 1)) | (s & (w - 1))); }
template <class T> T __shfl_xor_sync(unsigned m, T v, int x, int w = 32) { unsigned l = shim::cur->lin % 32, s = l ^ x; return shim::shfl(m, v, (s & ~(w - 1)) > (l & ~(w - 1)) ? l : s); }
template <class T> T __shfl_down_sync(unsigned m, T v, unsigned d, int w = 32) { unsigned l = shim::cur->lin % 32; return shim::shfl(m, v, (l & (w - 1)) + d < (unsigned)w ? l + d : l); }
template <class T> T __shfl_up_sync(unsigned m, T v, unsigned d, int w = 32) { unsigned l = shim::cur->lin % 32; return shim::shfl(m, v, (l & (w - 1)) >= d ? l - d : l); }
inline unsigned __ballot_sync(unsigned m, int pred) {
    unsigned p = shim::sync_warp(m, pred != 0), r = 0;
    auto& w = shim::cur->b->w[shim::cur->lin / 32];
    for (int i = 0; i < 32; ++i) r |= (m >> i & 1) && w.slot[p][i] ? 1u << i : 0u;
    return r;
}
inline int __any_sync(unsigned m, int p) { return __ballot_sync(m, p) != 0; }
inline int __all_sync(unsigned m, int p) { return __ballot_sync(m, p) == m; }
template <class T> T atomicAdd(T* p, T v) {
    if constexpr (std::is_integral_v<T>) return __atomic_fetch_add(p, v, __ATOMIC_ACQ_REL);
    else {
        T o, n;
        __atomic_load(p, &o, __ATOMIC_RELAXED);
        do n = o + v; while (!__atomic_compare_exchange(p, &o, &n, true, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED));
        return o;
    }
}
inline unsigned atomicAdd(unsigned* p, int v) { return atomicAdd<unsigned>(p, (unsigned)v); }
template <class T> T atomicExch(T* p, T v) { return __atomic_exchange_n(p, v, __ATOMIC_ACQ_REL); }
template <class T> T atomicCAS(T* p, T c, T v) { __atomic_compare_exchange_n(p, &c, v, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE); return c; }
template <class T> T atomicMax(T* p, T v) { T o = *p; while (o < v && !__atomic_compare_exchange_n(p, &o, v, true, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)); return o; }
inline unsigned shim_ld_acquire(const unsigned* p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
inline void shim_st_release(unsigned* p, unsigned v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
inline void shim_wait(const unsigned& word, unsigned old) { shim::wait_on(shim::kSpin, word, old); }   // for a word that whoever changes it leaves changed
inline void shim_yield() { shim::to_main(shim::kSpin); }
inline unsigned long long shim_clock_ns() { return std::chrono::steady_clock::now().time_since_epoch().count(); }
[[noreturn]] inline void shim_trap() { std::_Exit(86); }  // the whole process, as a trap ends a launch
