"""Training of the demo as CUDA graphs against kernels that are launched one by one: same losses, same gradients, also of a second replay; and its own kernels
between products against PyTorch's."""
import sys

import numpy as np
import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch", reason="PyTorch trains the demo; nothing else needs it")

from command import ROOT  # noqa: E402

sys.path.append(str(ROOT / "scripts"))
from demo_training import fused, plain  # noqa: E402
from demo_training.draft import Draft  # noqa: E402
from demo_training.model import K3  # noqa: E402
from demo_training.shapes import config, draft_json  # noqa: E402
from demo_training.train import Schedule, Trainer  # noqa: E402
from demo_training.train_drafts import train_drafts  # noqa: E402
from demo_training.vocabulary import train_tokenizer  # noqa: E402

from k3cuda.draft_config import GQA, MLA  # noqa: E402

# Products in F32 as the GPU does them: sums of two runs differ only where kernels add in no fixed order (the embedding's gradient).
LIMIT = 1e-4
KERNELS = 0.02


@pytest.fixture(scope="module")
def trainers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("train")
    tokenizer = train_tokenizer(0)
    tokenizer.write_files(folder)
    made = [Trainer(K3(config("demo", tokenizer), 0, between=fused), tokenizer, folder, 0, 0, "cuda", {}, is_captured=captured) for captured in (False, True)]
    for trainer in made:
        trainer.schedule = Schedule(10, 16, 1024, ((0.0, 512),))
    return made


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_a_step_has_the_same_losses_and_gradients(trainers):
    eager, captured = trainers
    for step, length in ((0, 256), (1, 512), (2, 256)):   # the third one replays what the first one captured
        batches = eager.rows.step(0, step, 16, 1024 // length, length)
        found = []
        for trainer in trainers:
            losses, loads, left_out = trainer.backward(batches)
            found.append((losses.cpu().numpy(), [x.cpu().numpy() for x in loads], float(left_out), gradients(trainer.model)))
            for p in trainer.model.parameters():
                p.grad = None
        (losses, loads, left_out, grads), (own, own_loads, own_left_out, own_grads) = found
        np.testing.assert_allclose(own, losses, rtol=LIMIT)
        assert left_out == own_left_out and all(map(np.array_equal, loads, own_loads)) and grads.keys() == own_grads.keys() and len(grads) > 100
        for name, grad in grads.items():
            assert float((own_grads[name] - grad).norm()) <= LIMIT * float(grad.norm()) + 1e-12, (step, name)


def test_own_kernels_give_what_pytorch_does(trainers):
    """A choice of experts that a rounding turns over moves gradients more than roundings do; KERNELS leaves room for a few."""
    own, _ = trainers
    for length in (128, 512):
        batches, found = own.rows.step(0, 5, 16, 1024 // length, length), []
        for between in (plain, fused):
            own.model.between = between
            losses, loads, _ = own.backward(batches)
            found.append((losses.cpu().numpy(), torch.stack(loads).cpu().numpy(), gradients(own.model)))
            for p in own.model.parameters():
                p.grad = None
        (losses, loads, grads), (own_losses, own_loads, own_grads) = found
        np.testing.assert_allclose(own_losses, losses, rtol=1e-4)
        assert np.abs(loads - own_loads).sum() <= 20
        worst = max((float((own_grads[name] - grad).norm()) / (float(grad.norm()) + 1e-12), name) for name, grad in grads.items())
        print("largest relative difference of a gradient", worst)
        assert worst[0] <= KERNELS


def test_drafts_learn_the_same(trainers):
    weights = []
    for trainer in trainers:
        drafts = {family: Draft(draft_json(family, trainer.model.cfg, trainer.rows.tokenizer), trainer.model, 0).to("cuda") for family in (MLA, GQA)}
        train_drafts(trainer, drafts, 4, float("inf"))
        weights.append({(family, name): p.detach() for family, d in drafts.items() for name, p in d.named_parameters()})
    for name, value in weights[0].items():
        assert float((weights[1][name] - value).norm()) <= 0.02 * float(value.norm()) + 1e-6, name   # four steps, the optimizer's signs among them
