"""Packing of documents into rows."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from narrowgauge.data.pack_rows import NO_LABEL, fill_row, pack_rows

CONTEXT = 16
lengths_of_documents = st.lists(st.integers(1, CONTEXT), min_size=1, max_size=60)


@given(lengths_of_documents, st.integers(0, 3))
def test_every_document_is_in_one_row_and_rows_are_not_too_long(lengths, seed):
    rows = pack_rows(lengths, CONTEXT, seed)
    assert sorted(document for row in range(len(rows)) for document in rows[row]) == list(range(len(lengths)))
    sums = [sum(lengths[document] for document in rows[row]) for row in range(len(rows))]
    assert all(0 < total <= CONTEXT for total in sums)
    assert len(rows) <= 11 / 9 * -(-sum(lengths) // CONTEXT) * 1.5 + 1  # far from a row for each document
    again = pack_rows(np.array(lengths), CONTEXT, seed)
    assert np.array_equal(rows.documents, again.documents) and np.array_equal(rows.ends, again.ends)


@given(lengths_of_documents)
def test_the_best_fit_is_chosen(lengths):
    """Against a slow reference: each row's free space after the documents, from the longest to the shortest."""
    free = []
    for size in sorted(lengths, reverse=True):
        fits = [index for index, space in enumerate(free) if space >= size]
        if not fits:
            free.append(CONTEXT)
            fits = [len(free) - 1]
        free[min(fits, key=lambda index: free[index])] -= size
    rows = pack_rows(lengths, CONTEXT, 0)
    ours = [CONTEXT - sum(lengths[document] for document in rows[row]) for row in range(len(rows))]
    assert sorted(ours) == sorted(free)


@given(st.lists(st.integers(1, 6), max_size=4), st.integers(0, 5), st.randoms())
def test_a_row_keeps_documents_apart(lengths, extra, random):
    context = sum(lengths) + extra
    documents = [
        (
            np.array([random.randrange(100, 999) for _ in range(size)], np.int32),
            np.array([random.randrange(2) for _ in range(size)], np.uint8),
        )
        for size in lengths
    ]
    row = fill_row(documents, context, pad=7)
    tokens = [int(token) for document, _ in documents for token in document]
    assert row.input_ids.tolist() == tokens + [7] * extra
    assert row.position_ids.tolist() == [place for size in (*lengths, extra) for place in range(size)]
    expected = [
        int(token) if has_loss and index else NO_LABEL
        for document, losses in documents
        for index, (token, has_loss) in enumerate(zip(document, losses, strict=True))
    ]
    assert row.labels.tolist() == expected + [NO_LABEL] * extra


def test_the_seed_decides_the_order():
    lengths = [4] * 40
    one, other = pack_rows(lengths, CONTEXT, 0), pack_rows(lengths, CONTEXT, 1)
    assert len(one) == len(other) == 10 and not np.array_equal(one.documents, other.documents)


def test_many_documents_are_packed_quickly_and_densely():
    lengths = np.random.default_rng(0).integers(1, 2049, 20_000)
    rows = pack_rows(lengths, 2048, 0)
    assert lengths.sum() / (len(rows) * 2048) > 0.98
