"""Text to ids and back, a character at a time; chat templates in a sandbox; vocabularies out of GGUF metadata."""
# ruff: noqa: E402 (what needs the package comes after the check that it is there)

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed: pip install 'phasewise[engine]'")

from hypothesis import given, settings
from hypothesis import strategies as st

from phasewise.instrumented_engine.llama.gguf_tokenizer import tokenizer_files
from phasewise.instrumented_engine.llama.tokenizer import ByteTokenizer, TextTokenizer, Tokenizer, load_tokenizer
from phasewise.rules.errors import InputError, MachineError

WORDS = ["Ġthe", "th", "he", "Ġt", "in", "Ġa", "er", "12"]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '\n' + message['role'] }}: {{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\nassistant: ' }}{% endif %}"
)
MESSAGES = [{"role": "user", "content": "hi"}]


def byte_characters() -> list[str]:
    """The 256 printable stand-ins of byte-level BPE, in the order of the bytes."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in kept else chr(next(others)) for byte in range(256)]


def metadata(**changes: object) -> dict[str, Any]:
    """A byte-level vocabulary: 3 control tokens, 256 bytes, a few merged words."""
    tokens = ["<|begin|>", "<|im_start|>", "<|im_end|>", *byte_characters(), *WORDS]
    fields = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": ["h e", "Ġ t", "Ġt he", "t h", "i n", "Ġ a", "e r", "1 2"],
        "tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE, **changes,
    }  # fmt: skip
    return {key: value for key, value in fields.items() if value is not ...}


def loaded(folder: Path, **changes: object) -> TextTokenizer:
    for name, text in tokenizer_files(metadata(**changes), Path("model.gguf")).items():
        (folder / name).write_text(text)
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return loaded(tmp_path_factory.mktemp("words"))


# --- vocabularies out of GGUF ---------------------------------------------------------------------------------------------


def test_merges_and_bytes(words: TextTokenizer) -> None:
    ids = words.encode("in the a")
    assert words.decode(ids) == "in the a"
    assert ids == [3 + 256 + WORDS.index(word) for word in ("in", "Ġthe", "Ġa")]


def test_digits_stand_alone_where_the_model_was_trained_so(tmp_path: Path, words: TextTokenizer) -> None:
    (tmp_path / "plain").mkdir()
    plain = loaded(tmp_path / "plain", **{"tokenizer.ggml.pre": "gpt-2"})
    assert len(words.encode("12")) == 2
    assert len(plain.encode("12")) == 1


def test_control_tokens_are_matched_whole_and_not_shown(words: TextTokenizer) -> None:
    ids = words.encode("<|im_start|>the<|im_end|>")
    assert (ids[0], ids[-1]) == (1, 2)
    assert words.decode(ids) == "the"


def test_stop_ids_come_from_the_file_and_from_known_ends_of_a_turn(tmp_path: Path, words: TextTokenizer) -> None:
    assert words.stop_ids == (2,)
    assert loaded(tmp_path, **{"tokenizer.ggml.eos_token_id": 0}).stop_ids == (0, 2)


def test_a_prompt_begins_with_the_token_the_model_wants(tmp_path: Path, words: TextTokenizer) -> None:
    assert words.encode("a")[0] != 0
    assert loaded(tmp_path, **{"tokenizer.ggml.add_bos_token": True}).encode("a")[0] == 0


def test_llama3_splits_numbers_by_three(tmp_path: Path) -> None:
    """The vocabulary knows 12, so 1212 split as 121|2 leaves 12|1|2, while split digit by digit nothing is joined."""
    ids = loaded(tmp_path, **{"tokenizer.ggml.pre": "llama-bpe"}).encode("1212")
    assert len(ids) == 3


def test_sentence_piece_joins_by_score(tmp_path: Path) -> None:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "ab", "▁a", "▁ab"]
    scores = [0.0] * 259 + [-9.0, -9.0, -9.0, -2.0, -1.0, -3.0]
    tokenizer = loaded(
        tmp_path,
        **{
            "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": pieces, "tokenizer.ggml.scores": scores,
            "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * 6, "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.add_bos_token": ...,
        },
    )  # fmt: skip
    names = {piece: number for number, piece in enumerate(pieces)}
    assert tokenizer.encode("ab") == [1, names["▁ab"]], "▁a has the best score, then b joins it"
    assert tokenizer.encode("bab") == [1, names["▁"], names["b"], names["ab"]]
    assert tokenizer.decode(tokenizer.encode("ab a é")) == "ab a é"
    assert [names[f"<0x{byte:02X}>"] for byte in "é".encode()] == tokenizer.encode("é")[-2:]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tokenizer.ggml.model": "bert"}, "'bert'"),
        ({"tokenizer.ggml.pre": "klingon"}, "'klingon'"),
        ({"tokenizer.ggml.tokens": ...}, "holds no vocabulary"),
        ({"tokenizer.ggml.merges": ["q qq"]}, "does not fit together"),
        ({"tokenizer.ggml.merges": ...}, "does not fit together"),
        ({"tokenizer.ggml.eos_token_id": 10**6}, "does not fit together"),
        ({"tokenizer.ggml.token_type": [1]}, "does not fit together"),
    ],
)
def test_vocabularies_of_other_kinds_are_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        tokenizer_files(metadata(**changes), Path("model.gguf"))


# --- a character at a time ----------------------------------------------------------------------------------------------


def streamed(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    stream = tokenizer.stream()
    return [*(stream.push(token) for token in ids), stream.finish()]


@given(st.text(max_size=40))
@settings(max_examples=150, deadline=None)
def test_pieces_add_up_to_the_text_and_hold_whole_characters(words: TextTokenizer, text: str) -> None:
    ids = words.encode(text)
    pieces = streamed(words, ids)
    assert "".join(pieces) == words.decode(ids)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@given(st.lists(st.integers(0, 258 + len(WORDS)), max_size=40))
@settings(max_examples=150, deadline=None)
def test_any_tokens_add_up_to_the_decoded_whole(words: TextTokenizer, ids: list[int]) -> None:
    """A model may utter half a character and go on with something else."""
    assert "".join(streamed(words, ids)) == words.decode(ids)


def test_a_character_of_four_bytes_comes_with_its_last_byte(words: TextTokenizer) -> None:
    assert streamed(words, words.encode("👧a")) == ["", "", "", "👧", "a", ""]


def test_half_a_character_at_the_end_is_shown_as_a_replacement(words: TextTokenizer) -> None:
    assert streamed(words, words.encode("👧")[:2]) == ["", "", "\ufffd"]


def test_a_long_stream_does_not_decode_itself_again_and_again(words: TextTokenizer) -> None:
    stream, longest = words.stream(), 0
    for token in words.encode("the ether in there " * 200):
        stream.push(token)
        longest = max(longest, len(stream._window))  # type: ignore[attr-defined]
    assert longest <= 8


@given(st.text(max_size=60))
def test_bytes_there_and_back(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode()) + 1
    assert tokenizer.decode(ids) == text
    assert "".join(streamed(tokenizer, ids)) == text


def test_ids_a_random_model_makes_up_show_as_something() -> None:
    tokenizer = ByteTokenizer(vocab=1000)
    assert all(tokenizer.decode([token]).isalpha() for token in range(259, 1000))
    with pytest.raises(InputError, match="100 is below 259"):
        ByteTokenizer(vocab=100)


# --- chat ---------------------------------------------------------------------------------------------------------------


def test_the_template_of_the_model(words: TextTokenizer) -> None:
    assert words.decode(words.encode_chat(MESSAGES)) == "\nuser: hi\nassistant: "
    assert words.encode_chat(MESSAGES)[0] == 0, "bos_token of the file"


def test_without_a_template_the_usual_one(tmp_path: Path) -> None:
    ids = loaded(tmp_path, **{"tokenizer.chat_template": ...}).encode_chat(MESSAGES)
    assert ids[0] == 1
    assert ids.count(2) == 1


def test_a_template_can_refuse(tmp_path: Path) -> None:
    template = "{% if messages[0].role == 'user' %}{{ raise_exception('system first') }}{% endif %}"
    with pytest.raises(InputError, match="system first"):
        loaded(tmp_path, **{"tokenizer.chat_template": template}).encode_chat(MESSAGES)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% for x in %}",
        "{{ cycler.__init__.__globals__ }}",
    ],
)
def test_a_template_gets_nowhere(tmp_path: Path, template: str) -> None:
    with pytest.raises(InputError, match="chat template"):
        loaded(tmp_path, **{"tokenizer.chat_template": template}).encode_chat(MESSAGES)


def test_messages_a_template_cannot_take(tmp_path: Path) -> None:
    template = "{% for message in messages %}{{ message['role'] + message['content'] }}{% endfor %}"
    with pytest.raises(InputError, match="role and content as text"):
        loaded(tmp_path, **{"tokenizer.chat_template": template}).encode_chat([{"role": "user", "content": [1]}])


def test_turns_in_bytes() -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    assert ids == [256, 258, *b"user\nhi", 257, 258, *b"assistant\n"]


# --- folders --------------------------------------------------------------------------------------------------------------


def test_settings_of_a_published_folder(tmp_path: Path) -> None:
    loaded(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "bos_token": {"content": "<|begin|>"},
                "chat_template": [{"name": "tool_use", "template": "T"}, {"name": "default", "template": TEMPLATE}],
            }
        )
    )
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.stop_ids == (1, 2)
    assert tokenizer.encode_chat(MESSAGES)[0] == 0
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert load_tokenizer(tmp_path).decode(load_tokenizer(tmp_path).encode_chat(MESSAGES)) == "hi"


def test_folders_that_are_not_whole(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is missing"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(InputError, match="cannot be read"):
        load_tokenizer(tmp_path)
    loaded(tmp_path)
    (tmp_path / "generation_config.json").write_text("[1]")
    with pytest.raises(InputError, match="not a JSON object"):
        load_tokenizer(tmp_path)


def test_without_the_package_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded(tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(MachineError, match=r"tokenizers \(pip install 'phasewise\[engine\]'\)"):
        load_tokenizer(tmp_path)
