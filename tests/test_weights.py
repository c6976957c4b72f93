"""The weight table against the released checkpoint: every byte, every tensor, every cut."""
from itertools import pairwise
from math import prod

import pytest

from k3cuda.config import K3Config
from k3cuda.errors import ConfigError
from k3cuda.runtime.made_config import made_config
from k3cuda.weights import (BY_NAME, DTYPE_BYTES, LEGAL_TP, WEIGHTS, check_tp, checkpoint_bytes, checkpoint_key, expected_tensors,
                            layer_weights, legal_tps, model_bytes, num_pieces, outnumbered, padded_dims, rank_bytes, rank_slice, stored_shapes)
from models import FEW_PIECES
from real_config import real_config

REAL = K3Config.from_json(real_config())
DIMS = REAL.dims()


def test_bytes_and_tensors_of_the_release():
    assert checkpoint_bytes(REAL) == 1_559_965_606_912
    count = total = 0
    for _, weight, _, _ in expected_tensors(REAL):
        count += 1
        total += prod(stored_shapes(weight, DIMS)[0]) * DTYPE_BYTES[weight.dtype]
    assert (count, total) == (497_052, 1_559_965_606_912)


@pytest.mark.parametrize("layer, tensors", [(0, 23), (1, 5404), (3, 5398), (92, 5398), (None, 5)])
def test_tensors_a_shard(layer, tensors):
    assert sum(REAL.num_experts if w.per_expert else 1 for w in layer_weights(REAL, layer)) == tensors


def test_names_are_unique_and_keys_are_the_release_own():
    keys = [key for key, *_ in expected_tensors(made_config())]
    assert len(set(keys)) == len(keys) and len(BY_NAME) == len(WEIGHTS)
    assert checkpoint_key(BY_NAME["lm_head"]) == "language_model.lm_head.weight"
    assert checkpoint_key(BY_NAME["embed_tokens"]) == "language_model.model.embed_tokens.weight"
    assert checkpoint_key(BY_NAME["kda_a_log"], 7) == "language_model.model.layers.7.self_attn.A_log"
    want = "language_model.model.layers.92.block_sparse_moe.experts.895.w2.weight_scale"
    assert checkpoint_key(BY_NAME["expert_w2_scale"], 92, 895) == want
    assert want in {key for key, *_ in expected_tensors(REAL)}


@pytest.mark.parametrize("name, shapes, dtype", [
    ("kda_a_log", [(128,), (96,)], "F32"), ("kda_q_conv", [(12288, 1, 4), (12288, 4)], "F32"), ("o_proj", [(7168, 12288)], "BF16"),
    ("mlp_res_proj", [(1, 7168)], "BF16"), ("expert_w1", [(3072, 1792)], "U8"), ("expert_w2", [(3584, 1536)], "U8"),
    ("expert_w2_scale", [(3584, 96)], "U8"), ("mla_kv_b_proj", [(24576, 512)], "BF16"), ("mla_q_b_proj", [(18432, 1536)], "BF16"),
    ("mla_kv_a_proj", [(576, 7168)], "BF16"), ("e_score_correction_bias", [(896,)], "F32"), ("router", [(896, 7168)], "BF16"),
])
def test_shapes_of_the_release(name, shapes, dtype):
    assert stored_shapes(BY_NAME[name], DIMS) == shapes and BY_NAME[name].dtype == dtype


def test_bytes_a_rank():
    # Counted by hand from the release's index: 97.5 GB resident at TP16 with latent, router, MLA-down and f_a cut too.
    assert f"{model_bytes(REAL, 16) / 1e9:.3f}" == "97.506"
    for tp, after in pairwise(LEGAL_TP):
        assert model_bytes(REAL, tp) < 2 * model_bytes(REAL, after) < 1.01 * model_bytes(REAL, tp)
    expert = sum(rank_bytes(w, DIMS, experts=1) for w in WEIGHTS if w.per_expert)
    assert expert == 17_547_264


