"""A rank's KDA layers with random weights, states and inputs, run by the cores and by the reference."""
import ctypes
from types import SimpleNamespace

import numpy as np
from core_kernels import BF16, KDA_GATES_SHARED, KDA_ROWS_SHARED, KDA_SCAN_SHARED, KdaCommit, KdaMix, KdaWork, down, fill, kda_mix_shared, poisoned, up

from k3cuda.config import L2NORM_EPS
from k3cuda.reference import kda

D, WIDTH, LOWER, EPS = 128, 4, -5.0, 1e-5
F32 = np.float32
WEIGHTS = ("f_b", "a_log", "dt_bias", "q_conv", "k_conv", "v_conv", "o_norm")


def sequences(row_slot):
    """(slot, its rows), as the engine lays them out: neighbours."""
    r = 0
    while r < len(row_slot):
        end = r + 1
        while end < len(row_slot) and row_slot[end] == row_slot[r]:
            end += 1
        if row_slot[r] >= 0:
            yield int(row_slot[r]), slice(r, end)
        r = end


class Kda:
    """`layers` layers on the device; weights differ by layer, inputs are given a step at a time."""

    def __init__(self, cores, heads, slots, record_rows, layers=1, seed=0):
        self.cores, self.heads, self.slots, self.record_rows, self.layers, self.advances = cores, heads, slots, record_rows, layers, 0
        g, c = np.random.default_rng(seed), heads * D

        def f32(*shape, scale=1.0, shift=0.0):
            return (g.standard_normal((layers, *shape)) * scale + shift).astype(F32)

        self.w = {"f_b": f32(c, D, scale=0.1).astype(BF16), "a_log": f32(heads, scale=0.5), "dt_bias": f32(c, scale=2.0, shift=-1),
                  "q_conv": f32(c, WIDTH, scale=0.5), "k_conv": f32(c, WIDTH, scale=0.5), "v_conv": f32(c, WIDTH, scale=0.5),
                  "o_norm": f32(D, scale=0.3, shift=1)}
        self.dw = {k: up(v) for k, v in self.w.items()}
        self.state = up(f32(slots, heads, D, D, scale=0.3))
        self.conv = up(f32(slots, 3, WIDTH - 1, c).astype(BF16))
        self.k, self.v, self.decay = (poisoned((layers, record_rows, c), F32) for _ in range(3))
        self.qkv, self.beta = poisoned((layers, record_rows, 3, c), BF16), poisoned((layers, record_rows, heads), F32)

    def inputs(self, tokens, seed=1):
        """What kda_in would write for `tokens` rows of one layer."""
        g, c = np.random.default_rng(seed), self.heads * D

        def draw(*shape, scale=1.0):
            return (g.standard_normal((tokens, *shape)) * scale).astype(F32)
        return {"qkv": draw(3, c).astype(BF16), "f_a": draw(D).astype(BF16), "beta": (1 / (1 + np.exp(-draw(self.heads)))).astype(F32),
                "out_gate": draw(c, scale=2.0)}

    def mix(self, kernel, split, row_slot, x, layer=0, blocks=None):
        """One launch over the rows; x as from `inputs`. Returns what it wrote, records of untouched rows included. blocks: where not each row has its own."""
        return self._run(row_slot, x, layer, lambda args, rows: self.cores.run(kernel, blocks or (self.heads * split, rows), [args],
                                                                               shared=kda_mix_shared(2 if blocks else split)))

    def mix_rows(self, kernel, row_slot, x, layer=0, parts=3):
        """The same by the kernel of a step of 16 to 64 rows."""
        return self._run(row_slot, x, layer, lambda args, rows: self.cores.run(kernel, self.heads * parts, [args, ctypes.c_int(parts)], shared=KDA_ROWS_SHARED))

    def mix_wide(self, kernels, row_slot, x, layer=0, lanes=3):
        """The same by the three kernels of a wide step."""
        work = fill(KdaWork, **{n: poisoned((len(row_slot), self.heads * D * (3 if n == "rows" else 1)), F32) for n in ("rows", "v", "o")})

        def run(args, rows):
            gates, scan, norm = kernels
            self.cores.run(gates, -(-rows // 8) * self.heads, [args, work], shared=KDA_GATES_SHARED)
            self.cores.run(scan, (self.heads * 16, lanes), [args, work], shared=KDA_SCAN_SHARED)
            self.cores.run(norm, -(-rows * self.heads // 8), [args, work])
        return self._run(row_slot, x, layer, run)

    def _run(self, row_slot, x, layer, launch):
        rows, c = len(row_slot), self.heads * D
        self.qkv[layer, :rows], self.beta[layer, :rows] = up(x["qkv"]), up(x["beta"])
        for a in (self.k, self.v, self.decay):
            a[layer].fill(np.nan)
        out = poisoned((rows, c), BF16)
        args = fill(KdaMix, row_slot=up(np.asarray(row_slot, np.int32)), rows=rows, heads=self.heads, qkv=self.qkv[layer], f_a=up(x["f_a"]),
                    beta=self.beta[layer], out_gate=up(x["out_gate"]), state=self.state[layer], conv_state=self.conv[layer],
                    **{k: v[layer] for k, v in self.dw.items()}, k=self.k[layer], v=self.v[layer], decay=self.decay[layer], out=out,
                    lower_bound=LOWER, l2_eps=L2NORM_EPS, eps=EPS, advances=self.advances)
        launch(args, rows)
        got = {n: down(getattr(self, n)[layer, :rows]) for n in ("k", "v", "decay")}
        return got | {"out": down(out, BF16)}

    def commit(self, kernel, split, row_slot, accepted, lanes=3):
        args = fill(KdaCommit, row_slot=up(np.asarray(row_slot, np.int32)), row_accepted=up(np.asarray(accepted, np.uint8)), rows=len(row_slot),
                    heads=self.heads, slots=self.slots, record_rows=self.record_rows, qkv=self.qkv, k=self.k, v=self.v, decay=self.decay,
                    beta=self.beta, state=self.state, conv_state=self.conv)
        self.cores.run(kernel, (self.heads * split, lanes, self.layers), [args])

    def session(self):
        return down(self.state), down(self.conv)

    def restore(self, session):
        self.state, self.conv = up(session[0]), up(session[1])

    def reference(self, row_slot, x, session, layer=0, accepted=None):
        """The reference's buffers after kda_mix, and after the commit where `accepted` is given."""
        rows, c, h = len(row_slot), self.heads * D, self.heads
        padded = -(-rows // 8) * 8

        def rows_of(v):
            return np.concatenate([v.astype(F32), np.zeros((padded - rows, *v.shape[1:]), F32)])
        slots = np.concatenate([np.asarray(row_slot), np.full(padded - rows, -1)])
        m = SimpleNamespace(num=SimpleNamespace(round=lambda v: v), sequences=sequences, cfg=SimpleNamespace(
            rms_norm_eps=EPS, linear_attn_config=SimpleNamespace(gate_lower_bound=LOWER)))
        w = SimpleNamespace(kda_f_b_proj=self.w["f_b"][layer].astype(F32), **{f"kda_{n}": self.w[n][layer] for n in WEIGHTS[1:]})
        b = SimpleNamespace(row_slot=slots, row_accepted=accepted, kda_state=session[0][layer].copy(),
                            conv_state=session[1][layer].view(BF16).astype(F32), kda_qkv=rows_of(x["qkv"]), kda_f_a=rows_of(x["f_a"]),
                            kda_beta=rows_of(x["beta"]), kda_out_gate=rows_of(x["out_gate"]), mixer_out=np.zeros((padded, c), F32),
                            **{n: np.zeros((padded, h, D), F32) for n in ("kda_decay", "kda_k", "kda_v")})
        with np.errstate(all="ignore"):   # padding rows hold NaN
            kda.kda_mix(m, w, b, None)
            if accepted is not None:
                kda.kda_commit(m, w, b, None)
        flat = {n: getattr(b, f"kda_{n}")[:rows].reshape(rows, c) for n in ("k", "v", "decay")}
        return flat | {"out": b.mixer_out[:rows], "state": b.kda_state, "conv": b.conv_state}


def live(row_slot):
    return np.asarray(row_slot) >= 0


def with_nan(x, dead):
    """The inputs with NaN in the rows of a mask."""
    x = {k: v.copy() for k, v in x.items()}
    for v in x.values():
        v[dead] = np.nan
    return x


def take(x, rows):
    return {k: v[rows] for k, v in x.items()}
