# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The example word2vec and the benchmark case beside it, on a small made-up text."""

from __future__ import annotations

import gzip
import importlib
import json
import math
import sys
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import printed
import pytest
import torch
import torch.nn.functional as F
import word2vec
import word2vec_batches as batches
import word2vec_data as data
import word2vec_model as models
import word2vec_report as report
from lazily import Lazily
from patience import PATIENCE_S

import torch_cpudist as cpudist

pictures = Lazily("word2vec_picture", importlib.import_module)  # matplotlib

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import run  # noqa: E402
from cases import word2vec as case  # noqa: E402

TEXT = """Cat \\Kat\\ [OE. cat.] A cat is a small beast; a cat eats mice.
The cat's eye? It sees

mice! Alone.
"""


def made_up(sentences: int = 400, seed: int = 1) -> str:
    """Two topics that never meet; words of one are alike."""
    draws = np.random.default_rng(seed)
    topics = [["ash", "elm", "fir", "oak", "yew"], ["ace", "bet", "jot", "pip", "win"]]
    lines = [" ".join(draws.choice(topics[i % 2], 8)) for i in range(sentences)]
    return ".\n".join(lines)


@pytest.fixture
def corpus() -> data.Corpus:
    return data.build(made_up(), min_count=1)


def test_text_is_cleaned_and_cut_into_sentences() -> None:
    assert list(data.sentences(TEXT)) == [
        ["cat", "a", "cat", "is", "a", "small", "beast"],
        ["a", "cat", "eats", "mice"],
        ["the", "cat's", "eye"],
        ["it", "sees"],
    ]


def test_the_vocabulary_goes_by_count_and_rare_words_leave() -> None:
    found = data.build(TEXT, min_count=2)
    assert found.words == ["cat", "a"]
    assert found.counts.tolist() == [3, 3]
    assert found.tokens.tolist() == [0, 1, 0, 1, 1, 0]
    assert found.lengths.tolist() == [4, 2]


@pytest.mark.parametrize("zipped", [True, False])
def test_a_text_is_numbered_once(tmp_path: Path, zipped: bool) -> None:
    path, cache = tmp_path / "text", tmp_path / "cache"
    plain = TEXT.encode()
    path.write_bytes(gzip.compress(plain) if zipped else plain)
    first = data.load(path, cache, 2)
    (kept,) = cache.iterdir()
    written = kept.stat().st_mtime_ns
    second = data.load(path, cache, 2)
    assert kept.stat().st_mtime_ns == written
    assert first.words == second.words == ["cat", "a"]
    assert np.array_equal(first.tokens, second.tokens)
    path.write_bytes(plain + b" Another sentence of a cat.")
    assert len(data.load(path, cache, 2).tokens) > len(first.tokens)
    assert data.CACHE == BENCHMARKS.parent / "build" / "word2vec"


