"""Bytes, BPE made here, and tokenizers of others."""

from __future__ import annotations

import json
import random

import pytest
from corpora import jsonl, opened, prose

from mnemos.data import ByteTokenizer, check_vocabulary, open_tokenizer, readers, train_bpe
from mnemos.data.bpe import sample_texts
from mnemos.data.readers import ReadRules, read
from mnemos.data.report import ReadReport
from mnemos.data.sources import resolve

pytest.importorskip("tokenizers")
STRANGE = "naïve <eos> 日本 𝄞\n\n\t  x" + "".join(chr(random.Random(0).randrange(1, 0x3000)) for _ in range(300))


@pytest.fixture(scope="module")
def bpe():
    return train_bpe([prose(50_000)], 500)


def test_bytes_are_their_own_tokens_and_come_back():
    tokenizer = ByteTokenizer()
    assert tokenizer.encode(STRANGE) == list(STRANGE.encode())
    assert tokenizer.decode(tokenizer.encode(STRANGE)) == STRANGE
    assert tokenizer.encode("a\0b") == [97, 98], "byte 0 ends documents"
    assert (tokenizer.vocab_size, tokenizer.eos_token_id, tokenizer.bytes_per_token) == (256, 0, 1.0)


def test_saved_bytes_give_the_same_ids_in_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    ByteTokenizer().save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = STRANGE.replace("<eos>", "")
    assert theirs.encode(text) == ByteTokenizer().encode(text)
    assert theirs.decode(theirs.encode(text)) == text
    assert (len(theirs), theirs.eos_token_id, theirs.pad_token_id) == (256, 0, 0)
    assert isinstance(open_tokenizer(str(tmp_path)), ByteTokenizer)


def test_a_trained_bpe_brings_every_text_back_and_treats_its_special_tokens_as_text(bpe):
    assert bpe.vocab_size <= 500 and bpe.decode(bpe.encode(STRANGE)) == STRANGE
    assert [bpe.backend.id_to_token(i) for i in range(4)] == ["<pad>", "<unk>", "<bos>", "<eos>"]
    assert bpe.eos_token_id not in bpe.encode("a <eos> in a text is text")
    assert len(bpe.encode(prose(1000, seed=9))) < 500


def test_training_twice_gives_the_same_tokenizer(bpe):
    assert train_bpe([prose(50_000)], 500).fingerprint() == bpe.fingerprint()
    assert train_bpe([prose(50_000, seed=1)], 400).fingerprint() != bpe.fingerprint()


def test_a_saved_bpe_opens_from_its_file_its_folder_and_transformers(bpe, tmp_path):
    transformers = pytest.importorskip("transformers")
    bpe.save(tmp_path)
    ids = bpe.encode("The quick brown fox")
    for name in (str(tmp_path), str(tmp_path / "tokenizer.json")):
        opened_again = open_tokenizer(name)
        assert opened_again.encode("The quick brown fox") == ids
        assert (opened_again.eos_token_id, opened_again.bos_token_id, opened_again.pad_token_id) == (3, 2, 0)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.encode("The quick brown fox") == ids and theirs.eos_token == "<eos>"


def test_a_text_tokenised_in_pieces_has_the_same_tokens(bpe, tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "BLOCK_BYTES", 1000)
    text = prose(20_000, seed=3).replace(". ", ".\n\n   ")
    (tmp_path / "a.txt").write_text(text)
    (source,) = resolve([str(tmp_path / "a.txt")], ReadRules())
    pieces = [piece.text for piece in read(source.items[0], ReadRules(), ReadReport())]
    assert len(pieces) > 10
    assert [i for ids in bpe.encode_batch(pieces) for i in ids.tolist()] == bpe.encode(text)


