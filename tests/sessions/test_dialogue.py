"""Turns as tokens: only new ones are sent, and together they are the conversation as its template renders it."""

from __future__ import annotations

import pytest
from session_models import open_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mnemos.sessions import Dialogue, Session

CHATML = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nBe kind<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRICT = (  # as Llama 2 and Mistral: a begin token, turns that alternate, an end token behind an answer
    "{{ '<s>' }}{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m['role'] == 'user' %}[INST] {{ m['content'] | trim }} [/INST]{% else %}{{ m['content'] | trim }}</s>{% endif %}{% endfor %}"
)
SPECIAL = ["<|im_end|>", "<|im_start|>", "<s>", "</s>"]


def tokenizer(template: str | None, eos: str) -> PreTrainedTokenizerFast:
    """Characters as tokens, and special tokens."""
    letters = [chr(i) for i in range(32, 127)] + ["\n"]
    words = {token: i for i, token in enumerate([*SPECIAL, *letters])}
    backend = Tokenizer(models.WordLevel(words, unk_token=" "))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.add_special_tokens(SPECIAL)
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos, bos_token="<s>")
    made.chat_template = template
    return made


def conversation(dialogue: Dialogue, answers: list[tuple[str, str | None]], system: str = "") -> str:
    """The tokens of a conversation as text, read turn by turn: pairs of a question and an answer, None for a told turn."""
    ids: list[int] = []
    after = ""
    for text, answer in answers:
        is_asked = answer is not None
        if not ids:
            ids += dialogue.first(text, system, is_asked)
        else:
            ids += dialogue.next(text, after, ids[-1], is_asked)
        ids += dialogue.encode(answer or "")
        after = "assistant" if is_asked else "user"
    return "".join(dialogue.tokenizer.convert_ids_to_tokens(ids))


def rendered(made: PreTrainedTokenizerFast, messages: list[tuple[str, str]], answer: bool) -> str:
    listed = [{"role": role, "content": content} for role, content in messages]
    return made.apply_chat_template(listed, tokenize=False, add_generation_prompt=answer)


def test_turns_sent_one_by_one_are_the_conversation_that_the_template_renders():
    made = tokenizer(CHATML, "<|im_end|>")
    found = conversation(Dialogue(made), [("one", "1<|im_end|>"), ("two", "2<|im_end|>"), ("three", "3<|im_end|>")])
    messages = [
        ("user", "one"),
        ("assistant", "1"),
        ("user", "two"),
        ("assistant", "2"),
        ("user", "three"),
        ("assistant", "3"),
    ]
    assert found == rendered(made, messages, False).removesuffix("\n")
    assert found.count("Be kind") == 1


def test_the_system_prompt_is_read_once():
    made = tokenizer(CHATML, "<|im_end|>")
    found = conversation(Dialogue(made), [("one", "1<|im_end|>"), ("two", "2<|im_end|>")], system="Be brief")
    assert found.count("Be brief") == 1 and "Be kind" not in found and found.startswith("<|im_start|>system\nBe brief")


def test_an_answer_that_was_cut_off_is_closed_before_the_next_turn():
    made = tokenizer(CHATML, "<|im_end|>")
    cut = conversation(Dialogue(made), [("one", "1"), ("two", None)])
    whole = conversation(Dialogue(made), [("one", "1<|im_end|>"), ("two", None)])
    assert cut == whole == rendered(made, [("user", "one"), ("assistant", "1"), ("user", "two")], False)


def test_told_turns_follow_each_other():
    made = tokenizer(CHATML, "<|im_end|>")
    found = conversation(Dialogue(made), [("one", None), ("two", None), ("three", "3")])
    assert found == rendered(made, [("user", "one"), ("user", "two"), ("user", "three")], True) + "3"


def test_a_template_whose_roles_must_alternate_gets_an_answer_behind_a_told_turn():
    made = tokenizer(STRICT, "</s>")
    found = conversation(Dialogue(made), [("one", "1</s>"), ("two", None), ("three", "3</s>")])
    assert found == "<s>[INST] one [/INST]1</s>[INST] two [/INST]Noted.</s>[INST] three [/INST]3</s>"
    assert found.count("<s>") == 1


def test_a_tokenizer_without_a_template_sends_the_text_alone():
    made = tokenizer(None, "</s>")
    assert conversation(Dialogue(made), [("one", "1"), ("two", "2")]) == "one1two2"
    with pytest.raises(ValueError, match="encode and decode are needed"):
        Dialogue(object())


def test_a_session_with_a_template_reads_the_conversation_once():
    model, _ = open_model("titans-mag")
    made = tokenizer(CHATML, "<|im_end|>")
    session = Session(model, made, system="Be brief")
    read: list[int] = []
    for text in ("one", "two"):
        pending = len(session.pending)
        session.ask(text, max_new_tokens=4)
        assert session.last_turn is not None
        read += session.last_turn[1][pending:]
    shown = "".join(made.convert_ids_to_tokens(read, skip_special_tokens=False) if max(read) < len(made) else [])
    assert sum(turn["tokens"] for turn in session.turns) == session.tokens_read + 1 == len(read)
    assert session.turns[0] == session.turns[0] | {"role": "system", "content": "Be brief", "tokens": 0}
    assert not shown or shown.count("Be brief") == 1
