"""From text to rows of token numbers: 0 is padding, at the end of a row and nowhere else."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fedstill.core.choices import SMALLEST_VOCABULARY
from fedstill.core.errors import DataError, FedstillError, SettingError
from fedstill.core.files import home_path
from fedstill.data import download
from fedstill.data.formats.decoded import Array, Decoded
from fedstill.data.formats.text import Columns, Corpus

PADDING = {"[PAD]", "<pad>", "<PAD>"}  # what token 0 may be called
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")  # what a name on the hub may look like
_CHUNK = 4096  # texts at a time, so that temporary copies stay small


@dataclass(frozen=True)
class TextSettings:
    """How text becomes numbers.

    `tokenizer` is a file of the tokenizers library, a folder with a tokenizer.json, a name on the Hugging Face hub,
    a dataset or CSV file whose texts anybody may see, to train one on, or a tokenizer itself, as JSON. If it is
    empty, one is trained on the training texts: of use for published data, but what is in a tokenizer's vocabulary
    was in somebody's text, so where clients' texts are their own, name one.

    Not `labelled`: a table is texts alone, and none of them is held out.
    """

    tokenizer: str = ""
    vocabulary: int = 8000  # tokens of a tokenizer that is trained, at most
    max_length: int = 128  # tokens that a text is cut to
    labelled: bool = True
    columns: Columns = field(default_factory=Columns)  # of a table


def trained(texts: Sequence[str], vocabulary: int) -> str:
    """A tokenizer of byte pairs, in lower case, that knows the words of these texts and can spell any other, as JSON.

    The same texts give the same tokenizer: WordPiece would number the parts of words differently each time.
    """
    library = _library()
    bytes_, special = library.pre_tokenizers.ByteLevel(add_prefix_space=True), ("[CLS]", "[SEP]")
    if vocabulary < SMALLEST_VOCABULARY:
        raise SettingError(f"vocabulary = {vocabulary}: at least {SMALLEST_VOCABULARY} tokens are needed")
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.normalizer = library.normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = bytes_
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocabulary,
        min_frequency=2,
        special_tokens=["[PAD]", *special],
        initial_alphabet=bytes_.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = library.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[(name, number) for number, name in enumerate(special, 1)]
    )
    return str(tokenizer.to_str())


def encoded(corpus: Corpus, where: str, settings: TextSettings) -> Decoded:
    """Texts as rows of token numbers, by the corpus' own tokenizer, the one that is set, or one trained on them."""
    if corpus.tokenizer and settings.tokenizer not in ("", corpus.tokenizer):
        raise SettingError(f"tokenizer: {where} has tokens of its own; leave tokenizer empty")
    found, texts, test_texts = corpus.divided(where)
    made = corpus.tokenizer or settings.tokenizer
    made = made or trained(texts, settings.vocabulary)  # which thus knows no word of a test
    train, test = (
        replace(part, x=encode(made, part_texts, corpus.length or settings.max_length))
        for part, part_texts in ((found.train, texts), (found.test, test_texts))
    )
    return replace(found, train=train, test=test, tokenizer=made)


class NoTokenizer(SettingError):
    """A tokenizer that is not on this machine, and cannot be fetched."""


def read(name: str) -> str:
    """The tokenizer in a file or folder, or on the hub, as JSON."""
    library = _library()
    path = home_path(name)
    if path.is_dir():
        path = path / "tokenizer.json"
        if not path.is_file():
            raise SettingError(f"tokenizer = {name!r}: this folder has no tokenizer.json")
    try:
        if path.is_file():
            return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"tokenizer = {name!r} cannot be read: {error}") from error
    return str(library.Tokenizer.from_file(_from_hub(name)).to_str())


