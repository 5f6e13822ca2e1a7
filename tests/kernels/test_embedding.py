"""The embedding's gradient matches torch's for repeated tokens, odd widths, strided rows and 16-bit gradients."""

import pytest
import torch
import torch.nn.functional as F

from narrowgauge.kernels.embedding import embedding_backward, embedding_backward_reference
from narrowgauge.nn.fused import embedding

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make(tokens, words, width, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(words, (tokens,), generator=generator)
    ids[::2] = 1  # half of all tokens are the same
    return torch.randn(tokens, width, generator=generator).to(DEVICE, dtype), ids.to(DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "words", "width"), [(64, 10, 48), (7, 3, 5), (33, 100, 130), (1, 4, 16)])
def test_embedding_gradient_matches_torch(tokens, words, width, dtype):
    grad, ids = make(tokens, words, width, dtype)
    weight = torch.zeros(words, width, device=DEVICE, dtype=torch.float64, requires_grad=True)
    F.embedding(ids, weight).backward(grad.double())
    found = embedding_backward(grad, ids, words)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found.double(), weight.grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found, embedding_backward_reference(grad, ids, words), rtol=1e-5, atol=1e-5)


def test_strided_and_transposed_rows():
    grad, ids = make(16, 6, 32)
    for strided in (grad[:, :20], grad[:, ::2], torch.randn(24, 16, device=DEVICE).t()):
        wanted = embedding_backward_reference(strided, ids, 6)
        torch.testing.assert_close(embedding_backward(strided, ids, 6), wanted, rtol=1e-5, atol=1e-5)


def test_no_tokens_and_rows_too_wide_for_the_kernel():
    grad, ids = make(0, 4, 8)
    assert not embedding_backward(grad, ids, 4).any()
    grad, ids = make(2, 3, 20000)
    torch.testing.assert_close(embedding_backward(grad, ids, 3), embedding_backward_reference(grad, ids, 3))


def test_the_operator_passes_opcheck():
    grad, ids = make(16, 8, 32)
    operator = torch.ops.narrowgauge.embedding_backward
    torch.library.opcheck(operator, (grad, ids, 8), test_utils=("test_schema", "test_faketensor"))


def test_only_plain_embeddings_are_converted():
    plain = torch.nn.Embedding(4, 8)
    assert embedding.fits(plain)
    special = ({"padding_idx": 0}, {"sparse": True}, {"max_norm": 1.0}, {"scale_grad_by_freq": True})
    others = [torch.nn.Embedding(4, 8, **options) for options in special]
    for other in (*others, plain.to(torch.bfloat16), torch.nn.Linear(4, 8)):
        assert not embedding.fits(other)


def test_the_function_gives_lookup_and_gradient():
    _, ids = make(24, 8, 16)
    weight = torch.randn(8, 16, device=DEVICE, requires_grad=True)
    twin = weight.detach().clone().requires_grad_()
    wanted = F.embedding(ids.view(4, 6), twin)
    found = embedding._Lookup.apply(weight, ids.view(4, 6))
    assert torch.equal(found, wanted)
    slope = torch.randn(wanted.shape, device=DEVICE)
    found.backward(slope)
    wanted.backward(slope)
    torch.testing.assert_close(weight.grad, twin.grad, rtol=1e-5, atol=1e-5)
