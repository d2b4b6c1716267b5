"""The kernels and the unpadded encoder against fp64, on the GPU where there is one: `pytest benchmarks/gpu_check.py`.

Errors are ||out - reference|| / ||reference||, the reference in fp64 on the CPU from the same (rounded) inputs.
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from xscale.data.collate import real_places
from xscale.models import varlen
from xscale.models.build import build_encoder
from xscale.models.encoder import Encoder
from xscale.ops.alignment_gather import alignment_gather
from xscale.ops.masked_ce import masked_cross_entropy

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16] if CUDA else [torch.float32, torch.bfloat16]
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2**-9, torch.float16: 2**-12}
"""More than the error of one rounding at the end, relative to the norm."""


def error(out: Tensor, reference: Tensor) -> float:
    difference = out.detach().cpu().double() - reference
    assert difference.isfinite().all()
    return float(difference.norm() / reference.norm().clamp(min=1e-30))


def wide(tensor: Tensor) -> Tensor:
    """A leaf with the same values, fp64 on the CPU."""
    return tensor.detach().cpu().double().requires_grad_()


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def test_device() -> None:
    print(torch.cuda.get_device_name() if CUDA else "CPU", torch.__version__)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(128 * 128, 768, 4915), (2000, 1024, 300), (257, 320, 64), (40, 256, 1)], ids=str)
def test_gather(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Both directions, of masked rows alone and of linked ones with 0 to 9 links; the same bits every time."""
    places, width, masked = shape
    random = np.random.default_rng(places)
    alone = np.sort(random.choice(places, masked, replace=False))
    linked = [np.sort(random.choice(places, n, replace=False)) for n in random.choice([0, 1, 1, 1, 2, 5, 9], masked)]
    rows = [*alone[:, None], *linked]
    columns = np.concatenate(rows)
    counts = np.array([len(row) for row in rows])
    row_of, by_place = np.repeat(np.arange(len(rows)), counts), np.argsort(columns, kind="stable")
    index = {
        "offsets_R1": np.concatenate([[0], np.cumsum(counts)]),
        "columns_K": columns,
        "t_offsets_N1": np.concatenate([[0], np.cumsum(np.bincount(columns, minlength=places))]),
        "t_rows_K": row_of[by_place],
    }
    on_device = {name: torch.from_numpy(array.astype(np.int32)).to(DEVICE) for name, array in index.items()}
    hidden = torch.randn(places, width, device=DEVICE).to(dtype).requires_grad_()
    incoming = [torch.randn(masked, width, device=DEVICE).to(dtype) for _ in range(2)]
    runs = []
    for _ in range(2):
        outs = alignment_gather(hidden, split=masked, **on_device)
        (gradient,) = torch.autograd.grad(outs, hidden, incoming)
        runs.append([*outs, gradient])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    plain = wide(hidden)
    sums = torch.zeros(2 * masked, width).double().index_add(0, torch.from_numpy(row_of), plain[columns])
    (expected,) = torch.autograd.grad(sums, plain, torch.cat(incoming).cpu().double())
    for out, reference in zip(runs[0], [*sums.split(masked), expected], strict=True):
        assert out.dtype == dtype and error(out, reference.detach()) < ROUNDING[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "smoothing", "z_loss"), [(0, 0.0, 0.0), (1, 0.0, 0.0), (1500, 0.0, 0.0), (1500, 0.1, 1e-3)]
)
def test_masked_cross_entropy(rows: int, smoothing: float, z_loss: float, dtype: torch.dtype) -> None:
    """Loss, hits and the three gradients, which an fp16 loss scale must not spoil."""
    H, V, scale = 256, 20_011, 2.0**10
    inputs = [torch.randn(rows, H), torch.randn(V, H) * 0.1, torch.randn(V) * 0.1]
    on_device = [tensor.to(DEVICE, dtype).requires_grad_() for tensor in inputs]
    labels = torch.randint(V, (rows,))
    loss, right = masked_cross_entropy(*on_device, labels.to(DEVICE), smoothing, z_loss)
    plain = [wide(tensor) for tensor in on_device]
    logits = F.linear(*plain)
    expected = F.cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing)
    expected = expected + z_loss * logits.logsumexp(-1).square().sum()
    assert loss.dtype == torch.float32
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-5 if dtype == torch.float32 else 3e-3)
    if dtype == torch.float32:
        assert int(right) == int((logits.argmax(-1) == labels).sum())
    count = max(rows, 1)
    ours = torch.autograd.grad(loss * (scale / count), on_device)
    theirs = torch.autograd.grad(expected * (scale / count), plain)
    limit = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    for gradient, reference in zip(ours, theirs, strict=True):
        assert gradient.dtype == dtype and error(gradient, reference) < limit


