"""Made checkpoints: the released layout, the same bytes for the same seed, alive, and whole again from every rank's slices."""
import json
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors import numpy as official

from k3cuda.config import K3Config
from k3cuda.errors import OutOfMemory, UsageError
from k3cuda.reference.mxfp4 import dequantize
from k3cuda.runtime.backend import StepRows
from k3cuda.runtime.checkpoint import Checkpoint
from k3cuda.runtime.tiny_random import open_tiny_random
from k3cuda.runtime.made_config import made_config
from k3cuda.runtime.made_model import MadeCheckpoint, position_values
from k3cuda.runtime.numpy_backend import NumpyBackend
from k3cuda.runtime.safetensors_file import SafetensorsFile
from k3cuda.runtime.write_checkpoint import PROJECTOR, TOWER, write_checkpoint
from k3cuda.weights import BY_NAME, checkpoint_bytes, checkpoint_key, expected_tensors, layer_weights
from real_config import real_config

SCRIPT = Path(__file__).parents[1] / "scripts" / "make_checkpoint.py"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return write_checkpoint(MadeCheckpoint(made_config(), seed=5), tmp_path_factory.mktemp("made") / "model", vision=True)


@pytest.fixture(scope="module")
def coded(tmp_path_factory):
    path = write_checkpoint(MadeCheckpoint(made_config(), fill="positions"), tmp_path_factory.mktemp("coded") / "model")
    return Checkpoint.open(path)


def test_layout_is_the_release_own(made):
    cfg = made_config()
    index = json.loads((made / "model.safetensors.index.json").read_text())
    shards = sorted(p.name for p in made.glob("*.safetensors"))
    assert shards == [f"model-0000{i}-of-000007.safetensors" for i in range(1, 8)]
    assert index["metadata"]["total_size"] == checkpoint_bytes(cfg) + 2 * sum(np.prod(s) for s in (*PROJECTOR.values(), *TOWER.values()))
    for key, _, layer, _ in expected_tensors(cfg):
        assert index["weight_map"][key] == shards[4 if layer is None else layer]
    assert {index["weight_map"][key] for key in PROJECTOR} == {shards[5]} and {index["weight_map"][key] for key in TOWER} == {shards[6]}
    names = {p.name for p in made.iterdir()} - set(shards)
    assert names == {"config.json", "generation_config.json", "model.safetensors.index.json", "tiktoken.model", "tokenizer_config.json"}
    assert Checkpoint.open(made).tokenizer().vocab_size == 582


def test_files_are_byte_for_byte_what_the_package_writes(made, tmp_path):
    for path in made.glob("*.safetensors"):
        official.save_file(official.load_file(path), tmp_path / path.name, {"format": "pt"})
        assert (tmp_path / path.name).read_bytes() == path.read_bytes(), path.name


def test_experts_lie_together_but_not_in_order(made):
    tensors = SafetensorsFile.open(made / "model-00002-of-000007.safetensors").tensors
    by_place = sorted((tensor.begin, key) for key, tensor in tensors.items() if ".experts." in key)
    order = [key.split(".experts.")[1].split(".")[0] for _, key in by_place]
    assert order == [e for e in dict.fromkeys(order) for _ in range(6)] and order[6] == "1" and order[12] == "10"


def test_padding_and_dtypes(made):
    checkpoint = Checkpoint.open(made)
    a_log = checkpoint.stored(BY_NAME["kda_a_log"], 0, None)
    assert a_log.shape == (128,) and not a_log[16:].any() and a_log[:16].all()
    assert checkpoint.read("kda_a_log", 0).shape == (16,)
    assert checkpoint.read("kda_q_conv", 0).shape == (256, 4) and checkpoint.read("mlp_res_proj", 0).shape == (64,)
    kinds = {"F32": np.float32, "BF16": ml_dtypes.bfloat16, "U8": np.uint8}
    for _, weight, layer, expert in expected_tensors(checkpoint.cfg):
        assert checkpoint.read(weight, layer, expert).dtype == kinds[weight.dtype]


def test_written_is_what_was_made(made):
    checkpoint, source = Checkpoint.open(made), MadeCheckpoint(made_config(), seed=5)
    assert checkpoint.cfg == source.cfg and checkpoint.generation_config == source.generation_config
    for key, weight, layer, expert in expected_tensors(source.cfg):
        assert checkpoint.read(weight, layer, expert).tobytes() == source.read(weight, layer, expert).tobytes(), key


