"""The way of a checkpoint into a GPU's memory: the tests of the host shim on the device, and what a failed load leaves there."""
import gc

import pytest

cp = pytest.importorskip("cupy", reason="CuPy holds the device's memory; install k3cuda[cu13] or k3cuda[cu12]")

import test_device_load as beside  # noqa: E402
from damage import fail_reads_after  # noqa: E402

from k3cuda.errors import CheckpointError, OutOfMemory  # noqa: E402
from k3cuda.plan import build_plan  # noqa: E402
from k3cuda.runtime import device_load  # noqa: E402
from k3cuda.runtime.checkpoint import Checkpoint  # noqa: E402
from k3cuda.runtime.cuda_driver import open_device  # noqa: E402
from k3cuda.runtime.cuda_load import CudaLoadDevice  # noqa: E402
from k3cuda.runtime.cuda_upload import upload  # noqa: E402
from k3cuda.runtime.load_plan import BLOCK_BYTES  # noqa: E402
from k3cuda.runtime.loading import Loading  # noqa: E402
from k3cuda.runtime.repacked import RepackedModel  # noqa: E402
from k3cuda.runtime.repacking import repack  # noqa: E402

pytestmark = pytest.mark.gpu
coded, stored = beside.coded, beside.stored


@pytest.fixture
def device():
    with CudaLoadDevice(open_device(0), BLOCK_BYTES) as device:
        yield device


@pytest.mark.parametrize("mode", ["direct", "buffered", "mmap"])
@pytest.mark.parametrize("tp, ranks", [(1, range(1)), (4, range(4)), (16, range(5, 6)), (16, range(12, 16))])
def test_every_array_of_every_rank(stored, coded, device, monkeypatch, mode, tp, ranks):
    monkeypatch.setattr(device_load, "STAGING_BYTES", 100_000)   # experts come in lots
    beside.check(device_load.load_weights(build_plan(beside.CFG, tp), stored, tp, ranks, device, Loading(mode)), coded, tp, ranks)


def test_a_source_that_is_no_file(coded, device):
    beside.check(device_load.load_weights(build_plan(beside.CFG, 2), coded, 2, range(2), device, Loading()), coded, 2, range(2))


@pytest.mark.parametrize("tp", [1, 4])
def test_a_repacked_folder(stored, coded, tmp_path, tp):
    """A plain stream of what is in kernel order already."""
    repack(stored.path, tp, tmp_path / "r")
    beside.check(upload(build_plan(beside.CFG, tp), RepackedModel.open(tmp_path / "r"), tp, range(tp), open_device(0), Loading()), coded, tp, range(tp))


@pytest.mark.parametrize("error", [CheckpointError, OutOfMemory])
def test_nothing_stays_of_a_load_that_failed(folder, monkeypatch, error):
    checkpoint = Checkpoint.open(folder)
    with CudaLoadDevice(open_device(0), BLOCK_BYTES) as device:
        gc.collect()
        before = cp.get_default_memory_pool().used_bytes()   # of this process: others may have the GPU, too
        if error is CheckpointError:
            fail_reads_after(monkeypatch, 6)
        else:
            array, count = device.array, iter(range(15))
            monkeypatch.setattr(device, "array", lambda nbytes: array(nbytes) if next(count, None) is not None else _full())
        with pytest.raises(error):
            device_load.load_weights(build_plan(checkpoint.cfg, 2), checkpoint, 2, range(2), device, Loading("buffered"))
        gc.collect()
        assert (cp.get_default_memory_pool().used_bytes(), device._pool.used_bytes()) == (before, 0)



def _full():
    raise OutOfMemory("no more")