def test_a_tokenizer_of_another_library_is_used_as_it_is(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    inner = Tokenizer(models.WordLevel({"<unk>": 0, "<|endoftext|>": 1, "hello": 2, "world": 3}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.enable_truncation(2)
    inner.enable_padding(length=9)
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = open_tokenizer(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode("hello world hello what") == [2, 3, 2, 0], "neither truncated nor padded"
    assert tokenizer.eos_token_id == 1 and tokenizer.vocab_size == 4
    assert open_tokenizer(str(tmp_path / "tokenizer.json"), "world").eos_token_id == 3


def test_what_is_no_tokenizer_is_one_sentence(tmp_path, monkeypatch):
    from tokenizers import Tokenizer, models

    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(ValueError, match=r"is not a readable tokenizer\.json"):
        open_tokenizer(str(tmp_path / "broken.json"))
    Tokenizer(models.WordLevel({"a": 0})).save(str(tmp_path / "endless.json"))
    with pytest.raises(ValueError, match="defines no end-of-document token: name it with eos_token"):
        open_tokenizer(str(tmp_path / "endless.json"))
    with pytest.raises(ValueError, match="eos_token 'b' is not in the vocabulary"):
        open_tokenizer(str(tmp_path / "endless.json"), "b")
    with pytest.raises(ValueError, match="does not exist"):
        open_tokenizer("./nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="is a folder, but transformers cannot open it"):
        open_tokenizer(str(tmp_path / "empty"))
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub.HfApi, "model_info", lambda *a, **k: (_ for _ in ()).throw(ConnectionError("no network")))
    with pytest.raises(ValueError, match="is not a file or folder, and the hub cannot open it: no network"):
        open_tokenizer("someone/tokenizer")
    with pytest.raises(ValueError, match="vocab_size must be at least 260"):
        train_bpe(["x"], 100)


def test_a_vocabulary_that_does_not_fit_is_refused():
    check_vocabulary(256, 256)
    check_vocabulary(256, 32_000)
    with pytest.raises(ValueError, match="the tokenizer has 257 tokens, but the model's vocab_size is 256"):
        check_vocabulary(257, 256)


def test_the_sample_takes_from_every_file_and_source_by_weight(tmp_path):
    for i in range(10):
        (tmp_path / f"many{i}.txt").write_text(str(i) * 5000)
    (tmp_path / "other.txt").write_text("x" * 5000)
    many = tmp_path / "many"
    many.mkdir()
    for i in range(10):
        (tmp_path / f"many{i}.txt").rename(many / f"{i}.txt")
    sources = resolve([f"{many}:3", f"{tmp_path / 'other.txt'}:1"], ReadRules())
    text = "".join(sample_texts(sources, ReadRules(), 4000))
    assert 3900 <= len(text) <= 4100 and 900 <= text.count("x") <= 1100
    assert all(text.count(str(i)) >= 250 for i in range(10))
    assert text == "".join(sample_texts(sources, ReadRules(), 4000))


def test_bpe_is_trained_on_first_use_and_kept(tmp_path, monkeypatch):
    corpus = jsonl(tmp_path / "a.jsonl", 200)
    data = opened(tmp_path, corpus, tokenizer="bpe:400")
    assert 260 < data.vocab_size <= 400 and data.tokenizer.name == "bpe:400"
    assert 1.5 < data.tokenizer.bytes_per_token == data.report.bytes / data.report.tokens
    batch = next(data.train)
    assert data.tokenizer.decode(batch["input_ids"][0].tolist())
    monkeypatch.setattr("mnemos.data.dataset.train_bpe", None)  # a second training would fail
    again = opened(tmp_path, corpus, tokenizer="bpe:400")
    assert (next(again.train)["input_ids"] == batch["input_ids"]).all()
    with pytest.raises(ValueError, match="must include its vocabulary size, as in bpe:32000"):
        opened(tmp_path, corpus, tokenizer="bpe:many")
    (folder,) = (tmp_path / "cache/tokenizers").glob("bpe-400-*[0-9a-f]")
    assert json.loads((folder / "tokenizer_config.json").read_text())["eos_token"] == "<eos>"