def test_each_tensor_follows_from_seed_and_name():
    one, other = MadeCheckpoint(made_config(), seed=1), MadeCheckpoint(made_config(), seed=2)
    first = one.read("o_proj", 0).tobytes()
    one.read("o_proj", 1)
    assert one.read("o_proj", 0).tobytes() == first != other.read("o_proj", 0).tobytes()
    assert one.read("expert_w1", 1, 3).tobytes() != one.read("expert_w1", 1, 4).tobytes()
    for wrong in (("o_proj",), ("lm_head", 0), ("kda_q_proj", 3), ("router", 0), ("expert_w1", 1), ("o_proj", 0, 0)):
        with pytest.raises(KeyError):
            one.read(*wrong)


def test_tiny_random_is_the_same_everywhere():
    # Raw bits of PCG64 and single IEEE operations: a change here changes what every user sees.
    model = open_tiny_random()
    digest = sha256()
    for _, weight, layer, expert in expected_tensors(model.cfg):
        digest.update(model.read(weight, layer, expert).tobytes())
    assert digest.hexdigest()[:16] == "0b6b00252a2bc9fe"


@pytest.mark.parametrize("name, place", [("o_proj", (0,)), ("lm_head", ()), ("mla_q_b_proj", (3,)), ("shared_down_proj", (1,))])
def test_linears_keep_the_size_of_their_input(name, place):
    x = MadeCheckpoint(made_config()).read(name, *place).astype(np.float32)
    assert x.std() * x.shape[1] ** 0.5 == pytest.approx(1, rel=0.05)


def test_experts_keep_the_size_of_their_input():
    source = MadeCheckpoint(made_config())
    for which in ("w1", "w2", "w3"):
        x = dequantize(source.read(f"expert_{which}", 1, 3), source.read(f"expert_{which}_scale", 1, 3))
        assert 0.7 < x.std() * x.shape[1] ** 0.5 < 1.4  # scales are powers of two


def test_a_made_model_is_alive():
    """Activations near 1, routing spread over experts, decays from short to long, logits that tell tokens apart."""
    model = open_tiny_random()
    backend, seen = NumpyBackend(model, max_batch=1, max_model_len=64), []
    backend.open_slot(0, [0])
    ids = np.random.default_rng(0).integers(0, 326, 24).astype(np.int32)
    keep = ("expert_ids", "kda_decay", "ffn_in", "attn_in", "mixer_out", "moe_out_part")
    for i, token in enumerate(ids):
        backend.step(StepRows(ids[i:i + 1], *(np.array([n], np.int32) for n in (0, i, 0))),
                     lambda op, arenas: seen.extend((b, arenas[0][b].copy()) for b in op.stage.outputs if b in keep))
        logits = backend.logits()[0].copy()
        backend.commit(np.array([True]))
    last = {name: [array for n, array in seen if n == name] for name in keep}
    chosen = np.concatenate([array[0] for array in last["expert_ids"]])
    counts = np.bincount(chosen, minlength=16)
    assert (counts > 0).all() and counts.max() < len(chosen) / 4
    decay = np.exp(np.concatenate([array[:, 0].reshape(-1) for array in last["kda_decay"]]))
    decay = decay[np.isfinite(decay) & (decay > 0)]
    assert np.quantile(decay, 0.02) < 0.1 and np.quantile(decay, 0.98) > 0.95
    for name in ("ffn_in", "attn_in", "mixer_out", "moe_out_part"):
        sizes = [np.sqrt(np.mean(array[0] ** 2)) for array in last[name]]
        assert 0.05 < min(sizes) and max(sizes) < 10, name
    assert np.isfinite(logits).all() and 0.5 < logits.std() < 10


def codes_of(cfg, weight, layer) -> np.ndarray:
    """What every value of a weight must be, from the formula alone: [experts, rows, columns], or without experts."""
    shape = tuple(cfg.dims()[name] for name in weight.shape)
    columns = shape[-1] if len(shape) > 1 else 1

    def one(expert):
        return position_values(weight, checkpoint_key(weight, layer, expert), range(shape[0]), columns).reshape(shape)

    return np.stack([one(e) for e in range(cfg.num_experts)]) if weight.per_expert else one(None)