def test_bad_texts_are_refused_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "gcide.dict.dz"
    with pytest.raises(data.DataError, match="apt-get download dict-gcide"):
        data.load(path, tmp_path)
    path.write_bytes(b"")
    with pytest.raises(data.DataError, match=r"at least 2 words .* found 0 words, 0"):
        data.load(path, tmp_path)
    path.write_bytes(gzip.compress(b"some text " * 99)[:20])
    with pytest.raises(data.DataError, match="expected text or a whole gzip file"):
        data.load(path, tmp_path)
    options = word2vec.parse_arguments(["--data", str(path), "--cache", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"word2vec: .*whole gzip file"):
        word2vec.read_data(options)


def test_frequent_words_are_thinned_out_as_word2vec_does() -> None:
    counts = np.array([9_000, 900, 100])
    kept = batches.keep_probability(counts, 0.01)
    ratio = np.array([90.0, 9.0, 1.0])
    assert kept == pytest.approx(np.minimum(1, (np.sqrt(ratio) + 1) / ratio))
    assert kept[0] < kept[1] < kept[2] == 1
    assert batches.keep_probability(counts, 0).tolist() == [1, 1, 1]
    tokens = np.repeat([0, 1, 2], counts).astype(np.int32)
    tokens = np.random.default_rng(1).permutation(tokens)
    # Long sentences: hardly one is left with a single word.
    text = data.Corpus(["a", "b", "c"], counts, tokens, np.full(50, 200, np.int32))
    sampling = batches.Sampling(sample=0.01, batch_words=64)
    seen = batches.Sampler(text, sampling)
    words = np.zeros(3)
    for batch in seen.epoch(0):
        # Whatever is no pair's input is padding.
        real = batch.pairs.sum(dim=2).flatten() > 0
        words += np.bincount(batch.inputs[real].numpy(), minlength=3)
    assert words == pytest.approx(kept * counts, rel=0.1)


def test_negatives_follow_counts_to_the_power_of_three_quarters() -> None:
    counts = np.array([10_000, 100, 1])
    table = batches.negative_table(counts, slots=100_000)
    share = counts**0.75 / (counts**0.75).sum()
    assert np.bincount(table) / len(table) == pytest.approx(share, abs=1e-5)
    rare = batches.negative_table(np.array([10**9, 1]), slots=100)
    assert np.bincount(rare).tolist() == [100, 1]


def test_pairs_are_within_reach_and_within_a_sentence() -> None:
    sentence = np.array([-1, -1, 0, 0, 0, 1, 1, -1, -1])
    marks = batches.pair_marks(sentence, np.array([2, 1, 2, 2, 0]), 2)
    assert marks.tolist() == [
        [0, 0, 0, 1, 1],
        [0, 1, 0, 1, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 0, 1, 0],
        [0, 0, 0, 0, 0],
    ]


def test_trainers_share_the_text_and_an_epoch_has_all_of_it(
    corpus: data.Corpus,
) -> None:
    sampling = batches.Sampling(sample=0, batch_words=96)
    seen = np.zeros(len(corpus.words), np.int64)
    words, outputs = 0.0, []
    for rank in range(3):
        for batch in batches.Sampler(corpus, sampling, rank, 3).epoch(0):
            real = batch.pairs.sum(dim=2).flatten() > 0
            seen += np.bincount(batch.inputs[real].numpy(), minlength=len(seen))
            words += batch.words
            outputs.append(batch.outputs)
    assert words == pytest.approx(len(corpus.tokens))
    assert seen.tolist() == corpus.counts.tolist()
    again = batches.Sampler(corpus, sampling, 0, 3)
    assert torch.equal(next(again.epoch(0)).outputs, outputs[0])
    assert not torch.equal(next(again.epoch(1)).inputs, next(again.epoch(0)).inputs)
    part = sum(b.words for b in batches.Sampler(corpus, sampling).epoch(0, 800))
    assert 800 <= part < 830


def expected_loss(x: torch.Tensor, out: torch.Tensor, pairs: torch.Tensor, k: int):
    """Sums pair by pair what NegativeSampling makes of matrices."""
    blocks, size, reach = pairs.shape
    text = blocks * size + reach - 1
    total = torch.zeros((), dtype=x.dtype)
    for place in range(blocks * size):
        block = place // size
        negatives = out[text + block * k : text + (block + 1) * k]
        far = F.logsigmoid(-(negatives @ x[place])).sum()
        for offset in pairs[block, place % size].nonzero().flatten().tolist():
            near = F.logsigmoid(x[place] @ out[place + offset])
            total = total - near - 5 / k * far
    return total


def test_loss_and_gradients_are_those_of_single_pairs(corpus: data.Corpus) -> None:
    sampling = batches.Sampling(
        window=3, block=8, shared_negatives=4, batch_words=24, sample=0
    )
    batch = next(batches.Sampler(corpus, sampling).epoch(0))
    draws = torch.Generator().manual_seed(1)
    x = torch.randn(24, 6, dtype=torch.float64, generator=draws, requires_grad=True)
    shape = len(batch.outputs), 6
    out = torch.randn(shape, dtype=torch.float64, generator=draws, requires_grad=True)
    pairs = batch.pairs.double()
    expected = expected_loss(x, out, pairs, 4)
    loss = models.NegativeSampling.apply(x, out, pairs, 5.0)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    wanted = torch.autograd.grad(3 * expected, [x, out])
    for found, gradient in zip(
        torch.autograd.grad(3 * loss, [x, out]), wanted, strict=True
    ):
        torch.testing.assert_close(found, gradient, rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match="blocks of at least 10 words"):
        models.SkipGram(9, batches.Sampling(block=8))


def test_similarity_is_the_rank_correlation_of_known_pairs() -> None:
    assert report.ranks([3.0, 1.0, 3.0]).tolist() == [2.5, 1.0, 2.5]
    assert report.spearman([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx(0.8)
    assert report.spearman([1, 2, 3], [9, 4, -1]) == pytest.approx(-1)
    vectors = np.array([[1, 0], [2, 0.2], [0, 1], [0, 0]], np.float32)
    text = "# a list\nOak\tash\t9\noak\tbet\t1\nash\tbet\t2\noak\tnone\t5\n"
    found = report.similarity(
        ["oak", "ash", "bet", "nil"], vectors, report.read_pairs(text)
    )
    assert (found.rho, found.pairs, found.unknown) == (pytest.approx(1), 3, 0.25)
    alone = report.similarity(["oak"], vectors, report.read_pairs(text))
    assert math.isnan(alone.rho)
    for bad, words in (("oak ash 3", "line 1 of the word pairs"), ("#", "found none")):
        with pytest.raises(data.DataError, match=words):
            report.read_pairs(bad)


def test_the_list_is_read_from_a_file_or_a_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report.util, "find_spec", lambda name: None)
    assert report.find_list(None, tmp_path) is None
    wheel = tmp_path / "gensim-4.4.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as made:
        made.writestr("other", "")
    with pytest.raises(data.DataError, match=r"wordsim353\.tsv in it, found none"):
        report.find_list(None, tmp_path)
    with zipfile.ZipFile(wheel, "w") as made:
        made.writestr(report.LIST_IN_PACKAGE, "oak\tash\t9\n")
    assert report.find_list(None, tmp_path) == "oak\tash\t9\n"
    plain = tmp_path / "list.tsv"
    plain.write_text("a\tb\t1\n")
    assert report.find_list(plain, tmp_path) == "a\tb\t1\n"
    with pytest.raises(data.DataError, match="pip download --no-deps gensim"):
        report.find_list(tmp_path / "none", tmp_path)


def train_alone(folder: Path, *more: str) -> tuple[dict, str]:
    """Train on the made-up text in this process; return results and vectors."""
    text, pairs = folder / "text.txt", folder / "pairs.tsv"
    text.write_text(made_up())
    pairs.write_text("oak\telm\t9\noak\tash\t8\noak\tbet\t1\npip\tyew\t2\npip\tace\t9")
    results, vectors = folder / "results.json", folder / "vectors.txt"
    paths = ["--data", text, "--cache", folder, "--wordsim", pairs]
    paths += ["--results", results, "--vectors", vectors]
    numbers = ["--dim", "8", "--batch-size", "64", "--sample", "0", "--epochs", "2"]
    told = word2vec.parse_arguments([*map(str, paths), *numbers, *more])
    corpus = word2vec.read_data(told)
    cpudist.init()
    try:
        word2vec.train(told, corpus)
    finally:
        cpudist.shutdown(pull="none")
    return json.loads(results.read_text()), vectors.read_text()


def test_training_tells_topics_apart_and_is_repeatable(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "words.png"
    found, vectors = train_alone(tmp_path, "--picture", str(picture))
    assert found["rho"] > 0.7
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert found["points"][-1]["loss"] < found["points"][0]["loss"]
    assert (found["trainers"], found["strategy"]) == (1, "sync")
    assert found["words"] == pytest.approx(2 * 3200)
    lines = vectors.splitlines()
    assert lines[0] == "10 8"
    assert len(lines) == 11
    assert len(lines[1].split()) == 9
    shown = capsys.readouterr().out
    assert "WordSim-353: rho" in shown
    assert "words/s" in shown
    printed.check("word2vec", shown)
    assert train_alone(tmp_path)[1] == vectors
    assert train_alone(tmp_path, "--seed", "2")[1] != vectors


def test_the_map_has_the_words_that_the_text_has() -> None:
    rows, groups = pictures.chosen(["the", "gold", "horse", "tin"])
    assert (rows, groups) == ([2, 1, 3], ["animals", "metals", "metals"])
    vectors = np.array([[9, 9, 9], [0, 3, 0], [2, 0, 0], [0, 1, 0.1]], np.float32)
    found = pictures.plane(vectors[rows])
    apart = np.linalg.norm(found[:, None] - found[None], axis=2)
    assert apart[1, 2] < 0.2 < 1 < apart[0, 1]


@pytest.mark.parametrize("optimizer", ["sgd", "sparse_adam"])
def test_other_optimizers_and_strategies_learn_too(
    tmp_path: Path, optimizer: str
) -> None:
    more = ["--optimizer", optimizer, "--strategy", "geo"]
    rate = {"sgd": "0.005", "sparse_adam": "0.02"}[optimizer]
    found, _ = train_alone(tmp_path, *more, "--lr", rate)
    assert found["points"][-1]["loss"] < found["points"][0]["loss"]
    assert found["strategy"] == "geo"


@pytest.mark.parametrize(("counts", "planned"), [((3, 5, 0), 4), ((97, 103, 100), 100)])
def test_trainers_step_on_until_the_last_one_is_done(counts, planned) -> None:
    meet = threading.Barrier(len(counts), timeout=PATIENCE_S)
    told = [False] * len(counts)

    def steps(rank: int) -> list[int | None]:
        def ask(has_more: bool) -> bool:
            told[rank] = has_more
            meet.wait()
            found = any(told)
            meet.wait()
            return found

        numbers = iter(range(counts[rank]))
        return list(word2vec.until_all_are_done(numbers, planned, ask))

    with ThreadPoolExecutor(len(counts)) as pool:
        every = list(pool.map(steps, range(len(counts))))
    for count, found in zip(counts, every, strict=True):
        assert found == [*range(count), *[None] * (max(counts) - count)]


def test_alone_there_is_nobody_to_wait_for() -> None:
    assert list(word2vec.until_all_are_done(iter("abc"), 2)) == ["a", "b", "c"]


def test_a_rate_that_is_too_high_is_said(tmp_path: Path) -> None:
    with pytest.raises(word2vec.DivergedError, match=r"expected a finite loss.*--lr"):
        train_alone(tmp_path, "--optimizer", "sgd", "--lr", "10")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--batch-size", "100"], "multiple of 32"),
        (["--window", "17"], "at most 16"),
        (["--epochs", "0"], "--epochs must be at least 1"),
        (["--sample", "1"], "from 0 to below 1"),
    ],
)
def test_bad_options_are_refused(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        word2vec.parse_arguments(arguments)
    assert words in capsys.readouterr().err


def options(*arguments: str):
    return run.parse(["word2vec", *arguments])


def test_benchmark_rows_are_told_alike(tmp_path: Path) -> None:
    args = options("--data", "text", "--words", "1000", "--epochs", "2")
    for name in case.ROWS:
        layout, optimizer = case.layout_of(name, 2)
        assert layout.script.is_file()
        words = case.command(layout, args, tmp_path / "r.json", optimizer)
        told = words[words.index(str(layout.script)) + 1 :]
        read = word2vec.parse_arguments(told)
        assert (read.words, read.epochs, read.batch_size) == (1000, 2, 2048)
        assert read.data == Path("text").resolve()
        assert ("--nproc-per-node=2" in words) == layout.torchrun
    groups, _ = case.layout_of("half_async:group=0+1/2@sgd", 3)
    assert groups.variables == {
        **{"CPUDIST_STRATEGY": "half_async", "CPUDIST_HALFASYNC_GROUP": "0,1;2"}
    }
    hosts = ("--nnodes=2", "--node-rank=1", "--master-addr=10.0.0.1")
    words = case.command(groups, args, tmp_path / "r.json", "sgd", hosts)
    assert words[3:7] == [*hosts, "--nproc-per-node=3"]
    for bad in ("gensim0", "sync@lbfgs", "geo:push_every", "torch:x=1", "nonesuch"):
        with pytest.raises(ValueError, match=f"found {bad!r}"):
            case.layout_of(bad, 2)


def test_benchmark_rows_have_medians_and_say_what_is_worse() -> None:
    args = options()
    rows = []
    for name, rho in (("gensim1", 0.35), ("geo", 0.45), ("sync", 0.2)):
        launch = {"words": 9.0, "rho": rho, "cpu_us_per_word": 2.0, "loss": None}
        launches = [{**launch, "words_per_s": s, "bytes_per_word": 0} for s in (10, 30)]
        layout, _ = case.layout_of(name, 2)
        rows.append(case.make_row(name, layout, args, launches))
    case.compare(rows, "gensim1", True)
    assert [row["words_per_s"] for row in rows] == [20, 20, 20]
    assert [row["verified"] for row in rows] == [True, True, False]
    assert "rho 0.200, gensim1 has 0.350" in rows[2]["problems"][0]
    assert rows[0]["loss"] is None
