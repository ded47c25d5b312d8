"""Rows of BERT's pre-training from documents whose every token says where it stands in the corpus."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hetseq.preprocessing.bert import pairs as bert_pairs
from hetseq.preprocessing.bert.pairs import Documents, Ids, Integers, Pairs, Recipe, Rows, fill, find_pairs

# token ids: five special ones, then one for each place in the corpus
FIRST = 5
SEED = (7, 0)


def corpus_of(*documents: int, mean: int = 20) -> Documents:
    """Documents with so many sentences each, of 1 to 2 x `mean` - 1 tokens; token k of the corpus is FIRST + k."""
    generator = np.random.default_rng(documents)
    sizes = generator.integers(1, 2 * mean, size=sum(documents))
    return Documents(
        ids=np.arange(FIRST, FIRST + sizes.sum()),
        sentences=np.concatenate([[0], np.cumsum(sizes)]),
        documents=np.concatenate([[0], np.cumsum(documents)]),
    )


def ids_of(corpus: Documents) -> Ids:
    return Ids(pad=0, unk=1, cls=2, sep=3, mask=4, vocab_size=FIRST + len(corpus.ids))


def rows_of(corpus: Documents, recipe: Recipe, *, duplicate: int = 2) -> tuple[Pairs, Rows]:
    pairs = find_pairs(corpus, recipe, seed=SEED, duplicate=duplicate)
    return pairs, fill(corpus, pairs, recipe, ids_of(corpus))


def originals(rows: Rows) -> Integers:
    """The rows with the masked tokens put back."""
    restored = rows.input_ids.copy()
    for row, positions, masked in zip(restored, rows.masked_lm_positions, rows.masked_lm_ids):
        row[positions[positions > 0]] = masked[positions > 0]
    return restored


def homes(corpus: Documents, places: Integers) -> Integers:
    """The documents of tokens given by their place in the corpus."""
    return np.searchsorted(corpus.sentences[corpus.documents], places, side="right") - 1


def test_a_row_without_its_masks_is_cls_a_sep_b_sep_in_the_words_of_the_corpus() -> None:
    corpus = corpus_of(60, 40, 3, 80)
    pairs, rows = rows_of(corpus, Recipe(max_seq_length=64))
    assert len(pairs) > 100
    ids = ids_of(corpus)
    for row, mask, segments, (a0, a1, b0, b1) in zip(
        originals(rows), rows.input_mask, rows.segment_ids, pairs.stretches
    ):
        assert a0 < a1
        assert b0 < b1
        a, b = FIRST + np.arange(a0, a1), FIRST + np.arange(b0, b1)
        length = len(a) + len(b) + 3
        assert row[:length].tolist() == [ids.cls, *a, ids.sep, *b, ids.sep]
        assert set(row[length:]) <= {ids.pad}
        assert mask.tolist() == [1] * length + [0] * (64 - length)
        assert segments.tolist() == [0] * (len(a) + 2) + [1] * (len(b) + 1) + [0] * (64 - length)


def test_padding_is_that_of_the_vocabulary() -> None:
    corpus = corpus_of(30)
    recipe = Recipe(short_sequence_share=1)
    pairs = find_pairs(corpus, recipe, seed=SEED, duplicate=2)
    odd = Ids(pad=4, unk=1, cls=2, sep=3, mask=0, vocab_size=FIRST + len(corpus.ids))
    rows = fill(corpus, pairs, recipe, odd)
    assert (rows.input_mask == 0).any()
    assert (rows.input_ids[rows.input_mask == 0] == 4).all()


@pytest.mark.parametrize("length", [8, 9, 16, 128])
@pytest.mark.parametrize("mean", [1, 20, 300])
def test_no_row_is_too_long_and_none_has_an_empty_half(length: int, mean: int) -> None:
    corpus = corpus_of(40, 2, 30, mean=mean)
    pairs = find_pairs(corpus, Recipe(max_seq_length=length), seed=SEED, duplicate=3)
    sizes = pairs.stretches[:, 1::2] - pairs.stretches[:, ::2]  # (rows, 2)
    assert sizes.min() >= 1
    assert sizes.sum(axis=1).max() <= length - 3


def test_label_0_means_that_b_goes_on_where_a_ended_and_label_1_that_it_is_of_another_document() -> None:
    corpus = corpus_of(50, 50, 60, 40)
    recipe = Recipe(max_seq_length=256, short_sequence_share=1)
    pairs = find_pairs(corpus, recipe, seed=SEED, duplicate=20)
    a0, a1, b0, _ = pairs.stretches.T
    follows = pairs.labels == 0
    same = homes(corpus, a0) == homes(corpus, b0)
    assert follows[same].all()
    assert not follows[~same].any()
    # what was cut off lies between them, and it is little
    gap = (b0 - a1)[follows]
    assert gap.min() == 0
    assert (gap == 0).mean() > 0.5
    assert gap.max() < 80


def test_a_and_b_are_whole_sentences_where_there_is_room() -> None:
    corpus = corpus_of(50, 50, 60, 40, mean=3)
    pairs = find_pairs(corpus, Recipe(max_seq_length=256, short_sequence_share=1), seed=SEED, duplicate=9)
    short = pairs.stretches[(pairs.stretches[:, 1::2] - pairs.stretches[:, ::2]).sum(axis=1) < 253]
    assert len(short) > 50
    assert np.isin(short, corpus.sentences).all()


def test_a_single_document_takes_its_random_next_from_far_away() -> None:
    corpus = corpus_of(2000)
    pairs = find_pairs(corpus, Recipe(), seed=SEED, duplicate=4)
    sentence = np.searchsorted(corpus.sentences, pairs.stretches, side="right") - 1
    distance = np.maximum(sentence[:, 2] - sentence[:, 1], sentence[:, 0] - sentence[:, 3])
    assert distance[pairs.labels == 1].min() >= 64
    assert distance[pairs.labels == 0].max() <= 5  # what was cut off lies between
    # anywhere: before and after, near the ends too
    starts = sentence[pairs.labels == 1, 2]
    assert np.histogram(starts, bins=4, range=(0, 2000))[0].min() > len(starts) / 6


def test_a_leaflet_beside_a_book_is_not_met_over_and_over() -> None:
    corpus = corpus_of(1000, 4)
    pairs = find_pairs(corpus, Recipe(), seed=SEED, duplicate=4)
    in_leaflet = homes(corpus, pairs.stretches[:, 2]) == 1
    assert in_leaflet[pairs.labels == 1].mean() < 0.1


@pytest.mark.parametrize("documents", [(3000,), (500, 500, 500), (3,) * 500, (2,) * 900])
@pytest.mark.parametrize("mean", [20, 150])
def test_half_of_the_labels_are_1_whatever_the_documents_are_like(documents: tuple[int, ...], mean: int) -> None:
    pairs = find_pairs(corpus_of(*documents, mean=mean), Recipe(), seed=SEED, duplicate=3)
    deviation = np.sqrt(0.25 / len(pairs))
    assert abs(pairs.labels.mean() - 0.5) < 4 * deviation


def test_the_length_of_a_row_does_not_tell_its_label() -> None:
    pairs = find_pairs(corpus_of(*(3, 4, 5, 6) * 150), Recipe(), seed=SEED, duplicate=3)
    lengths = (pairs.stretches[:, 1::2] - pairs.stretches[:, ::2]).sum(axis=1)
    means = [lengths[pairs.labels == label].mean() for label in (0, 1)]
    assert abs(means[0] - means[1]) < 0.1 * lengths.mean()


@pytest.mark.parametrize("share", [0.0, 0.1, 1.0])
def test_that_share_of_the_rows_is_short(share: float) -> None:
    corpus = corpus_of(20_000, mean=5)
    pairs = find_pairs(corpus, Recipe(short_sequence_share=share), seed=SEED, duplicate=1)
    lengths = (pairs.stretches[:, 1::2] - pairs.stretches[:, ::2]).sum(axis=1)
    # a short one wants 2 to 125 tokens, all as likely, and gets half a sentence more
    assert (lengths < 112).mean() == pytest.approx(0.87 * share, abs=0.03)


def test_what_is_cut_off_is_of_the_longer_half_at_both_of_its_ends() -> None:
    # two sentences a document: A is 90 tokens, B 10, of which 97 fit
    sizes = np.tile([90, 10], 400)
    corpus = Documents(
        ids=np.arange(FIRST, FIRST + sizes.sum()),
        sentences=np.concatenate([[0], np.cumsum(sizes)]),
        documents=np.arange(0, len(sizes) + 1, 2),
    )
    pairs = find_pairs(corpus, Recipe(max_seq_length=97, short_sequence_share=0), seed=SEED, duplicate=1)
    follow = pairs.stretches[pairs.labels == 0]
    assert (follow[:, 3] - follow[:, 2] == 10).all()
    assert (follow[:, 1] - follow[:, 0] == 84).all()
    front = follow[:, 0] % 100
    assert 2.5 < front.mean() < 3.5
    assert set(front) > {1, 2, 3, 4, 5}


def test_halves_of_equal_length_are_cut_alike() -> None:
    sizes = np.tile([60, 61], 50)
    corpus = Documents(
        ids=np.arange(FIRST, FIRST + sizes.sum()),
        sentences=np.concatenate([[0], np.cumsum(sizes)]),
        documents=np.arange(0, len(sizes) + 1, 2),
    )
    pairs = find_pairs(corpus, Recipe(max_seq_length=64, short_sequence_share=0), seed=SEED, duplicate=1)
    follow = pairs.stretches[pairs.labels == 0]
    # 61 tokens for both; from the longer one first, then by turns, B first
    assert set(follow[:, 1] - follow[:, 0]) == {31}
    assert set(follow[:, 3] - follow[:, 2]) == {30}


def test_every_sentence_but_the_last_is_reached() -> None:
    corpus = corpus_of(40, 40, mean=4)
    pairs = find_pairs(corpus, Recipe(max_seq_length=512, short_sequence_share=0), seed=SEED, duplicate=1)
    covered = np.zeros(len(corpus.ids) + 1, bool)
    for a0, a1, b0, b1 in pairs.stretches:
        covered[a0:a1] = covered[b0:b1] = True
    assert covered[: corpus.sentences[39]].all()


def test_rows_are_those_of_the_whole_whoever_finds_which_part_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bert_pairs, "SPAN", 16)
    corpus = corpus_of(100, 1, 16, 3, 17, 2, 40)
    whole = find_pairs(corpus, Recipe(), seed=SEED, duplicate=2)
    for step in (1, 7, 16, 50):
        parts = [
            find_pairs(corpus, Recipe(), seed=SEED, duplicate=2, begin=begin, end=begin + step).table()
            for begin in range(0, 179, step)
        ]
        assert np.array_equal(np.concatenate(parts), whole.table())
    # a row lies in one span, and each span has generators of its own
    first, last = (np.searchsorted(corpus.sentences, whole.stretches[:, at], side="right") - 1 for at in (0, 1))
    begins = corpus.documents[whole.origins[:, 0]]
    assert ((first - begins) // 16 == (last - 1 - begins) // 16).all()
    assert len(np.unique(whole.origins, axis=0)) == len(whole)
    assert len(set(((first - begins) // 16)[whole.origins[:, 0] == 0])) == 7
    even = replace(corpus_of(32), sentences=np.arange(0, 33 * 20, 20), ids=np.arange(FIRST, FIRST + 640))
    one, two = (find_pairs(even, Recipe(), seed=SEED, duplicate=1, begin=at, end=at + 16).stretches for at in (0, 16))
    assert not np.array_equal(one[:, :2], two[:, :2] - 320)


def test_a_document_of_one_sentence_gives_no_row() -> None:
    assert len(find_pairs(corpus_of(1, 1, 1), Recipe(), seed=SEED, duplicate=5)) == 0
    assert len(find_pairs(corpus_of(1, 2, 1), Recipe(), seed=SEED, duplicate=5)) == 5
    assert len(find_pairs(Documents(*(np.zeros(1, int),) * 3), Recipe(), seed=SEED, duplicate=5)) == 0


def test_two_sentences_alone_in_the_world_can_only_follow_each_other() -> None:
    pairs = find_pairs(corpus_of(2), Recipe(), seed=SEED, duplicate=20)
    assert pairs.labels.tolist() == [0] * 20


# Masks


def test_15_percent_are_masked_of_them_80_by_mask_10_by_another_and_10_by_themselves() -> None:
    corpus = corpus_of(3000)
    _, rows = rows_of(corpus, Recipe(), duplicate=2)
    chosen = rows.masked_lm_positions > 0
    tokens = rows.input_mask.sum(axis=1)
    assert chosen.sum() / tokens.sum() == pytest.approx(0.15, abs=0.003)
    assert (np.abs(chosen.sum(axis=1) - 0.15 * tokens) <= 0.5 + 1e-9)[tokens > 6].all()
    seen = np.take_along_axis(rows.input_ids, rows.masked_lm_positions.astype(int), axis=1)[chosen]
    masked = rows.masked_lm_ids[chosen]
    deviation = 4 * np.sqrt(0.25 / len(masked))
    assert (seen == 4).mean() == pytest.approx(0.8, abs=deviation)
    assert (seen == masked).mean() == pytest.approx(0.1, abs=deviation)
    others = seen[(seen != 4) & (seen != masked)]
    assert len(others) / len(seen) == pytest.approx(0.1, abs=deviation)
    # any ordinary token, each as likely
    assert others.min() >= FIRST
    assert others.mean() == pytest.approx(FIRST + len(corpus.ids) / 2, rel=0.05)


def test_no_token_but_the_masked_ones_is_changed() -> None:
    corpus = corpus_of(200)
    pairs, rows = rows_of(corpus, Recipe())
    whole = fill(corpus, pairs, Recipe(max_predictions=1), ids_of(corpus))
    changed = originals(rows) != originals(whole)
    assert not changed.any()
    differs = rows.input_ids != originals(rows)
    for row, positions in zip(differs, rows.masked_lm_positions):
        assert set(np.flatnonzero(row)) <= set(positions[positions > 0])


def test_positions_ascend_and_end_with_the_first_0() -> None:
    _, rows = rows_of(corpus_of(300), Recipe(max_predictions=24, short_sequence_share=0.5))
    counts = (rows.masked_lm_positions > 0).sum(axis=1)
    assert len(set(counts)) > 5
    for positions, ids, count in zip(rows.masked_lm_positions, rows.masked_lm_ids, counts):
        assert (np.diff(positions[:count]) > 0).all()
        assert not positions[count:].any()
        assert not ids[count:].any()


def test_neither_cls_nor_sep_nor_unk_is_ever_masked() -> None:
    corpus = corpus_of(300)
    corpus = replace(corpus, ids=np.where(np.arange(len(corpus.ids)) % 3 == 0, 1, corpus.ids))
    _, rows = rows_of(corpus, Recipe(masked_share=0.9, max_predictions=128))
    assert rows.masked_lm_ids[rows.masked_lm_positions > 0].min() >= FIRST
    assert (rows.input_ids[:, 0] == 2).all()
    assert ((rows.input_ids == 3).sum(axis=1) == 2).all()


def test_a_row_of_unknown_words_has_nothing_to_predict() -> None:
    corpus = corpus_of(30)
    _, rows = rows_of(replace(corpus, ids=np.ones_like(corpus.ids)), Recipe())
    assert not rows.masked_lm_positions.any()


@pytest.mark.parametrize(("predictions", "most"), [(1, 1), (5, 5), (19, 19), (128, 19)])
def test_there_are_never_more_than_max_predictions(predictions: int, most: int) -> None:
    _, rows = rows_of(corpus_of(200), Recipe(max_predictions=predictions))
    assert rows.masked_lm_ids.shape[1] == predictions
    assert (rows.masked_lm_positions > 0).sum(axis=1).max() == most
    assert (rows.masked_lm_positions > 0).sum(axis=1).min() >= 1


def test_every_row_has_something_to_predict_however_small_the_share_is() -> None:
    _, rows = rows_of(corpus_of(100), Recipe(masked_share=0.001))
    assert set((rows.masked_lm_positions > 0).sum(axis=1)) == {1}


def test_no_special_token_is_put_in_the_place_of_a_masked_one() -> None:
    corpus = corpus_of(400)
    corpus = replace(corpus, ids=FIRST + corpus.ids % 3)
    ids = Ids(pad=0, unk=1, cls=2, sep=3, mask=4, vocab_size=FIRST + 3)
    rows = fill(corpus, find_pairs(corpus, Recipe(), seed=SEED, duplicate=2), Recipe(), ids)
    seen = np.take_along_axis(rows.input_ids, rows.masked_lm_positions.astype(int), axis=1)
    assert set(seen[rows.masked_lm_positions > 0]) == {4, 5, 6, 7}


# The seed


def same(one: Rows, other: Rows) -> bool:
    return all(np.array_equal(left, right) for left, right in zip(vars(one).values(), vars(other).values()))


def test_rows_do_not_depend_on_the_order_in_which_they_are_made() -> None:
    corpus, recipe = corpus_of(60, 40), Recipe()
    pairs, rows = rows_of(corpus, recipe)
    order = np.random.default_rng(0).permutation(len(pairs))
    backwards = [fill(corpus, pairs[np.array([number])], recipe, ids_of(corpus)) for number in order]
    for number, row in zip(order, backwards):
        assert np.array_equal(row.input_ids[0], rows.input_ids[number])
        assert np.array_equal(row.masked_lm_ids[0], rows.masked_lm_ids[number])


def test_a_later_duplicate_changes_nothing_in_the_earlier_ones() -> None:
    corpus = corpus_of(60, 40)
    two, three = (find_pairs(corpus, Recipe(), seed=SEED, duplicate=count) for count in (2, 3))
    kept = three.origins[:, 1] < 2
    assert np.array_equal(two.stretches, three.stretches[kept])


def test_the_same_seed_gives_the_same_rows_and_another_one_others() -> None:
    corpus, recipe = corpus_of(60, 40), Recipe()
    ids = ids_of(corpus)
    first, again, other, split = (
        find_pairs(corpus, recipe, seed=seed, duplicate=2).shuffled() for seed in (SEED, SEED, (8, 0), (7, 1))
    )
    assert same(fill(corpus, first, recipe, ids), fill(corpus, again, recipe, ids))
    assert not np.array_equal(first.stretches, other.stretches)
    assert not np.array_equal(first.stretches, split.stretches)


def test_duplicates_differ_in_pairs_and_masks() -> None:
    corpus = corpus_of(2, 2)
    recipe = Recipe(short_sequence_share=0)
    pairs, rows = rows_of(corpus, recipe, duplicate=10)
    assert len(np.unique(pairs.stretches, axis=0)) > 2
    follows = (pairs.labels == 0) & (pairs.origins[:, 0] == 0)
    assert len(np.unique(rows.masked_lm_positions[follows], axis=0)) == follows.sum() > 2


def test_shuffling_keeps_the_rows_and_loses_their_order() -> None:
    pairs = find_pairs(corpus_of(300, 300), Recipe(), seed=SEED, duplicate=1)
    shuffled = pairs.shuffled()
    assert sorted(map(tuple, pairs.origins.tolist())) == sorted(map(tuple, shuffled.origins.tolist()))
    assert abs(np.corrcoef(np.arange(len(pairs)), shuffled.stretches[:, 0])[0, 1]) < 0.3
    lookup = {tuple(origin): tuple(row) for origin, row in zip(pairs.origins.tolist(), pairs.stretches.tolist())}
    assert all(lookup[tuple(o)] == tuple(s) for o, s in zip(shuffled.origins.tolist(), shuffled.stretches.tolist()))