@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16])
def test_positions_come_back_whole_from_every_ranks_slices(coded, tp):
    cfg = coded.cfg
    for layer in (None, *range(cfg.num_hidden_layers)):
        for weight in layer_weights(cfg, layer):
            want = codes_of(cfg, weight, layer)
            parts = [coded.rank_slices(weight, layer, tp, rank) for rank in range(tp)]
            if weight.cut:
                got = np.concatenate(parts, axis=weight.cut.axis + weight.per_expert)
            else:
                got = parts[0]
                assert all(part.tobytes() == got.tobytes() for part in parts)
            assert got.shape == want.shape and got.tobytes() == want.tobytes(), (weight.name, layer)


def test_position_codes_tell_places_apart(coded):
    for name, place in (("o_proj", (0,)), ("expert_w1", (1, 0)), ("kda_q_conv", (0,))):
        x = coded.read(name, *place)
        bits = x.view(f"u{x.dtype.itemsize}")
        assert np.isfinite(x.astype(np.float32)).all()
        assert (bits[1:] == bits[:-1]).mean() < 0.05 and (bits[:, 1:] == bits[:, :-1]).mean() < 0.05
    assert (coded.read("expert_w1", 1, 0) == coded.read("expert_w1", 1, 1)).mean() < 0.05
    assert (coded.read("expert_w1", 1, 0) == coded.read("expert_w3", 1, 0)).mean() < 0.05


def test_single_file(tmp_path):
    source = MadeCheckpoint(made_config(vocab_size=320, num_hidden_layers=2), seed=9)
    path = write_checkpoint(source, tmp_path / "one", single_file=True)
    assert {p.name for p in path.iterdir()} == {"config.json", "generation_config.json", "model.safetensors"}  # 320 ids: no tokenizer fits
    for given in (path, path / "model.safetensors"):
        assert Checkpoint.open(given).read("lm_head").tobytes() == source.read("lm_head").tobytes()


def test_never_overwrites(made, tmp_path):
    with pytest.raises(UsageError, match="not an empty folder"):
        write_checkpoint(open_tiny_random(), made)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="not an empty folder"):
        write_checkpoint(open_tiny_random(), tmp_path / "file")


def test_a_disk_that_is_too_small(tmp_path):
    with pytest.raises(OutOfMemory, match="1560.0 GB are needed"):
        write_checkpoint(MadeCheckpoint(K3Config.from_json(real_config())), tmp_path / "real")
    assert not list((tmp_path / "real").iterdir())


def run_script(*args):
    return subprocess.run([sys.executable, SCRIPT, *map(str, args)], capture_output=True, text=True, cwd=SCRIPT.parents[1],
                          env={"PYTHONPATH": str(SCRIPT.parents[1])})


def test_script(tmp_path):
    done = run_script(tmp_path / "a", "--set", "num_hidden_layers=2", "--seed", 3, "--vision")
    assert done.returncode == 0, done.stderr
    assert Checkpoint.open(tmp_path / "a").cfg == made_config(num_hidden_layers=2)
    done = run_script(tmp_path / "b", "--config", tmp_path / "a" / "config.json", "--seed", 3, "--vision")
    assert done.returncode == 0, done.stderr
    assert {p.name: p.read_bytes() for p in (tmp_path / "a").iterdir()} == {p.name: p.read_bytes() for p in (tmp_path / "b").iterdir()}


@pytest.mark.parametrize("args, code, words", [
    (("--set", "num_experts_per_token=99"), 3, "num_experts_per_token 99 is more than num_experts 16"),
    (("--set", "surprise=1"), 3, "surprise: unknown key"),
    (("--set", "hidden_size"), 2, "KEY=JSON"), (("--set", "hidden_size=x"), 2, "KEY=JSON"),
    (("--tiny-random", "--set", "hidden_size=64"), 2, "exclude each other"), (("--config", "nowhere"), 2, "nowhere"),
])
def test_script_errors(tmp_path, args, code, words):
    done = run_script(tmp_path / "x", *args)
    assert done.returncode == code and words in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "x").exists()