def test_legal_tp():
    assert legal_tps(REAL) == legal_tps(made_config()) == [1, 2, 4, 8, 16]
    assert legal_tps(FEW_PIECES) == [1, 2, 4, 8, 16]
    assert legal_tps(made_config(vocab_size=600)) == [1, 2, 4, 8] and legal_tps(made_config(q_lora_rank=17)) == [1]
    for tp in (1, 2, 4, 8, 16):
        check_tp(REAL, tp)


@pytest.mark.parametrize("tp", [0, -1, 3, 6, 32])
def test_illegal_tp_names_what_fits(tp):
    with pytest.raises(ConfigError, match=f"tp {tp} .*; 1, 2, 4, 8, 16 fit this model"):
        check_tp(REAL, tp)


def test_tp_that_this_model_cannot_have():
    with pytest.raises(ConfigError, match="num_experts .* over 8 ranks: of what ranks gather each has an equal part; 1, 2, 4 fit this model") as caught:
        check_tp(made_config(num_experts=20), 8)
    assert caught.value.code == 3


def test_what_has_fewer_pieces_than_ranks():
    """Heads of either kind and o_proj's inputs at the same places; of a size whose sums have few leaves, no more than these."""
    dims = made_config(num_attention_heads=12, num_heads=6, head_dim=128, v_head_dim=64, qk_nope_head_dim=64, intermediate_size=48).dims()
    by_heads = [w for w in WEIGHTS if w.cut and ("num_attention_heads", 0) in w.cut.limits]
    assert {w.name for w in by_heads} >= {"o_proj", "kda_q_proj", "kda_a_log", "mla_kv_b_proj"} and {num_pieces(w, dims, 16) for w in by_heads} == {2}
    assert num_pieces(BY_NAME["dense_up_proj"], dims, 8) == num_pieces(BY_NAME["dense_down_proj"], dims, 8) == 1
    assert num_pieces(BY_NAME["router"], dims, 16) == 16 and num_pieces(BY_NAME["mlp_res_norm"], dims, 16) == 1
    padded = padded_dims(dims, 16)
    assert (padded["num_attention_heads"], padded["kda_num_heads"], padded["kda_dim"], padded["intermediate_size"]) == (96, 48, 8 * 768, 16 * 48)
    assert padded_dims(padded, 16) == padded and padded_dims(DIMS, 16) == DIMS
    assert "num_attention_heads (pieces: 2), intermediate_size (pieces: 1)" in outnumbered(WEIGHTS, dims, 16) and outnumbered(WEIGHTS, DIMS, 16) == ""


@pytest.mark.parametrize("cfg", [REAL, made_config(), FEW_PIECES], ids=["release", "made", "few pieces"])
@pytest.mark.parametrize("tp", LEGAL_TP)
def test_slices_cover_every_weight_once(cfg, tp):
    dims = cfg.dims()
    for w in WEIGHTS:
        slices = [rank_slice(w, dims, tp, rank) for rank in range(tp)]
        sizes = [prod(s.stop - s.start for s in part) * DTYPE_BYTES[w.dtype] for part in slices]
        assert set(sizes) == {rank_bytes(w, dims, tp, 1)}, w.name
        if not w.cut:
            assert slices == [tuple(slice(0, dims[n]) for n in w.shape)] * tp
            continue
        ends = [part[w.cut.axis] for part in slices]
        assert ends[0].start == 0 and ends[num_pieces(w, dims, tp) - 1].stop == dims[w.shape[w.cut.axis]]
        assert all(a.stop == b.start for a, b in pairwise(ends))


@pytest.mark.parametrize("tp", LEGAL_TP)
def test_packed_halves_and_scales_are_cut_at_the_same_place(tp):
    for which in ("w1", "w2", "w3"):
        packed, scale = BY_NAME[f"expert_{which}"], BY_NAME[f"expert_{which}_scale"]
        for rank in range(tp):
            rows, columns = rank_slice(packed, DIMS, tp, rank)
            groups = rank_slice(scale, DIMS, tp, rank)
            assert groups[0] == rows and (groups[1].start, groups[1].stop) == (columns.start / 16, columns.stop / 16)