def _from_hub(name: str) -> str:
    """The tokenizer.json of a name on the hub, what was fetched before first."""
    from huggingface_hub import hf_hub_download

    if not HUB_NAME.fullmatch(name):
        raise SettingError(f"tokenizer = {name!r}: there is no such file or folder, and on the hub no such name")
    try:
        return str(hf_hub_download(name, "tokenizer.json", local_files_only=True))
    except (OSError, ValueError):
        if not download.allowed():
            raise NoTokenizer(f"tokenizer = {name!r}: there is no such file, and {download.why_not()}") from None
    try:
        with download.quiet("huggingface_hub"):
            return str(hf_hub_download(name, "tokenizer.json"))
    except Exception as error:  # of many kinds, those of the network among them
        raise NoTokenizer(
            f"tokenizer = {name!r} is no file or folder, and cannot be fetched from the hub: {first_line(error)}"
        ) from error


def first_line(error: BaseException) -> str:
    """The first line of an error's text."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def same_vocabulary(one: str, other: str) -> bool:
    """Whether two tokenizers give the same tokens the same numbers."""
    first, second = (_parsed(tokenizer).get_vocab(with_added_tokens=True) for tokenizer in (one, other))
    return bool(first == second)


def encode(tokenizer: str, texts: Sequence[str], length: int) -> Array:
    """Token numbers of each text, (N, length) int32: cut where the text is longer, zeros where it is shorter."""
    parser = _parsed(tokenizer)
    if parser.id_to_token(0) not in PADDING:
        raise SettingError(f"tokenizer: token 0 must be padding, {' or '.join(sorted(PADDING))}, not a token of text")
    with _refused(SettingError, "tokenizer: it is not JSON"):  # the library is less strict
        model = dict(json.loads(tokenizer)["model"])
    if model.get("unk_token") == parser.id_to_token(0) or model.get("unk_id") == 0:
        raise SettingError(
            "tokenizer: words that it does not know would become padding; give them a token of their own"
        )
    parser.encode_special_tokens = True  # a text that says [SEP] does not end there
    if length <= parser.num_special_tokens_to_add(is_pair=False):
        raise SettingError(f"max_length = {length}: no token of a text would be left")
    parser.enable_truncation(length)
    parser.no_padding()
    found = np.zeros((len(texts), length), np.int32)
    for start in range(0, len(texts), _CHUNK):
        with _refused(SettingError, "tokenizer: it cannot encode these texts"):
            encoded_texts = parser.encode_batch(texts[start : start + _CHUNK])
        if any(len(encoded.ids) > length for encoded in encoded_texts):
            raise SettingError(f"tokenizer: it is damaged: of a text cut to {length} tokens it makes more")
        for row, encoded in enumerate(encoded_texts, start):
            try:
                found[row, : len(encoded.ids)] = encoded.ids
            except OverflowError as error:
                raise SettingError(f"tokenizer: it is damaged: the number of a token is too large, {error}") from error
    return found


def check_json(tokenizer: str) -> None:
    """Refuse what is not a tokenizer itself: from elsewhere, a name or a path is not looked for here."""
    try:
        found = json.loads(tokenizer)
    except (ValueError, RecursionError) as error:
        raise DataError("a tokenizer as JSON is needed, not its name or place") from error
    if not isinstance(found, dict) or not isinstance(found.get("model"), dict) or not tokenizer.startswith("{"):
        raise DataError("this JSON is no tokenizer of the tokenizers library: it has no model")
    _parsed(tokenizer)


def _parsed(tokenizer: str) -> Any:
    library = _library()
    with _refused(DataError, "not a tokenizer of the tokenizers library"):
        return library.Tokenizer.from_str(tokenizer)


@contextmanager
def _refused(kind: type[FedstillError], what: str) -> Iterator[None]:
    """The library's errors as ours. It raises plain ones, and if its Rust code panics what is no Exception at all."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise kind(f"{what}: {first_line(error)}") from error
        raise


def _library() -> Any:
    # Its threads would not survive the fork of the worker processes.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        import tokenizers
    except ImportError as error:
        raise SettingError("text needs the tokenizers library: pip install 'fedstill[text]'") from error
    return tokenizers