def small_encoder(dtype: torch.dtype, device: torch.device) -> Encoder:
    fields = {"max_length": 128, "vocab_size": 3000, "pad_id": 0, "languages": ["en"], "seed": 0}
    encoder = build_encoder(
        init=None, preset="mini", dropout=0.0, language_embeddings=False, reset_positions=False, **fields
    )
    return encoder.to(device, dtype).train()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sequences", [1, 32])
def test_flat_encoder(sequences: int, dtype: torch.dtype) -> None:
    """States and gradients of the unpadded row are as near to fp64 as those of padded sequences; 0 at padding."""
    lengths = torch.randint(3, 129, (sequences,))
    mask = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
    batch = {"input_ids": torch.randint(5, 3000, mask.shape) * mask, "attention_mask": mask}
    places = torch.from_numpy(real_places({"attention_mask": mask.numpy()})["places"])
    incoming = torch.randn(*mask.shape, 256) * mask[..., None]

    def run(dtype: torch.dtype, device: torch.device, flat: bool) -> list[Tensor]:
        encoder = small_encoder(torch.float32, torch.device("cpu"))
        if dtype != torch.float64:
            encoder.to(dtype)
        else:
            encoder.to(rounded).double()
        encoder.to(device)
        inputs = batch | ({"places": places} if flat else {})
        hidden = encoder.hidden({name: tensor.to(device) for name, tensor in inputs.items()})
        if flat:
            assert not hidden[mask.to(device) == 0].any()
        weights = [p for name, p in encoder.lm.base_model.named_parameters() if "pooler" not in name]
        hidden.backward(incoming.to(device, hidden.dtype))
        real = hidden.flatten(0, 1)[places.to(device)]
        return [real, torch.cat([p.grad.flatten() for p in weights if p.grad is not None])]

    rounded = dtype
    reference = [tensor.detach() for tensor in run(torch.float64, torch.device("cpu"), flat=False)]
    for ours, padded, exact in zip(run(dtype, DEVICE, True), run(dtype, DEVICE, False), reference, strict=True):
        assert error(ours, exact) < 1.5 * error(padded, exact) + 1e-6


def test_attention_dropout_keeps_the_mean() -> None:
    """The mean of many draws is the value without dropout; the draws differ."""
    dtype = torch.float16 if CUDA else torch.float32
    lengths = torch.tensor([7, 40, 64], device=DEVICE)
    starts = F.pad(lengths.cumsum(0), (1, 0)).int()
    mask = (torch.arange(64, device=DEVICE) < lengths[:, None]).flatten()
    row = varlen.Row(mask.nonzero()[:, 0], starts, 3, 64, CUDA)
    q, k, v = (torch.randn(111, 4, 64, device=DEVICE, dtype=dtype, requires_grad=True) for _ in range(3))
    attend = varlen.flash if CUDA else varlen.exact
    whole = attend(q, k, v, row, 0.125, 0.0)
    draws = torch.stack([attend(q, k, v, row, 0.125, 0.1) for _ in range(400)]).float()
    assert error(draws.mean(0), whole.detach().cpu().double()) < 0.05
    assert error(draws[0], draws[1].detach().cpu().double()) > 0.05
    draws[0].sum().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() and x.grad.any() for x in (q, k, v))
